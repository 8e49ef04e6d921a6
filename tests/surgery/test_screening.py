"""What paths are worth by kept factors: exact where factors cannot change, and honest about where they do."""

import copy
import math

import pytest
import torch
from torch import nn

import autosym
from autosym.nn import layers, nets
from autosym.surgery import simplifying
from autosym.surgery.screening import ABOVE, BELOW, ERROR, Estimate, screen

SHAPE = (1, 4, 4)


@pytest.fixture(scope="module")
def linear():
    """One relaxed layer, squared loss: columns are inputs and the loss has one curvature, so no factor depends on weights."""
    torch.manual_seed(0)
    paths = {"f-fc": layers.Factored(SHAPE, SHAPE), "fc": layers.fc(SHAPE, SHAPE)}
    model = nn.Sequential(layers.Relaxed({"conv": layers.conv(SHAPE, SHAPE)}, paths), nn.Flatten()).double()
    x = torch.randn(60, *SHAPE).double()
    data = x, (x.roll(1, 2) + 0.3 * x.flip(3)).flatten(1) + 0.5 * torch.randn(60, 16).double()
    return data, autosym.fit(model, data, "gaussian", epochs=5, every=1, burn_in=0)


def test_an_estimate_is_the_evidence_lost_where_no_other_factor_changes(linear, monkeypatch):
    monkeypatch.setattr(simplifying, "STEPS", 300)  # wherever they begin, precisions are at their best
    data, fit = linear
    whole = simplifying._without(fit, (), data, {}, refined=False)
    found = screen(whole, data, ["0.fc", "0.f-fc"], simplifying.STEPS, batch_size=7)
    for stem, estimate in found.items():
        lost = whole.evidence.log_evidence - simplifying._without(fit, (stem,), data, {}, refined=False).evidence.log_evidence
        assert estimate.nats == pytest.approx(float(lost), rel=1e-7), stem
        assert abs(estimate.nats) > 1, "the test would be empty"
    assert not fit.model[0]["fc"].linear.weight.grad_fn
    assert fit.model[0]["fc"].linear.weight.any(), "the model is as it was"


def test_the_log_likelihood_without_a_path_is_exact_for_classes_too():
    torch.manual_seed(0)
    model = nets.build("f-fc+conv+gconv:c4", (1, 8, 8), 3, 4, channels=(1, 1), strides=(2, 2), hidden=2).double()
    data = torch.randn(30, 1, 8, 8).double(), torch.arange(30) % 3
    fit = autosym.fit(model, data, epochs=2, every=1, burn_in=0)
    whole = simplifying._without(fit, (), data, {}, refined=False)
    for stem, estimate in screen(whole, data, ["blocks.0.f-fc", "blocks.1.conv"], 20).items():
        zeroed = copy.deepcopy(fit.model)
        for name, parameter in zeroed.named_parameters():
            if name.startswith(f"{stem}."):
                nn.init.zeros_(parameter)
        with torch.no_grad():
            logs = [-nn.functional.cross_entropy(one(data[0]), data[1], reduction="sum") for one in (whole.model, zeroed)]
        lost = float(logs[0] - logs[1])
        assert estimate.moved == pytest.approx(abs(lost) + abs(lost - estimate.nats), rel=1e-6), stem


@pytest.mark.parametrize("moved", [0.0, 1.0, 100.0])
def test_an_estimate_decides_if_it_is_further_from_the_threshold_than_it_may_be_wrong(moved):
    for sign, part in ((1, ABOVE), (-1, BELOW)):
        assert Estimate(10 + sign * (ERROR + part * moved + 0.1), moved).decides(10)
        assert not Estimate(10 + sign * (ERROR + part * moved - 0.1), moved).decides(10)
    assert Estimate(5.0, moved).decides(math.inf)


def test_each_batch_is_shown_once_with_all_paths_and_once_without_each(linear):
    data, fit = linear
    whole, calls = simplifying._without(fit, (), data, {}, refined=False), []
    handle = whole.model.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    screen(whole, data, ["0.fc", "0.f-fc"], 1, batch_size=40)
    handle.remove()
    assert calls[-6:] == [40, 40, 40, 20, 20, 20]
    assert sum(calls) == 3 * 60 + 2, "and a verification of two samples"
