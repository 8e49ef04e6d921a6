"""harden: the same function in ordinary layers, what is not needed dropped and accounted for."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autosym
from architectures import ARCHITECTURES, assert_plain, built, labels, net, relaxed, shaken
from autosym.curvature.owners import sites
from autosym.linear.conv import Conv
from autosym.linear.dense import Bias, Dense
from autosym.linear.groups import GROUPS
from autosym.nn import layers, nets
from autosym.nn.layers import Affine, Factored, Relaxed
from autosym.papers import datasets
from autosym.surgery import merging
from autosym.surgery.merging import Offset, Polyphase, TwoFactors
from factories import LAYERS
from models import small


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


# ---- the same function


@pytest.mark.parametrize("paths", ["f-fc", "fc", "s-fc", "f-fc+fc", "where", "where:8", "where+f-fc", "fc+where"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nothing_dropped_is_the_same_function(name, paths):
    model, x = relaxed(name, paths)
    hard = autosym.harden(model, (x, labels()), tolerance=0.0)
    assert not any(part.dropped for part in hard.hardening.parts)
    assert_close(hard(x), model(x), rtol=1e-10, atol=1e-10)
    assert_plain(hard, {type(m) for m in built(name)[0].modules()})
    assert type(hard) is type(model)
    assert not hasattr(hard, "relaxation")
    assert model.relaxation  # the model given is left alone


@pytest.mark.parametrize("name", [*nets.NAMES, "fc+f-fc+conv+s-conv"])
def test_networks_of_ours(name):
    model, x = net(name)
    hard = autosym.harden(model, (x, labels()), tolerance=0.0)
    assert_close(hard(x), model(x), rtol=1e-10, atol=1e-10)
    assert_plain(hard, {nets.Net})


def test_a_dense_layer_that_is_shared_by_positions():
    layer = shaken(Affine(Dense((4,), (3,)), Bias((1, 3), (5, 3))).double())
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    hard = merging.plain("layer", layer)
    assert type(hard) is nn.Linear
    assert_close(hard(x), layer(x))


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_alone(kind):
    layer = shaken(LAYERS[kind]().double())
    x = torch.randn(5, 2, 4, 6, dtype=torch.float64)
    hard = merging.plain(kind, layer)
    assert_close(hard(x), layer(x), rtol=1e-10, atol=1e-10)
    assert_plain(hard, ())


@pytest.mark.parametrize("group", ["c4", "d4", "flip-horizontal"])
def test_group_convolutions_become_one_convolution(group):
    order = len(GROUPS[group])
    layer = Relaxed(
        {
            "conv": layers.conv((1, 6, 6), (2 * order, 3, 3)),
            "gconv": layers.gconv((1, 6, 6), (2 * order, 3, 3), GROUPS[group], lift=True),
        },
        {},
        stride=2,
    )
    x = torch.randn(4, 1, 6, 6)
    hard = merging.plain(group, shaken(layer))
    assert [type(m) for m in hard] == [nn.Conv2d, Polyphase]
    assert_close(hard(x), layer(x))


@pytest.mark.parametrize("lift", [True, False], ids=["lifting", "mixing"])
@pytest.mark.parametrize("names", ["gconv:c4+turn:c4+conv", "gconv:d4+turn:d4+turn:c4+turn:c2"])
def test_a_chain_becomes_one_convolution(names, lift):
    """The biases that break a group included."""
    model = nets.build(names, (1, 8, 8), 3, 1, (1, 1), (2, 2), hidden=2)
    layer = shaken(model.blocks[0 if lift else 1])
    x = torch.randn(4, 1, 8, 8) if lift else torch.randn(4, model.order, 4, 4)
    hard = merging.plain("layer", layer)
    assert [type(m) for m in hard] == [nn.Conv2d, Polyphase]
    assert_close(hard(x), layer(x))


def test_a_bias_that_breaks_a_group_is_dropped_like_the_weights():
    """If it stayed, the network without the weights would still not be invariant."""
    model = shaken(nets.build("gconv:c4+turn:c4", (1, 8, 8), 3, 2, (1, 2), (2, 2), hidden=2).double())
    for block in model.blocks:
        for parameter in block["turn:c4"].parameters():
            parameter.data.mul_(1e-4)
    x = torch.randn(30, 1, 8, 8, dtype=torch.float64)
    hard = autosym.harden(model, (x, torch.arange(30) % 3), tolerance=0.05)
    gone = {(part.path, part.part) for part in hard.hardening.parts if part.dropped}
    assert gone == {("turn:c4", "weights"), ("turn:c4", "bias")}
    before, after = (autosym.equivariance_error(net, "c4", x).output()["c4"] for net in (model, hard))
    assert after < 1e-10 < before


@pytest.mark.parametrize(
    ("padding", "mode", "expected"),
    [
        ((1, 1, 0, 0), "zeros", nn.Conv2d),
        ((0, 1, 1, 1), "zeros", nn.Conv2d),  # what torch calls "same"
        ((1, 0, 1, 1), "zeros", nn.Sequential),
        ((2, 1, 0, 1), "circular", nn.Sequential),
        ((1, 0, 1, 2), "reflect", nn.Sequential),
        ((1, 0, 1, 2), "replicate", nn.Sequential),
    ],
)
def test_padding_that_differs_by_side(padding, mode, expected):
    conv = Conv(2, 3, (3, 2), padding=padding, padding_mode=mode).double()
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64)
    hard = merging.plain("conv", conv)
    assert type(hard) is expected
    assert_close(hard(x), conv(x))


def test_sequences_padded_by_side():
    conv = Conv(2, 3, 3, 2, (2, 0), padding_mode="zeros", dims=1).double()
    x = torch.randn(2, 2, 7, dtype=torch.float64)
    assert_close(merging.plain("conv", conv)(x), conv(x))


@pytest.mark.parametrize(("shape", "out", "kind"), [((3, 4, 4), (2, 1, 1), nn.Sequential), ((3, 4, 4), (2, 4, 4), TwoFactors)])
def test_a_factored_path_becomes_dense_where_that_is_smaller(shape, out, kind):
    layer = shaken(Factored(shape, out).double())
    x = torch.randn(3, *shape, dtype=torch.float64)
    hard = merging.plain("layer", layer)
    assert type(hard) is kind
    assert_close(hard(x), layer(x))
    assert count(hard) <= count(layer)


def test_a_polyphase_grid_is_chosen_by_sample_as_in_layers():
    y = torch.randn(6, 3, 6, 4)
    assert_close(Polyphase(2)(y), layers.polyphase(y, 2), rtol=0, atol=0)
    moved = Polyphase(2)(y.roll(1, -1))
    assert not torch.equal(moved, y.roll(1, -1)[..., ::2, ::2])  # the control: a fixed grid is another map


# ---- what is dropped


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_network_that_stayed_convolutional_comes_back_as_it_was(name):
    model, x = built(name, torch.float64)
    hard = autosym.harden(autosym.relax(model, x), (x, labels()))
    assert count(hard) == count(model)
    assert_close(hard(x), model(x), rtol=1e-10, atol=1e-10)
    free = [part for part in hard.hardening.parts if part.path == "f-fc"]
    assert free
    assert all(part.dropped and part.change == 0 for part in free)
    kinds = {n: type(m) for n, m in model.named_modules() if isinstance(m, (nn.Conv1d, nn.Conv2d))}
    assert {n: type(hard.get_submodule(n)) for n in kinds} == kinds
    for n in kinds:
        before = str(model.get_submodule(n))
        same = "same" if name == "forms" else "(1, 1)"  # in numbers, where it is as wide on all sides
        assert str(hard.get_submodule(n)) == before.replace("padding=same", f"padding={same}")


def test_a_free_path_in_use_is_not_dropped():
    model, x = relaxed("sequential")
    hard = autosym.harden(model, (x, labels()), tolerance=0.05)
    assert all(part.change > 0.05 for part in hard.hardening.parts if not (part.dropped or part.stays))
    assert not [part for part in hard.hardening.parts if part.dropped and part.part == "weights"]
    assert hard.hardening.cost.change <= 0.05


def test_the_printed_table_says_what_its_numbers_are():
    model, x = relaxed("vgg")
    record = autosym.harden(model, (x, labels()), tolerance=0.3).hardening
    head, _, *rows = str(record).splitlines()
    assert head.endswith("share of layer  outputs change by")
    done = [row.split()[-1] for row in rows[: len(record.parts)]]
    assert done == ["dropped" if part.dropped else "kept" for part in record.parts]
    assert set(done) == {"dropped", "kept"}
    assert [row.endswith("-  always kept") for row in rows[: len(record.parts)]] == [part.stays for part in record.parts]
    assert any(part.stays for part in record.parts)


def test_what_is_dropped_together_stays_within_the_tolerance():
    model, x = relaxed("vgg")
    alone = autosym.harden(model, (x, labels()), tolerance=0.0).hardening
    tolerance = min(0.9, 1.01 * max(part.change for part in alone.parts if part.part == "bias" and not part.stays))
    record = autosym.harden(model, (x, labels()), tolerance=tolerance).hardening
    candidates = [part for part in record.parts if part.change <= tolerance]
    dropped = [part for part in candidates if part.dropped]
    assert 0 < len(dropped) < len(candidates), "the test would be empty"
    assert record.cost.change <= tolerance


def plain_cnn(outputs=3, channels=(8, 16), seed=0):
    torch.manual_seed(seed)
    parts = []
    for index, (width, out) in enumerate(pairwise((1, *channels))):
        parts += [nn.Conv2d(width, out, 3, 2 if index else 1, 1, padding_mode="circular"), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(out, outputs))


@pytest.mark.parametrize("free", [1e9, 1e-3], ids=["free paths that the prior removed", "free paths in use"])
def test_a_fit_is_judged_by_effective_parameters(free):
    net, x = plain_cnn(), torch.randn(24, 1, 6, 6)
    model = autosym.relax(net, x)
    names = [site.name for site in sites(model)]
    precision = {name: free if ".f-fc" in name else 1e-3 for name in names}
    fit = autosym.fit(model, (x, labels(24)), epochs=4, step="none", prior_precision=precision)
    with pytest.raises(ValueError, match="fixed precisions"):
        autosym.harden(fit)
    fit = replace(fit, schedule=autosym.Schedule())  # as if they had been learned
    hard = autosym.harden(fit)
    assert (count(hard) == count(net)) == (free == 1e9)
    assert hard.hardening.cost is None
    assert all(math.isnan(part.change) for part in hard.hardening.parts)
    shares = {(p.layer, p.path): 0.0 for p in hard.hardening.parts if p.path == "f-fc"}
    for part in hard.hardening.parts:
        if part.path == "f-fc":
            shares[part.layer, part.path] += part.share
    table = {(p.layer, p.path): p.share for p in fit.symmetry() if p.path == "f-fc"}
    assert shares == pytest.approx(table)
    whole = {layer: sum(part.share for part in hard.hardening.parts if part.layer == layer) for layer, _ in shares}
    assert whole == pytest.approx(dict.fromkeys(whole, 1.0)), "biases that stay are parts too"
    assert_close(autosym.harden(fit, (x, labels(24)), tolerance=0.0)(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_share_keeps_what_the_outputs_would_not_miss():
    """Free paths that the data determine, but which have not moved from zero."""
    x, y = torch.randn(24, 1, 6, 6), labels(24)
    fit = autosym.fit(autosym.relax(plain_cnn(), x), (x, y), epochs=1, lr=1e-9, step="none", prior_precision=1e-3)

    def free(model):
        parts = autosym.harden(model, (x, y)).hardening.parts
        return [part for part in parts if part.path == "f-fc" and part.part == "weights"]

    assert all(part.change < 0.05 < part.share and not part.dropped for part in free(fit))
    assert all(part.dropped for part in free(fit.model)), "of which nothing but the outputs is known"


@pytest.mark.parametrize("part", ["", "theta_1"], ids=["a path", "a factor"])
def test_what_was_frozen_is_not_dropped_by_a_share_that_is_not_known(part):
    model, x = relaxed("sequential", dtype=torch.float32)
    model[0]["f-fc"].get_submodule(part).requires_grad_(False)
    fit = autosym.fit(model, (x, labels()), epochs=3)
    hard = autosym.harden(fit, tolerance=0.5)
    (frozen,) = [p for p in hard.hardening.parts if (p.layer, p.path, p.part) == ("0", "f-fc", "weights")]
    assert math.isnan(frozen.share)
    assert not frozen.dropped
    with torch.no_grad():
        model[0]["f-fc"].theta_1.weight.zero_()
    hard = autosym.harden(replace(fit, weights={}), (x, labels()), tolerance=1e-6)
    assert next(p for p in hard.hardening.parts if (p.layer, p.path, p.part) == ("0", "f-fc", "weights")).dropped, "by outputs"


class Alias(nn.Module):
    """A convolution under two names in one module, and called by the second."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 2, 3, padding=1)
        self.b = self.a
        self.nothing = None
        self.head = nn.Linear(2, 3)

    def forward(self, x):
        return self.head(self.b(x).mean((2, 3)))


def test_a_layer_with_two_names_is_replaced_under_both():
    x = torch.randn(8, 1, 5, 5, dtype=torch.float64)
    model = shaken(autosym.relax(Alias().double(), x))
    hard = autosym.harden(model, (x, labels()), tolerance=0.0)
    assert_plain(hard, {Alias})
    assert hard.a is hard.b
    assert_close(hard(x), model(x), rtol=1e-10, atol=1e-10)


def test_a_model_whose_outputs_are_random_is_not_judged():
    x = torch.randn(8, 1, 6, 6)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 3)).eval()
    model = autosym.relax(net, x)
    with pytest.raises(ValueError, match="Dropout"):
        autosym.harden(model.train(), (x, labels()))
    assert autosym.harden(model.eval(), (x, labels())).hardening.cost.change < 0.05


def trained(net, x, y, epochs=20):
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
    return net


@pytest.fixture(scope="module")
def quadrants():
    """For two tasks, a trained plain CNN that can tell digits but not where they are, and the fit of its relaxed form."""
    images, digits = datasets.digits()
    x, quadrant = datasets.in_quadrants(images[:1400], 2, 0)
    x = (x - x.mean()) / x.std()
    found = {}
    for task, y, epochs in (("digit", digits[:1400], 35), ("quadrant", quadrant, 15)):
        net = trained(plain_cnn(10, channels=(12, 24, 24)), x, y)
        found[task] = (net, autosym.fit(autosym.relax(net, x[:4]), (x, y), epochs=epochs), (x, y))
    return found


@pytest.mark.slow
def test_a_fit_that_needs_no_position_becomes_a_plain_cnn(quadrants):
    net, fit, (x, y) = quadrants["digit"]
    assert max(fit.symmetry().free_share().values()) < 0.05
    for hard in (autosym.harden(fit), autosym.harden(fit, (x, y))):
        assert count(hard) == count(net)
        assert [type(m) for m in hard] == [type(m) for m in net]
    cost = hard.hardening.cost
    assert cost.samples == len(x)
    assert cost.change < 0.05
    assert cost.loss[1] == pytest.approx(cost.loss[0], abs=0.02)


@pytest.mark.slow
def test_a_fit_that_needs_position_keeps_it(quadrants):
    net, fit, (x, y) = quadrants["quadrant"]
    assert max(fit.symmetry().free_share().values()) > 0.1
    for hard in (autosym.harden(fit), autosym.harden(fit, (x, y))):
        assert count(hard) > count(net)
        assert (hard(x).argmax(1) == y).double().mean() > 0.9


def test_a_spatial_bias_that_survives_is_one_small_module():
    model, x = relaxed("sequential")
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer["f-fc"].theta_1.weight.zero_()
    hard = autosym.harden(model, (x, labels()), tolerance=1e-9)
    assert [type(m) for m in hard[0]] == [nn.Conv2d, Offset]
    assert_close(hard(x), model(x), rtol=1e-10, atol=1e-10)
    assert_close(torch.export.export(hard, (x,)).module()(x), hard(x))


def test_the_weights_of_one_path_stay():
    model, x = relaxed("sequential")
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.zero_()
    hard = autosym.harden(model, (x, labels()))
    assert sum(p.dropped for p in hard.hardening.parts if p.layer == "0" and p.part == "weights") == 1
    assert_close(hard(x), model(x), rtol=1e-10, atol=1e-10)


def test_a_pool_that_is_all_a_dense_layer_needs():
    model, x = relaxed("lenet")
    with torch.no_grad():
        model.fc1["rest"].weight.zero_()
    hard = autosym.harden(model, (x, labels()), tolerance=1e-9)
    assert isinstance(hard.fc1[-1], nn.Linear)
    assert hard.fc1[-1].in_features == 6
    assert_close(hard(x), model(x), rtol=1e-10, atol=1e-10)


def test_regression_and_loaders_whose_order_changes():
    model, x = relaxed("sequential")
    pairs = torch.utils.data.TensorDataset(x, torch.randn(8, 3, dtype=torch.float64))
    loader = torch.utils.data.DataLoader(pairs, batch_size=3, shuffle=True)
    cost = autosym.harden(model, loader, tolerance=0.0).hardening.cost
    assert cost.change < 1e-10
    assert cost.accuracy is None
    assert cost.loss[0] == pytest.approx(cost.loss[1])


def test_the_record_prints():
    model, x = relaxed("lenet")
    record = autosym.harden(model, (x, labels())).hardening
    text = str(record)
    assert all(part.layer in text for part in record.parts)
    assert f"parameters: {record.parameters[0]} before, {record.parameters[1]} after" in text
    assert "accuracy" in text
    assert "conv1 is now Sum(Conv2d, TwoFactors)" in text


@pytest.mark.parametrize(
    ("make", "pairs", "options", "error", "message"),
    [
        (lambda: small(), None, {}, ValueError, "pass data, or a Fit"),
        (lambda: nn.Linear(3, 2), (torch.randn(4, 3), labels(4)), {}, ValueError, "no autosym path"),
        (lambda: small(), (torch.randn(4, 2, 4, 4), labels(4)), {"tolerance": 1.5}, ValueError, "tolerance"),
        (lambda: small(), (torch.randn(0, 2, 4, 4), labels(0)), {}, ValueError, "empty"),
        (lambda: small(), (torch.randn(4, 2, 4, 4), labels(4) + 5), {}, ValueError, "labels run from 5"),
    ],
)
def test_refusals(make, pairs, options, error, message):
    with pytest.raises(error, match=message):
        autosym.harden(make(), pairs, **options)


def test_a_path_without_a_plain_form_is_named():
    model = nn.Sequential(Relaxed({}, {"odd": nn.Identity(), "fc": layers.fc((3,), (3,))}), layers.fc((3,), (2,)))
    with pytest.raises(ValueError, match=r"no plain form for odd of 0 \(Identity\)"):
        autosym.harden(model, (torch.randn(4, 3), labels(4) % 2))
    with pytest.raises(ValueError, match=r"no plain form for alone of bias \(Bias\)"):
        merging.plain("bias", Bias((3,)))
