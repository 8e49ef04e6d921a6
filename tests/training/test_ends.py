"""Where a fit ends: its last weights, its best snapshot or its start, and whose evidence chooses."""

import copy
import math

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import autosym
from autosym.bayes.priors import Prior
from autosym.training import guarding
from autosym.training.fitting import prepare
from autosym.training.snapshots import Progress, Snapshot
from trained_before import pictures


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
    for_three = [{"log_evidence": value, "steps": 3} for value in (-10.0, -10.0, -11.0, -11.0)]
    assert guarding.stopped_rising(for_three, 17), "a step in place of three counts three times"
    assert not guarding.stopped_rising(for_three[1:], 17)


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


@pytest.mark.parametrize("curvature", ["kronecker", "whole"])
def test_ends_hold_the_factors_of_the_best_alone_where_memory_is_short_and_the_choice_is_the_same(
    trained, monkeypatch, curvature
):
    held, real = [], guarding.held

    def watched(run, ends):
        found = real(run, ends)
        held.append([end.at is not None for end in found])
        return found

    monkeypatch.setattr(guarding, "held", watched)
    monkeypatch.setattr(guarding, "_more", lambda one, other: one is not None)  # all ends are looked at
    fits = []
    for room in (1e12, 0.0):
        monkeypatch.setattr(guarding.Run, "room", lambda run, room=room: room)
        torch.manual_seed(0)
        fits.append(autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), curvature=curvature, **ENDS))
    half = len(held) // 2
    assert all(all(line) for line in held[:half])
    assert held[half:]
    assert all(sum(line) == 1 for line in held[half:])
    one, other = fits
    assert (one.epoch, one.chosen_by) == (other.epoch, other.chosen_by)
    assert float(one.evidence.log_evidence) == float(other.evidence.log_evidence)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert other.laplace.curvature.factors.keys() == one.laplace.curvature.factors.keys()
