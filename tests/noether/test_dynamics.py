"""Flows, symmetrised Hamiltonians and integrators, against definitions in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from autosym.noether.conserved import MEASURES, Network, Quadratic, draw, even, recordable_exponential, shifted, spread, times
from autosym.noether.dynamics import apply_j, euler, gradient, midpoint, residual, symmetrised, trajectory, velocity
from autosym.noether.known import bodies, catalogue, symbols, unitary
from autosym.noether.systems import oscillators, pendulum, planar_bodies

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def J(dimension):
    return apply_j(torch.eye(dimension, dtype=torch.float64)).mT


def quantities(kind, dimension, count=2, seed=0):
    torch.manual_seed(seed)
    return (
        Quadratic(dimension, count, 0.3) if kind == "quadratic" else Network(dimension, count, 8, steps=3, iterations=25)
    ).double()


def jacobian(conserved, x, tau):
    return torch.autograd.functional.jacobian(lambda y: conserved.flow(y, tau)[0], x)


def scalar_network(dimension):
    net = nn.Sequential(nn.Linear(dimension, 16), nn.Tanh(), nn.Linear(16, 1, bias=False)).double()
    return lambda x: net(x)[..., 0]


def test_j_is_what_the_design_says():
    assert_close(apply_j(torch.tensor([1.0, 2.0, 3.0, 4.0])), torch.tensor([3.0, 4.0, -1.0, -2.0]))
    assert_close(J(4) @ J(4), -torch.eye(4, dtype=torch.float64))


@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(["quadratic", "network"]),
    pairs=st.integers(1, 3),
    seed=st.integers(0, 99),
    length=st.floats(-1.0, 1.0),
)
def test_flows_are_symplectic(kind, pairs, seed, length):
    conserved = quantities(kind, 2 * pairs, seed=seed)
    x, tau = torch.randn(2 * pairs, dtype=torch.float64), length * torch.randn(1, 2, dtype=torch.float64)
    D = jacobian(conserved, x, tau)
    assert_close(D.mT @ J(2 * pairs) @ D, J(2 * pairs), **EXACT)


def test_a_flow_of_the_gradient_itself_would_not_be_symplectic():
    A = torch.tensor([[1.0, 0.3], [0.3, 2.0]], dtype=torch.float64)
    D = torch.matrix_exp(A)
    assert not torch.allclose(D.mT @ J(2) @ D, J(2))


@settings(max_examples=8, deadline=None)
@given(pairs=st.integers(1, 3), seed=st.integers(0, 99))
def test_flows_conserve_their_generator(pairs, seed):
    conserved, x = quantities("quadratic", 2 * pairs, seed=seed), torch.randn(5, 2 * pairs, dtype=torch.float64)
    tau = torch.randn(3, 2, dtype=torch.float64)
    generator = lambda y: (conserved(y) * tau[:, None]).sum(-1)  # noqa: E731
    assert_close(generator(conserved.flow(x, tau)), generator(x.expand(3, 5, -1)), **EXACT)
    moved = conserved(conserved.flow(x, tau))
    assert not torch.allclose(moved, conserved(x).expand_as(moved)), "one by one they are not conserved: they do not commute"


def test_the_flow_of_a_network_conserves_it_to_the_order_of_its_steps():
    x, tau = torch.randn(5, 4, dtype=torch.float64), torch.tensor([[0.9, -0.7]], dtype=torch.float64)
    errors = []
    for steps in (4, 8, 16):
        conserved = quantities("network", 4)
        for p in conserved.parameters():
            p.data *= 2
        conserved.steps = steps
        generator = lambda y: (conserved(y) * tau).sum(-1)  # noqa: B023, E731
        errors.append(float((generator(conserved.flow(x, tau)[0]) - generator(x)).detach().abs().max()))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.3)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.3)


def test_a_network_that_is_quadratic_has_the_flow_of_the_quadratic():
    quadratic = quantities("quadratic", 4)
    network = quantities("network", 4)
    network.forward = quadratic.forward
    network.steps, network.iterations = 100, 6
    x, tau = torch.randn(3, 4, dtype=torch.float64), 0.5 * torch.randn(2, 2, dtype=torch.float64)
    assert_close(network.flow(x, tau), quadratic.flow(x, tau), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("norm", "error"), [(1.0, 1e-8), (10.0, 1e-7), (30.0, 1e-4)])
def test_the_exponential_that_can_be_recorded_is_torchs(norm, error):
    A = torch.randn(5, 4, 4, dtype=torch.float64)
    A = (A + A.mT) @ J(4)  # Hamiltonian matrices
    A = (norm / torch.linalg.matrix_norm(A, 2))[:, None, None] * A
    A.requires_grad_()
    expected, found = torch.matrix_exp(A), recordable_exponential(A)
    assert float(((found - expected).norm() / expected.norm()).detach()) < error
    slopes = [torch.autograd.grad(t.square().sum().log(), A)[0] for t in (expected, found)]
    assert float((slopes[0] - slopes[1]).norm() / slopes[0].norm()) < 10 * error


def test_shifted_times_are_even_and_each_is_uniform():
    uniform = even(64, 1, torch.zeros((), dtype=torch.float64))
    drawn = torch.stack([shifted("cube", uniform) for _ in range(200)])[..., 0]
    means, independent = drawn.mean(1), torch.stack([draw("cube", 64, 1, uniform) for _ in range(200)])[..., 0].mean(1)
    assert means.std() < 0.3 * independent.std()
    assert abs(float(drawn[:, 0].mean())) < 4 * math.pi / math.sqrt(3 * 200)
    assert drawn.abs().max() <= math.pi
    assert not torch.equal(drawn[0], drawn[1])


def test_the_flow_is_the_exponential_of_the_generators():
    conserved, x = quantities("quadratic", 4), torch.randn(3, 4, dtype=torch.float64)
    tau = torch.tensor([[0.3, -0.8]], dtype=torch.float64)
    G = conserved.generators()
    assert_close(
        G[0],
        torch.block_diag(J(4) @ conserved.A[0], torch.zeros(1, 1))
        + nn.functional.pad((J(4) @ conserved.b[0])[:, None], (4, 0, 0, 1)),
    )
    ones = torch.cat([x, torch.ones(3, 1, dtype=torch.float64)], 1)
    assert_close(conserved.flow(x, tau)[0], (ones @ torch.matrix_exp(0.3 * G[0] - 0.8 * G[1]).mT)[:, :4])


@pytest.mark.parametrize("measure", MEASURES)
def test_measures_have_the_moments_they_should(measure):
    variance = {"cube": 1 / 3, "ball": 1 / 5, "gaussian": 1 / 3}[measure]
    for tau in (draw(measure, 20_000, 3, torch.zeros(1).double()), spread(measure, 20_000, 3, torch.zeros(1).double(), 0)):
        tau = tau / math.pi
        assert tau.shape == (20_000, 3)
        assert_close(tau.mT @ tau / len(tau), variance * torch.eye(3, dtype=torch.float64), atol=0.012, rtol=0)
    if measure == "cube":
        assert tau.abs().max() <= 1
    if measure == "ball":
        assert tau.norm(dim=1).max() <= 1
        assert float((tau.norm(dim=1) < 0.5).double().mean()) == pytest.approx(0.125, abs=0.01)


def test_an_unknown_measure_is_refused():
    with pytest.raises(ValueError, match="cube, ball, gaussian"):
        times("sphere", torch.rand(3, 2))


# ---- symmetrised Hamiltonians


def test_one_compact_generator_over_whole_periods_makes_it_invariant():
    network, x = scalar_network(2), torch.randn(6, 2, dtype=torch.float64)
    rotation = Quadratic.of(torch.eye(2, dtype=torch.float64)[None])
    whole = (2 * torch.arange(64, dtype=torch.float64)[:, None] / 64 - 1) * math.pi
    moves = torch.tensor([[0.3], [1.7], [-2.0]], dtype=torch.float64)
    assert residual(network, rotation, x, whole, moves) < 1e-6
    assert residual(network, rotation, x, whole / 2, moves) > 0.05, "half a period leaves a residual"
    H = symmetrised(network, rotation, whole)
    along = (gradient(H, x) * velocity(lambda y: rotation(y)[..., 0], x)).sum(-1)
    assert along.abs().max() < 1e-5, "the bracket {H, C} vanishes, so that the dynamics of H conserve C"


def test_without_motion_symmetrising_changes_nothing():
    network, x = scalar_network(4), torch.randn(6, 4, dtype=torch.float64)
    still = Quadratic.of(torch.zeros(2, 4, 4, dtype=torch.float64))
    assert_close(symmetrised(network, still, torch.randn(5, 2).double())(x), network(x))


@pytest.mark.parametrize("kind", ["quadratic", "network"])
def test_gradients_reach_the_quantities_through_the_dynamics(kind):
    conserved, network = quantities(kind, 2, 1), scalar_network(2)
    x, tau = torch.randn(4, 2, dtype=torch.float64), torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    loss = midpoint(lambda y: velocity(symmetrised(network, conserved, tau), y), x, 0.1).square().sum()
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in conserved.parameters())


# ---- dynamics


def test_the_velocity_is_the_one_of_the_equations():
    x = torch.randn(5, 2, dtype=torch.float64)
    assert_close(velocity(pendulum().hamiltonian, x), torch.stack([x[:, 1], -x[:, 0].sin()], 1))


@pytest.mark.parametrize("steps", [1, 10])
def test_the_midpoint_rule_is_symplectic_and_euler_is_not(steps):
    field = lambda y: velocity(pendulum().hamiltonian, y)  # noqa: E731
    x = torch.randn(2, dtype=torch.float64)
    for rule, symplectic in (
        (lambda y: midpoint(field, y, 0.3, steps, 40), True),
        (lambda y: euler(field, y, 0.3, steps), False),
    ):
        D = torch.autograd.functional.jacobian(rule, x)
        assert bool((torch.linalg.det(D) - 1).abs() < 1e-12) == symplectic


@pytest.mark.parametrize(("rule", "order"), [(euler, 1), (midpoint, 2)])
def test_integrators_have_their_order(rule, order):
    field = lambda y: velocity(oscillators(1).hamiltonian, y)  # noqa: E731
    x = torch.tensor([[1.0, 0.5]], dtype=torch.float64)
    true = Quadratic.of(torch.eye(2, dtype=torch.float64)[None]).flow(x, torch.ones(1, 1, dtype=torch.float64))[0]
    coarse, fine = (float((rule(field, x, 1.0, steps) - true).norm().detach()) for steps in (20, 40))
    assert coarse / fine == pytest.approx(2**order, rel=0.1)


def test_euler_adds_energy_where_the_midpoint_rule_keeps_it():
    system = oscillators(1)
    start = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    drift = []
    for rule in (euler, midpoint):
        states = trajectory(lambda y: velocity(system.hamiltonian, y), start, 0.2, 100, 1, rule)
        drift.append(float(system.hamiltonian(states[:, -1]) / system.hamiltonian(start)))
    assert drift[0] > 10
    assert drift[1] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("p_scale", [0.5, 2.0])
def test_starts_have_their_sizes(p_scale):
    q, p = planar_bodies(2).starts(4000, torch.Generator().manual_seed(0), p_scale).chunk(2, 1)
    assert_close(q.std(0), torch.ones(4).double(), rtol=0.05, atol=0)
    assert_close(p.std(0), torch.full((4,), p_scale).double(), rtol=0.05, atol=0)


@pytest.mark.parametrize("system", [oscillators(3), planar_bodies(3)], ids=lambda s: s.name)
def test_known_quantities_are_conserved_and_complete(system):
    """Their brackets with H vanish, they are independent, and no other quantity of degree two is conserved."""
    x = torch.randn(2000, system.dimension, dtype=torch.float64)
    v = velocity(system.hamiltonian, x)
    for known in system.conserved:
        rate = ((x @ known.A + known.b) * v).sum(-1)
        assert rate.abs().max() < 1e-10, known.name
    upper = torch.triu_indices(system.dimension, system.dimension)
    rates = torch.cat([x[:, upper[0]] * v[:, upper[1]] + v[:, upper[0]] * x[:, upper[1]], v], 1)
    values = torch.linalg.svdvals(rates / rates.norm(dim=0))
    assert int((values < 1e-8).sum()) == len(system.conserved)
    stack = torch.stack([known.vector() for known in system.conserved])
    assert torch.linalg.matrix_rank(stack) == len(stack)


def test_the_numbers_of_known_quantities():
    assert len(list(unitary(3))) == 9
    assert len(list(bodies(3, 2))) == 7
    assert len({known.name for known in catalogue(2)}) == len(catalogue(2))


def test_symbols():
    A, b = torch.tensor([[1.0, -0.5], [-0.5, 0.001]]), torch.tensor([0.0, -2.0])
    assert symbols(A, b, ["q1", "p1"]) == "-2.00 p1 + 0.50 q1^2 - 0.50 q1 p1"
    assert symbols(torch.zeros(2, 2), torch.tensor([1.0, 0.0]), ["q1", "p1"]) == "1.00 q1"


@pytest.mark.parametrize("build", [Quadratic, Network])
def test_odd_phase_spaces_are_refused(build):
    with pytest.raises(ValueError, match="must be even"):
        build(3, 1)
