"""Runs, what is known of them, and the plan of a search: which networks, how long, within which budget."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Stage = Literal["short", "long", "on", "whole", "layers"]
# of a fit, at its full length
PARTS: dict[Stage, float] = {"short": 0.15, "long": 1.0, "on": 0.3, "whole": 0.5, "layers": 0.15}
FITS: tuple[Stage, ...] = ("long", "on")  # whose ends are compared
RESERVE = 0.15  # part of the budget that the plan leaves: for wider networks, more seeds and single layers
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


@dataclass
class Plan:
    """What may be spent, and on what. ``scale`` shortens all runs alike, so that those that are sure to be made are within the budget.

    That is at the widths that cost most. When short runs have chosen widths, what is left makes the others longer (``stretched``).
    """

    networks: tuple[str, ...]
    widths: tuple[float, ...]
    seeds: int
    budget: float
    scale: float = 1.0
    widest: float = 4.0
    stretched: float | None = None
    paced: dict[Stage, float] = field(default_factory=dict)  # parts that the time left decided on (``deadline``)

    def part(self, stage: Stage) -> float:
        """Of the length of a fit; whole evidence takes what it takes."""
        if stage == "whole":
            return PARTS[stage]
        if stage in self.paced:
            return self.paced[stage]
        return (self.scale if stage == "short" or self.stretched is None else self.stretched) * PARTS[stage]

    def stretch(self, spent: float, fits: float, whole: float) -> None:
        """Make runs longer by what short ones have left of the budget, if ``fits`` and ``whole`` are all that is still sure to be made."""
        left = (1 - RESERVE) * self.budget - spent - whole
        self.stretched = max(self.scale, min(1.0, self.scale * left / fits))


Perform = Callable[[Sequence[Run]], Mapping[Run, Outcome]]
Cost = Callable[[str, float], float]  # of a fit of the network at the width, in units of the largest


def planned(
    questions: Sequence[Question], others: Sequence[str], widths: Sequence[float], seeds: int, budget: float, cost: Cost
) -> Plan:
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
    worst = {network: max(plan.widths, key=lambda width: cost(network, width)) for network in plan.networks}
    short = sum(cost(network, width) for network in plan.networks for width in plan.widths) * FEWEST * plan.part("short")
    short = short if len(plan.widths) > 1 else 0.0
    fits, whole = after_short(plan, questions, worst, cost)
    return short + fits, whole


def after_short(plan: Plan, questions: Sequence[Question], widths: Mapping[str, float], cost: Cost) -> tuple[float, float]:
    """What long runs and those that go on from them take, and whole evidence, at these widths of the networks."""
    now = {network: cost(network, width) for network, width in widths.items()}
    on = sum(now[network] for network in plan.networks if network not in exchanged(questions))
    for q in questions:  # both at the width of either
        on += sum(cost(network, widths[other]) for network in (q.strict, q.relaxed) for other in (q.strict, q.relaxed))
    long = plan.seeds * sum(now.values()) * plan.part("long")
    widest = {n: max([widths[n], *(widths[o] for q in questions for o in _both(q) if n in _both(q))]) for n in plan.networks}
    whole = sum(cost(network, width) for network, width in widest.items()) * plan.part("whole")
    return long + FEWEST * on * plan.part("on"), whole


def _both(question: Question) -> tuple[str, str]:
    return question.strict, question.relaxed


def exchanged(questions: Sequence[Question]) -> set[str]:
    """The networks that are fitted on in pairs."""
    return {network for q in questions for network in (q.strict, q.relaxed)}
