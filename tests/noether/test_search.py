"""Conserved quantities from trajectories: what is found, what it says of them, and what is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from autosym.evidence import exact
from autosym.noether import Search, discover
from autosym.noether.candidates import cuts, least_drift, monomials, pairs_of_bodies
from autosym.noether.conserved import Quadratic
from autosym.noether.dynamics import symmetrised, velocity
from autosym.noether.found import Quantity, count_directions, is_conserved, readable
from autosym.noether.known import catalogue, unit, unitary
from autosym.noether.regression import Regression
from autosym.noether.search import _others, drift_of
from autosym.noether.systems import System, oscillators, pendulum, planar_bodies
from autosym.noether.trajectories import checked, velocities


def trajectories(system, count=10, dt=0.1, steps=20, seed=0):
    return system.trajectories(system.starts(count, torch.Generator().manual_seed(seed)), dt, steps)


QUICK = Search(points=20, starts=1, steps=200, features=64)


@pytest.fixture(scope="module")
def oscillator():
    return discover(trajectories(oscillators(1)), 0.1, search=QUICK)


# ---- the exact variant


@pytest.mark.parametrize("quantities", [0, 2])
def test_features_are_velocities_of_the_symmetrised_hamiltonian(quantities):
    model = Regression(4, Quadratic(4, 2, 0.3) if quantities else None, features=7).double()
    x, tau = torch.randn(5, 4).double(), model.times(6, 0)
    weights = torch.randn(7).double()
    network = lambda y: model.values(y) @ weights  # noqa: E731
    hamiltonian = symmetrised(network, model.conserved, tau) if quantities else network
    assert_close(model.features(x, tau) @ weights, velocity(hamiltonian, x).flatten())


def test_the_evidence_is_exact_and_its_gradient_right():
    model = Regression(2, Quadratic(2, 1, 0.3), features=9).double()
    x, v = torch.randn(4, 2).double(), torch.randn(4, 2).double()
    tau = model.times(8, 0)
    record = model.evidence(x, v, tau)
    phi, variance = model.features(x, tau).detach(), float(model.log_variance.detach().exp()) + 1e-6
    covariance = phi @ phi.mT + variance * torch.eye(8).double()
    expected = torch.distributions.MultivariateNormal(torch.zeros(8).double(), covariance).log_prob(v.flatten())
    assert float(record.log_evidence.detach()) == pytest.approx(float(expected), rel=1e-9)
    assert record.bound_of is None
    raw = model.conserved.raw.detach().clone().requires_grad_()

    def value(raw):
        phi = torch.func.functional_call(Features(model), {"model.conserved.raw": raw}, (x, tau))
        return exact.at(phi, v.flatten(), 1.0, variance).log_evidence

    torch.autograd.gradcheck(value, (raw,))


class Features(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, tau):
        return self.model.features(x, tau)


@pytest.mark.parametrize("size", [1.0, 6.0])
def test_a_direction_is_taken_out_and_put_back(size):
    """In units of the states: b is ``size`` times what stands in the direction."""
    model = Regression(2, Quadratic(2, 3, 0.3, size))
    before = model.conserved
    direction = unit(next(unitary(1)).vector()[None] + torch.tensor([0, 0, 0, 0, 0.5, 0.2])).float()
    with model.without(direction):
        stack = torch.cat([model.conserved.A.flatten(1), model.conserved.b / size], 1)
        change = stack - torch.cat([before.A.flatten(1), before.b / size], 1)
        assert (stack @ direction.mT).abs().max() < 1e-6
        assert change.abs().max() > 0.01
        assert (change - change @ direction.mT @ direction).abs().max() < 1e-6, "of what was asked for, and no other"
    assert model.conserved is before


# ---- reading the result


def test_an_oscillator_is_found_to_conserve_its_energy(oscillator):
    assert oscillator.symmetries == 1
    assert oscillator.parallelness(oscillators(1).conserved)[0] >= 0.99
    (energy,) = oscillator.quantities
    assert energy.name == "energy"
    assert energy.angle < 8
    assert energy.drift < 0.15
    assert energy.nats > 3
    assert oscillator.log_evidence > oscillator.log_evidence_without
    assert "0.50 q1^2" in str(oscillator)
    assert "You have 1 symmetry" in str(oscillator)


def test_it_is_the_same_for_the_same_seed_and_leaves_the_generator_of_torch_alone():
    short = Search(points=8, starts=1, steps=5, features=8)
    state = torch.random.get_rng_state()
    one, two = (discover(trajectories(oscillators(1)), 0.1, search=short) for _ in range(2))
    assert one.singular_values == two.singular_values
    assert torch.equal(state, torch.random.get_rng_state())
    assert discover(trajectories(oscillators(1)), 0.1, search=short, seed=1).singular_values != one.singular_values


def test_a_discovery_is_json_and_a_figure(oscillator):
    pytest.importorskip("matplotlib")
    held = json.loads(json.dumps(oscillator.as_dict(), allow_nan=False))
    assert {"parallelness", "singular_values", "generators", "quantities", "residual"} <= held.keys()
    assert np.shape(held["generators"]) == (1, 3, 3)
    (G,) = np.array(held["generators"])
    assert_close(torch.tensor(G[:2, :2]), torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64), atol=0.1, rtol=0)
    assert len(oscillator.plot().axes) == 2


def test_a_pendulum_conserves_nothing_of_degree_two():
    wide = pendulum().trajectories(
        torch.linspace(0.5, 2.8, 10).double()[:, None] * torch.tensor([[1.0, 0.0]]).double(), 0.1, 60
    )
    found = discover(wide, 0.1, search=Search(points=60, starts=2, steps=200))
    assert found.symmetries == 0, str(found)
    assert "no symmetries" in str(found)


HYPERBOLIC = System("hyperbolic", 2, 1, lambda x: (x[..., 1] ** 2 - x[..., 0] ** 2) / 2, ())
FALL = System("fall", 2, 1, lambda x: x[..., 1] ** 2 / 2 + x[..., 0], ())


@pytest.mark.parametrize("search", [QUICK, Search(points=20, starts=2, steps=200)])
def test_a_flow_that_only_smooths_is_no_symmetry(search):
    """q - p nearly stops where q + p grows: it drifts by 7 to 16 %, and has evidence only if the lengthscale is too short."""
    found = discover(trajectories(HYPERBOLIC, 15, seed=1), 0.1, search=search, seed=1)
    assert found.symmetries == 0, str(found)
    assert min(q.drift for q in found.drifting) < 0.25, "the case is one where the drift alone does not decide"
    assert "no symmetries" in str(found)


def test_what_has_evidence_only_beside_a_direction_that_drifts_is_no_symmetry():
    """Free fall conserves p^2 / 2 + q, and the evidence does not need it: see the page on conserved quantities."""
    found = discover(trajectories(FALL, 15), 0.1, search=QUICK)
    assert found.log_evidence > found.log_evidence_without, "the case is one where both together have evidence"
    assert min(q.drift for q in found.drifting) < 0.25 < max(q.drift for q in found.drifting)
    assert found.symmetries == 0
    assert "Not counted: 2" in str(found)


@pytest.mark.parametrize("system", [HYPERBOLIC, FALL], ids=lambda s: s.name)
def test_open_orbits_have_their_energy_as_the_quantity_of_least_drift(system):
    x = trajectories(system)
    drifts, directions = least_drift(x)
    energy = Quadratic.of(directions[0, :4].reshape(1, 2, 2), directions[:1, 4:])
    assert drifts[0] < 1e-6 < 0.05 < drifts[1]
    values = torch.stack([energy(x)[..., 0], system.hamiltonian(x)]).flatten(1).detach()
    assert torch.corrcoef(values)[0, 1].abs() > 0.999999


@pytest.mark.parametrize(
    ("drift", "nats", "conserved"), [(0.09, -60.0, True), (0.11, 4.0, False), (0.2, 6.0, True), (0.26, 100.0, False)]
)
def test_a_quantity_that_drifts_needs_evidence(drift, nats, conserved):
    assert is_conserved(Quantity("", (), (), None, 0.0, drift, nats)) == conserved


def test_other_directions_are_the_rest_of_the_span():
    span = torch.linalg.qr(torch.randn(6, 4).double())[0].mT
    kept = torch.tensor([[1.0, 2.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0]]).double() @ span
    rest = _others(span, kept)
    assert_close(rest @ rest.mT, torch.eye(2).double())
    assert_close(rest @ kept.mT, torch.zeros(2, 2).double())
    assert torch.linalg.matrix_rank(torch.cat([rest, span])) == 4


@pytest.mark.slow
def test_two_oscillators_have_four_symmetries():
    found = discover(trajectories(oscillators(2), 20), 0.1)
    assert found.symmetries == 4
    assert found.singular_values[3] > 3 * found.singular_values[4]
    assert min(found.parallelness(oscillators(2).conserved)) >= 0.98
    assert {q.name for q in found.quantities} == {"energy 1", "energy 2", "exchange 1 2", "angular momentum 1 2"}


# ---- many dimensions: directions of least drift, their number by evidence


def in_x(system):
    """The system in a field that depends on x: it conserves neither the momentum along x nor angular momentum."""
    return replace(system, hamiltonian=lambda x: system.hamiltonian(x) - 0.5 * torch.cos(2 * x[..., 0:6:2]).sum(-1))


def within(span, known, scale):
    """How much of a known quantity lies in the span of directions (n, D): 1 is all of it."""
    basis = torch.linalg.qr(span.mT)[0]
    return float((known.vector(scale) @ basis).norm())


@pytest.mark.parametrize("masses", [(1.0, 1.0, 1.0), (1.0, 2.0, 0.5)])
@pytest.mark.parametrize(("noise", "least"), [(0.0, 0.9999), (0.01, 0.98)])
def test_the_least_drift_is_that_of_what_bodies_conserve(masses, noise, least):
    system = planar_bodies(3, masses)
    x = trajectories(system, 30, steps=50)
    x = x + noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    drifts, directions = least_drift(x)
    assert cuts(drifts, 24, 1) == [7]
    assert min(within(directions[:7], known, 1.0) for known in system.conserved) > least
    for drift, direction in zip(drifts[[0, 7, 20]], directions[[0, 7, 20]], strict=True):
        quantity = Quadratic.of(direction[:144].reshape(1, 12, 12), direction[None, 144:])
        assert drift_of(quantity, x) == pytest.approx(float(drift), rel=1e-3, abs=1e-5), "the drift that is reported"


def test_a_field_takes_its_momentum_from_the_quantities_of_least_drift():
    x = trajectories(in_x(planar_bodies(3)), 30, steps=50)
    drifts, directions = least_drift(x)
    found = {k.name: within(directions[: int((drifts < 1e-3).sum())], k, 1.0) for k in planar_bodies(3).conserved}
    assert found["momentum y"] > 0.999
    assert max(found["momentum x"], found["angular momentum"]) < 0.3


def test_monomials_are_an_orthonormal_basis_of_symmetric_forms():
    basis = monomials(4)
    assert_close(basis @ basis.mT, torch.eye(14, dtype=torch.float64))
    A = basis[:, :16].unflatten(1, (4, 4))
    assert torch.equal(A, A.mT)


def test_cuts_are_where_the_drift_jumps():
    drifts = torch.tensor([0.0, 1e-9, 0.02, 0.021, 0.1, 0.11, 5.0])
    assert cuts(drifts, 6, 2) == [2, 6]
    assert cuts(drifts, 5, 2) == [2, 4], "not beyond the most that are asked for"


def test_features_see_two_places_or_one_momentum():
    sees = pairs_of_bodies(60, 3, 2)
    places, momenta = (part.unflatten(1, (3, 2)) for part in sees.chunk(2, 1))
    assert torch.equal(places[..., 0], places[..., 1])
    assert {(int(q), int(p)) for q, p in zip(places.sum((1, 2)), momenta.sum((1, 2)), strict=True)} == {(4, 0), (0, 2)}
    assert len(torch.unique(sees, dim=0)) == 6


def test_states_that_do_not_fill_the_phase_space_are_refused():
    x = trajectories(planar_bodies(3), 30, steps=10)
    centred = (x.unflatten(2, (2, 3, 2)) - x.unflatten(2, (2, 3, 2)).mean(3, keepdim=True)).flatten(2)
    with pytest.raises(ValueError, match=r"8 of 12 dimensions.*moving centre"):
        least_drift(centred)
    with pytest.raises(ValueError, match="unknown directions 'best'"):
        discover(x, 0.1, search=Search(directions="best"))


def quartic(x):
    """Three different oscillators, pinned and coupled: nothing of degree two is conserved."""
    (q1, q2, q3), p = x[..., :3].unbind(-1), x[..., 3:]
    pinned = sum(w * (q**2 / 2 + q**4 / 4) for w, q in ((1.0, q1), (1.7, q2), (2.3, q3)))
    return p.square().sum(-1) / 2 + pinned + 0.5 * q1 * q2 + 0.3 * (q2 - q3) ** 4


QUARTIC = System("quartic", 6, 1, quartic, ())


def test_directions_of_least_drift_are_not_judged_by_the_trajectory_they_were_chosen_by():
    one = trajectories(QUARTIC, 1, steps=49)
    assert least_drift(one)[0][12] < 0.1, "13 of 27 hardly drift along it, and none is conserved"
    with pytest.raises(ValueError, match=r"one trajectory.*Give several trajectories"):
        discover(one, 0.1, search=TINY)
    with pytest.raises(ValueError, match="one trajectory"):
        discover(trajectories(oscillators(1), 1), 0.1, search=replace(TINY, directions="least-drift"))
    assert discover(trajectories(oscillators(1), 1), 0.1, search=TINY).points == 8, "learned directions may have one"


def test_fewer_changes_than_quantities_are_refused():
    """6 coordinates have 27 quantities. Each trajectory shows one change less than its states."""
    x = trajectories(QUARTIC, 3, steps=13)
    with pytest.raises(ValueError, match=r"show 26 changes, so 1 .* 3 trajectories, or 15 states"):
        least_drift(x[:2])
    with pytest.raises(ValueError, match=r"^2 trajectories of 14 states"):
        discover(x, 0.1, search=TINY)
    assert len(least_drift(x[:, :10])[0]) == 27


TINY = Search(points=8, starts=1, steps=2, samples=4, features=8, cuts=1)
LIGHT = Search(points=30, cuts=2, steps=40, samples=32, features=96)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_three_bodies_conserve_momenta_and_angular_momentum(seed):
    system = planar_bodies(3, (1.0, 1.0, 1.0) if seed == 0 else (1.0, 2.0, 0.5))
    found = discover(trajectories(system, 30, steps=50, seed=seed), 0.1, space=2, search=LIGHT, seed=seed)
    assert found.symmetries == 7, str(found)
    assert {"momentum x", "momentum y", "angular momentum"} <= {q.name for q in found.quantities}
    assert min(within(found.directions[:7], known, found.scale) for known in system.conserved) >= 0.95
    assert found.features == "pairs of bodies"
    assert found.log_evidence > found.log_evidence_without + 50
    assert min(q.nats for q in found.quantities) < 0, "a member of the set that the evidence does not need, and that counts"


@pytest.mark.slow
def test_in_a_field_three_bodies_do_not_conserve_the_momentum_along_it():
    search = replace(LIGHT, points=40, cuts=3, steps=40, samples=64, features=192)
    found = discover(trajectories(in_x(planar_bodies(3)), 30, steps=50), 0.1, space=2, search=search)
    assert not {"momentum x", "angular momentum"} & {q.name for q in found.quantities}, str(found)
    assert "momentum y" in {q.name for q in found.quantities}


def test_the_rule_of_counting():
    assert count_directions(torch.tensor([2.0, 1.0, 0.3]), 1.0) == 2
    assert count_directions(torch.tensor([2.0, 1.0, 0.3]), -1.0) == 0


def test_a_rotated_span_is_read_as_the_known_quantities_in_it():
    known = catalogue(2)
    stack = torch.stack([one.vector() for one in unitary(2)])
    turned = torch.linalg.qr(torch.randn(4, 4).double())[0] @ stack
    assert_close(readable(turned, known, 1.0), stack, rtol=1e-9, atol=1e-9)
    strange = torch.linalg.qr(torch.randn(20, 3).double())[0].mT
    basis = readable(strange, known, 1.0)
    assert torch.linalg.matrix_rank(torch.cat([basis, strange])) == 3


def test_drift_tells_what_is_conserved_from_what_is_not():
    x = trajectories(oscillators(1), steps=60)
    energy, momentum = (
        Quadratic.of(torch.eye(2)[None].double()),
        Quadratic.of(torch.zeros(1, 2, 2).double(), torch.tensor([[0.0, 1.0]]).double()),
    )
    assert drift_of(energy, x) < 1e-4
    assert drift_of(momentum, x) > 0.5
    moved = x - x.mean(1, keepdim=True)
    usual = moved.square().sum(-1).mean() / 2  # of a slope of one, along any of two directions
    assert drift_of(momentum, x) == pytest.approx(float((moved[..., 1].square().mean() / usual).sqrt()))
    assert drift_of(momentum, 7 * x) == pytest.approx(drift_of(momentum, x)), "whatever the units"


def test_drift_is_that_of_held_out_trajectories_alone(oscillator):
    """The last two of ten, which were not learned from; others differ."""
    (energy,) = oscillator.quantities
    quantity, x = Quadratic.of(torch.tensor([energy.A]), torch.tensor([energy.b])), trajectories(oscillators(1))
    assert energy.drift == pytest.approx(drift_of(quantity, x[8:]), rel=1e-4)
    assert energy.drift != pytest.approx(drift_of(quantity, x), rel=0.02)
    assert energy.drift != pytest.approx(drift_of(quantity, x[:8]), rel=0.02)
    assert len(energy.along) == 2


# ---- data


@pytest.mark.parametrize(("window", "order"), [(3, 2), (5, 4)])
def test_velocities_have_their_order(window, order):
    errors, starts = [], torch.randn(3, 2).double()
    for dt in (0.2, 0.1):
        turned = Quadratic.of(torch.eye(2).double()[None]).flow(starts, dt * torch.arange(10).double()[:, None])
        states, rates = velocities(turned.transpose(0, 1).detach(), dt, window)
        errors.append(float((rates - velocity(oscillators(1).hamiltonian, states)).abs().max()))
    assert errors[0] / errors[1] > 0.6 * 2**order


def test_wide_windows_take_out_noise():
    x = trajectories(oscillators(1), 10, 0.05, 60)
    noisy = x + 0.01 * torch.randn_like(x)
    errors = [float((velocities(noisy, 0.05, w)[1] - velocities(x, 0.05, w)[1]).square().mean()) for w in (5, 21)]
    assert errors[1] < errors[0] / 20


GOOD = np.random.default_rng(0).normal(size=(4, 9, 2))


@pytest.mark.parametrize(
    ("x", "dt", "match"),
    [
        (GOOD[0], 0.1, r"\(N, T, 2n\)"),
        (GOOD[:, :, :1], 0.1, "must be even"),
        (np.zeros((2, 9, 3)), 0.1, "must be even"),
        (GOOD[:, :2], 0.1, "too short"),
        (GOOD[:0], 0.1, "no trajectories"),
        (np.where(np.arange(9)[None, :, None] == 4, np.nan, GOOD), 0.1, r"not finite, the first at \(0, 4, 0\)"),
        ([[[1.0, 2.0]] * 3, [[1.0, 2.0]] * 4], 0.1, "all of one length"),
        (GOOD, 0.0, "positive step"),
        (GOOD, float("nan"), "positive step"),
        (GOOD, [0.1, 0.2], "9 times"),
        (GOOD, np.arange(9) ** 2.0, "irregular"),
    ],
)
def test_bad_data_get_a_clear_error(x, dt, match):
    with pytest.raises(ValueError, match=match):
        discover(x, dt)


def test_regular_times_serve_as_a_step():
    assert checked(GOOD, np.linspace(0, 4, 9))[1] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("x", "keys", "match"),
    [
        (GOOD * np.array([1.0, 1000.0]), {}, "choose units"),
        (np.ones((4, 9, 2)), {}, "nothing moves"),
        (GOOD, {"space": 2}, "bodies in 2 dimensions"),
        (GOOD, {"derivatives": GOOD[:, :5]}, "shape of the trajectories"),
        (GOOD, {"search": Search(window=4)}, "window must be odd"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(x, keys, match):
    with pytest.raises(ValueError, match=match):
        discover(x, 0.1, **keys)
