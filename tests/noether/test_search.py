"""Conserved quantities from trajectories: what is found, what it says of them, and what is refused."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from autosym.evidence import exact
from autosym.noether import Search, discover
from autosym.noether.candidates import cuts, least_drift, monomials, pairs_of_bodies
from autosym.noether.conserved import Quadratic
from autosym.noether.drift import STILL, UNCLEAR, drift_of, judged, motion, noise, noise_of, unexplained
from autosym.noether.dynamics import symmetrised, velocity
from autosym.noether.found import EVIDENT, readable, standing_out
from autosym.noether.known import catalogue, coordinates, unit, unitary
from autosym.noether.regression import Regression, stacked, unstacked
from autosym.noether.search import _others, _quantity, settled
from autosym.noether.systems import System, oscillators, pendulum, planar_bodies
from autosym.noether.trajectories import checked, velocities, warn_of_axes, warn_of_order


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
    assert oscillator.parallelness(oscillators(1).conserved)[0] >= 0.9999
    (energy,) = oscillator.quantities
    assert energy.name == "energy"
    assert energy.angle < 0.5
    assert energy.drift < 0.001
    assert energy.nats > 3
    assert oscillator.log_evidence > oscillator.log_evidence_without
    assert "0.50 q1^2" in str(oscillator)
    assert str(oscillator).startswith("1 conserved quantity was found among all that are linear or quadratic")


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
    assert "No conserved quantity was found" in str(found)


HYPERBOLIC = System("hyperbolic", 2, 1, lambda x: (x[..., 1] ** 2 - x[..., 0] ** 2) / 2, ())
FALL = System("fall", 2, 1, lambda x: x[..., 1] ** 2 / 2 + x[..., 0], ())


def anharmonic(x):
    q1, q2, p1, p2 = x.unbind(-1)
    return (p1**2 + p2**2 + q1**2 + 2.7 * q2**2 + q1**2 * q2**2) / 2 + q1**4 / 4 + 0.075 * q2**4


ANHARMONIC = System("anharmonic", 4, 2, anharmonic, ())


def test_evidence_alone_makes_no_symmetry():
    """Flows that smooth the Hamiltonian have evidence: 80 and 100 nats where they drift by 20 and 25 %, which counted before.

    How much depends on the machine, by rounding: another one reached 23 nats in all, where 314 are usual.
    """
    search = Search(starts=3, steps=120, samples=64, features=64)
    found = discover(trajectories(ANHARMONIC, 30, steps=39), 0.1, space=2, search=search)
    assert found.log_evidence > found.log_evidence_without + EVIDENT, "the case is one where evidence misleads"
    assert found.symmetries == 0, str(found)
    assert found.drifting
    assert "Not conserved" in str(found)


@pytest.mark.parametrize("system", [HYPERBOLIC, FALL], ids=lambda s: s.name)
def test_what_does_not_drift_and_has_no_evidence_is_undecided(system):
    """The energy of an open orbit: see the page on conserved quantities."""
    found = discover(trajectories(system, 15), 0.1, search=QUICK)
    assert found.symmetries == 0, str(found)
    (energy,) = found.undecided
    assert energy.drift < 1e-3
    assert "Undecided" in str(found)
    assert "More states" in str(found)
    assert found.as_dict()["undecided"][0]["doubt"] == "evidence"


@pytest.mark.parametrize("system", [HYPERBOLIC, FALL], ids=lambda s: s.name)
def test_open_orbits_have_their_energy_as_the_quantity_of_least_drift(system):
    x = trajectories(system)
    drifts, directions = least_drift(x)
    energy = Quadratic.of(directions[0, :4].reshape(1, 2, 2), directions[:1, 4:])
    assert drifts[0] < 1e-6 < 0.05 < drifts[1]
    values = torch.stack([energy(x)[..., 0], system.hamiltonian(x)]).flatten(1).detach()
    assert torch.corrcoef(values)[0, 1].abs() > 0.999999


def central(broken=0.0):
    """A central force, broken by a term that turns angular momentum."""
    return System(
        "central", 4, 2, lambda x: x.square().sum(-1) / 2 + x[..., :2].square().sum(-1) ** 2 / 4 + broken * x[..., 0] ** 2, ()
    )


@pytest.mark.parametrize(("broken", "counts"), [(0.0, (1, 0)), (0.05, (0, 1)), (0.3, (0, 0))])
def test_a_quantity_is_settled_undecided_or_not_conserved(broken, counts):
    x = trajectories(central(broken), 30, steps=39)
    x /= x.square().mean().sqrt()
    still, unclear = settled(x[:24], x[24:])
    assert (len(still), len(unclear)) == counts
    for one in torch.cat([still, unclear]):
        angular = list(catalogue(2, 2))[2]
        assert angular.name == "angular momentum"
        assert abs(one @ angular.vector()) > 0.99


def test_a_quantity_is_judged_along_trajectories_it_was_not_chosen_by():
    x = trajectories(central(), 30, steps=39)
    x /= x.square().mean().sqrt()
    other = trajectories(central(0.3), 6, steps=39)
    assert [len(span) for span in settled(x[:24], other / other.square().mean().sqrt())] == [0, 0]


def test_noise_explains_its_own_drift_and_no_other():
    """Angular momentum drifts by the noise alone; momentum by more."""
    x = trajectories(central(), 40, steps=39)
    noisy = (
        x + torch.tensor([0.02, 0.02, 0.05, 0.05]) * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double()
    )
    for bound in noise(noisy):
        assert_close(bound.sqrt(), torch.tensor([0.02, 0.02, 0.05, 0.05]).double(), rtol=0.1, atol=0)
    least, most = noise(x)
    assert not least.any(), "smooth motion is not noise"
    assert most.sqrt().max() < 3e-3
    momentum, _, angular = (unstacked(known.vector()[None]) for known in catalogue(2, 2)[:3])
    assert drift_of(angular, noisy) > STILL, "the case is one where the drift alone is too large"
    assert unexplained(drift_of(angular, noisy), noise_of(angular, noisy)[0]) < STILL
    assert unexplained(drift_of(momentum, noisy), noise_of(momentum, noisy)[0]) > 5 * UNCLEAR


# ---- data that look as if something were conserved


def doubts(x, count=24):
    """What is said of the quantities of least drift, and how many do not change."""
    x = x / x.square().mean().sqrt()
    return [judged(unstacked(one[None]), x[:count], x[count:]) for one in least_drift(x[:count])[1]]


def test_motion_between_few_states_is_not_noise(monkeypatch):
    """Four states 0.5 apart: differences of any order are large, and taken for noise they explain 15 % of drift."""
    x = ANHARMONIC.trajectories(ANHARMONIC.starts(60, torch.Generator().manual_seed(0)), 0.5, 3)
    assert not noise(x)[0].any()
    assert "" not in doubts(x, 48)
    for bound, value in (("LEVEL", 0.0), ("LOUD", 1.0), ("SURE", 10.0)):
        monkeypatch.setattr(f"autosym.noether.drift.{bound}", value)
    assert "" in doubts(x, 48)


def test_noise_that_hides_much_explains_nothing():
    x = trajectories(central(), 30, steps=39)
    loud = x + 0.2 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double()
    assert "" in doubts(x)
    assert "" not in doubts(loud)
    assert "unclear" in doubts(loud)


def test_noise_larger_than_the_drift_is_none():
    """Momentum of a free body is exact, and its place is noisy in turns: what alternates has differences of white noise."""
    x = trajectories(central(), 30, steps=39)
    angular = unstacked(catalogue(2, 2)[2].vector()[None])
    assert judged(angular, x[:24], x[24:]) == ""
    grown = angular.A[0] @ x.mT  # along it L changes most
    swaying = x + 0.06 * grown.mT * torch.tensor([1.0, -1.0]).repeat(20)[:, None]
    assert judged(angular, swaying[:24], swaying[24:]) != ""


def test_states_that_change_by_chance_are_refused():
    starts = ANHARMONIC.starts(10, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"p\w+ changes from one state to the next as if by chance.*shorter steps"):
        discover(ANHARMONIC.trajectories(starts, 1.0, 39), 1.0, search=TINY)


@pytest.mark.parametrize("small", [1.0, 0.005])
def test_a_small_coordinate_conserves_no_more(small):
    """Relative to the motion of the other oscillator everything of this one stood still: ten quantities in place of four."""
    starts = oscillators(2).starts(30, torch.Generator().manual_seed(0)) * torch.tensor([1.0, small]).repeat(2)
    x = oscillators(2).trajectories(starts, 0.1, 39)
    assert doubts(x).count("") == 4
    assert set(doubts(x)[4:]) == {"changes"}
    assert_close(motion(x)[1] / motion(x)[0], motion(x / torch.tensor([1.0, small]).repeat(2))[1] / motion(x)[0] * small**2)


@pytest.mark.parametrize("near", [0.1, 0.01])
def test_starts_that_are_nearly_alike_conserve_no_more(near):
    draw = torch.Generator().manual_seed(2)
    starts = ANHARMONIC.starts(1, draw) + near * torch.randn(30, 4, generator=draw).double()
    x = ANHARMONIC.trajectories(starts, 0.1, 39)
    found = doubts(x)
    assert "" not in found
    assert found.count("changes") >= 12


def test_what_is_the_same_for_all_trajectories_is_undecided():
    """A circle of one size, in pieces: its energy is the same everywhere, but for a wave that is the same along every piece."""
    angle = torch.linspace(0, 200, 1200).double()
    x = torch.stack([angle.cos(), angle.sin()], 1).reshape(30, 40, 2)
    x = x * (1 + 0.005 * torch.linspace(0, 6, 40).double().sin()[:, None])
    energy = unstacked(catalogue(1)[0].vector()[None])
    assert drift_of(energy, x) < STILL
    assert judged(energy, x[:24], x[24:]) == "alike"
    differing = x * torch.linspace(0.5, 2, 30).double()[:, None, None]
    assert judged(energy, differing[:24], differing[24:]) == ""


def test_a_quantity_is_shown_with_the_terms_that_change():
    """Far from the origin the energy has factors that are small beside those of its linear terms, which it cannot do without."""
    found = discover(trajectories(oscillators(1)) + 50, 0.1, search=TINY)
    (energy,) = found.quantities + found.undecided
    assert "q1^2" in energy.text
    assert "p1^2" in energy.text


def test_rows_are_quantities_and_back():
    quantities = Quadratic(4, 3, 0.3, 6.0)
    back = unstacked(stacked(quantities), 6.0)
    assert_close(back.A, quantities.A)
    assert_close(back.b, quantities.b)


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
        left = unexplained(drift_of(quantity, x), noise_of(quantity, x)[0])
        assert left == pytest.approx(float(drift), rel=1e-3, abs=1e-5), "the drift that is reported"


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


def test_few_states_of_many_coordinates_may_be_swapped_axes():
    x = trajectories(planar_bodies(3), 3, steps=40)[:, :40]
    with pytest.warns(UserWarning, match=r"have 12 states of 40 coordinates each.*swap the last two axes"):
        warn_of_axes(x.mT)
    warn_of_axes(x)  # the right order warns of nothing


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
        discover(trajectories(oscillators(1), 1), 0.1, search=TINY)


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


@pytest.mark.slow
def test_in_a_field_three_bodies_do_not_conserve_the_momentum_along_it():
    search = replace(LIGHT, points=40, cuts=3, steps=40, samples=64, features=192)
    found = discover(trajectories(in_x(planar_bodies(3)), 30, steps=50), 0.1, space=2, search=search)
    assert not {"momentum x", "angular momentum"} & {q.name for q in found.quantities}, str(found)
    assert "momentum y" in {q.name for q in found.quantities}


def test_how_many_directions_stand_out():
    assert standing_out([2.0, 1.0, 0.3]) == 2


def test_a_rotated_span_is_read_as_the_known_quantities_in_it():
    known = catalogue(2)
    stack = torch.stack([one.vector() for one in unitary(2)])
    turned = torch.linalg.qr(torch.randn(4, 4).double())[0] @ stack
    assert_close(readable(turned, known, 1.0), stack, rtol=1e-9, atol=1e-9)
    strange = torch.linalg.qr(torch.randn(20, 3).double())[0].mT
    basis = readable(strange, known, 1.0)
    assert torch.linalg.matrix_rank(torch.cat([basis, strange])) == 3


@pytest.mark.parametrize(
    ("degrees", "name"), [(4.0, "energy 1"), (6.0, "near energy 1"), (17.0, "near energy 1"), (19.0, None)]
)
def test_a_mixture_of_two_energies_is_not_called_one_of_them(degrees, name):
    one, two = (known.vector() for known in unitary(2) if known.name in ("energy 1", "energy 2"))
    turn, x = np.radians(degrees), trajectories(oscillators(2))
    mixed = np.cos(turn) * one + np.sin(turn) * two
    alone = [known for known in catalogue(2) if known.name == "energy 1"]
    found = _quantity(mixed, 0.0, alone, ["q1", "q2", "p1", "p2"], 1.0, x[:5], x[5:])
    assert found.name == name
    assert found.angle == pytest.approx(degrees)


def test_drift_tells_what_is_conserved_from_what_is_not():
    x = trajectories(oscillators(1), steps=60)
    energy, momentum = (
        Quadratic.of(torch.eye(2)[None].double()),
        Quadratic.of(torch.zeros(1, 2, 2).double(), torch.tensor([[0.0, 1.0]]).double()),
    )
    assert drift_of(energy, x) < 1e-4
    assert drift_of(momentum, x) > 0.5
    along = (x - x.mean(1, keepdim=True)).square().mean((0, 1))
    part = (along / x.flatten(0, 1).var(0, correction=0)).mean()
    between = x.var(0).mean(0)
    assert drift_of(momentum, x) == pytest.approx(float((along[1] / (between[1] * part)).sqrt()))
    for units in (7.0, torch.tensor([1.0, 7.0]).double()):
        assert drift_of(momentum, units * x) == pytest.approx(drift_of(momentum, x)), "whatever the units"


def test_drift_is_that_of_held_out_trajectories_alone():
    """The last two of ten, which were not learned from; others differ."""
    x = trajectories(oscillators(1))
    x += 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double()
    found = discover(x, 0.1, search=TINY)
    (energy,) = found.quantities + found.undecided
    quantity = Quadratic.of(torch.tensor([energy.A]).double(), torch.tensor([energy.b]).double())
    moves = motion(x)
    assert energy.drift == pytest.approx(drift_of(quantity, x[8:], moves), rel=1e-4)
    assert energy.drift != pytest.approx(drift_of(quantity, x, moves), rel=0.02)
    assert energy.drift != pytest.approx(drift_of(quantity, x[:8], moves), rel=0.02)
    assert energy.noise == pytest.approx(noise_of(quantity, x[8:], moves)[0], rel=1e-4)
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


def test_columns_in_another_order_are_noticed():
    x = trajectories(oscillators(2))
    names = ["q1", "q2", "p1", "p2"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_order(*velocities(x, 0.1), names)
        for system in (planar_bodies(3), pendulum(), central()):
            own = coordinates(system.dimension // 2, system.space)
            warn_of_order(*velocities(trajectories(system), 0.1), own)
    with pytest.warns(UserWarning, match="dq1/dt follows q2, not p1: columns must be all positions, then all momenta"):
        warn_of_order(*velocities(x[..., [0, 2, 1, 3]], 0.1), names)


def test_springs_along_the_axes_have_energies_with_names():
    assert {"energy x", "energy y", "energy", "angular momentum"} <= {known.name for known in catalogue(2, 2)}
    assert "energy" not in {known.name for known in catalogue(6, 2)}, "of three bodies"
