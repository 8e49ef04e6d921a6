"""Counted work: of the routes to the evidence of the whole network, and of a fit."""

import pytest
import torch

from autosym import Prior
from autosym.curvature.passes import Pass
from autosym.evidence import costs, laplace, whole
from models import mlp, randomised, small


def problem(samples, model=None):
    torch.manual_seed(0)
    model = mlp(5, 4, 3) if model is None else model
    data = torch.randn(samples, 5, dtype=torch.float64), torch.arange(samples) % 3
    return model, data, laplace.at(model, data)


def test_a_forward_pass_is_counted_by_the_path_law():
    model, data, at = problem(6)
    found = costs.of(model, data, at)
    shapes = [(4, 5), (4, 1), (3, 4), (3, 1)]  # out and in of weights and biases
    assert found.forward == sum(o * i + costs.NUMBER * (o + i) for o, i in shapes)
    assert found.paths == 4
    more = costs.of(model, tuple(t.repeat(2, *[1] * (t.dim() - 1)) for t in data), at)
    assert more.forward == found.forward, "it is of one sample"


def test_positions_count():
    torch.manual_seed(0)
    model = randomised(small("conv", 3))
    data = torch.randn(4, 2, 4, 4, dtype=torch.float64), torch.arange(4) % 3
    shapes = costs._shapes(model, data[0][:1])
    weight = next(shape for name, shape in shapes.items() if "blocks.0" in name and "bias" not in name)
    assert weight[0] == 16
    assert weight[1] * weight[2] * weight[3] == dict(model.named_parameters())["blocks.0.conv.linear.weight"].numel()


def test_the_route_is_the_one_of_least_work_that_there_is_memory_for(monkeypatch):
    model, data, at = problem(4)
    assert costs.of(model, data, at).cheapest == "rows"
    assert whole.at(model, data, at, Prior(at.names)).how == "rows"
    many = problem(400)
    assert costs.of(*many).cheapest == "weights"
    assert costs.of(model, data, at, memory=1e-9).cheapest == "probes"
    monkeypatch.setattr(costs, "FEW", 3)
    assert costs.of(model, data, at).cheapest == "probes"


def test_work_is_compared_with_that_of_the_fit():
    model, data, at = problem(40)
    assert costs.within_a_fit(model, data, at, epochs=100, batch_size=8)
    found = costs.of(model, data, at)
    times = int(found.fit(100, 8) / found.least)
    assert costs.within_a_fit(model, data, at, 100, 8, times)
    assert not costs.within_a_fit(model, data, at, 100, 8, times + 1)
    assert found.fit(200, 8) == pytest.approx(2 * found.fit(100, 8))
    assert found.fit(100, 4) > found.fit(100, 8), "calls take time"


def test_counting_reads_one_batch_only(monkeypatch):
    model, data, at = problem(40)
    shown = []
    real = Pass.__iter__
    monkeypatch.setattr(Pass, "__iter__", lambda self: (shown.append(len(part[0])) or part for part in real(self)))
    costs.of(model, data, at)
    assert shown == [1]
