"""Decides what was learned: a verdict for each layer and for the network, and cautions. The words are in ``report.words``.

    share < 1 %: strict        < 5 %: nearly        else: mixed

The share is the part of a layer's effective parameters in its free paths. If a layer has no free path, but paths that keep no
group beside group convolutions, the share is the part in these, and the symmetry is the group's. Each group of a layer is also a
step of its own, with the share of all paths that break it: a layer may keep C4 and break D4. A free sparse path is
constant in space if its inverse lengthscales were learned and are all below 0.01. Such a path breaks nothing, whatever its
share. Shares are not judged if the evidence is not above guessing or must not be used, or if a layer has less than one
effective parameter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import groupby
from operator import and_
from typing import Any, Literal

from autosym.evidence import possible
from autosym.evidence.cautions import (
    Borders,
    Caution,
    Dead,
    Failed,
    Guessing,
    Little,
    Moving,
    OneClass,
    OneStep,
    Rising,
    Unused,
)
from autosym.evidence.shares import PathShare
from autosym.linear.path import BORDERS, INTERPOLATION, Kept

STRICT, NEARLY = 0.01, 0.05  # upper limits of the share of paths that break a layer's symmetry
CONSTANT = 0.01  # a path with an inverse lengthscale below it is constant in space
FEWEST = 1.0  # a layer with fewer effective parameters is not judged
LITTLE = 0.2  # gain over guessing: above it planted comparisons were right, below it many were wrong (docs/lab/findings.md)
RISING = 0.05  # part of the span of the evidence, at least LEAST: with a larger rise at its last steps it is not settled
LEAST = 1.0  # nats
MOVING = 0.05  # part of a range: if it moves more in the last quarter of its steps it is not settled

UNESTABLISHED = (OneClass, Failed, Guessing)  # with one of these cautions there is nothing to judge
Judgement = Literal["fixed", "unknown", "free", "held", "guess", "failed", "unused", "constant", "strict", "nearly", "mixed"]


@dataclass(frozen=True)
class Known:
    """What is known about a fit beside its shares; None means not known. ``classes`` is None if targets are not classes.

    ``fingerprint`` begins with the sums of labels and of their squares. ``learned``: whether precisions were learned at all. The
    log evidence can be at most ``most``. ``effective_parameters`` are those of the whole network. The weights are those after ``epoch``.
    """

    log_evidence: float | None = None
    samples: int | None = None
    classes: int | None = None
    fingerprint: Sequence[float] | None = None
    learned: bool = True
    lr: float | None = None
    history: Sequence[Mapping[str, Any]] = ()
    log_likelihood: float | None = None
    most: float | None = None
    effective_parameters: float | None = None
    epoch: int | None = None


@dataclass(frozen=True)
class Step:
    """One group that a path of a layer is made for, and the share of all its paths that break this group."""

    group: str
    share: float
    verdict: Literal["strict", "nearly", "mixed"]


@dataclass(frozen=True)
class LayerVerdict:
    """The verdict on one relaxed layer, the ``number``-th.

    ``share`` is the share of paths that break its symmetry (None: not known). ``keeps`` is what it keeps without them, up to
    its ``limits``. If no path is free, ``breaks`` lists the groups that its paths without a group break. ``steps`` are the groups
    of its paths, each judged by itself, the larger first.
    """

    number: int
    name: str
    paths: tuple[PathShare, ...]
    verdict: Judgement
    share: float | None
    keeps: Kept
    breaks: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def up_to(self) -> tuple[str, ...]:
        """What limits the symmetry that the layer keeps."""
        return self.limits if self.keeps.groups else self.shifts_up_to

    @property
    def shifts_up_to(self) -> tuple[str, ...]:
        """What limits equivariance to translations."""
        return tuple(limit for limit in self.limits if limit != INTERPOLATION)  # interpolation concerns groups only


@dataclass(frozen=True)
class Verdict:
    """The verdict on a network. Print ``cautions`` beside a table of its shares, ``beside_headline()`` beside a headline."""

    layers: tuple[LayerVerdict, ...]
    learned: bool
    cautions: tuple[Caution, ...]

    @property
    def nothing(self) -> OneClass | Failed | Guessing | None:
        """Why nothing was learned, or None if something was."""
        found = (caution for caution in self.cautions if isinstance(caution, UNESTABLISHED))
        return next(found, None) if self.learned else None

    def beside_headline(self) -> tuple[Caution, ...]:
        """The cautions that a headline does not state itself. Without layers, cautions about shares are left out."""
        left_out = (Unused,) if self.layers else (OneStep, Rising)
        return tuple(c for c in self.cautions if c is not self.nothing and not isinstance(c, left_out))


def verdict(paths: Sequence[PathShare], known: Known, limits: Mapping[str, Sequence[str]] | None = None) -> Verdict:
    """The verdict on the relaxed layers with these paths. They keep their symmetry up to ``limits``, by name of layer."""
    found = cautions(paths, known, limits)
    guess = any(isinstance(caution, UNESTABLISHED) for caution in found)
    judged = layers(paths, known.learned, limits, guess)
    if any(isinstance(caution, Failed) for caution in found):
        judged = tuple(replace(layer, verdict="failed") if layer.verdict == "guess" else layer for layer in judged)
    return Verdict(judged, known.learned, found)


# ---- layers


def layers(
    paths: Sequence[PathShare],
    learned: bool = True,
    limits: Mapping[str, Sequence[str]] | None = None,
    guess: bool = False,
) -> tuple[LayerVerdict, ...]:
    """The relaxed layers in order.

    Shares are not judged if precisions were not ``learned``, or if the network is not better than a ``guess``.
    """
    found = []
    for number, (name, group) in enumerate(groupby(paths, key=lambda path: path.layer), 1):
        own = tuple(group)
        judged, share = _judged(own, learned, guess)
        nested = all(path.symmetric for path in own) and bool(_breaking(own))
        breaks = tuple(path.keeps.group for path in own if path.keeps.group) if nested else ()
        limited = tuple((limits or {}).get(name, ()))
        found.append(LayerVerdict(number, name, own, judged, share, _keeps(own), breaks, limited, _steps(own)))
    return tuple(found)


def _judged(paths: Sequence[PathShare], learned: bool, guess: bool) -> tuple[Judgement, float | None]:
    breaking = _breaking(paths)
    if all(path.symmetric for path in paths) and not breaking:
        return "fixed", 0.0
    if any(math.isnan(path.share) for path in paths):
        return "unknown", None
    share = sum(path.share for path in breaking)
    if len(breaking) == len(paths):
        return "free", share
    if not learned:
        return "held", share
    if guess or sum(path.effective_parameters for path in paths) < FEWEST:
        return "guess" if guess else "unused", share
    if not breaking:
        return "constant", share
    return _by_share(share), share


def _by_share(share: float) -> Literal["strict", "nearly", "mixed"]:
    return "strict" if share < STRICT else "nearly" if share < NEARLY else "mixed"


def _steps(paths: Sequence[PathShare]) -> tuple[Step, ...]:
    """The groups of a layer's paths, those with more groups within them first; none if a share is not known."""
    own = {path.keeps.group: path.keeps for path in paths if path.keeps.group}
    shares = {group: sum(p.share for p in paths if group not in p.keeps and not is_constant(p)) for group in own}
    within = {group: sum(other in kept for other in own) for group, kept in own.items()}
    steps = [
        Step(group, shares[group], _by_share(shares[group])) for group in sorted(own, key=within.__getitem__, reverse=True)
    ]
    return tuple(steps) if not any(math.isnan(path.share) for path in paths) else ()


def _breaking(paths: Sequence[PathShare]) -> list[PathShare]:
    """The free paths, or, if there are none, those without a group beside a group convolution: they break its group."""
    if any(not path.symmetric for path in paths):
        return [path for path in paths if not path.symmetric and not is_constant(path)]
    grouped = any(path.keeps.group for path in paths)
    return [path for path in paths if not path.keeps.groups and not path.keeps.every] if grouped else []


def is_constant(path: PathShare) -> bool:
    """Whether a sparse path learned that nothing varies in space."""
    return path.learned_omega and bool(path.omega) and all(abs(omega) < CONSTANT for omega in path.omega.values())


def _keeps(paths: Sequence[PathShare]) -> Kept:
    """What a layer keeps without the paths that break its symmetry: what all symmetric paths in use have in common."""
    breaking = _breaking(paths)
    symmetric = [path for path in paths if path.symmetric and path not in breaking]
    in_use = [path for path in symmetric if math.isnan(path.share) or path.share >= STRICT]
    kept = [path.keeps for path in in_use or symmetric]
    if not kept:
        return Kept()
    common = reduce(and_, kept)  # several paths that are hardly in use may together break a group that all others keep
    broken = {group: sum(path.share for path in symmetric if group not in path.keeps) for group in common.groups}
    return replace(common, groups=tuple(group for group, share in broken.items() if share < STRICT))


# ---- cautions


def cautions(
    paths: Sequence[PathShare], known: Known, limits: Mapping[str, Sequence[str]] | None = None
) -> tuple[Caution, ...]:
    """What to print beside every table of shares and ranges: that nothing is established, or not yet settled."""
    unusable = _one_class(known) or failed(known)
    if unusable or not known.learned:
        return (unusable,) if unusable else ()
    dead = _dead(paths, known)
    little = _told_apart(known, dead)
    if isinstance(little, Guessing):
        return (little,)
    judged = layers(paths, limits=limits)
    unused = tuple(layer.name for layer in judged if layer.verdict == "unused")
    found = (dead, Unused(unused) if unused else None, little, *_unsettled(known), _borders(judged))
    return tuple(caution for caution in found if caution)


def _borders(judged: Sequence[LayerVerdict]) -> Borders | None:
    """Whether layers were found symmetric that see borders."""
    found = [
        one.name for one in judged if one.verdict in ("strict", "nearly") and any(BORDERS in limit for limit in one.limits)
    ]
    return Borders(tuple(found)) if found else None


def failed(known: Known) -> Failed | None:
    """Why the evidence must not be used; None if it may be, or if that is not known."""
    if known.log_evidence is None or math.isnan(known.log_evidence) or not known.samples:
        return None
    likelihood = -math.inf if known.log_likelihood is None else known.log_likelihood
    most, gamma = (math.inf if number is None else number for number in (known.most, known.effective_parameters))
    return possible.reason(known.log_evidence, likelihood, known.samples, most, known.classes, gamma, known.lr)


def gained(log_evidence: float, samples: int, classes: int) -> float:
    """1 - log p(D) / (N log(1/K)): guessing one of K classes gives 0, a certain and right model 1."""
    return 1 - log_evidence / (-samples * math.log(classes)) if classes > 1 else 1.0


def _told_apart(known: Known, dead: Dead | None) -> Guessing | Little | None:
    """Whether the evidence is not, or hardly, above guessing. Data that say so little make a network look symmetric."""
    if known.log_evidence is None or not known.samples or not known.classes:
        return None
    part = gained(known.log_evidence, known.samples, known.classes)
    if part >= LITTLE:
        return None
    if part > 0:
        return Little(part)
    return Guessing(known.log_evidence / known.samples, -math.log(known.classes), known.classes, dead)


def _one_class(known: Known) -> OneClass | None:
    """All labels are the same if N sum y^2 = (sum y)^2."""
    if known.classes is None or not known.fingerprint or not known.samples:
        return None
    total, squares, *_ = known.fingerprint
    return OneClass(known.samples, round(total / known.samples)) if known.samples * squares == total**2 else None


def _dead(paths: Sequence[PathShare], known: Known) -> Dead | None:
    found = []
    for layer in layers(paths):
        effective = (path.effective_parameters for path in layer.paths)
        if any(path.parameters for path in layer.paths) and all(math.isnan(gamma) or not gamma for gamma in effective):
            found.append(layer.name)
    return Dead(tuple(found), known.lr) if found else None


def _unsettled(known: Known) -> tuple[Caution | None, ...]:
    """Whether the evidence or a range still moved when the run ended. A run that went back further than its last steps had enough.

    Steps whose evidence has failed came later than the epoch that was kept: they say nothing of it.
    """
    steps = [line for line in known.history if line.get("log_evidence") is not None]
    went_back = known.epoch is not None and bool(steps) and known.epoch < steps[-1]["epoch"]
    kept = [line for line in known.history if known.epoch is None or line.get("epoch", 0) <= known.epoch]
    return () if went_back else (_rising([line["log_evidence"] for line in steps]), _moving(kept))


def _rising(values: Sequence[float]) -> OneStep | Rising | None:
    """Whether the evidence still rose when precisions were learned for the last time."""
    if len(values) < 2:
        return OneStep() if values else None
    late = values[-max(2, len(values) // 4) :]
    half = len(late) // 2  # compare means, because sampled curvature makes each value noisy
    rise = sum(late[half:]) / (len(late) - half) - sum(late[:half]) / half
    return Rising(rise) if rise > max(LEAST, RISING * (max(values) - min(values))) and max(late) == max(values) else None


def _moving(history: Sequence[Mapping[str, Any]]) -> Moving | None:
    """Which learned ranges moved by more than MOVING over the last quarter of their steps."""
    found = [line["ranges"] for line in history if line.get("ranges")]
    if len(found) < 4:
        return None
    moved = [(name, found[-1 - len(found) // 4][name], last) for name, last in found[-1].items()]
    moved = [(name, before, last) for name, before, last in moved if abs(last - before) > MOVING * abs(last)]
    return Moving(tuple(moved)) if moved else None
