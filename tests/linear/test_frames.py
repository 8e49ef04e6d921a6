"""Steps of anchor values in coordinates in which their basis is orthonormal."""

import copy

import pytest
import torch
from torch import nn

from anchors import SPARSE, dense_weights, set_omega
from autosym import Gaussian, Prior, fit
from autosym.bayes.likelihoods import LIKELIHOODS
from autosym.curvature.owners import frames, sites
from autosym.linear.sparse import SparseConv, SparseIn, SparseOut
from autosym.nn import nets
from autosym.training.steps import Weights
from models import randomised


class Widened(nn.Module):
    def forward(self, x):
        return x.double()


@pytest.mark.parametrize(("name", "make", "positions", "shape"), SPARSE)
def test_a_frame_measures_anchors_by_the_weights_they_make(name, make, positions, shape):
    """Lengths of v are those of weights, the prior of u is that of v, slopes are those of v, and nothing is lost on the way."""
    path = randomised(make(positions - 2))
    frame, u = path.frame(), path.weight.detach().clone()
    v = frame.coordinates(u)
    assert float(v.square().sum()) == pytest.approx(float(dense_weights(path).square().sum()), rel=1e-9)
    torch.testing.assert_close(frame.values(v), u, rtol=1e-9, atol=1e-9)
    delta = torch.full_like(u, 0.7)
    assert float((frame.precision(delta) * v.square()).sum()) == pytest.approx(0.7 * float(u.square().sum()), rel=1e-9)
    x = torch.randn(3, *shape, dtype=torch.float64)
    (by_u,) = torch.autograd.grad(path(x).square().sum(), path.weight)
    path.weight.requires_grad_(False)
    v.requires_grad_()
    moved = torch.func.functional_call(path, {"weight": frame.values(v)}, (x,))
    torch.testing.assert_close(frame.slope(by_u), torch.autograd.grad(moved.square().sum(), v)[0], rtol=1e-9, atol=1e-9)
    assert frame.unit(u, 7.0) == pytest.approx(float(v.detach().square().mean().sqrt()))
    steps = torch.stack([frame.coordinates(0.3 * torch.randn_like(u)) for _ in range(300)])
    assert float(steps.square().mean().sqrt()) == pytest.approx(frame.unit(torch.zeros_like(u), 0.3), rel=0.1)


def test_a_frame_of_a_basis_that_shrinks_much_loses_nothing_either():
    """Its smallest eigenvalues are those of rounding: coordinates and prior still belong together, in single precision."""
    path = SparseIn((2, 16, 16), 3, 256)
    frame, u = path.frame(), torch.randn(2, 3, 256)
    assert float(frame.spectrum.min() / frame.spectrum.max()) == pytest.approx(1e-6, rel=1e-3)
    v = frame.coordinates(u)
    assert float((frame.values(v) - u).norm() / u.norm()) < 1e-3
    assert float((frame.precision(torch.ones_like(u)) * v.square()).sum()) == pytest.approx(float(u.square().sum()), rel=1e-3)


def test_a_step_of_no_length_leaves_anchors_as_they_are():
    """To the bit, also in single precision: the step is taken to the frame and back, the weights are not."""
    net = nets.build("s-fc+s-conv", (1, 4, 4), 2, 2, channels=(1,), strides=(1,), hidden=2)
    owned = sites(net)
    weights = Weights({s.name: s.parameter for s in owned}, 8, "adam", frames=frames(owned))
    weights.set_prior(Prior([s.name for s in owned], 3.0), LIKELIHOODS["categorical"]())
    before = {s.name: s.parameter.detach().clone() for s in owned}
    weights.step(net, LIKELIHOODS["categorical"](), torch.randn(8, 1, 4, 4), torch.arange(8) % 2)
    assert all(torch.equal(s.parameter, before[s.name]) for s in owned)
    weights.lr.fill_(0.1)
    weights.step(net, LIKELIHOODS["categorical"](), torch.randn(8, 1, 4, 4), torch.arange(8) % 2)
    assert all(not torch.equal(s.parameter, before[s.name]) for s in owned if s.name in weights.frames)


def test_sparse_paths_train_beside_others_of_another_precision():
    net = nn.Sequential(SparseConv(1, 2, 3, 4), nn.Flatten(), Widened(), nn.Linear(32, 2).double())
    x, y = torch.randn(8, 1, 4, 4), torch.arange(8) % 2
    owned = sites(net)
    weights = Weights({s.name: s.parameter for s in owned}, 8, "adam", frames=frames(owned))
    weights.lr.fill_(0.1)
    before = net[0].weight.detach().clone()
    weights.step(net, LIKELIHOODS["categorical"](), x, y)
    assert torch.isfinite(net[0].weight).all()
    assert not torch.equal(net[0].weight, before)


@pytest.mark.parametrize(("name", "make", "positions", "shape"), SPARSE)
def test_a_frame_stays_where_a_basis_is_learned_and_not_where_it_is_set(name, make, positions, shape):
    """A run that is resumed has other bases than at its start, and the same coordinates."""
    learned, fixed = make(positions - 2, True, True), make(positions - 2)
    torch.testing.assert_close(learned.frame().forth, fixed.frame().forth)
    with torch.no_grad():
        learned.basis.shift.normal_()
    before = learned.frame().forth
    torch.testing.assert_close(set_omega(learned, 0.3).frame().forth, before)
    assert not torch.allclose(set_omega(fixed, 0.3).frame().forth, before)
    torch.testing.assert_close(fixed.basis.made(), fixed.basis())


@pytest.mark.parametrize(("name", "make", "positions", "shape"), SPARSE)
def test_steps_in_a_frame_leave_the_map_where_it_is_and_lead_there(name, make, positions, shape):
    path = randomised(make(positions - 2))
    x = torch.randn(30, *shape, dtype=torch.float64)
    y = path(x).detach()
    y = (y + 0.3 * torch.randn_like(y)).flatten(1)
    model, likelihood = nn.Sequential(path, nn.Flatten()), Gaussian(1.0)
    zero = torch.zeros_like(path.weight)

    def outputs(u):
        return torch.func.functional_call(model, {"0.weight": u}, (x,)).flatten()

    jacobian = torch.func.jacrev(outputs)(zero).flatten(1)  # the path is linear in u
    optimum = torch.linalg.solve(jacobian.T @ jacobian + 2.0 * torch.eye(zero.numel()).double(), jacobian.T @ y.flatten())
    owned = sites(model)
    with torch.no_grad():
        path.weight.copy_(optimum.view_as(path.weight))
    # At the optimum Adam's metric is that of small gradients: every step there makes errors of rounding some hundred times larger.
    for start, steps, tolerance in (("optimum", 2, 1e-8), ("zero", 1500, 1e-3)):
        if start == "zero":
            path.weight.data.zero_()
        weights = Weights({s.name: s.parameter for s in owned}, len(x), "adam", frames=frames(owned))
        weights.set_prior(Prior([s.name for s in owned], 2.0), likelihood)
        for step in range(steps):
            weights.lr.fill_(0.1 * (1 - step / steps))
            weights.step(model, likelihood, x, y)
        torch.testing.assert_close(path.weight.detach().flatten(), optimum, rtol=tolerance, atol=tolerance)


def test_training_moves_anchors_in_their_frames_where_the_prior_and_the_optimiser_have_them(monkeypatch):
    seen = []

    class Spy(Weights):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            seen.append(set(self.frames))

    monkeypatch.setattr("autosym.training.fitting.Weights", Spy)
    net = nets.build("s-fc+s-conv", (1, 4, 4), 2, 2, channels=(1,), strides=(1,), hidden=2)
    pair = torch.randn(8, 1, 4, 4), torch.tensor([0, 1]).repeat(4)
    anchors = {s.name for s in sites(net) if isinstance(s.module, SparseConv | SparseIn | SparseOut)}
    across = {
        s.name for s in sites(net) if isinstance(s.module, SparseConv | SparseIn)
    }  # rows of scales of their own run along
    for options, expected in (
        ({}, anchors),
        ({"nu": 4.0}, across),
        ({"optimiser": "sgd"}, set()),
        ({"relative": False}, set()),
    ):
        fit(copy.deepcopy(net), pair, epochs=1, burn_in=0, **options)
        assert seen.pop() == expected
    assert (len(anchors), len(across)) == (3, 2)
