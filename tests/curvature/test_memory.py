"""A memory budget changes how many samples go at a time, and nothing else; running out of memory is named."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autosym
from autosym import log_evidence
from autosym.curvature import kronecker, passes, verification
from autosym.curvature.verification import verify
from autosym.linear.conv import Conv
from autosym.linear.dense import Dense
from autosym.nn import nets
from models import KINDS, convnet, curvature, draw, mlp, randomised

SAMPLE = 1000  # bytes


@pytest.fixture
def known(monkeypatch):
    """Every sample takes SAMPLE bytes: ``memory=known(3)`` is enough for three, and for no more."""
    for module in (kronecker, verification):
        monkeypatch.setattr(module, "verify", lambda *some, **more: replace(verify(*some, **more), bytes_per_sample=SAMPLE))
    return lambda samples: (samples + 0.5) * SAMPLE / 2**30


def bytes_of(model, x):
    return verify(model, x).bytes_per_sample


def taken(model, data, likelihood="categorical", **options):
    """The curvature, and the sizes of the batches that the model saw after the two samples of its verification."""
    sizes = []
    handle = model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    found = curvature(model, data, likelihood, **options)
    handle.remove()
    assert sizes[0] == 2, "the verification"
    return found, sizes[1:]


def assert_equal_factors(one, two, tolerance=1e-12):
    assert (one.samples, one.outputs, one.factors.keys()) == (two.samples, two.outputs, two.factors.keys())
    assert float(one.statistic) == pytest.approx(float(two.statistic), rel=tolerance)
    for name, factors in two.factors.items():
        for letter in "AG":
            expected = getattr(factors, letter)
            assert (getattr(one.factors[name], letter) - expected).norm() <= tolerance * expected.norm(), (letter, name)


def relaxed():
    return randomised(nets.build("f-fc+conv", (2, 4, 4), 3, 2, channels=(1, 2), strides=(1, 2), hidden=2))


MODELS = {"mlp": (lambda: mlp(5, 4, 3), (5,)), "convnet": (convnet, (2, 6, 5)), "relaxed": (relaxed, (2, 4, 4))}
SPLITS = {
    "exact": ({}, [3] * 6 + [2]),
    "sampled": ({"sampled": True}, [3] * 6 + [2]),
    "subset": ({"subset": 7}, [3, 3, 1, 3, 3, 3, 3, 1]),
    "sampled subset": ({"sampled": True, "subset": 7}, [3, 3, 1, 3, 3, 3, 3, 1]),
    "small batches": ({"batch_size": 5}, [3, 2] * 4),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("case", SPLITS)
def test_a_small_budget_takes_fewer_samples_at_a_time_and_gives_the_same(case, kind, known):
    (make, shape), (options, sizes) = MODELS[kind], SPLITS[case]
    model, data = make(), draw("categorical", 20, shape)
    found, seen = taken(model, data, **options, seed=3, memory=known(3))
    assert seen == sizes
    whole, seen = taken(model, data, **options, seed=3)
    assert max(seen) == (13 if "subset" in options else options.get("batch_size", 20)), "a budget is what splits them"
    assert_equal_factors(found, whole)


@pytest.mark.parametrize("likelihood", KINDS)
def test_at_least_one_sample_is_taken_at_a_time(likelihood):
    model, data = convnet(), draw(likelihood, 6, (2, 6, 5))
    found, sizes = taken(model, data, likelihood, memory=1e-12)
    assert sizes == [1] * 6
    assert_equal_factors(found, curvature(model, data, likelihood))


def test_a_large_batch_of_a_loader_is_split_too(known):
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 20)
    loader = DataLoader(TensorDataset(x, y), 16)
    found, sizes = taken(model, loader, memory=known(6))
    assert sizes == [6, 6, 4, 4]
    assert_equal_factors(found, curvature(model, (x, y)))


def test_without_a_budget_batches_are_whole():
    model, data = mlp(5, 4, 3), draw("categorical", 600)
    assert taken(model, data)[1] == [256, 256, 88]
    assert taken(model, data, batch_size=1000)[1] == [600]
    assert taken(model, data, memory=2.0)[1] == [256, 256, 88]


def test_the_evidence_takes_a_budget(known):
    model, data, sizes = mlp(5, 4, 3), draw("categorical", 20), []
    expected = log_evidence(model, data)
    model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    assert log_evidence(model, data, memory=known(3)) == pytest.approx(expected, rel=1e-12)
    assert max(sizes) == 3


@pytest.mark.parametrize("step", ["mackay", "none"])
def test_a_fit_takes_a_budget_for_its_evidence(step, known):
    (x, y), runs = draw("categorical", 20), []
    for memory in (None, known(3)):
        torch.manual_seed(0)
        model, sizes = mlp(5, 4, 3), []
        model.register_forward_pre_hook(lambda _, inputs, sizes=sizes: sizes.append(len(inputs[0])))
        fit = autosym.fit(
            model, (x, y), epochs=2, batch_size=20, burn_in=0, every=1, step=step, memory=memory, curvature="kronecker"
        )
        runs.append((fit.history[-1]["loss"], fit.prior.precision(), float(fit.evidence.log_evidence)))
    assert [size for size in sizes if size not in (2, 20)] == [3] * 6 * (3 if step == "mackay" else 1)
    for one, two in zip(*runs, strict=True):
        assert two == pytest.approx(one, rel=1e-9)


def test_what_a_sample_takes_grows_with_the_map_and_not_with_the_number_of_samples():
    model = randomised(nn.Sequential(nn.Conv2d(2, 8, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)))
    small, large = (torch.randn(8, 2, size, size, dtype=torch.float64) for size in (8, 16))
    assert bytes_of(model, small) == pytest.approx(bytes_of(model, small[:2].clone()), rel=1e-2)
    assert bytes_of(model, large) > 4 * bytes_of(model, small)
    columns, outputs = (8 * positions * 14 * 14 for positions in (2 * 9, 8))  # of float64: patches, and what autograd keeps
    assert 3 * columns + outputs <= bytes_of(model, large) <= 2 * (3 * columns + outputs)


def test_normalised_inputs_are_counted():
    model = randomised(nn.Sequential(nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8 * 6 * 6, 3)))
    x, found = torch.randn(2, 2, 8, 8, dtype=torch.float64), []
    for trainable in (True, False):
        model[1].requires_grad_(trainable)
        found.append(bytes_of(model, x))
    assert found[0] - found[1] == pytest.approx(8 * 8 * 6 * 6, rel=0.1)


def test_a_budget_is_of_what_samples_take():
    """By the estimate itself: a tenth of the memory of a batch of 20 is that of few samples, twice as much that of more."""
    model, data = convnet(), draw("categorical", 20, (2, 6, 5))
    whole = 20 * bytes_of(model, data[0]) / 2**30
    largest = [max(taken(model, data, memory=part * whole)[1]) for part in (0.001, 0.1, 0.2, 100)]
    assert largest[0] == 1
    assert largest[-1] == 20
    assert largest == sorted(largest)
    assert largest[1] <= 2


def test_what_a_sample_takes_does_not_depend_on_the_batch_it_is_of():
    """Two samples are a view of 4096: of the storage only their part counts."""
    model, (x, _) = mlp(5, 4, 3), draw("categorical", 4096)
    assert bytes_of(model, x[:2]) == pytest.approx(bytes_of(model, x[:2].clone()), rel=0.01)


def test_frozen_weights_are_no_activations():
    model, (x, _) = mlp(5, 500, 500, 3), draw("categorical", 2)
    whole = bytes_of(model, x)
    model[2].requires_grad_(False)
    assert bytes_of(model, x) < 2 * whole


@pytest.mark.parametrize(("free", "taken"), [(4, 2), (32, 16), (139, 16)])
def test_by_itself_a_pass_leaves_most_of_a_gpu_to_others(free, taken, monkeypatch):
    """Half of what is free each would leave the seventh of several runs a hundredth of it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 139 * 2**30))
    assert passes.budget(None, torch.device("cuda")) == taken * 2**30


def test_a_budget_may_have_no_limit():
    model, data = mlp(5, 4, 3), draw("categorical", 600)
    assert taken(model, data, memory=math.inf)[1] == [256, 256, 88]


@pytest.mark.parametrize("memory", [0, -1, 0.0, -math.inf, math.nan])
def test_impossible_budgets(memory):
    with pytest.raises(ValueError, match=f"memory is in GiB and must be positive, got {memory}"):
        curvature(mlp(5, 4, 3), draw("categorical", 6), memory=memory)


# ---- no memory left

SHORTAGES = {
    "gpu": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
        "8000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
}
REMEDIES = ("memory=", "batch_size=", "f-fc", "requires_grad_(False)")


def raising(error, real, when):
    def run(self, *inputs):
        if when(self):
            raise error
        return real(self, *inputs)

    return run


def out_of_memory(where, model, data, error, **options):
    """A pass runs out of memory, and says at which layer and what to do."""
    with pytest.raises(MemoryError, match=f"out of memory in the curvature pass at {where}:") as caught:
        curvature(model, data, **options)
    assert all(remedy in str(caught.value) for remedy in REMEDIES)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("kind", SHORTAGES)
def test_a_factor_of_inputs_that_finds_no_memory(kind, monkeypatch):
    error, model = SHORTAGES[kind](), convnet()
    monkeypatch.setattr(Conv, "gram", raising(error, Conv.gram, lambda path: path.kernel_size == (3, 1)))
    out_of_memory("2.weight", model, draw("categorical", 6, (2, 6, 5)), error)


@pytest.mark.parametrize("kind", SHORTAGES)
def test_a_factor_of_inputs_from_columns_that_finds_no_memory(kind, monkeypatch):
    """Of paths without a gram of their own; the verification, which comes first, finds memory."""
    error, model, calls = SHORTAGES[kind](), mlp(5, 4, 4, 3), []
    count = lambda path: calls.append(path) or len(calls) == 5  # noqa: E731 (three layers, then the second again)
    monkeypatch.setattr(Dense, "columns", raising(error, Dense.columns, count))
    out_of_memory("2.weight", model, draw("categorical", 6), error)


@pytest.mark.parametrize("kind", SHORTAGES)
def test_a_factor_of_cotangents_that_finds_no_memory(kind, monkeypatch):
    error, model, real = SHORTAGES[kind](), convnet(), kronecker.gram
    monkeypatch.setattr(kronecker, "gram", lambda t: raising(error, real, lambda t: t.shape[-1] == 2)(t))
    out_of_memory("2.weight", model, draw("categorical", 6, (2, 6, 5)), error)


@pytest.mark.parametrize("kind", SHORTAGES)
@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_layer_that_finds_no_memory(first, kind, monkeypatch):
    """In the verification, before there is any factor, or in a batch; the layers after it were the last to be named before."""
    error, model, calls = SHORTAGES[kind](), mlp(5, 4, 4, 3), []
    count = lambda layer: layer is model[2] and (calls.append(1) or len(calls) == first)  # noqa: E731
    monkeypatch.setattr(nn.Linear, "forward", raising(error, nn.Linear.forward, count))
    out_of_memory("2.weight", model, draw("categorical", 6), error, batch_size=3)


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_hook_that_finds_no_memory(first):
    """One of the user's own, before the layer's forward: it is that layer's all the same."""
    error, model, calls = SHORTAGES["gpu"](), mlp(5, 4, 4, 4, 3), []

    def short(*_):
        calls.append(1)
        if len(calls) == first:
            raise error

    model[4].register_forward_pre_hook(short)
    out_of_memory("4.weight", model, draw("categorical", 20), error, batch_size=5)


@pytest.mark.parametrize(("width", "where"), [(5, "0.weight"), (7, "2.weight"), (4, "4.weight"), (3, "4.weight")])
def test_a_dense_factor_that_finds_no_memory(width, where, monkeypatch):
    """A of the inputs on the way forward, or G of the three outputs on the way back."""
    error, model, real = SHORTAGES["cpu"](), mlp(5, 7, 4, 3), kronecker.add_gram
    monkeypatch.setattr(kronecker, "add_gram", raising(error, real, lambda total: total.shape[-1] == width))
    out_of_memory(where, model, draw("categorical", 6), error)


@pytest.mark.parametrize("error", [RuntimeError("a matrix is singular"), KeyError("memory"), MemoryError("own")], ids=repr)
def test_other_errors_pass_unchanged(error, monkeypatch):
    monkeypatch.setattr(Conv, "gram", raising(error, Conv.gram, lambda path: True))
    with pytest.raises(type(error)) as caught:
        curvature(convnet(), draw("categorical", 6, (2, 6, 5)))
    assert caught.value is error


def test_a_model_is_left_as_it_was_when_memory_is_short(monkeypatch):
    model = convnet()
    monkeypatch.setattr(Conv, "gram", raising(SHORTAGES["gpu"](), Conv.gram, lambda path: True))
    with pytest.raises(MemoryError):
        curvature(model, draw("categorical", 6, (2, 6, 5)))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
