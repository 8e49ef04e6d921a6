"""The pass over the data: options, batches and order, noise, and a model left as it was."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import autosym
from autosym.curvature.passes import TARGETS, Signs, alike
from autosym.curvature.tape import Tape
from autosym.curvature.verification import verify
from autosym.nn import layers, nets
from factories import LAYERS
from models import (
    EXACT,
    KINDS,
    assert_same,
    convnet,
    curvature,
    draw,
    mlp,
    randomised,
)

# ---- options of the pass


def test_share_blocks_is_the_mean():
    model = randomised(nn.Sequential(LAYERS["f-fc"](), nn.Tanh(), layers.fc((3, 4, 6), (3,))))
    data = draw("categorical", 5, (2, 4, 6))
    own, shared = curvature(model, data), curvature(model, data, share_blocks=True)
    for name, blocks in [("0.theta_2", 2), ("0.theta_1", 3), ("0.b_1", 1), ("2.linear", 1)]:
        assert own.factors[name].G.shape[0] == blocks
        assert_close(shared.factors[name].G, own.factors[name].G.mean(0).expand_as(own.factors[name].G), **EXACT)
        assert_close(shared.factors[name].A, own.factors[name].A, **EXACT)
    assert not torch.allclose(own.factors["0.theta_2"].G[0], own.factors["0.theta_2"].G[1])


@pytest.mark.parametrize("likelihood", KINDS)
def test_sampled_curvature_approaches_the_exact_one(likelihood):
    model, data = mlp(5, 4, 3), draw(likelihood, 8)
    exact = curvature(model, data, likelihood)
    draws = [curvature(model, data, likelihood, sampled=True, seed=seed) for seed in range(300)]
    for name, factors in exact.factors.items():
        errors = torch.stack([draw.factors[name].G - factors.G for draw in draws]).flatten(1) / factors.G.norm()
        assert errors.mean(0).norm() < 0.06
        assert errors.norm(dim=1).mean() > 0.12, "a single draw is nearly as good: nothing was sampled"
        assert_close(draws[0].factors[name].A, factors.A, **EXACT)
    assert_close(draws[0].statistic, exact.statistic, **EXACT)


def test_sampled_curvature_draws_for_every_sample():
    """Copies of one sample average to the exact curvature: their noise is not one and the same."""
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 1)
    data = x.expand(5000, -1), y.expand(5000)
    exact, sampled = curvature(model, data), curvature(model, data, sampled=True)
    for name, factors in exact.factors.items():
        assert (sampled.factors[name].G - factors.G).norm() < 0.1 * factors.G.norm()


@pytest.mark.parametrize("options", [{}, {"sampled": True}, {"subset": 7}, {"subset": 7, "sampled": True}], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3, 7, 1000])
def test_any_batch_size_gives_the_same(batch_size, options):
    model, data = mlp(5, 4, 3), draw("categorical", 20)
    whole = curvature(model, data, **options, batch_size=20, seed=3)
    assert_same(curvature(model, data, **options, batch_size=batch_size, seed=3), whole)


def fitted_head(classes=12):
    """A network that is sure of most of its labels, as a trained one: most columns of its output Hessians are next to nothing."""
    model, data = mlp(5, 8, classes), draw("categorical", 60)
    with torch.no_grad():
        model[-1].weight *= 8
    return model, (data[0], data[1] % classes)


@pytest.mark.parametrize("rest", [0.05, 0.2])
def test_only_the_rest_of_the_output_hessians_is_sampled(rest, monkeypatch):
    """Its trace is at most that part of the whole; so many columns are taken one by one, and one more for all others."""
    model, data = fitted_head()
    exact, calls, real = curvature(model, data), [], Tape.backward
    known = verify(model, data[0][:2])
    monkeypatch.setattr(Tape, "backward", lambda *given: calls.append(1) or real(*given))
    partly = curvature(model, data, rest=rest, batch_size=60, verified=known)
    with torch.no_grad():
        sizes = autosym.Categorical().root(model(data[0])).square().sum(1).sort(1, descending=True).values.sum(0)
    beyond = [float(sizes[k:].sum() / sizes.sum()) for k in range(12)]
    assert len(calls) - 1 == next(k for k, part in enumerate(beyond) if part <= rest)
    assert 1 < len(calls) < 11
    for name, factors in exact.factors.items():
        off = (partly.factors[name].G - factors.G).norm() / factors.G.norm()
        assert 0 < off < 3 * rest
        sampled = curvature(model, data, sampled=True).factors[name].G
        assert off < 0.7 * (sampled - factors.G).norm() / factors.G.norm()
        assert_close(partly.factors[name].A, factors.A, **EXACT)


def test_a_rest_is_the_same_in_any_batches_and_none_where_all_columns_are_alike():
    model, data = fitted_head()
    assert_same(*(curvature(model, data, rest=0.1, batch_size=size, seed=3) for size in (60, 7)))
    model, data = mlp(5, 4, 3), draw("gaussian", 20)
    assert_same(curvature(model, data, "gaussian", rest=0.1), curvature(model, data, "gaussian"))


def test_sampled_noise_is_the_same_beyond_its_buffer():
    model, data = mlp(5, 2, 3), draw("categorical", 2500)
    assert_same(*(curvature(model, data, sampled=True, batch_size=size) for size in (2500, 600)))


@pytest.mark.parametrize("model", [mlp(5, 4, 3), nn.Sequential(nn.Unflatten(1, (5, 1)), nn.Flatten(), mlp(5, 3))], ids=str)
def test_any_order_gives_the_same(model):
    x, y = draw("categorical", 20)
    order = torch.randperm(20)
    assert_same(curvature(model, (x[order], y[order]), batch_size=6), curvature(model, (x, y), batch_size=8))


def test_any_batch_size_and_order_give_the_same_for_relaxed_networks():
    model = randomised(nets.build("f-fc+conv", (2, 4, 4), 3, 2, channels=(1, 2), strides=(1, 2), hidden=2))
    x, y = draw("categorical", 10, (2, 4, 4))
    order = torch.randperm(10)
    assert_same(curvature(model, (x[order], y[order]), batch_size=3), curvature(model, (x, y)))


@pytest.mark.parametrize("options", [{"sampled": True}, {"subset": 5}], ids=str)
def test_randomness_comes_from_the_seed_alone(options):
    model, data = mlp(5, 4, 3), draw("categorical", 20)
    torch.manual_seed(1)
    one = curvature(model, data, **options, seed=5)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert_same(curvature(model, data, **options, seed=5), one, 0, 0)
    other = curvature(model, data, **options, seed=6)
    assert not torch.allclose(other.factors["0.weight"].G, one.factors["0.weight"].G)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"


@pytest.mark.parametrize("batch_size", [4, 100])
def test_subset_scales_to_all(batch_size):
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 20)
    found = curvature(model, (x, y), subset=5, seed=4, batch_size=batch_size)
    chosen = torch.randperm(20, generator=torch.Generator().manual_seed(4))[:5]
    part, whole = curvature(model, (x[chosen], y[chosen])), curvature(model, (x, y))
    assert found.samples == 20
    assert_close(found.statistic, whole.statistic, **EXACT)
    for name, factors in part.factors.items():
        assert_close(found.factors[name].G, factors.G * 20 / 5, **EXACT)
        assert_close(found.factors[name].A, factors.A, **EXACT)


def test_subset_of_all_is_all():
    model, data = mlp(5, 4, 3), draw("categorical", 20)
    assert_same(curvature(model, data, subset=20, batch_size=6), curvature(model, data))


@pytest.mark.parametrize("likelihood", KINDS)
def test_float32_is_close_to_float64(likelihood):
    model, (x, y) = convnet(), draw(likelihood, 10, (2, 6, 5))
    exact = curvature(model, (x, y), likelihood)
    single = copy.deepcopy(model).float()
    data = x.float(), y.float() if y.is_floating_point() else y
    for dtype, tolerance in ((None, 1e-4), (torch.float64, 1e-5)):
        found = curvature(single, data, likelihood, dtype=dtype)
        for name, factors in exact.factors.items():
            for letter in "AG":
                factor, value = getattr(factors, letter), getattr(found.factors[name], letter)
                assert value.dtype == (dtype or torch.float32)
                assert (value.double() - factor).norm() < tolerance * factor.norm()


# ---- noise of sampled curvature


@pytest.mark.parametrize("sizes", [[1] * 40, [7, 7, 7, 7, 7, 5], [40], [1, 39]], ids=str)
@pytest.mark.parametrize("width", [1, 3])
def test_signs_do_not_depend_on_how_many_are_drawn_at_a_time(sizes, width):
    signs = Signs(5)
    drawn = torch.cat([signs(places, width).double() for places in torch.arange(40).split(sizes)])
    assert torch.equal(drawn, Signs(5)(torch.arange(40), width).double())
    assert drawn.shape == (40, width)


def test_signs_are_independent_beyond_the_buffer():
    one, parts = Signs(2), Signs(2)
    whole = one(torch.arange(5000), 4)
    assert torch.equal(torch.cat([parts(places, 4) for places in torch.arange(5000).split([1000, 24, 1, 2000, 1975])]), whole)
    every_third = torch.arange(1, 5000, 3)
    assert torch.equal(Signs(2)(every_third, 4), whole[every_third])
    assert set(whole.unique().tolist()) == {-1, 1}
    whole = whole.double()
    assert whole.mean(0).abs().max() < 0.06, "four standard deviations"
    assert (whole.T @ whole / 5000 - torch.eye(4)).abs().max() < 0.06
    assert (whole[:-1] * whole[1:]).mean(0).abs().max() < 0.06
    assert (whole[:1024] * whole[1024:2048]).mean(0).abs().max() < 0.13
    assert not torch.equal(Signs(3)(torch.arange(5000), 4), whole)


# ---- the model is left as it was


def snapshot(model):
    return {
        "parameters": {n: (p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()},
        "gradients": {n: None if p.grad is None else (id(p.grad), p.grad.clone()) for n, p in model.named_parameters()},
        "buffers": {n: b.clone() for n, b in model.named_buffers()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "hooks": {
            n: [len(hooks) for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)]
            for n, m in model.named_modules()
        },
    }


def watched():
    """A model with a buffer, a hook, a gradient, no gradient, a frozen layer, and both modes."""
    norm = nn.BatchNorm1d(4).requires_grad_(False).eval()
    model = nn.Sequential(nn.Linear(5, 4), norm, nn.Tanh(), nn.Dropout(0.0), nn.Linear(4, 4), nn.Linear(4, 3)).double()
    norm.running_mean += 1
    model[4].requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    model[2].register_forward_hook(lambda module, inputs, output: None)
    return model


@pytest.mark.parametrize("options", [{}, {"sampled": True}, {"subset": 3}], ids=str)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_the_model_is_left_as_it_was(grad, options):
    model, data = watched(), draw("categorical", 6)
    before = snapshot(model)
    with torch.set_grad_enabled(grad):
        found = curvature(model, data, **options)
        assert torch.is_grad_enabled() is grad
    assert_close(snapshot(model), before, rtol=0, atol=0)
    assert found.factors.keys() == {"0.weight", "0.bias", "5.weight", "5.bias"}
    assert not any(t.requires_grad for f in found.factors.values() for t in (f.A, f.G))
    assert not found.statistic.requires_grad


def test_the_model_is_left_as_it_was_by_an_error():
    model, (x, y) = watched(), draw("categorical", 6)
    before = snapshot(model)
    with pytest.raises(ValueError, match="labels"):
        curvature(model, (x, y + 3))
    assert_close(snapshot(model), before, rtol=0, atol=0)


def test_the_model_is_left_as_it_was_with_running_statistics_of_instances():
    """Normalisation by instance does not mix samples, but in train mode it writes its running statistics."""
    norm = nn.InstanceNorm2d(4, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Flatten(), nn.Linear(48, 3)).double()
    data, before = draw("categorical", 6, (2, 6, 5)), snapshot(model)
    with pytest.raises(ValueError, match=r"1 \(InstanceNorm2d\) is in train mode and would change its running statistics"):
        curvature(model, data)
    assert_close(snapshot(model), before, rtol=0, atol=0)
    norm.eval()
    before = snapshot(model)
    curvature(model, data)
    assert_close(snapshot(model), before, rtol=0, atol=0)


def test_the_snapshot_sees_a_change():
    model = watched()
    before = snapshot(model)
    model[1].running_mean += 1e-9
    with pytest.raises(AssertionError):
        assert_close(snapshot(model), before, rtol=0, atol=0)


@pytest.mark.fault(18)
@pytest.mark.parametrize("shape", [(5,), (2, 6, 5)], ids=["mlp", "convnet"])
def test_in_place_activations_change_nothing(shape):
    def model(inplace):
        torch.manual_seed(0)
        make = mlp if len(shape) == 1 else convnet
        return make(*([5, 4, 4, 3] if len(shape) == 1 else []), activation=lambda: nn.ReLU(inplace=inplace))

    data = draw("categorical", 6, shape)
    assert_same(curvature(model(True), data), curvature(model(False), data))


@pytest.mark.fault(18)
@pytest.mark.parametrize("name", LAYERS)
def test_in_place_activations_after_our_layers_change_nothing(name):
    layer, head = randomised(LAYERS[name]()), randomised(layers.fc((3, 4, 6), (3,)))
    data = draw("categorical", 6, (2, 4, 6))
    assert_same(*(curvature(nn.Sequential(layer, nn.ReLU(inplace=inplace), head), data) for inplace in (True, False)))


@pytest.mark.fault(20)
def test_frozen_layers_are_left_out():
    model, data = mlp(5, 4, 4, 3), draw("categorical", 6)
    whole = curvature(model, data)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    found = curvature(model, data)
    assert list(found.factors) == ["2.weight", "4.weight", "4.bias"]
    for name, factors in found.factors.items():
        assert_close((factors.A, factors.G), (whole.factors[name].A, whole.factors[name].G), **EXACT)


# ---- data


def test_tensors_datasets_loaders_and_lists_give_the_same():
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 10)
    whole = curvature(model, (x, y))
    dataset = TensorDataset(x, y)
    pairs = list(zip(x, y, strict=True))
    for data in (dataset, DataLoader(dataset, 4), DataLoader(pairs, 3, shuffle=True), [(x[:4], y[:4]), (x[4:], y[4:])]):
        assert_same(curvature(model, data, batch_size=3), whole)


def test_float64_data_meet_a_float32_model():
    model, (x, y) = mlp(5, 4, 3).float(), draw("gaussian", 4)
    assert curvature(model, (x, y), "gaussian").factors["0.weight"].A.dtype == torch.float32


# ---- of which data


def test_fingerprints_are_compared_up_to_rounding_and_say_nothing_where_there_is_none():
    sums = torch.tensor([3.0, 5.0, 0.1, 0.2, 0.3], dtype=torch.float64)
    inputs, targets = (sums + torch.eye(5, dtype=torch.float64)[place] for place in (3, 1))
    assert alike(sums, sums * (1 + 1e-7))
    assert not alike(sums, sums * (1 + 1e-4))
    assert not alike(sums, sums * (1 + 1e-7), rtol=1e-9, atol=1e-9)
    assert not alike(sums, inputs)
    assert alike(sums, inputs, TARGETS)
    assert not alike(sums, targets, TARGETS)
    assert alike(None, sums)
    assert alike(sums, None)
