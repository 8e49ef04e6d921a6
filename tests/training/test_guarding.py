"""A fit does not ruin what it is given: its floor, its recoveries, its rate, and where it ends."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autosym
from autosym.bayes.priors import Prior
from autosym.curvature.owners import sites
from autosym.evidence import kernel, laplace, possible
from autosym.evidence.cautions import Impossible
from autosym.nn.layers import silent
from autosym.training import fitting, guarding, starting
from autosym.training.fitting import prepare
from autosym.training.schedule import Schedule
from autosym.training.snapshots import Progress, Snapshot


def pictures(samples=160, seed=0):
    """Bars and dots at random places: their kind does not depend on the place."""
    generator = torch.Generator().manual_seed(seed)
    x, y = 0.2 * torch.randn(samples, 1, 8, 8, generator=generator), torch.arange(samples) % 3
    for i in range(samples):
        a, b = torch.randint(1, 7, (2,), generator=generator).tolist()
        x[i, 0, a, b] += 2
        x[i, 0, a, b - 1] += 2 * int(y[i] == 1)
        x[i, 0, a - 1, b] += 2 * int(y[i] == 2)
    return x, y


def plain(seed=0):
    torch.manual_seed(seed)
    body = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


@pytest.fixture(scope="module")
def trained():
    net, (x, y) = plain(), pictures()
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(60):
        for rows in torch.randperm(len(x)).split(32):
            optimiser.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
    assert accuracy(net) > 0.9
    return net.eval()


def accuracy(net):
    x, y = pictures()
    with torch.no_grad():
        return float((net(x).argmax(1) == y).float().mean())


def learned(model, data, at=laplace.at):
    """The evidence at precisions learned in closed form."""
    found = at(model, data)
    prior = Prior(found.names)
    for _ in range(30 if at is laplace.at else 300):  # that of the kernel converges slowly
        found.mackay(prior)
    with torch.no_grad():
        return float(found(prior).log_evidence)


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


def test_a_loss_near_guessing_is_no_collapse_if_the_evidence_is_more():
    """Labels at random: to forget them is right, and the run may end there."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 10), torch.arange(60) % 2
    model = nn.Sequential(nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 2))
    fit = autosym.fit(model, (x, y), epochs=60, lr=0.1)
    assert fit.recoveries == 0
    assert sum(fit.history[-1].get("effective_parameters", {"": 0.0}).values()) < 1 or fit.history[-1]["loss"] > 0.5


def test_a_run_that_collapses_in_every_epoch_is_refused():
    model, (x, y) = nn.Linear(5, 2), (torch.randn(12, 5), torch.randn(12, 2))
    with pytest.raises(ValueError, match="lower lr"):
        autosym.fit(model, (x, y), "gaussian", optimiser="sgd", lr=1e200, prior_precision=1e-300, batch_size=4, epochs=9)


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


def test_evidence_that_cannot_be_wins_nothing(trained, monkeypatch):
    """The start has more than any evidence can be: it is no floor."""
    monkeypatch.setattr(possible, "failure", lambda at, prior: Impossible(-0.1, -1.8) if silent_of(at) else None)
    fit = autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), epochs=4)
    assert fit.start.explains
    assert fit.start.log_evidence is None
    assert not fit.nothing_gained


def silent_of(at):
    return bool(getattr(at, "left_out", ()))


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


def test_snapshots_are_the_start_the_last_and_the_best():
    progress = Progress()
    prior = Prior(["a"])
    for epoch, value in ((0, -5.0), (2, -4.0), (4, -2.0), (6, None), (8, -3.0)):
        progress.keep(Snapshot.of({}, prior, epoch, value, 1.0))
    assert (progress.good, progress.best) == (8, 4)
    assert set(progress.snapshots) == {0, 4, 8}


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


def test_what_a_fit_went_through_is_saved(trained, tmp_path):
    fit = autosym.fit(autosym.relax(trained, pictures(2)[0]), pictures(), epochs=5, lr=30.0)
    fit.save(tmp_path)
    again = autosym.load(tmp_path, autosym.relax(trained, pictures(2)[0]))
    assert (again.start, again.recoveries, again.epoch) == (fit.start, fit.recoveries, fit.epoch)
    assert again.recoveries > 0


def line_of_points():
    torch.manual_seed(0)
    x = torch.randn(80, 3, dtype=torch.float64)
    return x, x @ torch.tensor([[1.0], [2.0], [0.0]], dtype=torch.float64) + 0.3 * torch.randn(80, 1, dtype=torch.float64)


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


def test_a_start_that_is_returned_has_its_floor(monkeypatch):
    """Precisions that were given are learned after all: those of the floor."""
    x, y = line_of_points()
    model = nn.Linear(3, 1).double()
    model.weight.data, model.bias.data = torch.linalg.lstsq(x, y).solution.T, torch.zeros(1, dtype=torch.float64)
    monkeypatch.setattr("autosym.training.fitting._train_weights", lambda run, epoch: (0.05, 0.05))
    fit = autosym.fit(model, (x, y), "gaussian", prior_precision=1e-6, epochs=2, burn_in=0, trust=0.01, lr=0.1)
    assert fit.nothing_gained
    assert float(fit.evidence.log_evidence) == pytest.approx(fit.start.log_evidence)


def test_a_model_without_a_finite_loss_is_refused():
    x, y = line_of_points()
    model = nn.Linear(3, 1).double()
    model.weight.data.fill_(1e200)
    with pytest.raises(ValueError, match=r"loss of the given model|not finite|log-likelihood"):
        autosym.fit(model, (x, y), "gaussian", epochs=2)


# ---- what a review asked for


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


def test_a_prior_that_is_held_may_take_what_a_model_explains(trained):
    """The MAP of a strong prior is near guessing, and no collapse; its rate is the one asked for."""
    fit = autosym.fit(copy.deepcopy(trained), pictures(), epochs=30, step="none", prior_precision=1e4)
    assert fit.recoveries == 0
    assert fit.start.lr == fit.schedule.lr
    assert fit.history[-1]["loss"] > 0.9 * fit.start.guess


def test_precisions_that_are_held_stay_so_where_the_start_is_returned(trained, monkeypatch):
    monkeypatch.setattr("autosym.training.fitting.lost", lambda run, loss: "it was told so")
    fit = autosym.fit(copy.deepcopy(trained), pictures(), epochs=3, step="none", prior_precision=2.0, lr=0.01)
    assert fit.nothing_gained
    assert list(fit.prior.precision().values()) == pytest.approx([2.0] * len(fit.prior.names))


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


def test_after_settling_began_a_collapse_goes_back_to_where_it_began(trained, monkeypatch):
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5))
    starting.begin(run)
    for epoch, value in ((2, -10.0), (4, -50.0)):
        run.progress.low = epoch / 100
        run.progress.keep(run.state.snapshot(epoch, value))
    guarding.settle(run)
    assert (run.progress.good, run.progress.low) == (2, 0.02)


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


def test_a_floor_without_effective_parameters_is_none(trained, monkeypatch):
    """Far off a mode precisions may fall without end, and the evidence be the likelihood: nothing could win against it."""
    real = laplace.Laplace.effective_parameters
    monkeypatch.setattr(laplace.Laplace, "effective_parameters", lambda at, prior: 1e-6 * real(at, prior))
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5, lr=0.01))
    starting.begin(run)
    assert run.progress.start.explains
    assert run.progress.start.log_evidence is None
    assert list(run.prior.precision().values()) == pytest.approx([1.0] * len(run.prior.names)), "as given, not as learned"


def test_a_loss_is_near_guessing_beyond_four_fifths_of_the_way(trained):
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5, lr=0.01))
    starting.begin(run)
    run.progress.keep(run.state.snapshot(1, 0.0))  # with more evidence than there can be: nothing excuses a loss
    way = run.progress.start.guess - 0.1
    for part, collapsed in ((0.0, False), (0.5, False), (0.79, False), (0.81, True), (2.0, True)):
        run.progress.low = 0.1
        assert bool(guarding.lost(run, 0.1 + part * way)) is collapsed, part


def test_a_collapse_within_an_epoch_is_seen_at_its_end(trained):
    """The mean loss of an epoch may be small when its last steps are lost."""
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5, lr=0.01, batch_size=16))
    starting.begin(run)
    losses = iter([0.0] * 8 + [5.0, 7.0])

    def step(x, y):
        run.weights.loss += len(x) * next(losses)

    run.step = step
    mean, late = fitting._train_weights(run, 1)
    assert (mean, late) == (pytest.approx(1.2), pytest.approx(6.0))


def test_an_epoch_of_few_batches_has_one_loss(trained):
    run = prepare(autosym.relax(trained, pictures(2)[0]), pictures(), "categorical", Schedule(epochs=5, lr=0.01, batch_size=80))
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
