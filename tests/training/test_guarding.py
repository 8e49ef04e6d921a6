"""A fit does not ruin what it is given: its recoveries from a collapse, and where it ends."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autosym
from autosym.bayes.priors import Prior
from autosym.nn.layers import silent
from autosym.training import fitting, guarding, starting
from autosym.training.fitting import prepare
from autosym.training.schedule import Schedule
from autosym.training.snapshots import Progress, Snapshot
from trained_before import accuracy, line_of_points, pictures

# ---- recoveries


@pytest.mark.parametrize("lr", [1.0, 10.0, 1e4])
def test_an_absurd_rate_recovers(trained, lr):
    data, lines = pictures(), []
    fit = autosym.fit(autosym.relax(trained, data[0][:2]), data, epochs=12, lr=lr, log=lines.append)
    assert float(fit.evidence.log_evidence) >= fit.start.log_evidence - 1e-6
    assert accuracy(fit.model) >= accuracy(trained) - 0.05
    named = [line["recovered"] for line in lines if "recovered" in line]
    assert len(named) == fit.recoveries
    assert fit.recoveries >= (1 if lr > 1 else 0)
    for number, said in enumerate(named, 1):
        assert said["why"]
        assert said["lr"] == pytest.approx(lr / starting.SLOWER**number, rel=0.01)


def test_a_recovered_run_goes_on_from_the_last_good_snapshot(trained, monkeypatch):
    """One collapse in epoch 6, as told: weights and precisions are those of epoch 5, the last with an evidence step."""
    data, states, real = pictures(), {}, guarding.lost

    def lost(run, loss):
        epoch = len(run.progress.lines) + 1
        states[epoch] = copy.deepcopy(run.model.state_dict())
        return "it was told so" if epoch == 6 else real(run, loss)

    def watched(line):
        states[f"after {line['epoch']}"] = copy.deepcopy(model.state_dict())

    monkeypatch.setattr("autosym.training.fitting.lost", lost)
    model = autosym.relax(trained, data[0][:2])
    fit = autosym.fit(model, data, epochs=10, burn_in=2, every=3, lr=0.01, log=watched)
    assert fit.recoveries == 1
    assert fit.history[5]["recovered"] == {"why": "it was told so", "epoch": 5, "lr": pytest.approx(0.01 / 3, rel=0.01)}
    assert all(torch.equal(t, states["after 5"][name]) for name, t in states["after 6"].items())
    assert not all(torch.equal(t, states["after 5"][name]) for name, t in states[6].items())


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_recovered_run_resumes_bit_for_bit(trained, stop, tmp_path):
    """Interrupted before, at and after recoveries, with an absurd rate."""
    data, options = pictures(), {"epochs": 7, "lr": 30.0, "burn_in": 1, "every": 2, "checkpoint_seconds": 0}
    model = autosym.relax(trained, data[0][:2])
    other, third = copy.deepcopy(model), copy.deepcopy(model)
    whole = autosym.fit(model, data, **options)

    class Stop(Exception):
        pass

    def stopping(line):
        if line["epoch"] == stop + 1:
            raise Stop

    with pytest.raises(Stop):
        autosym.fit(other, data, checkpoint=tmp_path / "c", log=stopping, **options)
    again = autosym.fit(third, data, checkpoint=tmp_path / "c", resume=True, **options)
    assert whole.recoveries > 0
    assert (again.recoveries, again.epoch, again.start) == (whole.recoveries, whole.epoch, whole.start)
    for a, b in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    leave = lambda line: {key: value for key, value in line.items() if key != "seconds"}  # noqa: E731
    assert [leave(line) for line in again.history] == [leave(line) for line in whole.history]


def test_a_run_that_collapses_in_every_epoch_is_refused():
    model, (x, y) = nn.Linear(5, 2), (torch.randn(12, 5), torch.randn(12, 2))
    with pytest.raises(ValueError, match="lower lr"):
        autosym.fit(model, (x, y), "gaussian", optimiser="sgd", lr=1e200, prior_precision=1e-300, batch_size=4, epochs=9)


def test_a_run_that_collapses_too_often_ends_at_what_is_good(trained, monkeypatch):
    """It is not an error: the given model is there."""
    monkeypatch.setattr("autosym.training.fitting.lost", lambda run, loss: "it was told so")
    model = autosym.relax(trained, pictures(2)[0])
    before = copy.deepcopy(model.state_dict())
    fit = autosym.fit(model, pictures(), epochs=40, lr=0.01)
    assert (fit.recoveries, len(fit.history)) == (guarding.MOST, guarding.MOST)
    assert fit.nothing_gained, "though no snapshot was compared with it"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert float(fit.evidence.log_evidence) == pytest.approx(fit.start.log_evidence, abs=1e-6)


def test_after_settling_began_a_collapse_goes_back_to_where_it_began(trained, monkeypatch):
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5))
    starting.begin(run)
    for epoch, value in ((2, -10.0), (4, -50.0)):
        run.progress.low = epoch / 100
        run.progress.keep(run.state.snapshot(epoch, value))
    guarding.settle(run)
    assert (run.progress.good, run.progress.low) == (2, 0.02)


# ---- what is a collapse, and what is none


@pytest.mark.parametrize(
    ("epochs", "before", "most"),
    [(2, [], 0.8), (2, [0.24], 0.8), (2, [0.26], 0.25), (3, [0.26], 0.8), (3, [0.26, 0.24], 0.8), (3, [0.26, 0.26], 0.25)],
)
def test_a_loss_is_near_guessing_beyond_four_fifths_of_the_way_or_if_it_stays_beyond_a_quarter(
    trained, monkeypatch, epochs, before, most
):
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5, lr=0.01))
    starting.begin(run)
    run.progress.keep(run.state.snapshot(1, 0.0))  # with more evidence than there can be: nothing excuses a loss
    monkeypatch.setattr(guarding, "STAYS", epochs * math.ceil(run.count / run.schedule.batch_size))
    way = run.progress.start.guess - 0.1
    run.progress.lines += [{"epoch": epoch, "loss": 0.1 + part * way} for epoch, part in enumerate(before, 1)]
    for part, collapsed in ((0.0, False), (0.2, False), (most - 0.01, False), (most + 0.01, True), (2.0, True)):
        run.progress.low = 0.1
        why = guarding.lost(run, 0.1 + part * way)
        assert bool(why) is collapsed, part
        assert not why or ("near that of guessing" in why) is (part > 0.8), "half way is not near"


def test_a_loss_stays_for_as_many_steps_as_were_made_by_the_loader_that_was_given(trained):
    """Not for as many as the schedule's batch size would make of its epochs."""
    loader = DataLoader(TensorDataset(*pictures()), batch_size=2)
    settings = ("categorical", Schedule(epochs=5, lr=0.01, batch_size=1000))
    run = prepare(autosym.relax(trained, pictures(2)[0]), loader, *settings)
    assert run.count / 2 >= guarding.STAYS / 2
    run.progress.lines.append({"epoch": 1, "loss": 1.0})
    assert guarding._stayed(run, 0.5), "one epoch before this one is enough"


@pytest.mark.parametrize(("before", "collapsed"), [([], False), ([0.9], False), ([0.9, 0.7], False), ([0.9, 0.9], True)])
def test_a_network_from_scratch_may_visit_guessing_but_not_stay(trained, monkeypatch, before, collapsed):
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5, lr=0.01))
    starting.begin(run)
    run.progress.keep(run.state.snapshot(1, 0.0))
    monkeypatch.setattr(guarding, "STAYS", 3 * math.ceil(run.count / run.schedule.batch_size))
    guess = run.progress.start.guess
    run.progress.start, way = replace(run.progress.start, loss=guess), guess - 0.1
    assert not run.progress.start.explains
    run.progress.lines += [{"epoch": epoch, "loss": 0.1 + part * way} for epoch, part in enumerate(before, 1)]
    run.progress.low = 0.1
    assert bool(guarding.lost(run, 0.1 + 0.9 * way)) is collapsed


def test_more_evidence_than_the_last_step_is_no_excuse_if_the_start_had_more(trained, monkeypatch):
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5, lr=0.01))
    starting.begin(run)
    run.progress.keep(run.state.snapshot(1, -1e9))
    started, guess = run.progress.start.log_evidence, run.progress.start.guess
    for more, collapsed in ((-1.0, True), (1.0, False)):
        run.progress.low = 0.1
        monkeypatch.setattr(guarding, "_evidence", lambda run, more=more: started + more)
        assert bool(guarding.lost(run, guess)) is collapsed


def test_a_loss_near_guessing_is_no_collapse_if_the_evidence_is_more():
    """Labels at random: to forget them is right, and the run may end there."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 10), torch.arange(60) % 2
    model = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 2))
    fit = autosym.fit(model, (x, y), epochs=60, lr=0.1)
    assert fit.recoveries == 0
    assert sum(fit.history[-1].get("effective_parameters", {"": 0.0}).values()) < 1 or fit.history[-1]["loss"] > 0.5


def test_a_prior_that_is_held_may_take_what_a_model_explains(trained):
    """The MAP of a strong prior is near guessing, and no collapse; its rate is the one asked for."""
    fit = autosym.fit(copy.deepcopy(trained), pictures(), epochs=30, step="none", prior_precision=1e4)
    assert fit.recoveries == 0
    assert fit.start.lr == fit.schedule.lr
    assert fit.history[-1]["loss"] > 0.9 * fit.start.guess


def test_weights_that_overflow_in_an_evidence_step_are_a_collapse(trained, monkeypatch):
    """As KFAC says it: factors that overflow."""
    real, calls = guarding.Run.estimate, []

    def estimate(run, how, seed):
        calls.append(how)
        if len(calls) == 2:
            raise autosym.runtime.arithmetic.NotFinite("the factor A of x overflowed")
        return real(run, how, seed)

    monkeypatch.setattr(guarding.Run, "estimate", estimate)
    fit = autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), epochs=6, lr=0.01)
    assert fit.recoveries == 1
    assert "overflowed" in next(line["recovered"]["why"] for line in fit.history if "recovered" in line)


def test_evidence_that_is_not_a_number_is_a_collapse_and_no_figure_of_the_history(trained, monkeypatch, tmp_path):
    real, calls = guarding.evidence_steps.summary, []

    def summary(*arguments):
        calls.append(1)
        return real(*arguments) | ({"log_evidence": math.nan} if len(calls) == 2 else {})

    monkeypatch.setattr(guarding.evidence_steps, "summary", summary)
    options = {"epochs": 6, "lr": 0.01, "burn_in": 0, "every": 1, "checkpoint": tmp_path / "c", "checkpoint_seconds": 0}
    fit = autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), **options)
    assert fit.recoveries == 1
    assert set(fit.history[1]) == {"epoch", "loss", "recovered", "seconds"}


# ---- the end


def test_a_run_ends_at_its_best_snapshot(trained, monkeypatch):
    """All by one estimator: exact curvature at the draws of inference."""
    kept = {}
    real = guarding.Run.value

    def value(run, at):
        epoch = len(run.progress.lines) + (1 if len(run.progress.lines) < 9 else 0)
        found = real(run, at)
        if epoch == 4:
            kept.update({name: p.clone() for name, p in run.model.state_dict().items()})
        return found + (1e5 if kept and all(torch.equal(p, kept[n]) for n, p in run.model.state_dict().items()) else 0)

    monkeypatch.setattr(guarding.Run, "value", value)
    monkeypatch.setattr("autosym.training.fitting.settle", lambda run: None)
    model = autosym.relax(trained, pictures(2)[0])
    fit = autosym.fit(model, pictures(), epochs=9, burn_in=3, every=1, lr=0.01)
    assert fit.epoch == 4
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    fit.check_weights()


ENDS = {"epochs": 9, "burn_in": 3, "every": 1, "lr": 0.01}


def test_the_end_can_be_chosen_by_the_evidence_of_the_whole_network(trained, monkeypatch):
    """Whatever Kronecker factors say; they do not decide which snapshots are looked at either."""
    seen = []

    def whole_value(run, at):
        seen.append(run.value(at))
        return 1.0 if len(seen) == 3 else 0.0  # the last one: the start

    monkeypatch.setattr(guarding.Run, "whole_value", whole_value)
    given = autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), curvature="kronecker", **ENDS)
    assert (given.chosen_by, seen) == ("kronecker", [])
    monkeypatch.setattr(guarding.Run, "affords_whole", lambda run, at, times: False)
    same = autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), **ENDS)
    assert (same.chosen_by, same.epoch, seen) == ("kronecker", given.epoch, [])
    fit = autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), curvature="whole", **ENDS)
    assert len(seen) == 3
    assert fit.nothing_gained
    assert fit.chosen_by == "whole"
    fit.check_weights()
    with pytest.raises(ValueError, match="curvature must be"):
        autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), curvature="all")


def test_the_whole_network_chooses_the_end_by_default_where_kronecker_factors_leave_it_open(trained, monkeypatch):
    """All ends that may be the best, by one evidence. It is asked for as often as there are such ends, and not at all if one is sure."""
    asked, real = [], guarding.contenders

    def affords(run, at, times):
        asked.append(times)
        return True

    def fit():
        asked.clear()
        return autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), **ENDS)

    monkeypatch.setattr(guarding.Run, "affords_whole", affords)
    monkeypatch.setattr(guarding, "contenders", lambda ends: list(ends))
    worth = dict.fromkeys(range(10), 0.0) | {0: 5.0}
    monkeypatch.setattr(guarding.Run, "whole_value", lambda run, at: worth[epoch_of(run)])
    found = fit()
    assert (found.epoch, found.chosen_by) == (0, "whole")
    assert asked[0] == 2
    assert asked[1] in (2, 3)
    found.check_weights()
    monkeypatch.setattr(guarding, "contenders", lambda ends: [end for end in real(ends) if end.state.epoch][:1])
    assert fit().chosen_by == "kronecker"
    assert asked == [2]


def epoch_of(run):
    """Of the present weights: 0 if they are those of the start."""
    start = run.progress.snapshots[0].tensors
    same = [torch.equal(p, start[f"model/{name}"]) for name, p in run.model.state_dict().items()]
    return 0 if all(same) else 9


def test_contenders_are_ends_that_effective_parameters_may_put_first():
    def kept(*ends):
        ends = [guarding.End(Snapshot(epoch, None, 1.0, 0.0, {}), None, *end) for epoch, end in enumerate(ends)]
        return [end.state.epoch for end in guarding.contenders(ends)]

    assert kept((-100.0, 40.0), (-119.0, 40.0), (-121.0, 40.0)) == [0, 1], "by half of the effective parameters"
    assert kept((-100.0, 40.0), (-121.0, 60.0)) == [0, 1], "more parameters may be more in error"
    assert kept((-100.0, 0.0), (-math.inf, 10.0)) == [0], "evidence that failed"
    assert kept((-100.0, 40.0), (-101.0, 40.0), (-95.0, 5.0)) == [0, 1, 2], (
        "the best by Kronecker factors, however few parameters it has"
    )
    assert kept((-math.inf, 1.0), (-math.inf, 1.0)) == []


def test_whole_evidence_that_overflows_leaves_the_end_to_kronecker_factors(trained, monkeypatch):
    def overflows(run, at):
        raise autosym.runtime.arithmetic.NotFinite("the Jacobian of x overflowed")

    monkeypatch.setattr(guarding.Run, "affords_whole", lambda run, at, times: True)
    monkeypatch.setattr(guarding, "contenders", lambda ends: list(ends))
    monkeypatch.setattr(guarding.Run, "whole_value", overflows)
    model = autosym.relax(trained, pictures(2)[0])
    given = autosym.fit(copy.deepcopy(model), pictures(), curvature="kronecker", **ENDS)
    fit = autosym.fit(model, pictures(), **ENDS)
    assert (fit.chosen_by, fit.epoch) == ("kronecker", given.epoch)
    assert all(torch.equal(t, given.weights[name]) for name, t in fit.model.state_dict().items())
    with pytest.raises(autosym.runtime.arithmetic.NotFinite):
        autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), curvature="whole", **ENDS)


def test_the_end_is_chosen_by_the_whole_network_for_a_quarter_of_the_work_at_most(trained, monkeypatch):
    asked = []

    def within(model, data, laplace, epochs, batch, times, memory):
        asked.append((epochs, times))
        return False

    monkeypatch.setattr("autosym.training.running.costs.within_a_fit", within)
    for changes in ({}, {"sampled_end": True}, {"step": "none"}, {"nu": 4.0}, {"kernel": 10}):
        fit = autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), **ENDS, **changes)
        assert fit.chosen_by == ("kernel" if "kernel" in changes else "kronecker")
    assert asked == [(9, 8)], "twice, four times over; and never where less is wanted, or there is none"


class Augmented(TensorDataset):
    """Shown in another way each time."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.01 * torch.randn(x.shape), y


def test_data_that_are_augmented_leave_the_end_to_kronecker_factors(trained, monkeypatch):
    """The whole network's evidence and its factors are of the same data: a default fit does without, and does not fail at its end."""
    monkeypatch.setattr(guarding.Run, "affords_whole", lambda run, at, times: True)
    monkeypatch.setattr(guarding, "contenders", lambda ends: list(ends))
    loader, model = DataLoader(Augmented(*pictures()), batch_size=64), autosym.relax(trained, pictures(2)[0])
    fit = autosym.fit(copy.deepcopy(model), loader, **ENDS)
    assert fit.chosen_by == "kronecker"
    fit.check_weights()
    with pytest.raises(ValueError, match="are not the 160 that the evidence was computed on"):
        autosym.fit(model, loader, curvature="whole", **ENDS)


def test_memory_that_is_short_leaves_the_end_to_kronecker_factors(trained, monkeypatch):
    def fails(run, at):
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(guarding.Run, "affords_whole", lambda run, at, times: True)
    monkeypatch.setattr(guarding.Run, "whole_value", fails)
    monkeypatch.setattr(guarding, "contenders", lambda ends: list(ends))
    model = autosym.relax(trained, pictures(2)[0])
    assert autosym.fit(copy.deepcopy(model), pictures(), **ENDS).chosen_by == "kronecker"
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        autosym.fit(model, pictures(), curvature="whole", **ENDS)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_default_fit_does_not_end_below_its_start_by_the_evidence_that_chose(trained, monkeypatch, seed):
    monkeypatch.setattr(guarding.Run, "affords_whole", lambda run, at, times: True)
    monkeypatch.setattr(guarding, "contenders", lambda ends: list(ends))
    values, real = {}, guarding.Run.whole_value

    def whole_value(run, at):
        values[epoch_of(run)] = found = real(run, at)
        return found

    monkeypatch.setattr(guarding.Run, "whole_value", whole_value)
    fit = autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), seed=seed, **ENDS)
    assert fit.chosen_by == "whole"
    assert float(fit.refine(pictures()).evidence.log_evidence) >= values[0] - 1e-6


def test_snapshots_are_the_start_the_last_and_the_best():
    progress = Progress()
    prior = Prior(["a"])
    for epoch, value in ((0, -5.0), (2, -4.0), (4, -2.0), (6, None), (8, -3.0)):
        progress.keep(Snapshot.of({}, prior, epoch, value, 1.0))
    assert (progress.good, progress.best) == (8, 4)
    assert set(progress.snapshots) == {0, 4, 8}


def test_a_run_settles_when_the_evidence_stops_rising():
    def stopped(*values, planned=17):
        return guarding.stopped_rising([{"log_evidence": value} for value in values], planned)

    flat, lower = [-10.0] * 6, [-11.0] * 6
    assert stopped(*flat, *lower)
    assert stopped(*flat, *flat)
    assert not stopped(*flat, *lower[1:]), "too few"
    assert not stopped(*lower, *flat), "it rose"
    assert not stopped(*flat, *lower[1:], -9.0), "with a new best"
    assert not stopped(-9.0, *lower, *flat), "though the best is older"
    assert not stopped(*flat, *lower, planned=30), "thirds of all steps"


def test_settling_early_keeps_the_last_part_of_the_run(trained, monkeypatch):
    monkeypatch.setattr("autosym.training.fitting.stopped_rising", lambda lines, planned: len(lines) == 20)
    rates, lines = [], []
    model = autosym.relax(trained, pictures(2)[0])
    fit = autosym.fit(model, pictures(), epochs=60, every=1, lr=0.01, log=lines.append)
    assert len(fit.history) == 25, "a fifth of the run is at fixed precisions"
    assert [line["epoch"] for line in lines if "log_evidence" in line][-1] == 20
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", fit.schedule)
    run.progress.stopped = 20
    rates = [run.rate(epoch) for epoch in (20, 21, 22.5, 25)]
    assert rates[0] == pytest.approx(fit.schedule.rate(20 / 60))
    assert rates == sorted(rates, reverse=True)
    assert rates[2] == pytest.approx(rates[0] / 2)
    assert rates[3] < 1e-3 * rates[0]


def test_what_a_fit_went_through_is_saved(trained, tmp_path):
    fit = autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), epochs=5, lr=30.0)
    fit.save(tmp_path)
    again = autosym.load(tmp_path, autosym.relax(trained, pictures(2)[0]))
    assert (again.start, again.recoveries, again.epoch) == (fit.start, fit.recoveries, fit.epoch)
    assert again.recoveries > 0


# ---- nothing gained


def test_the_start_is_returned_where_nothing_was_gained(trained, monkeypatch):
    """As a floor above all that the run reaches has it."""
    model, data = autosym.relax(trained, pictures(2)[0]), pictures()
    before = copy.deepcopy(model.state_dict())
    real_value = guarding.Run.value
    monkeypatch.setattr(guarding.Run, "value", lambda run, at: real_value(run, at) + (1e6 if silent(run.model) else 0))
    fit = autosym.fit(model, data, epochs=5)
    assert fit.nothing_gained
    assert "nothing was gained" in repr(fit)
    assert "Nothing was gained" in str(fit.symmetry())
    assert not fit.symmetry().cautions, "the history is not that of these weights"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(share == 0 for share in fit.symmetry().free_share().values())
    assert all(fit.prior.precision()[name] == pytest.approx(1e12) for name in fit.estimate.left_out)


def test_a_start_that_is_returned_has_its_floor(monkeypatch):
    """Precisions that were given are learned after all: those of the floor."""
    x, y = line_of_points()
    model = nn.Linear(3, 1).double()
    model.weight.data, model.bias.data = torch.linalg.lstsq(x, y).solution.T, torch.zeros(1, dtype=torch.float64)
    monkeypatch.setattr("autosym.training.fitting._train_weights", lambda run, epoch: (0.05, 0.05))
    fit = autosym.fit(model, (x, y), "gaussian", prior_precision=1e-6, epochs=2, burn_in=0, trust=0.01, lr=0.1)
    assert fit.nothing_gained
    assert float(fit.evidence.log_evidence) == pytest.approx(fit.start.log_evidence)


def test_precisions_that_are_held_stay_so_where_the_start_is_returned(trained, monkeypatch):
    monkeypatch.setattr("autosym.training.fitting.lost", lambda run, loss: "it was told so")
    fit = autosym.fit(copy.deepcopy(trained), pictures(), epochs=3, step="none", prior_precision=2.0, lr=0.01)
    assert fit.nothing_gained
    assert list(fit.prior.precision().values()) == pytest.approx([2.0] * len(fit.prior.names))


def test_a_collapse_within_an_epoch_is_seen_at_its_end(trained):
    """The mean loss of an epoch may be small when its last steps are lost."""
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5, lr=0.01, batch_size=10))
    starting.begin(run)
    losses = iter([0.0] * 12 + [5.0, 7.0] * 2)

    def step(x, y):
        run.weights.loss += len(x) * next(losses)

    run.step = step
    mean, late = fitting._train_weights(run, 1)
    assert (mean, late) == (pytest.approx(1.5), pytest.approx(6.0))


def test_a_collapse_is_told_by_the_loss_at_the_end_of_an_epoch(trained, monkeypatch):
    seen, losses = [], iter([(0.1, 0.2), (0.1, 9.0)])
    monkeypatch.setattr("autosym.training.fitting._train_weights", lambda run, epoch: next(losses))
    monkeypatch.setattr("autosym.training.fitting.lost", lambda run, loss: seen.append(loss))
    fit = autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), epochs=2, burn_in=0, every=1, lr=0.01)
    assert seen == [0.2, 9.0]
    assert [line["loss"] for line in fit.history] == [0.1, 0.1], "the history tells the mean"


def test_an_epoch_of_few_batches_has_one_loss(trained):
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5, lr=0.01, batch_size=12))
    starting.begin(run)
    mean, late = fitting._train_weights(run, 1)
    assert mean == late > 0


def test_a_snapshot_that_collapses_twice_is_left_for_an_earlier_one(trained):
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=9, lr=0.01))
    starting.begin(run)
    for epoch, value in ((2, -10.0), (4, -50.0)):
        run.progress.keep(run.state.snapshot(epoch, value))
    gone_back_to = []
    for epoch in range(5, 10):
        line = {"epoch": epoch, "loss": 1.0} | (guarding.recover(run, "it was told so") if epoch != 6 else {})
        run.progress.lines.append(line)
        gone_back_to.append(line.get("recovered", {}).get("epoch"))
    assert gone_back_to == [4, None, 4, 2, 0]
