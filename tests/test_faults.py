"""Bad inputs: each gets a named error that says which module or argument it is, or a stated behaviour."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

import oracles
from autosym import log_evidence, nets
from autosym.layers import polyphase
from autosym.sites import sites
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


def with_layer(layer, shape=(6, 4)):
    """A model with the layer under the name ``odd``, which sees (B, 6, 4)."""
    model = nn.Sequential()
    model.add_module("first", nn.Linear(24, math.prod(shape)))
    model.add_module("unflatten", nn.Unflatten(1, shape))
    model.add_module("odd", layer)
    model.add_module("flatten", nn.Flatten())
    model.add_module("last", nn.LazyLinear(3))
    model(torch.randn(2, 24))
    return model.double()


@fault(13)
def test_batch_norm():
    model, data = with_layer(nn.BatchNorm1d(6)), draw("categorical", 5, (24,))
    refused(r"odd \(BatchNorm1d\).*statistics of the batch.*model.eval\(\)", model, data)
    refused("no path owns the parameter odd.weight of BatchNorm1d.*requires_grad_", model.eval(), data)
    model.odd.requires_grad_(False)
    assert log_evidence(model, data, batch_size=2) == pytest.approx(log_evidence(model, data), abs=1e-9)
    assert math.isfinite(log_evidence(model, data))


@fault(13)
def test_batch_norm_without_running_statistics():
    model = with_layer(nn.BatchNorm1d(6, affine=False, track_running_stats=False)).eval()
    refused(r"odd \(BatchNorm1d\) uses the statistics of the batch", model, draw("categorical", 5, (24,)))


@fault(14)
@pytest.mark.parametrize("layer", [nn.LayerNorm(4), nn.GroupNorm(2, 6), nn.PReLU()], ids=lambda layer: type(layer).__name__)
def test_other_layers_with_parameters_must_be_frozen(layer):
    model, data = with_layer(layer), draw("categorical", 5, (24,))
    refused(f"no path owns the parameter odd.weight of {type(layer).__name__}.*requires_grad_", model, data)
    layer.requires_grad_(False)
    assert math.isfinite(log_evidence(model, data))
    assert not any("odd" in site.name for site in sites(model))


class First(nn.Module):
    """The outputs of a recurrent layer, without its state."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


@fault(15)
@pytest.mark.parametrize(
    ("layer", "shape", "name"),
    [
        (nn.Conv1d(6, 2, 3), (6, 4), "odd.weight of Conv1d"),
        (nn.Conv3d(1, 2, (1, 3, 2)), (1, 3, 4, 2), "odd.weight of Conv3d"),
        (nn.ConvTranspose2d(2, 3, 2), (2, 3, 4), "odd.weight of ConvTranspose2d"),
        (First(nn.GRU(4, 3, batch_first=True)), (6, 4), "odd.layer.weight_ih_l0 of GRU"),
        (nn.Bilinear(4, 4, 2), None, "weight of Bilinear"),
    ],
    ids=["Conv1d", "Conv3d", "ConvTranspose2d", "GRU", "Bilinear"],
)
def test_layers_that_are_no_path(layer, shape, name):
    model = with_layer(layer, shape) if shape else layer
    refused(f"no path owns the parameter {name}", model, draw("categorical", 5, (24,)))


@fault(16)
def test_grouped_convolution_has_one_block_per_group():
    model = with_layer(nn.Conv2d(4, 6, 2, groups=2), (4, 3, 2))
    factors = curvature(model, draw("categorical", 5, (24,))).factors["odd.weight"]
    assert (factors.A.shape, factors.G.shape) == ((2, 8, 8), (2, 3, 3))


@fault(17)
def test_the_same_layer_used_twice():
    shared = nn.Linear(5, 5)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(5, 3)).double()
    refused("0.weight, 0.bias is used more than once", model, draw("categorical", 4))


@fault(17)
def test_tied_weights():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3)).double()
    model[2].weight = model[0].weight
    refused("2.weight and 0.weight are the same parameter", model, draw("categorical", 4))


@fault(17)
def test_positions_folded_into_the_batch():
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(3, 2), nn.Linear(4, 3)

        def forward(self, x):
            return self.outer(self.inner(x.reshape(-1, 3)).reshape(-1, 4))

    refused("inner.weight, inner.bias must see one positional tensor", Folded().double(), draw("categorical", 4, (6,)))


@fault(19)
@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.AlphaDropout(0.5)], ids=str)
def test_dropout_in_train_mode(layer):
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), layer, nn.Linear(4, 3)).double()
    refused(rf"2 \({type(layer).__name__}\) is in train mode.*model.eval\(\)", model, draw("categorical", 4))
    assert math.isfinite(log_evidence(model.eval(), draw("categorical", 4)))


@fault(19)
def test_random_activation_in_train_mode():
    model = nn.Sequential(nn.Linear(5, 4), nn.RReLU(), nn.Linear(4, 3)).double()
    refused(r"1 \(RReLU\)", model, draw("categorical", 4))


@fault(20)
def test_everything_frozen():
    refused("the model has no trainable parameter", mlp(5, 4, 3).requires_grad_(False), draw("categorical", 4))


class Branches(nn.Module):
    """Two layers, one of which takes no part, or has no influence."""

    def __init__(self, use):
        super().__init__()
        self.used, self.spare, self.use = nn.Linear(5, 3), nn.Linear(5, 3), use

    def forward(self, x):
        return self.used(x) + (self.spare(x).detach() if self.use else 0)


@fault(20)
def test_unused_parameters():
    data = draw("categorical", 4)
    refused("spare.weight, spare.bias took no part in the forward pass.*freeze", Branches(False).double(), data)
    refused("spare.weight has no influence on the output.*freeze", Branches(True).double(), data)
    model = Branches(False).double()
    model.spare.requires_grad_(False)
    assert math.isfinite(log_evidence(model, data))


@fault(20)
def test_loose_parameter():
    model = mlp(5, 4, 3)
    model.register_parameter("offset", nn.Parameter(torch.zeros(3)))
    refused("no path owns the parameter offset of Sequential", model, draw("categorical", 4))


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


@fault(25)
@pytest.mark.parametrize("size", [(33, 32), (32, 40), (1, 1)], ids=str)
def test_image_sizes_that_break_downsampling(size):
    side, length = ("height", size[0]) if size[0] % 32 else ("width", size[1])
    with pytest.raises(ValueError, match=f"{side} {length} is not divisible by the product of strides 32.*pad or resize"):
        nets.build("f-fc+conv", (1, *size), 10)
    with pytest.raises(ValueError, match=r"a map of \d+x\d+ has no polyphase grids of stride 16"):
        polyphase(torch.zeros(1, 1, *size), 16)


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


@pytest.mark.parametrize("head", [nn.Unflatten(1, (3, 1)), nn.Flatten(0)], ids=["three axes", "one axis"])
def test_outputs_of_another_shape(head):
    model = nn.Sequential(*mlp(5, 4, 3), head)
    refused(r"the model must return \(B, outputs\) for a batch of .*, got", model, draw("categorical", 6))


def test_inference_mode():
    """No graph can be made in inference mode: the error says so, or the pass leaves it."""
    model, data = mlp(5, 4, 3), draw("categorical", 6)
    expected = log_evidence(model, data)
    with torch.inference_mode():
        try:
            assert log_evidence(model, data) == pytest.approx(expected)
        except ValueError as error:
            assert "inference_mode" in str(error)  # noqa: PT017 (either answer will do)


def test_batches_of_different_lengths_inside():
    x, y = draw("categorical", 6)
    refused("6 inputs but 3 targets", mlp(5, 4, 3), [(x, y[:3])])
