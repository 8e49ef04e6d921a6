"""Margins between hypotheses, with their errors, and the verdicts that follow from them.

    margin = best(A) - best(B)            +- sqrt(s_A^2 + s_B^2 + e_A^2 + e_B^2)            in nats of log evidence

s is the deviation of the best of several runs that differ by their seed, e the error of the estimator. The spread between seeds is known
from few runs, so a margin is judged by Student's t. Two margins decide on a symmetry. *Breaking* is what a network that may break it gains
over one that keeps it; *tie* is what that one gains over a network without the tie. A network that may break the symmetry contains the
strict one, so breaking never loses much: the tie must speak for a symmetry.

    no          breaking gains more than its error; or more than next to nothing, and the data change when they are moved (``moving``)
    yes         breaking gains next to nothing, the tie is worth more than its error, the data do not change when they are moved, and the
                strict network explains more than little
    undecided   neither

Next to nothing is 10 nats; or one standard error, if a second witness says so too: strict and relaxed networks that were fitted on from
the same ends do not differ (such pairs have much smaller errors than runs that were trained apart), or the data do not change when they
are moved and such pairs do not differ by what counts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

CONFIDENCE = 0.975  # a margin counts if it is positive with this probability
FEW = 10.0  # nats: breaking that gains less is not worth a path (as in ``simplify``)
KNOWN = 10  # degrees of freedom by which the error of an estimator is known
RARE = 0.005  # a probability: what happens no more often by chance is taken for more than chance
COMMON = 0.1  # a probability: what happens more often by chance is taken for chance
LEAST = 1.0  # nats between the runs of a network that has learned something
LARGEST = (1.0, 0.826, 0.748, 0.701, 0.669, 0.645, 0.626, 0.611)  # deviations of the largest of 1, 2, ... normal numbers
Judgement = Literal["yes", "no", "undecided"]


@dataclass(frozen=True)
class Margin:
    """A difference of log evidence, its standard error, and the degrees of freedom by which the error is known."""

    nats: float
    error: float
    freedom: int

    @property
    def probability(self) -> float:
        """That the difference is positive."""
        if self.error == 0 or math.isinf(self.nats):
            return float(self.nats > 0)
        return student(self.nats / self.error, self.freedom)

    @property
    def bound(self) -> float:
        """The difference that counts: this many standard errors are passed by chance in 1 - ``CONFIDENCE`` of cases."""
        return quantile(CONFIDENCE, self.freedom) * self.error

    @property
    def counts(self) -> bool:
        """Whether the difference is larger than its error allows by chance."""
        return self.nats > self.bound

    def __str__(self) -> str:
        return f"{self.nats:+.0f} +- {'?' if math.isinf(self.error) else f'{self.error:.0f}'} nats"


@dataclass(frozen=True)
class Value:
    """The log evidence at the end of a run and the standard error of its estimate. Runs of one ``arm`` differ by their seed alone."""

    log_evidence: float
    error: float = 0.0
    arm: str = ""


def spread(runs: Iterable[Value]) -> tuple[float, int]:
    """The standard deviation between seeds, pooled over arms, and its degrees of freedom; (inf, 0) if no arm has two runs.

    An arm whose runs are all alike has learned nothing, and would make the others look surer than they are: it is left out.
    """
    arms: dict[str, list[float]] = {}
    for run in runs:
        if math.isfinite(run.log_evidence):
            arms.setdefault(run.arm, []).append(run.log_evidence)
    several = [values for values in arms.values() if len(values) > 1]
    alive = [values for values in several if max(values) - min(values) > LEAST] or several
    freedom = sum(len(values) - 1 for values in alive)
    if not freedom:
        return math.inf, 0
    squares = sum((value - sum(values) / len(values)) ** 2 for values in alive for value in values)
    return math.sqrt(squares / freedom), freedom


def mean(gains: Sequence[float]) -> Margin | None:
    """The mean of differences between runs in pairs; None if there is only one."""
    if len(gains) < 2:
        return None
    deviation, freedom = spread(Value(gain) for gain in gains)
    return Margin(sum(gains) / len(gains), deviation / math.sqrt(len(gains)), freedom)


def closed(breaking: Margin, lost: float) -> Margin:
    """What breaking gains if its best end ``lost`` so many nats without what breaks: the strict network then can be as good, too."""
    return replace(breaking, nats=lost) if lost < min(breaking.nats, FEW) else breaking


def margin(one: Value | None, other: Value | None, chance: float, freedom: int) -> Margin:
    """What ``one`` has more than ``other``; None has failed. ``chance`` is what training adds, known by so many degrees of freedom.

    Those of the sum are Satterthwaite's.
    """
    if one is None or other is None:
        return Margin(0.0 if one is other else math.inf if other is None else -math.inf, 0.0, 1)
    error = math.hypot(chance, one.error, other.error)
    parts = ((chance, max(freedom, 1)), (one.error, KNOWN), (other.error, KNOWN))
    terms = sum((part / error) ** 4 / each for part, each in parts) if 0 < error < math.inf else 0.0
    return Margin(one.log_evidence - other.log_evidence, error, max(1, int(1 / terms)) if terms else max(freedom, 1))


def best(runs: Sequence[Value]) -> Value | None:
    """The run with the most evidence; None if all have failed."""
    return max((run for run in runs if math.isfinite(run.log_evidence)), key=lambda run: run.log_evidence, default=None)


def of_best(runs: int) -> float:
    """The standard deviation of the largest of so many normal numbers, in units of theirs."""
    return LARGEST[min(max(runs, 1), len(LARGEST)) - 1]


def judge(
    breaking: Sequence[Margin], tie: Margin, pairs: Margin | None = None, moved: float = 1.0, weak: bool = False
) -> Judgement:
    """The verdict by what each way of breaking gains, by what the tie is worth, and by the mean gain of pairs from the same ends.

    ``moved`` is the probability that data with the symmetry change as much as these when they are moved; 1 says nothing. A ``weak``
    network explains so little that its symmetry says nothing.
    """
    if any(margin.counts and margin.nats > FEW for margin in breaking):
        return "no"
    if not all(next_to_nothing(margin, pairs, moved) for margin in breaking):
        return "no" if moved <= RARE else "undecided"
    return "yes" if tie.counts and tie.nats > FEW and moved > RARE and not weak else "undecided"


def next_to_nothing(breaking: Margin, pairs: Margin | None, moved: float) -> bool:
    """Whether breaking gains so little that it may be chance; arguments as for ``judge``."""
    alike = pairs is not None and pairs.nats <= max(pairs.error, FEW)
    differ = pairs is not None and pairs.counts and pairs.nats > FEW
    unmoved = COMMON < moved < 1 and not differ
    return breaking.nats <= (max(breaking.error, FEW) if alike or unmoved else FEW)


def telling(ways: Sequence[Margin], judgement: Judgement, pairs: Margin | None, moved: float) -> Margin:
    """Of all ways to break a symmetry the one that the judgement rests on."""
    if judgement == "undecided":
        open_ways = [one for one in ways if not next_to_nothing(one, pairs, moved)]
        return max(open_ways or ways, key=lambda one: one.nats)
    gains = [one for one in ways if one.nats > FEW] if judgement == "no" else []
    return max(gains or ways, key=lambda one: (one.nats - one.bound, one.nats))


def could_still_close(breaking: Margin, rise: float | None) -> bool:
    """Whether the strict network, widened once more with the same ``rise`` as before, would no longer lose to breaking.

    If so the network may be too small rather than the symmetry broken.
    """
    return rise is not None and rise > 0 and breaking.nats - rise <= max(breaking.bound, FEW)


def student(t: float, freedom: int, parts: int = 2000) -> float:
    """P(T <= t) of Student's t: with t = sqrt(f) tan a its density is cos(a)^(f-1) / B(1/2, f/2). By Simpson's rule."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    step = angle / parts
    weights = (1 if i in (0, parts) else 4 if i % 2 else 2 for i in range(parts + 1))
    area = step / 3 * sum(w * math.cos(i * step) ** (freedom - 1) for i, w in enumerate(weights))
    log_beta = math.lgamma(0.5) + math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2)
    part = min(0.5, area / math.exp(log_beta))
    return 0.5 + part if t > 0 else 0.5 - part


@cache
def quantile(probability: float, freedom: int) -> float:
    """The t that is not passed with this probability, above one half."""
    low, high = 0.0, 1.0
    while student(high, freedom, 200) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student(middle, freedom, 200) < probability else (low, middle)
    return high


def chances(values: Mapping[str, float], errors: Mapping[str, float], draws: int = 4096, seed: int = 0) -> dict[str, float]:
    """The mean of p(M_i | D) = softmax(log evidence + error) over normal errors of these standard deviations, by fixed draws."""
    names = list(values)
    noise = torch.randn(draws, len(names), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    noise = torch.cat([noise, -noise])  # in pairs, so that their mean is 0
    sizes = torch.tensor([errors[name] for name in names], dtype=torch.float64)
    centre = torch.tensor([values[name] for name in names], dtype=torch.float64)
    return dict(zip(names, (centre + sizes * noise).softmax(1).mean(0).tolist(), strict=True))
