"""Keeps a search within ``minutes``: what its runs took says how long later ones may be.

    seconds of a run ~ drift share (epochs epoch + beside)          share: its work, compared with the largest network's

A short fit of the largest network measures an epoch, a pass what a run takes beside; ``drift`` is what the last runs took, compared with
that. Long runs, and those that go on, get the length that the time left allows; if that is too short, there are fewer. What is optional
(wider networks, more seeds, single layers) is left out if it does not fit. No run is shorter than in the shortest plan. Where time allows
less than ``FULL`` of the epochs, one width is tried in place of two; where even the shortest plan takes too long with all samples, some of
them are drawn (``sampling``). What was decided is kept in the folder of the search, so that one that was stopped goes on as if it had not
been.
"""

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autosym.answer.plans import FEWEST, PARTS, RESERVE, Outcome, Question, Run, Stage, exchanged
from autosym.answer.routes import PRODUCTS, SHORT, Fitter
from autosym.evidence import costs, laplace
from autosym.evidence.costs import PRODUCT
from autosym.runtime import processes
from autosym.runtime.arithmetic import NotFinite
from autosym.training.fitting import fit
from autosym.training.guarding import NothingLearned

EPOCHS, STEPS = 15, 200  # of the weights, at least, in a fit of the shortest plan: with fewer little is learned
BESIDE: dict[Stage, float] = {
    "short": 1.0,
    "long": 1.6,
    "on": 1.6,
    "layers": 1.6,
}  # exact passes at the end, those of ends that are compared
TRIALS: dict[Stage, float] = {"on": 1.0, "layers": 1.0}  # of the rate, each about as long as the run
FULL = 0.5  # of the epochs that were asked for: with fewer, networks of one width are tried
PLANNED = 0.8  # of the time, at the start: the rest is for what is optional
TOLERATED = 1.2  # times what was asked for: what is expected to take longer is said before the start
REFUSED = 10.0  # times what was asked for: what is expected to take longer is not begun. A busy machine may measure three times too much
SHRUNK = 0.9  # of the samples at most, if there are too many
POWER = 1.5  # of the samples: about how the time grows, as networks for more samples are larger. What follows is measured
OPINIONS = 2.0  # times ``beside`` for each second opinion, and for the best network


class TooShort(UserWarning):
    """Even the shortest search of all samples takes longer than the minutes that were given: some are drawn, or it takes longer."""


@dataclass(frozen=True)
class Pace:
    """Seconds of the largest network: an epoch with an evidence step, what a run takes beside, and the evidence of the whole network."""

    epoch: float
    beside: float
    whole: float

    @classmethod
    def measured(cls, fitter: Fitter, weights: float, passed: float) -> "Pace":
        """By a short fit of the samples to try, without its first epoch, which warms up.

        ``weights`` are the seconds of the weight steps of an epoch, ``passed`` those of an exact pass.
        """
        model = fitter.networks.build(*fitter.largest, 0)
        schedule = replace(fitter.schedule, epochs=SHORT, burn_in=0, every=1, sampled_end=True)
        with processes.alone():
            try:
                found = fit(model, fitter.tried, fitter.likelihood, schedule=schedule, **fitter.options)
                taken = found.history[-1]["seconds"] - found.history[0]["seconds"]
                at, epoch = found.laplace, taken / (SHORT - 1) / fitter.part_tried
            except (NotFinite, NothingLearned):  # as other runs may
                model = fitter.networks.build(*fitter.largest, 0)
                at, epoch = laplace.at(model, fitter.tried, fitter.likelihood), 2 * weights
        known = costs.of(model, fitter.tried, at, fitter.options.get("memory"))
        work = min(known.least, PRODUCTS[0] * PRODUCT * known.samples * known.forward) / known.fit(1, schedule.batch_size)
        return cls(*(processes.agreed(seconds) for seconds in (epoch, passed, work * weights)))

    def seconds(self, stage: Stage, epochs: float) -> float:
        """Of one run."""
        if stage == "whole":
            return self.whole
        return (1 + TRIALS.get(stage, 0.0)) * max(SHORT, epochs) * self.epoch + BESIDE[stage] * self.beside


@dataclass
class Deadline:
    """The runs of ``fitter`` within ``seconds`` from ``begun``."""

    fitter: Fitter
    questions: Sequence[Question]
    pace: Pace
    seconds: float
    begun: float
    budget: float
    drift: float = 1.0
    spent: float = 0.0  # of the budget
    calls: int = 0

    def expected(self, epochs: int, short: bool = True) -> float:
        """Seconds of all that is sure to be made, if a fit has so many epochs, or of all but ``short`` runs; processes share the runs."""
        plan, share = self.fitter.plan, self.fitter.share
        widths = {n: sum(share(n, w) for w in plan.widths) / len(plan.widths) for n in plan.networks}
        first = FEWEST * len(plan.widths) * sum(widths.values()) if short and len(plan.widths) > 1 else 0.0
        long, on = plan.seeds * sum(widths.values()), 0.0
        for network in plan.networks:
            pairs = sum(2 for q in self.questions for n in (q.strict, q.relaxed) if n == network)
            on += FEWEST * max(1, pairs) * widths[network]
        counts: dict[Stage, float] = {"short": first, "long": long, "on": on, "whole": sum(widths.values())}
        each = {stage: self.pace.seconds(stage, plan.part(stage) * epochs) for stage in counts}
        runs = self.drift * sum(count * each[stage] for stage, count in counts.items())
        return runs / processes.count() + self.opinions

    def epochs(self) -> int:
        """Of a fit: as many as time allows, from those of the shortest plan to those that were asked for."""
        most, planned = self.fitter.schedule.epochs, PLANNED * self.open
        tried = range(most, self.shortest, -1)
        return next((n for n in tried if self.expected(n) <= planned), self.shortest)

    @property
    def shortest(self) -> int:
        """Epochs of a fit in the shortest plan."""
        schedule, samples = self.fitter.schedule, self.fitter.samples
        return min(schedule.epochs, max(EPOCHS, math.ceil(STEPS / math.ceil(samples / schedule.batch_size))))

    @property
    def tight(self) -> bool:
        """Whether time allows less than ``FULL`` of the epochs, or not even the shortest plan."""
        return self.epochs() < FULL * self.fitter.schedule.epochs or self.expected(self.shortest) > TOLERATED * self.open

    def samples(self, least: int) -> int:
        """How many samples time allows with the shortest plan, about, from ``least`` to those that there are."""
        now, expected = self.fitter.samples, self.expected(self.shortest)
        if expected <= TOLERATED * self.open or now <= least:
            return now
        return max(least, math.floor(now * min(SHRUNK, (PLANNED * self.open / expected) ** (1 / POWER))))

    @property
    def open(self) -> float:
        """Seconds that are left, as all processes see it."""
        return processes.agreed(max(0.0, self.seconds - (time.perf_counter() - self.begun)))

    @property
    def opinions(self) -> float:
        return OPINIONS * self.pace.beside * (len(self.questions) + 1)

    @property
    def left(self) -> float:
        """Seconds of which runs may take; calls before this one count."""
        return self.seconds - self.fitter.before - (time.perf_counter() - self.begun) - self.opinions

    def perform(self, runs: Sequence[Run]) -> dict[Run, Outcome]:
        """``Fitter.perform``, for as long as time allows. The budget is then what the time left allows."""
        fitter, plan, stage = self.fitter, self.fitter.plan, runs[0].stage
        self.calls += 1
        if stage in ("long", "on", "layers") and stage not in plan.paced:  # all of a stage are as long: they are compared
            plan.paced[stage] = fitter.store.decided(stage, lambda: self._part(stage, runs))
        found = fitter.perform(runs)
        took = {
            run: outcome.seconds for run, outcome in found.items() if not outcome.failed
        }  # what failed may have ended early
        expected = sum(self._raw(run.stage, run.network, run.width, plan.part(stage)) for run in took)
        if stage != "whole" and expected:
            self.drift = processes.agreed(sum(took.values()) / expected)
        self.spent += sum(fitter.price(run) for run in runs)
        if stage == "short":
            plan.seeds = round(fitter.store.decided(f"{self.calls} seeds", self._seeds))
        plan.budget = min(self.budget, fitter.store.decided(f"{self.calls} budget", self._affordable))
        return found

    def _raw(self, stage: Stage, network: str, width: float, part: float) -> float:
        return self.fitter.share(network, width) * self.pace.seconds(stage, part * self.fitter.schedule.epochs)

    def _affordable(self) -> float:
        """The budget that the time left allows, if all of it is spent on what takes longest for its price."""
        dearest = max(
            self._raw(stage, *self.fitter.largest, self.fitter.plan.part(stage)) / self.fitter.plan.part(stage)
            for stage in PARTS
        )
        return processes.agreed(self.spent + max(0.0, self.left) * processes.count() / (self.drift * dearest))

    def _seeds(self) -> int:
        """Of long runs: the fewest, if short ones took so long that even the shortest of all seeds would be late."""
        return FEWEST if processes.agreed(self.expected(self.shortest, short=False)) > self.open else self.fitter.plan.seeds

    def _part(self, stage: Stage, runs: Sequence[Run]) -> float:
        """The part of a fit that runs have: what time and budget allow, at most that of a full plan, at least that of the shortest."""
        plan, share, full = self.fitter.plan, self.fitter.share, self.fitter.schedule.epochs
        later: list[tuple[Stage, float]] = [(stage, sum(share(run.network, run.width) for run in runs))]
        if stage == "long":
            later.append(("on", self._going_on({run.network: run.width for run in runs})))
        whole = (
            0.0 if stage == "layers" else sum(share(run.network, run.width) for run in {r.network: r for r in runs}.values())
        )
        now = PARTS[stage]
        slope = sum(count * PARTS[s] / now * (1 + TRIALS.get(s, 0.0)) * full * self.pace.epoch for s, count in later)
        fixed = sum(count * BESIDE[s] * self.pace.beside for s, count in later) + whole * self.pace.whole
        open_yet = (1 - RESERVE * (stage == "long")) * self.left
        by_time = (open_yet * processes.count() / self.drift - fixed) / slope
        units = sum(count * PARTS[s] / now for s, count in later)
        by_budget = ((1 - RESERVE * (stage == "long")) * self.budget - self.spent - whole * PARTS["whole"]) / units
        shortest = plan.scale * now * min(1.0, self.shortest / full)
        return processes.agreed(max(shortest, min(now, by_time, by_budget)))

    def _going_on(self, widths: dict[str, float]) -> float:
        """The work of runs that go on from the ends of long ones at these widths."""
        share, paired = self.fitter.share, exchanged(self.questions)
        found = sum(FEWEST * share(network, width) for network, width in widths.items() if network not in paired)
        for q in self.questions:
            both = (q.strict, q.relaxed)
            found += sum(FEWEST * share(network, widths[one]) for one in both for network in both)
        return found


def check(seconds: float, expected: float, symmetries: int, left_out: str = "", few: bool = False) -> None:
    """Say before the start which samples are ``left_out``, or that the shortest plan takes longer than was asked for.

    Refuse it if it takes far longer. Of ``few`` samples none can be left out.
    """
    if expected <= TOLERATED * seconds:
        if left_out and processes.first():
            warnings.warn(left_out, TooShort, stacklevel=4)
        return
    minutes = math.ceil(expected / 6) / 10 if expected < 600 else math.ceil(expected / 60)
    fewer = [*([] if left_out or few else ["fewer samples"]), *(["ask for one symmetry"] if symmetries > 1 else [])]
    some = f" with {left_out.partition(' were ')[0]}" if left_out else ""
    said = (
        f"even the shortest search{some} takes about {minutes:g} minutes here, more than the {seconds / 60:g} that were given: "
    )
    how = ", or ".join([f"give {minutes:g} or more", *fewer])
    if expected > REFUSED * seconds:
        raise ValueError(f"{said}{how}")
    if processes.first():
        warnings.warn(f"{said}it goes on; to change that, {how}", TooShort, stacklevel=4)
