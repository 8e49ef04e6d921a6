"""Which runs are made, in which order, and what they say: the search behind ``discover``, without any fit in it.

    short    every network at two widths and two seeds, a part of a fit each; wider while the evidence rises by more than its error.
             None if there is one width
    long     every network at its best width, by all seeds (by one if the network is hopeless)
    on       from the two best of these ends: each fitted on; the strict one opened; the relaxed one without what breaks
    whole    the evidence of the whole network at the best end of each: margins are between these
    closed   where breaking is ahead: its best end without all that breaks, the rest fitted on, and with it
    more     another seed for questions that are undecided, while there is budget
    layers   where a symmetry is broken: each layer without what breaks it, then all that do not need it, the rest fitted on

So neither hypothesis loses by a worse optimum: each is also fitted from the other's end. Before "whole", evidence is that of Kronecker
factors, corrected (``routes``): it chooses ends, and its spread between seeds is the error of all, or of two that differ by more.

All that a run needs is ``Run``; all that is known of it afterwards is ``Outcome``. ``perform`` makes runs, or finds them made. The search
depends on outcomes alone, not on time, so one that was stopped goes on as if it had not been. Costs are in fits: one is a fit of the
largest network at its full length. Lengths are scaled so that the whole plan is within the budget.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autosym.answer import margins, notes
from autosym.answer.hypotheses import SHIFTS
from autosym.answer.margins import Judgement, Margin, Value
from autosym.answer.plans import FEWEST, FITS, Cost, Outcome, Perform, Plan, Question, Run, Stage, after_short, exchanged
from autosym.evidence.record import nats
from autosym.evidence.verdicts import LITTLE

# errors, and part of the evidence: a network whose short runs are so far behind the best gets one long run
HOPELESS = (20.0, 0.5)
NOTHING = 0.02  # of the labels: a network that explains less has learned nothing
ALONE = 5 / 3  # times as much as else a strict network must explain where the untied one has learned nothing


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
    stuck: bool = False  # a no, but that the network that keeps the symmetry has learned nothing: it may be stuck


@dataclass(frozen=True)
class Price:
    """What a layer's paths that break a symmetry are worth, in nats, after the rest was fitted on; and whether they are needed.

    None: little by themselves, but they were not left out beside those that are not needed.
    """

    nats: float
    needed: bool | None


@dataclass
class Search:
    """A search as far as it has come. ``run()`` goes to its end."""

    questions: Sequence[Question]
    plan: Plan
    perform: Perform
    cost: Cost
    tell: Callable[[str], None] = lambda text: None
    route: Callable[[Run], str] = lambda run: ""  # by which weights a run begins: seeds of other routes tell nothing of chance
    layers: Callable[[str], Sequence[str]] = lambda network: ()  # of a relaxed network: those with paths that break
    explained: Callable[[float], float] = lambda log_evidence: (
        1.0
    )  # the part of the labels that a network with this evidence explains
    moved: Mapping[str, float] = field(
        default_factory=dict
    )  # by symmetry, how probable it is that data with it look like these
    little: float = LITTLE  # a strict network that explains less says nothing of its symmetry
    outcomes: dict[Run, Outcome] = field(default_factory=dict)
    spent: float = 0.0
    shuts: set[Run] = field(default_factory=set)  # that were made to see what is lost without all that breaks
    prices: dict[str, dict[str, Price]] = field(default_factory=dict)  # by symmetry and layer

    def run(self) -> "Search":
        """All stages; ``findings()`` then has the verdicts."""
        plan = self.plan
        if len(plan.widths) > 1:
            self.tell("short runs")
            self._go(Run(n, w, s, "short") for n in plan.networks for w in plan.widths for s in range(FEWEST))
            self._widen()
        widths = {network: self.width(network) for network in plan.networks}
        plan.stretch(self.spent, *after_short(plan, self.questions, widths, self.cost))
        self.tell("long runs")
        self._go(Run(n, self.width(n), s, "long") for n in plan.networks for s in self._seeds(n))
        self.tell("fitting on, from each other's ends")
        paired = exchanged(self.questions)
        alone = [self._on(run, run.network) for n in plan.networks if n not in paired for run in self._ends(n)]
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
            wider: list[Run] = []
            widths = {network: self.width(network) for network in self.plan.networks}
            for network in self.plan.networks:
                width, rise = self._last_rise(network)
                if rise is None or not rise.counts or 2 * width > self.plan.widest:
                    continue
                runs = [Run(network, 2 * width, seed, "short") for seed in range(FEWEST)]
                ahead = after_short(self.plan, self.questions, widths | {network: 2 * width}, self.cost)
                if self.spent + sum(ahead) + sum(self._price(run) for run in [*wider, *runs]) <= self.plan.budget:
                    wider, widths = [*wider, *runs], widths | {network: 2 * width}
            if not wider:
                return
            self.tell("wider networks")
            self._go(wider)

    def _seeds(self, network: str) -> range:
        """The seeds of long runs: all, or one of a network that is hopeless."""
        if not self._of(network, "short"):
            return range(self.plan.seeds)
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
        self._go(self._whole(networks))

    def _whole(self, networks: Iterable[str]) -> list[Run]:
        ends = [max(self._of(network, *FITS), key=self._value) for network in networks]
        return [Run(end.network, end.width, end.seed, "whole", end.key) for end in ends if math.isfinite(self._value(end))]

    def _more(self) -> None:
        """For what is undecided: another seed, as long as the budget lasts; if it does not last for runs on from its ends, without them."""
        seed = self.plan.seeds
        while True:
            self._close()
            found = zip(self.questions, self.findings(), strict=True)
            asked = [question for question, finding in found if finding.judgement == "undecided"]
            networks = list(dict.fromkeys(n for q in asked for n in q.networks))
            long = [Run(network, self.width(network), seed, "long") for network in networks]
            costs = [self.cost(run.network, run.width) for run in long]
            alone = self.spent + sum(map(self._price, long))
            if not long or alone + self.plan.part("whole") * max(costs) > self.plan.budget:
                return
            self.tell(f"another seed for {', '.join(question.symmetry for question in asked)}")
            self._go(long)
            if alone + (2 * self.plan.part("on") + self.plan.part("whole")) * sum(costs) <= self.plan.budget:
                self._go(run for question in asked for run in self._pairs(question))
            new = [run for run in self._whole(networks) if run not in self.outcomes]
            if self.spent + sum(map(self._price, new)) <= self.plan.budget:  # of all, or of none: they are compared
                self._take_whole(networks)
            seed += 1

    def _close(self) -> None:
        """What the best end that may break a symmetry loses without all that breaks, where it is ahead of the strict network.

        Unless the verdict is a yes, or a no that the data themselves confirm: they change when they are moved.
        """
        for question, finding in zip(self.questions, self.findings(), strict=True):
            confirmed = finding.judgement == "no" and self.moved.get(question.symmetry, 1.0) <= margins.RARE
            relaxed, strict = (margins.best(self.values(network)) for network in (question.relaxed, question.strict))
            each, shut = self._opened(question), self.shut(question)
            if finding.judgement == "yes" or confirmed or relaxed is None or strict is None or each is None or shut is None:
                continue
            runs = [run for run in (each, shut) if run not in self.outcomes]
            ahead = relaxed.log_evidence - strict.log_evidence > margins.FEW
            if ahead and shut not in self.shuts and self.spent + sum(map(self._price, runs)) <= self.plan.budget:
                self.tell(f"without all that breaks {question.symmetry}")
                self._go(runs)
                self.shuts.add(shut)

    def closed(self, question: Question) -> float:
        """The nats that the best end loses without all that breaks, both fitted on for as long; inf if it was not tried."""
        each, shut = self._opened(question), self.shut(question)
        if each is None or shut not in self.shuts or not math.isfinite(self._value(each)):
            return math.inf
        return self._value(each) - self._value(shut)

    def _opened(self, question: Question) -> Run | None:
        """On from the best end of the relaxed network; from it layers are left out."""
        end = max(self._of(question.relaxed, *FITS), key=self._value, default=None)
        if end is None or not math.isfinite(self._value(end)):
            return None
        return Run(end.network, end.width, end.seed, "layers", end.key)

    def shut(self, question: Question) -> Run | None:
        """The same without what breaks, in all layers."""
        each, names = self._opened(question), self.layers(question.relaxed)
        return replace(each, left=tuple(sorted(names))) if each is not None and names else None

    def _price_layers(self, question: Question) -> None:
        """Which layers need the paths that break: left out one by one, then all that are worth little, or half of them and then others."""
        each, names = self._opened(question), self.layers(question.relaxed)
        if each is None or not names:
            return
        if self.spent + (len(names) + 2) * self._price(each) > self.plan.budget:
            return
        self.tell(f"which layers break {question.symmetry}")
        alone = {name: replace(each, left=(name,)) for name in names}
        self._go([each, *alone.values()])
        worth = {name: self._value(each) - self._value(run) for name, run in alone.items()}
        out = sorted((name for name in names if worth[name] < margins.FEW), key=worth.__getitem__)
        while out:
            together = replace(each, left=tuple(sorted(out)))
            if together not in self.outcomes and self.spent + self._price(together) > self.plan.budget:
                out = out[:1]  # which is known
                continue
            self._go([together])
            if self._value(each) - self._value(together) < margins.FEW:
                break
            out = out[: len(out) // 2]
        for name in [name for name in names if worth[name] < margins.FEW and name not in out]:
            together = replace(each, left=tuple(sorted([*out, name])))
            if self.spent + self._price(together) > self.plan.budget:
                break
            self._go([together])
            out += [name] * (self._value(each) - self._value(together) < margins.FEW)

        def needed(name: str) -> bool | None:
            if name in out or worth[name] >= margins.FEW:
                return name not in out
            return True if replace(each, left=tuple(sorted([*out, name]))) in self.outcomes else None

        self.prices[question.symmetry] = {name: Price(worth[name], needed(name)) for name in names}

    def _on(self, end: Run, network: str) -> Run:
        return Run(network, end.width, end.seed, "on", end.key)

    def _go(self, runs: Iterable[Run]) -> None:
        todo = [run for run in dict.fromkeys(runs) if run not in self.outcomes]
        if todo:
            self.outcomes |= self.perform(todo)
            self.spent += sum(self._price(run) for run in todo)

    def _price(self, run: Run) -> float:
        return self.plan.part(run.stage) * self.cost(run.network, run.width)

    # ---- what is known

    def width(self, network: str) -> float:
        """The width with the most evidence in the mean of its short runs."""
        by_width: dict[float, list[float]] = {}
        for run in self._of(network, "short"):
            by_width.setdefault(run.width, []).append(self._value(run))
        mean = {width: sum(values) / len(values) for width, values in sorted(by_width.items())}
        return max(mean, key=mean.__getitem__, default=self.plan.widths[0])

    def findings(self) -> list[Finding]:
        """The verdicts by all long runs, and those from their ends."""
        return [self._finding(question) for question in self.questions]

    def spread(self, *networks: str) -> tuple[float, int]:
        """The standard deviation between seeds of the best ends of each network, or of these, and its degrees of freedom.

        Runs that learned nothing tell nothing of those that did, if two or more did. If one did, nobody knows how good others would be.
        """
        arms: dict[str, dict[int, float]] = {}
        for run in (run for network in networks or self.plan.networks for run in self._of(network, *FITS)):
            ends = arms.setdefault(f"{run.network} {self.route(run)}", {})
            ends[run.seed] = max(self._value(run), ends.get(run.seed, -math.inf))
        told: list[Value] = []
        for arm, ends in arms.items():
            alive = [value for value in ends.values() if not self._is_nothing(value)]
            told += [Value(value, 0.0, arm) for value in (alive if len(alive) > 1 else ends.values() if alive else ())]
        return margins.spread(told)

    def idle(self) -> tuple[int, int]:
        """How many of the fits learned nothing, and how many there are."""
        made = [outcome for run, outcome in self.outcomes.items() if run.stage in ("short", *FITS)]
        return sum(self._is_nothing(out.log_evidence) and "unusable" not in out.more for out in made), len(made)

    def cautions(self) -> list[str]:
        """Which runs have evidence that cannot be: those that were left out, and those whose corrected evidence is above the most."""
        unusable = [out.more["unusable"] for out in self.outcomes.values() if "unusable" in out.more]
        above = [run for run, out in self.outcomes.items() if _is_above(out)]
        found = []
        if unusable:
            found.append(
                f"the evidence of {len(unusable)} of {len(self.outcomes)} runs was left out, as the Laplace approximation has failed: "
                f"{unusable[0]}; a smaller lr, or longer runs, may mend it"
            )
        if above:
            run = max(above, key=self._value)
            has = f"{run.network}, width {run.width:g}, seed {run.seed} has {nats(self._value(run))}"
            found.append(
                f"the evidence of {len(above)} of {len(self.outcomes)} runs cannot be: {has}, but these labels allow at most "
                f"{nats(self.outcomes[run].more['most'])}; do not rely on its margins; a smaller lr, or more samples, may mend it"
            )
        return found

    def _is_nothing(self, log_evidence: float) -> bool:
        return not math.isfinite(log_evidence) or self.explained(log_evidence) < NOTHING

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
        breakers = (question.relaxed, question.untied, *question.breaking)
        best_of = {network: margins.best(self.values(network)) for network in breakers}
        ways = [margins.margin(best_of[network], strict, *self.between(network, question.strict)) for network in best_of]
        ways[0] = margins.closed(ways[0], self.closed(question))
        pairs = margins.mean(self.gains(question))
        explained = 1.0 if strict is None else self.explained(strict.log_evidence)
        alone = untied is None or self._is_nothing(untied.log_evidence)
        weak, moved = explained < self.little * (ALONE if alone else 1), self.moved.get(question.symmetry, 1.0)
        judgement = margins.judge(ways, tie, pairs, moved, weak)
        breaking = margins.telling(ways, judgement, pairs, moved)
        best = {"strict": self.best(question.strict), "breaking": self.best(*breakers), "untied": self.best(question.untied)}
        trials = {"a larger network": self._widened(question.strict), "longer runs": self._longer(question.strict)}
        tried = {what: gain for what, gain in trials.items() if gain is not None and math.isfinite(gain)}  # else one has failed
        _, rise = self._last_rise(question.strict)
        shifts = any(asked.symmetry == SHIFTS for asked in self.questions)
        why = notes.why(ways, tie, pairs, moved, weak, shifts, question.symmetry == SHIFTS) if judgement == "undecided" else ""
        stuck = judgement == "no" and explained < NOTHING and moved > margins.RARE
        if stuck:
            judgement, why = (
                "undecided",
                "the network that keeps the symmetry has learned nothing, but the data do not change when they are moved: it may be stuck; "
                "longer runs would tell",
            )
        failed = [network for network in question.networks if self.best(network) is None]
        if failed:  # which says nothing against it: networks that explain all labels fail too
            stuck = False
            judgement, why = (
                "undecided",
                f"no run of {failed[0]} has evidence that can be used; train longer, or rescale the inputs",
            )
        if judgement == "no" and rise is not None and rise.counts and margins.could_still_close(breaking, rise.nats):
            judgement, why = (
                "undecided",
                "the network that keeps the symmetry still gains by being wider, as much as breaking gains",
            )
        return Finding(question.symmetry, judgement, breaking, tie, best, why, tried, pairs, stuck)

    def between(self, one: str, other: str) -> tuple[float, int]:
        """What chance makes of the difference of the best ends of two networks that were trained apart.

        By the spread of all, or of these two if it is larger: an arm that is five times as noisy as six others would pass for sure in a
        third of all cases.
        """
        (between, freedom), own = self.spread(), self.spread(one, other)
        if own[1] and own[0] > between:
            between, freedom = own
        runs = [[run for run in self._of(network, *FITS) if not self._is_nothing(self._value(run))] for network in (one, other)]
        seeds = [len({run.seed for run in some}) for some in runs]  # one that learned nothing is no chance to be the best
        return between * math.hypot(*map(margins.of_best, seeds)), freedom

    def _last_rise(self, network: str) -> tuple[float, Margin | None]:
        """The largest width of the short runs, and what it has more than the one before, by the same estimator."""
        widths = sorted({run.width for run in self._of(network, "short")})
        if len(widths) < 2:
            return self.width(network), None
        before, last = ([self._value(r) for r in self._of(network, "short") if r.width == width] for width in widths[-2:])
        between, freedom = margins.spread(self._values("short"))
        chance = between * math.hypot(margins.of_best(len(last)), margins.of_best(len(before)))
        wide, narrow = (margins.best([Value(value) for value in some]) for some in (last, before))
        return widths[-1], margins.margin(wide, narrow, chance, freedom)

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
        runs = [run for run in self.outcomes if run.stage == stage]
        return [Value(self._value(run), 0.0, f"{run.network} {run.width} {self.route(run)}") for run in runs]

    def _of(self, network: str, *stages: Stage) -> list[Run]:
        return sorted(run for run in self.outcomes if run.network == network and run.stage in stages)

    def _value(self, run: Run) -> float:
        return self.outcomes[run].log_evidence


def _is_above(outcome: Outcome) -> bool:
    """Whether evidence is above the most that labels allow, by more than its error explains."""
    most = outcome.more.get("most")
    return most is not None and math.isfinite(outcome.log_evidence) and outcome.log_evidence - 2 * outcome.error > most
