"""What a fit does before its first step: the floor it must not end below, its precisions, and its rate."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import autosym
from autosym.curvature.owners import sites
from autosym.evidence import kernel, laplace, possible
from autosym.evidence.cautions import Impossible
from autosym.nn.layers import silent
from autosym.training import starting
from autosym.training.fitting import prepare
from autosym.training.schedule import Schedule
from trained_before import accuracy, learned, line_of_points, pictures, plain

# ---- the floor


@pytest.mark.parametrize("paths", ["f-fc", "fc", "s-fc", "f-fc+fc"])
@pytest.mark.parametrize("at", [laplace.at, kernel.at])
def test_the_floor_is_the_evidence_of_the_unrelaxed_network(trained, paths, at):
    """The mean over paths scales weights by their number, and precisions by its inverse square: the evidence is the same."""
    model, (x, y) = copy.deepcopy(trained).double(), pictures(60)
    data = (x.double(), y)
    relaxed = autosym.relax(model, data[0][:2], paths=paths)
    assert set(silent(relaxed)) == {f"{layer}.{path}" for layer in "02" for path in paths.split("+")}
    assert learned(relaxed, data, at) == pytest.approx(learned(model, data, at), abs=1e-5)


def test_a_path_that_computes_something_counts(trained):
    relaxed, data = autosym.relax(trained, pictures(2)[0]).double(), (pictures(60)[0].double(), pictures(60)[1])
    before = learned(relaxed, data)
    relaxed[0]["f-fc"].b_1.weight.data.fill_(1e-3)
    assert silent(relaxed) == ("2.f-fc",)
    assert set(laplace.at(relaxed, data).curvature.factors).isdisjoint(laplace.at(relaxed, data).left_out), (
        "nothing is kept of them"
    )
    assert laplace.at(relaxed, data).left_out == tuple(n for n in (s.name for s in sites(relaxed)) if n.startswith("2.f-fc"))
    assert learned(relaxed, data) < before - 1, "its other factor has a prior, and no curvature"


def test_the_floor_is_what_a_fit_says_of_its_start(trained):
    data = pictures()
    fit = autosym.fit(autosym.relax(trained, data[0][:2]), data, epochs=4)
    assert fit.start.log_evidence == pytest.approx(learned(trained, data), abs=0.01)
    assert fit.start.explains
    assert float(fit.evidence.log_evidence) >= fit.start.log_evidence - 1e-6


def test_a_network_from_scratch_has_no_floor():
    """Guessing by a network without effective parameters may have more evidence than the first epochs of learning."""
    fit = autosym.fit(plain(), pictures(), epochs=2)
    assert not fit.start.explains
    assert fit.start.log_evidence is None
    assert (fit.epoch, fit.nothing_gained) == (2, False)


def test_evidence_that_cannot_be_wins_nothing(trained, monkeypatch):
    """The start has more than any evidence can be: it is no floor."""
    monkeypatch.setattr(possible, "failure", lambda at, prior: Impossible(-0.1, -1.8) if at.left_out else None)
    fit = autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), epochs=4)
    assert fit.start.explains
    assert fit.start.log_evidence is None
    assert not fit.nothing_gained


def test_a_floor_without_effective_parameters_is_none(trained, monkeypatch):
    """Far off a mode precisions may fall without end, and the evidence be the likelihood: nothing could win against it."""
    real = laplace.Laplace.effective_parameters
    monkeypatch.setattr(laplace.Laplace, "effective_parameters", lambda at, prior: 1e-6 * real(at, prior))
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5, lr=0.01))
    starting.begin(run)
    assert run.progress.start.explains
    assert run.progress.start.log_evidence is None
    assert list(run.prior.precision().values()) == pytest.approx([1.0] * len(run.prior.names)), "as given, not as learned"


# ---- what a run starts from


def test_a_trained_network_starts_at_its_precisions_unless_they_are_given(trained):
    data = pictures()

    def started(**options):
        model = autosym.relax(trained, data[0][:2])
        run = prepare(model, data, "categorical", Schedule(epochs=5), **options)
        starting.begin(run)
        return run.prior.precision(), silent(model)

    found, paths = started()
    free = {name for name in found if name.startswith(paths)}
    assert [found[name] for name in free] == pytest.approx([1.0] * len(free)), "paths that have not begun start as ever"
    assert all(abs(math.log(found[name])) > 0.01 for name in found.keys() - free)
    given, _ = started(prior_precision=0.5)
    assert list(given.values()) == pytest.approx([0.5] * len(given))


@pytest.mark.parametrize("step", ["mackay", "gradient"])
def test_the_noise_of_a_trained_regression_is_learned_at_its_start(step):
    """Unless precisions are given: then all starts as given. In both cases the floor is at learned ones."""
    (x, y), found = line_of_points(), {}
    model = nn.Linear(3, 1).double()
    model.weight.data, model.bias.data = torch.linalg.lstsq(x, y).solution.T, torch.zeros(1, dtype=torch.float64)
    for given in (None, 1.0):
        run = prepare(copy.deepcopy(model), (x, y), "gaussian", Schedule(epochs=5, step=step), prior_precision=given)
        starting.begin(run)
        found[given] = float(run.likelihood.log_variance.detach().exp()) ** 0.5, run.progress.start.log_evidence
    assert found[None][0] == pytest.approx(0.3, rel=0.2)
    assert found[1.0][0] == 1
    assert found[1.0][1] == pytest.approx(found[None][1])


@pytest.mark.parametrize(("likelihood", "targets", "expected"), [
    ("categorical", torch.tensor([0, 0, 0, 1]), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))),
    ("gaussian", torch.tensor([[1.0], [3.0]]), 0.5),
    ("bernoulli", torch.tensor([[1.0], [0.0]]), math.log(2)),
])  # fmt: skip
def test_guessing_is_the_best_constant_output(likelihood, targets, expected):
    x = torch.randn(len(targets), 2)
    model = nn.Linear(2, 2 if likelihood == "categorical" else 1)
    run = prepare(model, (x, targets), likelihood, Schedule(epochs=5))
    assert starting._losses(run)[1] == pytest.approx(expected, abs=1e-4)


def test_a_model_without_a_finite_loss_is_refused():
    x, y = line_of_points()
    model = nn.Linear(3, 1).double()
    model.weight.data.fill_(1e200)
    with pytest.raises(ValueError, match=r"loss of the given model|not finite|log-likelihood"):
        autosym.fit(model, (x, y), "gaussian", epochs=2)


def test_data_that_can_be_read_once_are_refused_at_the_start():
    class Once(torch.utils.data.IterableDataset):
        rows = iter(zip(*pictures(20), strict=True))

        def __iter__(self):
            return self.rows

    run = prepare(plain(), pictures(20), "categorical", Schedule(epochs=5))
    run.stream.resident, run.stream.data = None, torch.utils.data.DataLoader(Once(), 4)
    assert len(list(starting._batches(run, 5))) == 5
    with pytest.raises(ValueError, match="no batch"):
        list(starting._batches(run, 5))


# ---- the rate


def test_the_rate_of_a_trained_network_is_found(trained, monkeypatch):
    """Trials leave no trace: weights, optimiser and random numbers are those of the start."""
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5))
    assert run.search
    tried, real = [], starting._trial
    monkeypatch.setattr(starting, "_trial", lambda run, pace: tried.append((pace, real(run, pace))) or tried[-1][1])
    before, noise = run.state.snapshot(0, None), run.stream.shuffle.get_state()
    starting.begin(run)
    after = run.state.snapshot(0, None)
    for name in before.tensors.keys() - {"prior/log_precision"}:
        assert torch.equal(before.tensors[name], after.tensors[name]), name
    assert torch.equal(run.stream.shuffle.get_state(), noise)
    most = run.progress.start.loss + starting.HARM * (run.progress.start.guess - run.progress.start.loss)
    assert [loss > most for _, loss in tried] == [*[True] * (len(tried) - 1), False], "the largest that does no harm"
    assert run.progress.pace == tried[-1][0]
    assert run.progress.start.lr == pytest.approx(run.schedule.lr * run.progress.pace)


def test_a_rate_that_was_given_is_not_searched_for(trained, monkeypatch):
    monkeypatch.setattr(starting, "_trial", lambda *_: pytest.fail("a trial"))
    fit = autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), epochs=2, lr=0.01)
    assert fit.start.lr == 0.01
    assert not autosym.fit(plain(), pictures(), epochs=2).start.explains, "nor is that of a network from scratch"


def test_three_epochs_do_no_harm(trained):
    fit = autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), epochs=3)
    assert accuracy(fit.model) >= accuracy(trained) - 0.02


@pytest.mark.parametrize(
    ("scale", "offset", "told"), [(1.0, 0.0, False), (2.0, 1.0, False), (50.0, 0.0, True), (1.0, 6.0, True)]
)
def test_targets_in_other_units_than_a_new_network_are_named(scale, offset, told):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(60, 3)
    y = scale * torch.sin(x[:, :1] + x[:, 1:2]) / 0.7 + offset
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit = autosym.fit(net, (x, y), "gaussian", epochs=60)
    assert [str(one.message)[:33] for one in said] == ["targets have a standard deviation"] * told
    if told:
        assert said[0].filename == __file__
        assert fit.start.explains is False
