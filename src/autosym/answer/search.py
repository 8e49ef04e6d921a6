"""Which runs are made, in which order, and what they say: the search behind ``discover``, without any fit in it.

    short    every network at two widths and two seeds, a part of a fit each; wider while the evidence rises by more than its error
    long     every network at its best width, by all seeds (by one if the network is hopeless)
    on       from the two best of these ends: each network fitted on, the relaxed one opened from the strict one, the strict one left of the relaxed one
    whole    the evidence of the whole network at the best end of each: margins are between these
    more     another seed for questions that are undecided, while there is budget
    layers   where a symmetry is broken: each layer without what breaks it, then all that do not need it, the rest fitted on

So neither hypothesis loses by a worse optimum: each is also fitted from the other's end. Before "whole", evidence is that of Kronecker
factors, corrected (``routes``): it chooses ends, and its spread between seeds is the error of all. All that a run needs is ``Run``; all
that is known of it afterwards is ``Outcome``. ``perform`` makes runs, or finds them made. The search depends on outcomes alone, not on time, so a search
that was stopped goes on as if it had not been.

Costs are in fits: one is a fit of the largest network at its full length. Lengths are scaled so that the whole plan is within the budget.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autosym.answer import margins
from autosym.answer.margins import Judgement, Margin, Value

Stage = Literal["short", "long", "on", "whole", "layers"]
PARTS: dict[Stage, float] = {"short": 0.15, "long": 1.0, "on": 0.3, "whole": 0.5, "layers": 0.15}  # of a fit, at its full length
FITS: tuple[Stage, ...] = ("long", "on")  # whose ends are compared
RESERVE = 0.15  # part of the budget that the plan leaves: for wider networks, more seeds and single layers
HOPELESS = (20.0, 0.5)  # errors, and part of the evidence: a network whose short runs are so far behind the best gets one long run
FEWEST = 2  # seeds: of short runs, and of those that go on
SHORTEST = 0.1  # of the planned lengths: with shorter runs nothing is learned


@dataclass(frozen=True, order=True)
class Run:
    """One fit: a network at a width, from scratch by ``seed``, or from the end of the run with the key ``start``."""

    network: str
    width: float
    seed: int
    stage: Stage
    start: str = ""
    left: tuple[str, ...] = ()  # layers without the paths that break the symmetry

    @property
    def key(self) -> str:
        """A name that no other run has, and that a file can have."""
        plain = "".join(c if c.isalnum() or c in "+-." else "_" for c in self.network)
        left = f"-{zlib.crc32(' '.join(self.left).encode()):08x}" if self.left else ""
        return f"{plain}~{self.width:g}~{self.seed}~{self.stage}{left}" + (f"~~{self.start}" if self.start else "")


@dataclass(frozen=True)
class Outcome:
    """What a run ended with: log evidence (-inf if it has failed), the standard error of its estimate, seconds, what else is known."""

    log_evidence: float
    error: float = 0.0
    seconds: float = 0.0
    failed: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """A symmetry, and the networks that keep it, that may break it and contain the former, and that are without the tie."""

    symmetry: str
    strict: str
    relaxed: str
    untied: str
    breaking: tuple[str, ...] = ()  # other networks that do not keep it

    @property
    def networks(self) -> tuple[str, ...]:
        return (self.strict, self.relaxed, self.untied)


@dataclass(frozen=True)
class Plan:
    """What may be spent, and on what: ``scale`` shortens all runs alike, so that those that are sure to be made are within the budget."""

    networks: tuple[str, ...]
    widths: tuple[float, ...]
    seeds: int
    budget: float
    scale: float = 1.0
    widest: float = 4.0

    def part(self, stage: Stage) -> float:
        """Of the length of a fit; whole evidence takes what it takes."""
        return (1.0 if stage == "whole" else self.scale) * PARTS[stage]


Perform = Callable[[Sequence[Run]], Mapping[Run, Outcome]]
Cost = Callable[[str, float], float]  # of a fit of the network at the width, in units of the largest


def planned(questions: Sequence[Question], others: Sequence[str], widths: Sequence[float], seeds: int, budget: float, cost: Cost) -> Plan:
    """The plan for these questions, and for ``others``, networks that belong to none."""
    if seeds < FEWEST:
        raise ValueError(f"seeds must be at least {FEWEST}, got {seeds}: the spread between seeds is the error of the answer")
    networks = tuple(dict.fromkeys([n for q in questions for n in q.networks] + list(others)))
    plan = Plan(networks, tuple(widths), seeds, budget)
    fits, whole = sure_cost(plan, questions, cost)
    left = (1 - RESERVE) * budget - whole
    if left < SHORTEST * fits:
        least = (SHORTEST * fits + whole) / (1 - RESERVE)
        raise ValueError(
            f"a budget of {budget:g} fits is too small for {len(networks)} networks, {len(widths)} widths and {seeds} seeds: give "
            f"{least:.1f} at least, or ask for fewer symmetries"
        )
    return replace(plan, scale=min(1.0, left / fits))


def sure_cost(plan: Plan, questions: Sequence[Question], cost: Cost) -> tuple[float, float]:
    """What fits, and what whole evidence takes at most, without what is wider than the first widths, and without more seeds."""
    worst = {network: max(cost(network, width) for width in plan.widths) for network in plan.networks}
    short = sum(cost(network, width) for network in plan.networks for width in plan.widths) * FEWEST * plan.part("short")
    long, on = _after_short(plan, questions, worst)
    return short + long + on, sum(worst.values()) * plan.part("whole")


def _after_short(plan: Plan, questions: Sequence[Question], cost: Mapping[str, float]) -> tuple[float, float]:
    """What long runs take, and those that go on from them, at these costs of the networks."""
    on = sum(2 * cost[q.strict] + 2 * cost[q.relaxed] for q in questions)
    on += sum(cost[network] for network in plan.networks if network not in _exchanged(questions))
    return plan.seeds * sum(cost.values()) * plan.part("long"), FEWEST * on * plan.part("on")


@dataclass(frozen=True)
class Finding:
    """The verdict on one symmetry: its two margins, what was tried, and why it is undecided, if it is."""

    symmetry: str
    judgement: Judgement
    breaking: Margin
    tie: Margin
    best: Mapping[str, Run | None]  # of strict, breaking and untied
    why: str = ""
    tried: Mapping[str, float] = field(default_factory=dict)  # what a larger network, or longer runs, gained, in nats
    pairs: Margin | None = None  # what the relaxed network gained, in the mean, over the strict one from the same end


@dataclass(frozen=True)
class Price:
    """What a layer's paths that break a symmetry are worth, in nats, after the rest was fitted on; and whether they are needed."""

    nats: float
    needed: bool


@dataclass
class Search:
    """A search as far as it has come. ``run()`` goes to its end."""

    questions: Sequence[Question]
    plan: Plan
    perform: Perform
    cost: Cost
    tell: Callable[[str], None] = lambda text: None
    layers: Callable[[str], Sequence[str]] = lambda network: ()  # of a relaxed network: those with paths that break
    outcomes: dict[Run, Outcome] = field(default_factory=dict)
    spent: float = 0.0
    prices: dict[str, dict[str, Price]] = field(default_factory=dict)  # by symmetry and layer

    def run(self) -> "Search":
        """All stages; ``findings()`` then has the verdicts."""
        plan = self.plan
        self.tell("short runs")
        self._go(Run(n, w, s, "short") for n in plan.networks for w in plan.widths for s in range(FEWEST))
        self._widen()
        self.tell("long runs")
        self._go(Run(n, self.width(n), s, "long") for n in plan.networks for s in self._seeds(n))
        self.tell("fitting on, from each other's ends")
        exchanged = _exchanged(self.questions)
        alone = [self._on(run, run.network) for n in plan.networks if n not in exchanged for run in self._ends(n)]
        self._go([run for question in self.questions for run in self._pairs(question)] + alone)
        self._take_whole(plan.networks)
        self._more()
        for question, finding in zip(self.questions, self.findings(), strict=True):
            if finding.judgement == "no":
                self._price_layers(question)
        return self

    # ---- stages

    def _widen(self) -> None:
        """Short runs at twice the width, while the evidence rises by more than its error and a long run there is within the reserve."""
        while True:
            wider = []
            for network in self.plan.networks:
                width, rise = self._last_rise(network)
                new = 2 * width
                if rise is None or not rise.counts or new > self.plan.widest:
                    continue
                runs = [Run(network, new, seed, "short") for seed in range(FEWEST)]
                if self.spent + self._ahead({network: new}) + sum(map(self._price, [*wider, *runs])) <= self.plan.budget:
                    wider += runs
            if not wider:
                return
            self.tell("wider networks")
            self._go(wider)

    def _ahead(self, widths: Mapping[str, float]) -> float:
        """What long runs, those from their ends and whole evidence take, at the present choice of widths, or at these."""
        cost = {network: self.cost(network, widths.get(network, self.width(network))) for network in self.plan.networks}
        return sum(_after_short(self.plan, self.questions, cost)) + sum(cost.values()) * self.plan.part("whole")

    def _seeds(self, network: str) -> range:
        """The seeds of long runs: all, or one of a network that is hopeless."""
        width = self.width(network)
        best = max(self._value(run) for run in self._of(network, "short") if run.width == width)
        return range(1 if best < self._far_behind() else self.plan.seeds)

    def _far_behind(self) -> float:
        """Short runs with less evidence than this are hopeless."""
        best = max(self._value(run) for run in self.outcomes if run.stage == "short")
        between, freedom = margins.spread(self._values("short"))
        return best - max(HOPELESS[0] * between, HOPELESS[1] * abs(best)) if freedom and math.isfinite(best) else -math.inf

    def _ends(self, network: str) -> list[Run]:
        """The best long runs."""
        runs = [run for run in self._of(network, "long") if math.isfinite(self._value(run))]
        return sorted(runs, key=lambda run: (-self._value(run), run))[:FEWEST]

    def _pairs(self, question: Question) -> list[Run]:
        """Both fitted on, from their own ends and from each other's, at equal lengths: pairs that differ by their paths alone."""
        both = (question.strict, question.relaxed)
        return [self._on(end, network) for one in both for end in self._ends(one) for network in both]

    def _take_whole(self, networks: Iterable[str]) -> None:
        """The evidence of the whole network, at the end of each that is the best by now."""
        self.tell("evidence of whole networks")
        ends = [max(self._of(network, *FITS), key=self._value) for network in networks]
        self._go(Run(end.network, end.width, end.seed, "whole", end.key) for end in ends if math.isfinite(self._value(end)))

    def _more(self) -> None:
        """Another seed for what is undecided, as long as the budget lasts."""
        seed = self.plan.seeds
        while True:
            open_yet = [f.symmetry for f in self.findings() if f.judgement == "undecided"]
            asked = [q for q in self.questions if q.symmetry in open_yet]
            networks = list(dict.fromkeys(n for q in asked for n in q.networks))
            long = [Run(network, self.width(network), seed, "long") for network in networks]
            each = self.plan.part("long") + 2 * self.plan.part("on") + self.plan.part("whole")
            if not long or self.spent + sum(each * self.cost(run.network, run.width) for run in long) > self.plan.budget:
                return
            self.tell(f"another seed for {', '.join(open_yet)}")
            self._go(long)
            self._go(run for question in asked for run in self._pairs(question))
            self._take_whole(networks)
            seed += 1

    def _price_layers(self, question: Question) -> None:
        """Which layers need the paths that break: left out one by one, then all that are worth little together, or half of them."""
        ends = self._of(question.relaxed, *FITS)
        end = max(ends, key=self._value, default=None)
        names = self.layers(question.relaxed)
        if end is None or not names or not math.isfinite(self._value(end)):
            return
        each = Run(end.network, end.width, end.seed, "layers", end.key)
        if self.spent + (len(names) + 2) * self._price(each) > self.plan.budget:
            return
        self.tell(f"which layers break {question.symmetry}")
        alone = {name: replace(each, left=(name,)) for name in names}
        self._go([each, *alone.values()])
        worth = {name: self._value(each) - self._value(run) for name, run in alone.items()}
        out = sorted((name for name in names if worth[name] < margins.FEW), key=worth.__getitem__)
        while out:
            together = replace(each, left=tuple(sorted(out)))
            self._go([together])
            if self._value(each) - self._value(together) < margins.FEW:
                break
            out = out[: len(out) // 2]
        self.prices[question.symmetry] = {name: Price(worth[name], name not in out) for name in names}

    def _on(self, end: Run, network: str) -> Run:
        return Run(network, end.width, end.seed, "on", end.key)

    def _go(self, runs: Iterable[Run]) -> None:
        todo = [run for run in dict.fromkeys(runs) if run not in self.outcomes]
        if todo:
            self.outcomes |= self.perform(todo)
            self.spent += sum(map(self._price, todo))

    def _price(self, run: Run) -> float:
        return self.plan.part(run.stage) * self.cost(run.network, run.width)

    # ---- what is known

    def width(self, network: str) -> float:
        """The width with the most evidence in the mean of its short runs."""
        by_width: dict[float, list[float]] = {}
        for run in self._of(network, "short"):
            by_width.setdefault(run.width, []).append(self._value(run))
        return max(sorted(by_width), key=lambda width: sum(by_width[width]) / len(by_width[width]))

    def findings(self) -> list[Finding]:
        """The verdicts by all long runs, and those from their ends."""
        return [self._finding(question) for question in self.questions]

    def spread(self) -> tuple[float, int]:
        """The standard deviation between seeds of the best ends of each network, and its degrees of freedom."""
        found: dict[tuple[str, int], float] = {}
        for run in (run for network in self.plan.networks for run in self._of(network, *FITS)):
            found[run.network, run.seed] = max(self._value(run), found.get((run.network, run.seed), -math.inf))
        return margins.spread([Value(value, 0.0, network) for (network, _), value in found.items()])

    def values(self, *networks: str) -> list[Value]:
        """The evidence of whole networks."""
        runs = [run for network in dict.fromkeys(networks) for run in self._of(network, "whole")]
        return [Value(self._value(run), self.outcomes[run].error, run.network) for run in runs]

    def best(self, *networks: str) -> Run | None:
        """The run with the most evidence of the whole network; None if all have failed."""
        runs = [run for network in networks for run in self._of(network, "whole") if math.isfinite(self._value(run))]
        return max(runs, key=self._value, default=None)

    def gains(self, question: Question) -> list[float]:
        """What the relaxed network had more than the strict one in each pair of runs from one end."""
        found = []
        for run in self._of(question.strict, "on"):
            other = Run(question.relaxed, run.width, run.seed, "on", run.start)
            if other in self.outcomes and math.isfinite(self._value(run)) and math.isfinite(self._value(other)):
                found.append(self._value(other) - self._value(run))
        return found

    def _finding(self, question: Question) -> Finding:
        strict, untied = (margins.best(self.values(network)) for network in (question.strict, question.untied))
        chance, freedom = self.between(question.strict, question.untied)
        tie = margins.margin(strict, untied, chance, freedom)
        ways = [margins.margin(margins.best(self.values(question.relaxed)), strict, *self.between(question.relaxed, question.strict))]
        for network in dict.fromkeys((question.untied, *question.breaking)):
            ways.append(margins.margin(margins.best(self.values(network)), strict, *self.between(network, question.strict)))
        pairs = margins.mean(self.gains(question))
        judgement = margins.judge(ways, tie, pairs)
        breaking = max(ways, key=lambda margin: (margin.nats - margin.bound, margin.nats))
        breakers = (question.relaxed, question.untied, *question.breaking)
        best = {"strict": self.best(question.strict), "breaking": self.best(*breakers), "untied": self.best(question.untied)}
        tried = {"a larger network": self._widened(question.strict), "longer runs": self._longer(question.strict)}
        tried = {what: gain for what, gain in tried.items() if gain is not None}
        _, rise = self._last_rise(question.strict)
        why = _why(ways, tie, pairs) if judgement == "undecided" else ""
        if judgement == "no" and rise is not None and rise.counts and margins.could_still_close(breaking, rise.nats):
            judgement, why = "undecided", "the network that keeps the symmetry still gains by being wider, as much as breaking gains"
        return Finding(question.symmetry, judgement, breaking, tie, best, why, tried, pairs)

    def between(self, one: str, other: str) -> tuple[float, int]:
        """What chance makes of the difference of the best ends of two networks that were trained apart."""
        between, freedom = self.spread()
        seeds = [len({run.seed for run in self._of(network, *FITS)}) for network in (one, other)]
        return between * math.hypot(*map(margins.of_best, seeds)), freedom

    def _last_rise(self, network: str) -> tuple[float, Margin | None]:
        """The largest width of the short runs, and what it has more than the one before, by the same estimator."""
        widths = sorted({run.width for run in self._of(network, "short")})
        if len(widths) < 2:
            return widths[-1], None
        before, last = ([self._value(r) for r in self._of(network, "short") if r.width == width] for width in widths[-2:])
        between, freedom = margins.spread(self._values("short"))
        chance = between * math.hypot(margins.of_best(len(last)), margins.of_best(len(before)))
        return widths[-1], margins.margin(*(margins.best([Value(v) for v in some]) for some in (last, before)), chance, freedom)

    def _widened(self, network: str) -> float | None:
        rise = self._last_rise(network)[1]
        return None if rise is None else rise.nats

    def _longer(self, network: str) -> float | None:
        """What fitting on gained over the end of the same run, at best."""
        gains = [
            self._value(run) - self._value(end)
            for run in self._of(network, "on")
            for end in self._of(network, "long")
            if run.start == end.key and math.isfinite(self._value(end))
        ]
        return max(gains, default=None)

    def _values(self, stage: Stage) -> list[Value]:
        return [Value(self._value(r), o.error, f"{r.network} {r.width}") for r, o in self.outcomes.items() if r.stage == stage]

    def _of(self, network: str, *stages: Stage) -> list[Run]:
        return sorted(run for run in self.outcomes if run.network == network and run.stage in stages)

    def _value(self, run: Run) -> float:
        return self.outcomes[run].log_evidence


def _why(ways: Sequence[Margin], tie: Margin, pairs: Margin | None) -> str:
    """Why two margins leave it open."""
    largest = max(ways, key=lambda margin: margin.nats)
    alike = pairs is not None and pairs.nats <= max(pairs.error, margins.FEW)
    if largest.nats > (max(largest.error, margins.FEW) if alike else margins.FEW):
        return f"breaking it gains {largest}, which is something, but less than what counts ({largest.bound:.0f} nats)"
    return f"breaking it gains nothing, but the tie is worth {tie}, less than what counts ({max(tie.bound, margins.FEW):.0f} nats)"


def _exchanged(questions: Sequence[Question]) -> set[str]:
    """The networks that are fitted on in pairs."""
    return {network for q in questions for network in (q.strict, q.relaxed)}
