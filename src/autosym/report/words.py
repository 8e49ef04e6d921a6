"""Verdicts in words: one sentence for the network, a predicate for each layer, and the strength of a difference in evidence."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autosym.evidence.shares import WHOLE
from autosym.evidence.verdicts import NEARLY, STRICT, LayerVerdict, Step, Verdict
from autosym.linear.path import Kept

APPROXIMATE = "change along held-out trajectories, or have no evidence without others that do"  # about conserved quantities
RULE = (
    "A layer counts as symmetric when its free paths (for a group: all paths that break the group) hold less than "
    f"{100 * STRICT:g}\u202f% of its effective parameters, and as nearly so below {100 * NEARLY:g}\u202f%."
)


def headline(found: Verdict, ranges: Sequence[Mapping[str, Any]] = ()) -> str:
    """One sentence for the network, which averages over ``ranges``."""
    if found.nothing:
        return str(found.nothing)
    if not found.layers:
        return invariance(ranges) or "No layer had a choice: the model has no relaxed layer."
    if all(layer.verdict == "fixed" for layer in found.layers):
        kinds = {_symmetry(layer) for layer in found.layers}
        return f"No layer had a choice: all of them are {kinds.pop() if len(kinds) == 1 else 'symmetric'} by construction."
    if all(layer.verdict == "free" for layer in found.layers):
        return "No layer had a choice: none of them has a symmetric path."
    if not found.learned:
        return "Symmetry was not learned: prior precisions were held fixed, so shares say little about what the data want."
    clauses: dict[tuple[str, ...], list[LayerVerdict]] = {}
    for layer in found.layers:
        nested = (_nested(layer), *layer.breaks) if layer.breaks else ()
        alike = _symmetry(layer) if layer.verdict != "mixed" else "" if nested else _used(layer)
        steps = [f"{step.verdict} {step.group}" for step in _beyond(layer)]
        clauses.setdefault((layer.verdict, alike, *nested, *steps), []).append(layer)
    words = "; ".join(f"{named([layer.number for layer in some])} {predicate(some)}" for some in clauses.values())
    return f"{words[0].upper()}{words[1:]}."


def predicate(some: Sequence[LayerVerdict]) -> str:
    """The verdict on layers that share verdict and symmetry, to be read after their numbers."""
    first, many = some[0], len(some) > 1
    symmetry = _symmetry(first)
    are, have, its = ("are", "have", "their") if many else ("is", "has", "its")
    broken = first.keeps.group or " and ".join(first.breaks)
    where = f"break {broken}" if first.breaks else "free"
    others = ", ", "" if first.keeps.groups else "equivariant "
    match first.verdict:
        case "strict":
            return f"became {symmetry}{_groups(some, *others)}"
        case "nearly":
            return f"{are} nearly {symmetry} ({_shares(some)} {where}){_groups(some, *others)}"
        case "mixed" if first.breaks:
            return f"{are} {_nested(first)}{_groups(some, ', ')}"
        case "mixed":
            return (
                f"use{'' if many else 's'} {_used(first)} ({_shares(some)} free){_groups(some, f' and {are} ', 'equivariant ')}"
            )
        case "held":
            held = f"in paths that break {broken}" if first.breaks else "free"
            return f"{have} {_shares(some)} of {its} effective parameters {held}, at fixed precisions"
        case "constant" if any(path.symmetric for path in first.paths):
            return f"became {symmetry}: {its} free paths are constant in space, by their lengthscales"
        case "constant":
            return f"became constant in space, by {its} lengthscales"
        case "guess":
            return f"{are} part of a network whose evidence is not above that of guessing"
        case "failed":
            return f"{are} part of a network whose evidence must not be used"
        case "unused":
            return f"{have} less than one effective parameter, too little to judge by"
        case "unknown":
            return f"{have} a frozen or unused path: the evidence says nothing about it"
        case "fixed":
            return f"{are} {symmetry} by construction"
        case "free":
            return f"{have} no symmetric path"


def _symmetry(layer: LayerVerdict) -> str:
    """The symmetry that a layer keeps, and how exactly."""
    return f"{_kept(layer.keeps)}{_up_to(layer.up_to)}"


def _kept(kept: Kept) -> str:
    if kept.groups:
        return f"{'equivariant' if kept.equivariant else 'invariant'} to translations and {kept.group}"
    return "translation-equivariant" if kept.equivariant else "translation-invariant" if kept.invariant else "symmetric"


def _used(layer: LayerVerdict) -> str:
    """What the free paths of a layer use."""
    of_shifts = (layer.keeps.equivariant or layer.keeps.invariant) and not layer.keeps.groups
    return "position" if of_shifts else "what breaks the symmetry"


def _nested(layer: LayerVerdict) -> str:
    return f"{'equivariant' if layer.keeps.equivariant else 'invariant'} to translations{_up_to(layer.shifts_up_to)}"


def _beyond(layer: LayerVerdict) -> list[Step]:
    """The groups that the layer, as its verdict says, does not keep. Elsewhere the verdict itself is about all of its groups."""
    judged = layer.verdict in ("strict", "nearly", "mixed")
    left = () if layer.verdict == "mixed" and layer.breaks else layer.keeps
    return [step for step in layer.steps if judged and step.verdict != "strict" and step.group not in left]


def _groups(some: Sequence[LayerVerdict], lead: str, equivariant: str = "") -> str:
    """How far layers with the same verdicts are from each group that they do not keep, e.g. ", not to d4 (30 % break d4)"."""
    said = ""
    for verdict, word in (("nearly", "nearly"), ("mixed", "not")):
        names = [step.group for step in _beyond(some[0]) if step.verdict == verdict]
        shares = {name: [step.share for layer in some for step in layer.steps if step.group == name] for name in names}
        listed = ", ".join(f"{_range(found)} break {name}" for name, found in shares.items())
        said += f"{lead}{word} {equivariant}to {' or '.join(names)} ({listed})" if names else ""
    return said


def _up_to(limits: Sequence[str]) -> str:
    return f" up to {' and '.join(limits)}" if limits else ""


def _shares(some: Sequence[LayerVerdict]) -> str:
    return _range([layer.share or 0.0 for layer in some])


def _range(shares: Sequence[float]) -> str:
    low, high = (f"{100 * pick(shares):.3g}" for pick in (min, max))
    return f"{high} %" if low == high else f"{low} to {high} %"


def invariance(ranges: Sequence[Mapping[str, Any]]) -> str:
    """One sentence for the transformations that a network averages over."""
    return f"The network averages over {', '.join(r['text'] for r in ranges)}." if ranges else ""


def whole(broken: Mapping[str, float]) -> str:
    """The share of all relaxed layers that is free, and the shares that break each group."""
    said = [f"{100 * share:.3g} % {'are free' if name == 'free' else f'break {name}'}" for name, share in broken.items()]
    if not said:
        return ""
    rule = f"on data with a planted symmetry, networks of nets.build usually have less than {100 * WHOLE:.0f} %"
    return f"Of all effective parameters {', '.join(said)}; {rule}."


def named(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 5] as "layers 1 to 3 and 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [part for run in runs for part in (map(str, run) if len(run) < 3 else [f"{run[0]} to {run[-1]}"])]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"layer{'' if len(numbers) == 1 else 's'} {listed}"


def strength(nats: float) -> str:
    """A difference of log evidence in words (Kass & Raftery 1995, whose 2 ln B is twice this)."""
    difference = abs(nats)
    if difference < 1:
        return "not worth more than a mention"
    return "positive" if difference < 3 else "strong" if difference < 5 else "very strong"


def odds(nats: float) -> str:
    """e^nats : 1, to three figures; beyond a million as a power of ten."""
    if nats < math.log(1e6):
        return f"{math.exp(nats):.3g} : 1"
    return f"{power_of_ten(round(nats / math.log(10)))} : 1"


def power_of_ten(exponent: int) -> str:
    """10 with a raised exponent."""
    return f"10{str(exponent).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
