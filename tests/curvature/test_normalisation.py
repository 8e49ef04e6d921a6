"""Scales and shifts of normalisation layers inside the evidence: exact blocks, and evidence that does not see a layer's scale."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import autosym
import oracles
from autosym.curvature.owners import sites, sizes
from autosym.evidence import laplace
from autosym.linear import normalisation
from autosym.linear.normalisation import NORMALISATIONS
from models import EXACT, KINDS, assert_same, curvature, draw, randomised

# By kind: the layer, and the shape of one sample that it sees.
LAYERS = {
    "BatchNorm1d flat": (lambda: nn.BatchNorm1d(4), (4,)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (4, 6)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (4, 3, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(2), (2, 3, 2, 2)),
    "LayerNorm": (lambda: nn.LayerNorm(6), (4, 6)),
    "LayerNorm of two axes": (lambda: nn.LayerNorm((3, 2)), (4, 3, 2)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (4, 3, 2)),
    "GroupNorm flat": (lambda: nn.GroupNorm(2, 6), (6,)),
}


def normalised(kind):
    """(5,) -> 3, with the layer in the middle; its running statistics are not those it starts with."""
    make, shape = LAYERS[kind]
    size = torch.Size(shape).numel()
    model = randomised(
        nn.Sequential(nn.Linear(5, size), nn.Unflatten(1, shape), make(), nn.ReLU(), nn.Flatten(), nn.Linear(size, 3))
    )
    layer = model[2]
    if hasattr(layer, "running_mean"):
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
    return model.eval()


@pytest.mark.parametrize("likelihood", KINDS)
@pytest.mark.parametrize("kind", LAYERS)
def test_blocks_are_exact(kind, likelihood):
    model, (x, y) = normalised(kind), draw(likelihood, 6)
    found = curvature(model, (x, y), likelihood)
    for name in ("2.weight", "2.bias"):
        exact = oracles.block_ggn(model, name, x, y, likelihood)
        assert exact.abs().max() > 1e-6, "the test would be empty"
        assert_close(oracles.kron_blocks(found, name)[0], exact, **EXACT)


@pytest.mark.parametrize("kind", LAYERS)
def test_blocks_do_not_depend_on_the_batch_size(kind):
    model, data = normalised(kind), draw("categorical", 7)
    assert_same(curvature(model, data, batch_size=2), curvature(model, data, batch_size=7))


@pytest.mark.parametrize("kind", LAYERS)
def test_every_part_may_be_frozen_or_missing(kind):
    model, data = normalised(kind), draw("categorical", 4)
    model[2].weight.requires_grad_(False)
    assert {"2.weight", "2.bias"} & {site.name for site in sites(model)} == {"2.bias"}
    assert curvature(model, data).factors.keys() >= {"2.bias"}
    model[2].register_parameter("weight", None)
    model[2].register_parameter("bias", None)
    assert [site.name for site in sites(model)] == ["0.weight", "0.bias", "5.weight", "5.bias"]


def test_every_kind_is_tested():
    assert {type(make()) for make, _ in LAYERS.values()} == set(NORMALISATIONS)


def test_a_layer_of_ones_own_is_refused():
    class Own(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) ** 2

    model = nn.Sequential(nn.Linear(5, 3), Own(3)).double()
    with pytest.raises(ValueError, match=r"no path owns the parameter 1\.weight of Own"):
        autosym.log_evidence(model, draw("categorical", 4))


def test_a_scale_that_is_too_wide_is_refused(monkeypatch):
    model, data = normalised("LayerNorm of two axes"), draw("categorical", 4)
    monkeypatch.setattr(normalisation, "WIDEST", 6)
    autosym.log_evidence(model, data)
    monkeypatch.setattr(normalisation, "WIDEST", 5)
    with pytest.raises(ValueError, match=r"2.weight of LayerNorm has 6 numbers: .*requires_grad_\(False\)"):
        autosym.log_evidence(model, data)
    model[2].requires_grad_(False)
    autosym.log_evidence(model, data)


def test_the_units_of_steps():
    model = normalised("LayerNorm")
    nn.init.constant_(model[2].weight, 2)
    assert sizes(sites(model))["2.weight"] == 2


# ---- the scale of a weight that a normalisation follows


def learned(model, data):
    """Evidence at precisions that are learned in closed form, to the end."""
    at = laplace.at(model, data)
    prior = autosym.Prior(at.names)
    for _ in range(300):
        at.mackay(prior)
    return float(at(prior).log_evidence.detach())


@torch.no_grad()
def before_rescaled(model, factor):
    """The same function, of other weights: the layer before the normalisation, and what that expects of its outputs."""
    model = copy.deepcopy(model)
    model[0].weight *= factor
    model[0].bias *= factor
    model[2].eps *= factor**2
    if hasattr(model[2], "running_mean"):
        model[2].running_mean *= factor
        model[2].running_var *= factor**2
    return model


@torch.no_grad()
def after_rescaled(model, factor):
    """The same function, of other weights: scale and shift, and the layer that follows their ReLU."""
    model = copy.deepcopy(model)
    for weight, power in ((model[2].weight, 1), (model[2].bias, 1), (model[5].weight, -1)):
        weight *= factor**power
    return model


@pytest.mark.parametrize("rescaled", [before_rescaled, after_rescaled])
@pytest.mark.parametrize("kind", LAYERS)
def test_rescaling_around_a_normalisation_does_not_change_the_evidence_at_learned_precisions(kind, rescaled):
    torch.manual_seed(0)
    model, data = normalised(kind), draw("categorical", 40)
    other = rescaled(model, 10.0)
    assert_close(other(data[0]), model(data[0]), **EXACT)
    assert learned(other, data) == pytest.approx(learned(model, data), abs=1e-6)
    one, ten = (autosym.log_evidence(net, data) for net in (model, other))
    assert abs(one - ten) > 1, "at a given precision the scale counts"
