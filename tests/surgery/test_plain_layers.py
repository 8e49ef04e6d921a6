import copy

import pytest
import torch
from torch import nn

import autosym
from autosym.surgery.plain_layers import plain_layers
from liftable import ActiveNorm, Cast, GroupedNorm, SamePadding, Standardised, built

KINDS = (nn.Sequential, nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm, nn.Linear, nn.Dropout, nn.SiLU, nn.ReLU, nn.ZeroPad2d)


@pytest.mark.parametrize("size", [9, 8])
def test_subclasses_become_torchs_layers_and_compute_the_same(size):
    model, x = built("subclasses")
    x, given = x[..., :size, :size], copy.deepcopy(model.state_dict())
    plain = plain_layers(model, x)
    torch.testing.assert_close(plain(x), model(x), rtol=0, atol=1e-12)
    assert {type(module) for module in plain.modules()} <= {*KINDS, nn.AdaptiveAvgPool2d, nn.Flatten}
    assert any(isinstance(module, nn.ZeroPad2d) for module in plain.modules()) == (size == 8)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in given.items()), "the given model is left alone"
    assert {type(module) for module in model} >= {ActiveNorm, Cast, GroupedNorm, SamePadding, Standardised}


def test_modes_and_frozen_parameters_are_kept():
    model, x = built("subclasses")
    model.train()[1].eval()
    model[1].bias.requires_grad_(False)
    model[7].requires_grad_(False)
    plain = plain_layers(model, x)
    assert [part.training for part in plain] == [part.training for part in model] == [True, False] + [True] * 6
    assert not any(part.training for part in plain[1].modules())
    assert [p.requires_grad for p in plain[1].parameters()] == [True, False]
    assert not any(p.requires_grad for p in plain[7].parameters())


def test_a_model_without_subclasses_is_not_copied():
    model, x = built("resnet")
    assert plain_layers(model, x) is model


class Halved(nn.BatchNorm2d):
    """torch's in evaluation, not in training."""

    def forward(self, x):
        return super().forward(x) / (2 if self.training else 1)


class Forgetful(nn.BatchNorm2d):
    """torch's outputs, but the statistics of training are not kept."""

    def forward(self, x):
        mean = None if self.running_mean is None else self.running_mean.clone()
        y = super().forward(x)
        self.running_mean.copy_(mean)
        return y


class Unused(nn.BatchNorm2d):
    """Has an activation that it does not use."""

    def __init__(self, width):
        super().__init__(width)
        self.act = nn.ReLU()


class Gated(nn.GroupNorm):
    """Has a parameter that torch's does not have."""

    def __init__(self, width):
        super().__init__(1, width)
        self.gate = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("kind", [Halved, Forgetful, Unused, Gated])
def test_normalisation_that_computes_something_else_stays(kind):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), kind(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()
    x = torch.randn(2, 3, 6, 6)
    assert type(plain_layers(model, x)[1]) is kind
    with pytest.raises(ValueError, match=rf"1 \({kind.__name__}\) has parameters of its own"):
        autosym.lift(model, x, "c4")


def test_lifting_tells_of_the_given_layers():
    model, x = built("subclasses")
    told = {note.layer: note for note in autosym.lift(model, x, "c4").lifting.layers}
    assert [told[name].kind for name in ("0", "1.0", "2", "3", "7")] == [
        "Standardised",
        "ActiveNorm",
        "SamePadding",
        "GroupedNorm",
        "Cast",
    ]
    assert told["0"].note == "3 channels to 2 fields, as Conv2d"
    lifting = autosym.lift(model, x, "c4").lifting
    assert lifting.parameters[0] == sum(parameter.numel() for parameter in model.parameters())
