"""``discover(minutes=)``: searches whose runs take known times on a clock that only they move, and one of real fits."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

import autosym
from autosym.answer import deadline
from autosym.answer.deadline import EPOCHS, Deadline, Pace, TooShort, check
from autosym.answer.plans import Outcome, Question, Run, planned
from autosym.answer.routes import SHORT, Store
from autosym.answer.search import Search
from autosym.training.guarding import NothingLearned
from autosym.training.schedule import Schedule
from searched import pictures

QUESTIONS = (Question("translations", "conv", "f-fc+conv", "f-fc"), Question("c4", "gconv", "gconv+turn", "conv"))
PACE = Pace(1.0, 4.0, 10.0)  # seconds of the largest network
EVIDENCE = {"conv": -1000.0, "f-fc+conv": -1000.0, "f-fc": -1990.0, "gconv": -1010.0, "gconv+turn": -1000.0}


class Clocked:
    """A fitter whose runs take their share of what the largest network takes, ``slow`` times as long as was measured."""

    before = 0.0
    samples = 2000

    def __init__(self, folder, clock, slow=lambda stage: 1.0, most=math.inf):
        self.store, self.clock, self.slow, self.most, self.made = Store(folder, {}), clock, slow, most, {}
        self.schedule, self.largest = Schedule(epochs=400), ("f-fc+conv", 2.0)
        self.plan = planned(QUESTIONS, (), (1.0, 2.0), 3, 13.0, self.share)

    def share(self, network, width):
        return 0.25 * width**2

    def price(self, run):
        return self.plan.part(run.stage) * self.share(run.network, run.width)

    def epochs(self, stage):
        return max(SHORT, math.ceil(self.plan.part(stage) * self.schedule.epochs))

    def perform(self, runs):
        found = {}
        for run in runs:
            known = self.store.outcome(run)
            if known is None:
                if len(self.made) >= self.most:
                    raise KeyboardInterrupt
                took = (
                    self.slow(run.stage) * self.share(run.network, run.width) * PACE.seconds(run.stage, self.epochs(run.stage))
                )
                known = Outcome(EVIDENCE[run.network] + 7.0 * run.seed, 1.0, took)
                self.clock.now += took
                self.store.keep(run, known, None)
                self.made[run] = self.epochs(run.stage)
            else:
                self.before += known.seconds
            found[run] = known
        return found


@pytest.fixture
def clock(monkeypatch):
    found = SimpleNamespace(now=0.0)
    monkeypatch.setattr(deadline.time, "perf_counter", lambda: found.now)
    return found


def searched(folder, clock, seconds, budget=13.0, **options):
    """The search, its fitter, and how long all calls took."""
    fitter, begun = Clocked(folder, clock, **options), clock.now
    limit = Deadline(fitter, QUESTIONS, PACE, seconds, begun, budget)
    fitter.schedule = fitter.store.schedule(replace(fitter.schedule, epochs=limit.epochs()))
    fitter.store.begin()
    search = Search(QUESTIONS, fitter.plan, limit.perform, fitter.share, layers=lambda network: ["0", "1"]).run()
    return search, fitter, fitter.before + clock.now - begun


def shortest():
    fitter = Clocked(None, SimpleNamespace(now=0.0))
    return Deadline(fitter, QUESTIONS, PACE, 0.0, 0.0, 13.0).expected(EPOCHS)


def test_processes_share_the_runs_but_not_the_second_opinions(monkeypatch):
    alone, opinions = shortest(), Deadline(Clocked(None, None), QUESTIONS, PACE, 0.0, 0.0, 13.0).opinions
    monkeypatch.setattr(deadline.processes, "count", lambda: 4)
    assert shortest() == pytest.approx((alone - opinions) / 4 + opinions)


@pytest.mark.parametrize(("samples", "epochs"), [(2000, EPOCHS), (300, 40), (64, 200), (10, 200)])
def test_the_shortest_plan_has_enough_steps(samples, epochs):
    """With 15 epochs of 120 steps two thirds of all runs learned nothing."""
    fitter = Clocked(None, None)
    fitter.samples = samples
    assert fitter.schedule.batch_size == 64
    assert Deadline(fitter, QUESTIONS, PACE, 0.0, 0.0, 13.0).shortest == epochs
    fitter.schedule = replace(fitter.schedule, epochs=30)
    assert Deadline(fitter, QUESTIONS, PACE, 0.0, 0.0, 13.0).shortest == min(epochs, 30), "never more than was asked for"


@pytest.mark.parametrize("budget", [13.0, 39.0])
@pytest.mark.parametrize("slow", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("times", [1.5, 3.0, 10.0])
def test_a_search_takes_about_as_long_as_it_may(clock, times, slow, budget):
    seconds = times * shortest()
    _, fitter, took = searched(None, clock, seconds, budget, slow=lambda stage: slow)
    assert took < 1.25 * seconds
    assert took > 0.45 * seconds, "which is time to learn in"
    short, long = (max(epochs for run, epochs in fitter.made.items() if run.stage == stage) for stage in ("short", "long"))
    assert long > 3 * short, "what is left of the time makes runs longer"


def test_runs_that_become_slow_are_shortened(clock):
    seconds = 4 * shortest()
    _, usual, _ = searched(None, clock, seconds)
    _, fitter, took = searched(None, clock, seconds, slow=lambda stage: 1.0 if stage == "short" else 2.0)
    assert took < 1.25 * seconds
    lengths = [
        {stage: max(n for run, n in f.made.items() if run.stage == stage) for stage in ("long", "on")} for f in (usual, fitter)
    ]
    assert lengths[1]["on"] < lengths[0]["on"], "long runs have told"


@pytest.mark.parametrize(("slow", "seeds"), [(1.0, 3), (4.0, 2)])
def test_there_are_fewer_long_runs_where_short_ones_took_too_long(clock, slow, seeds):
    search, _, _ = searched(None, clock, 1.5 * shortest(), slow=lambda stage: slow)
    assert search.plan.seeds == seeds
    assert {run.seed for run in search.outcomes if run.stage == "long"} >= set(range(seeds))


@pytest.mark.parametrize("most", [5, 25, 37, 50])
def test_a_search_that_was_stopped_makes_the_same_runs(clock, tmp_path, most):
    seconds = 3 * shortest()
    whole = searched(tmp_path / "whole", clock, seconds)[1].made
    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path / "stopped", clock, seconds, most=most)
    clock.now += 1e4  # which nobody waited for
    fitter = searched(tmp_path / "stopped", clock, seconds)[1]
    took = sum(run.seconds for run in fitter.store.outcomes.values())
    assert {run.key: n for run, n in fitter.made.items()} == {run.key: n for run, n in list(whole.items())[most:]}
    again = searched(tmp_path / "stopped", clock, seconds)
    assert not again[1].made, "all is there"
    assert again[2] == pytest.approx(took), "of all calls"


def test_a_timing_fit_that_learns_nothing_ends_no_search(monkeypatch):
    def fails(*args, **options):
        raise NothingLearned("nothing was learned")

    monkeypatch.setattr(deadline, "fit", fails)
    form = {"width": 4, "channels": (1, 2), "strides": (2, 2), "hidden": 2}
    options = {"network": form, "epochs": 4, "seeds": 2, "batch_size": 16, "minutes": 60.0}
    assert autosym.discover("f-fc+conv", pictures(), "translations", **options).verdicts


def test_runs_that_failed_early_say_nothing_of_how_fast_others_are(clock, tmp_path):
    fitter = Clocked(tmp_path, clock)
    made, network = fitter.perform, "f-fc"
    fitter.perform = lambda runs: {
        run: replace(out, failed="it died", seconds=0.0) if run.network == network else out for run, out in made(runs).items()
    }
    watched = Deadline(fitter, QUESTIONS, PACE, 1e6, clock.now, 13.0)
    watched.perform([Run(name, 1.0, 0, "short") for name in ("conv", network)])
    assert watched.drift == pytest.approx(1.0, rel=0.1)


def small(folder, minutes):
    form = {"width": 4, "channels": (1, 2), "strides": (2, 2), "hidden": 2}
    options = {"network": form, "epochs": 4, "seeds": 2, "batch_size": 16, "resume": folder, "minutes": minutes}
    return autosym.discover("f-fc+conv", pictures(), "translations", **options)


def test_far_too_few_minutes_are_refused_before_the_start(tmp_path):
    said = r"takes about [\d.]+ minutes here, more than the 0.001 that were given: give [\d.]+ or more$"  # too few to leave some out
    with pytest.raises(ValueError, match=said):
        small(tmp_path, 0.001)
    assert not list(tmp_path.iterdir()), "a call that is refused leaves nothing"


def test_minutes_that_are_a_little_short_are_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr(Deadline, "expected", lambda self, epochs, short=True: 1.5 * self.seconds)
    with pytest.warns(TooShort, match="even the shortest search takes about 0.3 minutes here, more than the 0.2") as said:
        answer = small(tmp_path, 0.2)
    assert len(said) == 1
    assert not any("shortest search" in note for note in answer.notes), "it was said before the start"
    monkeypatch.setattr(Deadline, "expected", lambda self, epochs, short=True: 10 * self.seconds)
    other = small(tmp_path, 0.2)  # it was begun, so it is not refused
    assert [v.judgement for v in other.verdicts] == [v.judgement for v in answer.verdicts]
    made = sum(json.loads(path.read_text())["seconds"] for path in tmp_path.glob("*/outcome.json"))
    assert other.seconds > made > 0, "of all calls, not of the last"
    assert (tmp_path / "decided.json").exists()


@pytest.mark.parametrize(
    ("expected", "minutes"), [(1.0, "0.1"), (66.0, "1.1"), (599.0, "10"), (601.0, "11"), (7200.0, "120")], ids=str
)
def test_the_minutes_that_are_needed_are_named(expected, minutes):
    with pytest.raises(ValueError, match=f"about {minutes} minutes here.*give {minutes} or more, .*or ask for one symmetry"):
        check(0.09 * expected, expected, 3)
    check(0.9 * expected, expected, 3)
    with pytest.warns(TooShort, match=f"it goes on; to change that, give {minutes} or more, or fewer samples$"):
        check(0.11 * expected, expected, 1)
