"""A fit does not ruin what it is given: its recoveries from a collapse, and where it ends."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autosym
from autosym.evidence.cautions import Borders
from autosym.nn.layers import silent
from autosym.training import fitting, guarding, starting
from autosym.training.fitting import prepare
from autosym.training.schedule import Schedule
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


def test_after_a_recovery_an_epoch_of_enough_steps_is_enough(trained):
    """The rate was too high twice: to wait another epoch is to lose it."""
    loader = DataLoader(TensorDataset(*pictures()), batch_size=1)
    run = prepare(autosym.relax(trained, pictures(2)[0]), loader, "categorical", Schedule(epochs=5, lr=0.01))
    assert run.count >= guarding.STAYS
    starting.begin(run)
    assert not guarding._stayed(run, 0.5), "the first epoch may be a visit"
    run.progress.lines.append({"epoch": 1, "loss": 1.0, **guarding.recover(run, "a test")})
    assert guarding._stayed(run, 0.5)


@pytest.mark.parametrize("more", [-1.0, 1.0])
def test_no_run_goes_back_to_where_its_loss_was_far_off_unless_that_had_the_most_evidence(trained, monkeypatch, more):
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5, lr=0.01))
    starting.begin(run)
    value, way = run.progress.start.log_evidence + more, run.progress.start.guess - run.progress.low
    run.schedule = replace(run.schedule, burn_in=0, every=1)
    told = {"log_evidence": value, "effective_parameters": {"": 9.0}}
    monkeypatch.setattr(fitting, "_learn_prior", lambda run, epoch, line, due: line.update(told) or value)
    for epoch, part in ((1, 0.3), (2, 0.2)):
        monkeypatch.setattr(fitting, "_train_weights", lambda run, epoch, loss=run.progress.low + part * way: (loss, loss))
        run.progress.lines.append(fitting._epoch(run, epoch))
        assert run.progress.good == (epoch if more > 0 or part < guarding.FAR else 0)


def test_what_collapsed_twice_from_the_start_goes_back_to_the_start(trained):
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5, lr=0.01))
    starting.begin(run)
    run.progress.keep(run.state.snapshot(3, -1e9))
    run.progress.good = 0
    for epoch in (4, 5, 6):
        run.progress.lines.append({"epoch": epoch, "loss": 1.0, **guarding.recover(run, "a test")})
        assert run.progress.lines[-1]["recovered"]["epoch"] == 0


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

    def estimate(run, *how):
        calls.append(how)
        if len(calls) == 2:
            raise autosym.runtime.arithmetic.NotFinite("the factor A of x overflowed")
        return real(run, *how)

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
    assert fit.symmetry().cautions == (Borders(("0", "2")),), "the history is not that of these weights"
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
