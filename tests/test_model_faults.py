"""Models that the evidence does not cover: each gets a named error that says which module it is, or a stated behaviour."""

import math

import pytest
import torch
from torch import nn

from autosym import fit, log_evidence, relax
from autosym.bayes.likelihoods import Categorical
from autosym.curvature.owners import sites
from autosym.nn import nets
from autosym.nn.layers import polyphase
from models import curvature, draw, mlp

fault = pytest.mark.fault


def refused(message, model, data):
    with pytest.raises(ValueError, match=message):
        log_evidence(model, data)


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
    for trainable in (True, False):
        model.eval().odd.requires_grad_(trainable)
        assert ("odd.weight" in [site.name for site in sites(model)]) == trainable
        assert log_evidence(model, data, batch_size=2) == pytest.approx(log_evidence(model, data), abs=1e-9)
        assert math.isfinite(log_evidence(model, data))


@fault(13)
def test_batch_norm_without_running_statistics():
    model = with_layer(nn.BatchNorm1d(6, affine=False, track_running_stats=False)).eval()
    refused(r"odd \(BatchNorm1d\) uses the statistics of the batch", model, draw("categorical", 5, (24,)))


@fault(14)
@pytest.mark.parametrize("layer", [nn.InstanceNorm1d(6, affine=True), nn.PReLU()], ids=lambda layer: type(layer).__name__)
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
        (nn.ConvTranspose2d(2, 3, 2), (2, 3, 4), "odd.weight of ConvTranspose2d"),
        (First(nn.GRU(4, 3, batch_first=True)), (6, 4), "odd.layer.weight_ih_l0 of GRU"),
        (nn.Bilinear(4, 4, 2), None, "weight of Bilinear"),
    ],
    ids=["ConvTranspose2d", "GRU", "Bilinear"],
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


@fault(25)
@pytest.mark.parametrize("size", [(33, 32), (32, 40), (1, 1)], ids=str)
def test_image_sizes_that_break_downsampling(size):
    side, length = ("height", size[0]) if size[0] % 32 else ("width", size[1])
    with pytest.raises(ValueError, match=f"{side} {length} is not divisible by the product of strides 32.*pad or resize"):
        nets.build("f-fc+conv", (1, *size), 10)
    with pytest.raises(ValueError, match=r"a map of \d+x\d+ has no polyphase grids of stride 16"):
        polyphase(torch.zeros(1, 1, *size), 16)


@pytest.mark.parametrize("head", [nn.Unflatten(1, (3, 1)), nn.Flatten(0)], ids=["three axes", "one axis"])
def test_outputs_of_another_shape(head):
    model = nn.Sequential(*mlp(5, 4, 3), head)
    refused(r"the model must return \(B, outputs\) for a batch of .*, got", model, draw("categorical", 6))


def test_inference_mode():
    """No graph can be made there: the error says so, and where one can."""
    model, data = mlp(5, 4, 3), draw("categorical", 6)
    with torch.inference_mode():
        refused(r"outside torch.inference_mode\(\)", model, data)
    with torch.no_grad():
        assert math.isfinite(log_evidence(model, data))


class Probabilities(nn.Module):
    """A softmax that is no module."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x).softmax(-1)


def test_a_softmax_at_the_end_is_refused_where_the_likelihood_has_one():
    net, (x, y) = mlp(5, 4, 3), draw("categorical", 9, outputs=3)
    refused(
        r"are probabilities, by a softmax in its forward\(\): the categorical likelihood applies", Probabilities(net), (x, y)
    )
    relaxed = relax(nn.Sequential(net, nn.Softmax(1)), x)
    with pytest.raises(ValueError, match=r"by 1 \(Softmax\)"):
        fit(relaxed, (x, y), epochs=1)
    targets = nn.functional.one_hot(y, 3).double()
    assert math.isfinite(log_evidence(Probabilities(net), (x, targets), "gaussian")), (
        "squared errors of probabilities are sound"
    )


def test_a_log_softmax_at_the_end_changes_nothing():
    net, data = mlp(5, 4, 3), draw("categorical", 9, outputs=3)
    assert log_evidence(nn.Sequential(net, nn.LogSoftmax(1)), data) == pytest.approx(log_evidence(net, data), rel=1e-12)


@pytest.mark.parametrize("outputs", [[[0.5, 0.6]], [[1.5, -0.5]], [[math.nan, 1.0]], [[1.0, 0.0], [1.0, 0.1]]])
def test_outputs_that_are_no_probabilities_are_logits(outputs):
    Categorical().check_outputs(torch.tensor(outputs), nn.Identity())
