"""Bad inputs: each gets a named error that says which module or argument it is, or a stated behaviour."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

import oracles
from autosym import log_evidence
from models import curvature, draw, exact_blocks, mlp

fault = pytest.mark.fault


def refused(message, model, data, likelihood="categorical", **options):
    with pytest.raises(ValueError, match=message):
        log_evidence(model, data, likelihood, **options)


def spoiled(value, row=7, samples=10):
    x, y = draw("categorical", samples)
    x[row, 2] = value
    return x, y


@fault(1)
@pytest.mark.parametrize("batch_size", [4, 100])
def test_nan_in_an_input_row(batch_size):
    which, row = ("samples 4 to 7", 3) if batch_size == 4 else ("samples 0 to 9", 7)
    refused(rf"inputs of {which} are not finite.*rows \[{row}\]", mlp(5, 4, 3), spoiled(math.nan), batch_size=batch_size)


@fault(1)
def test_nan_in_a_target():
    x, y = draw("gaussian", 4)
    y[2, 1] = math.nan
    refused("targets of samples 0 to 3 are not finite", mlp(5, 4, 3), (x, y), "gaussian")


@fault(2)
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_pixel(value):
    refused(r"inputs of samples 0 to 9 are not finite.*rows \[7\]", mlp(5, 4, 3), spoiled(value))


@fault(3)
def test_inputs_that_overflow_the_factors():
    model, (x, y) = mlp(5, 4, 3).float(), draw("categorical", 6)
    data = (x * 1e20).float(), y
    refused("factor A of 0.weight overflowed torch.float32: rescale the inputs.*dtype=torch.float64", model, data)
    assert math.isfinite(log_evidence(model, data, dtype=torch.float64))


@fault(3)
def test_inputs_that_overflow_a_layer():
    model, (x, y) = mlp(5, 4, 3, activation=nn.ReLU).float(), draw("categorical", 6)
    model[2].weight.data *= 1e20
    data = (x * 1e20).float(), y
    refused("output of 2.weight, 2.bias is not finite.*overflow torch.float32", model, data, dtype=torch.float64)


@fault(4)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["0.bias", "2.weight"])
def test_weight_that_is_not_finite(name, value):
    model = mlp(5, 4, 3)
    model.get_parameter(name).data.view(-1)[1] = value
    refused(f"{name} holds values that are not finite", model, draw("categorical", 4))


@fault(4)
def test_frozen_weight_that_is_not_finite():
    model = mlp(5, 4, 3)
    model[0].requires_grad_(False).weight[1, 1] = math.nan
    refused("0.weight", model, draw("categorical", 4))


@fault(5)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_model(dtype):
    x, y = draw("categorical", 4)
    refused(f"0.weight is {dtype}: curvature needs float32 or float64", mlp(5, 4, 3).to(dtype), (x.to(dtype), y))


@fault(6)
@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: RandomSampler(data, replacement=True),
        lambda data: WeightedRandomSampler(torch.ones(len(data)), len(data)),
    ],
    ids=["replacement", "weighted"],
)
def test_sampler_that_skips_and_repeats(sampler):
    """As many samples as the dataset has, but not the same ones (drop_last and short samplers: see test_evidence)."""
    data = TensorDataset(*draw("categorical", 20))
    refused("sampler", mlp(5, 4, 3), DataLoader(data, 5, sampler=sampler(data)))


@fault(6)
def test_sampler_that_shows_more():
    data = TensorDataset(*draw("categorical", 20))
    loader = DataLoader(data, 6, sampler=list(range(20)) * 2)
    refused("showed 40 of the 20 samples", mlp(5, 4, 3), loader)
    refused("showed 40 of the 20 samples", mlp(5, 4, 3), loader, subset=3)


@fault(6)
def test_subset_whose_samples_were_not_shown():
    data = TensorDataset(*draw("categorical", 20))
    loader = DataLoader(data, 5, sampler=[0])
    refused("subset", mlp(5, 4, 3), loader, subset=1, seed=0, allow_partial=True)


@fault(7)
@pytest.mark.parametrize(
    "empty",
    [
        lambda x, y: (x[:0], y[:0]),
        lambda x, y: TensorDataset(x[:0], y[:0]),
        lambda x, y: DataLoader(TensorDataset(x[:0], y[:0])),
        lambda x, y: [],
        lambda x, y: iter(()),
        lambda x, y: [(x[:0], y[:0])],
    ],
    ids=["tensors", "dataset", "loader", "list", "iterator", "empty batch"],
)
def test_empty_data(empty):
    refused("the data are empty", mlp(5, 4, 3), empty(*draw("categorical", 4)))


@fault(7)
def test_one_empty_batch_changes_nothing():
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 4)
    assert log_evidence(model, [(x[:0], y[:0]), (x, y)]) == pytest.approx(log_evidence(model, (x, y)))


@fault(8)
def test_one_sample_is_exact():
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 1)
    found = curvature(model, (x, y))
    for name in found.factors:
        assert_close(oracles.kron_blocks(found, name), exact_blocks(model, name, x, y, "categorical", 1), rtol=1e-9, atol=1e-10)
    assert math.isfinite(log_evidence(model, (x, y)))


class Stream(IterableDataset):
    def __init__(self, x, y):
        self.data = x, y

    def __iter__(self):
        return iter(zip(*self.data, strict=True))


@fault(9)
def test_iterable_dataset_without_length():
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 10)
    expected = log_evidence(model, (x, y))
    assert log_evidence(model, Stream(x, y), batch_size=4) == pytest.approx(expected, abs=1e-10)
    assert log_evidence(model, DataLoader(Stream(x, y), 4)) == pytest.approx(expected, abs=1e-10)
    refused("subset needs data whose length is known", model, Stream(x, y), subset=3)


@fault(9)
def test_drop_last_on_an_iterable_dataset():
    """Its length cannot be compared, so the flag itself is refused."""
    loader = DataLoader(Stream(*draw("categorical", 10)), 4, drop_last=True)
    refused("drop_last", mlp(5, 4, 3), loader)


@fault(10)
def test_flat_targets_against_one_output():
    x, y = draw("gaussian", 6, outputs=1)
    refused(r"targets \(6,\).*outputs \(6, 1\): use targets\[:, None\]", mlp(5, 4, 1), (x, y[:, 0]), "gaussian")


@fault(11)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda y: y + 1, "labels run from 1 to 3, but the model has 3 outputs"),
        (lambda y: y - 1, "labels run from -1 to 1"),
        (lambda y: nn.functional.one_hot(y, 3), "targets of shape .* one-hot"),
        (lambda y: nn.functional.one_hot(y, 3).double(), "targets of shape .* one-hot"),
        (lambda y: y.double(), "targets of shape .* not class indices"),
    ],
    ids=["too large", "negative", "one-hot", "one-hot float", "float"],
)
def test_labels_out_of_range(change, message):
    x, _ = draw("categorical", 6)
    refused(message, mlp(5, 4, 3), (x, change(torch.arange(6) % 3)))


@fault(12)
def test_a_single_class():
    x, _ = draw("categorical", 6)
    for classes in (2, 3):
        assert math.isfinite(log_evidence(mlp(5, 4, classes), (x, torch.zeros(6, dtype=torch.long))))


@fault(21)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * 0,
        lambda x: torch.ones_like(x),
        lambda x: torch.cat([x[:, :1], torch.zeros_like(x[:, 1:])], 1),
        lambda x: torch.eye(5).repeat(2, 1),
        lambda x: x * 1e-20,
    ],
    ids=["zero", "constant", "zero features", "repeated eigenvalues", "tiny"],
)
def test_degenerate_inputs_are_no_fault(change, dtype):
    x, y = draw("categorical", 10)
    for activation in (nn.Tanh, nn.ReLU):
        model = mlp(5, 4, 3, activation=activation)
        exact = log_evidence(model, (change(x), y))
        assert math.isfinite(exact)
        assert log_evidence(model.to(dtype), (change(x).to(dtype), y)) == pytest.approx(exact, rel=1e-4)


@fault(21)
def test_all_zero_inputs_leave_the_prior():
    """Without a bias nothing is learned: the evidence is that of guessing, and no parameter counts."""
    model = nn.Linear(5, 3, bias=False).double()
    nn.init.zeros_(model.weight)
    value = log_evidence(model, (torch.zeros(6, 5), torch.zeros(6, dtype=torch.long)))
    assert value == pytest.approx(-6 * math.log(3), abs=1e-10)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (lambda x, y: (x, y[:3]), ValueError, "6 inputs but 3 targets"),
        (lambda x, y: (x.long(), y), ValueError, "inputs are torch.int64"),
        (lambda x, y: [{"x": x, "y": y}], TypeError, "each batch must be a pair .* got dict"),
        (lambda x, y: [x], TypeError, "each batch must be a pair .* got Tensor"),
        (lambda x, y: TensorDataset(x, y, y), TypeError, "each batch must be a pair"),
    ],
    ids=["lengths", "integers", "dict", "tensor", "triples"],
)
def test_data_that_are_no_pairs(data, error, message):
    with pytest.raises(error, match=message):
        log_evidence(mlp(5, 4, 3), data(*draw("categorical", 6)))


@pytest.mark.parametrize("subset", [0, -1, 7])
def test_impossible_subsets(subset):
    refused(
        f"subset must be between 1 and the 6 samples of the data, got {subset}",
        mlp(5, 4, 3),
        draw("categorical", 6),
        subset=subset,
    )


@pytest.mark.parametrize("batch_size", [0, -1])
def test_impossible_batch_sizes(batch_size):
    refused("batch_size", mlp(5, 4, 3), draw("categorical", 6), batch_size=batch_size)


def test_batches_of_different_lengths_inside():
    x, y = draw("categorical", 6)
    refused("6 inputs but 3 targets", mlp(5, 4, 3), [(x, y[:3])])
