"""Verdicts in words: one sentence for the network, a predicate for each layer, and the strength of a difference in evidence."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autosym.evidence.shares import WHOLE
from autosym.evidence.verdicts import NEARLY, STRICT, LayerVerdict, Step, Verdict
from autosym.linear.path import Kept
from autosym.nn import symmetrised

DRIFTING = "found by evidence alone, which change along the trajectories"  # about conserved quantities
RULE = (
    f"A layer counts as symmetric if the paths that break the symmetry hold less than {100 * STRICT:g}\u202f% of its effective "
    f"parameters, and as nearly symmetric below {100 * NEARLY:g}\u202f%."
)
NOT_GAINED = "Nothing was gained: the network is as it was given."
REJECTED = (
    "Training found no more evidence than the given network has, so that one is kept, and curves are of a run that is not. Train longer, "
    "or at a lower rate (lr=)."
)
CLAUSES = 3  # a headline names at most so many kinds of layers


def headline(found: Verdict, ranges: Sequence[Mapping[str, Any]] = ()) -> str:
    """One plain sentence for the network, which averages over ``ranges``. Numbers stand beside each layer."""
    if found.nothing:
        return found.nothing.headline
    if not found.layers:
        return invariance(ranges) or "No layer had a choice: the model has no relaxed layer."
    if all(layer.verdict == "fixed" for layer in found.layers):
        kinds = {_symmetry(layer) for layer in found.layers}
        return f"No layer had a choice: all of them are {kinds.pop() if len(kinds) == 1 else 'symmetric'} by construction."
    if all(layer.verdict == "free" for layer in found.layers):
        return "No layer had a choice: none of them has a symmetric path."
    if not found.learned:
        return "Symmetry was not learned: prior precisions were held fixed."
    clauses: dict[str, list[LayerVerdict]] = {}
    for layer in found.layers:
        clauses.setdefault(predicate([layer], brief=True), []).append(layer)
    if len(clauses) > CLAUSES:
        return _counted(found.layers)
    if len(clauses) == 1 and len(found.layers) > 1:
        count = len(found.layers)
        return f"{'Both' if count == 2 else f'All {count}'} layers {predicate(found.layers, brief=True)}."
    said = "; ".join(f"{named([layer.number for layer in some])} {predicate(some, brief=True)}" for some in clauses.values())
    return f"{said[0].upper()}{said[1:]}."


def cautions(found: Verdict) -> list[str]:
    """What belongs beside the headline, each with what to do."""
    return [*([found.nothing.details] if found.nothing else []), *map(str, found.beside_headline())]


def _counted(layers: Sequence[LayerVerdict]) -> str:
    """One sentence for layers of which there are too many kinds to name."""
    kinds = {"strict": 0, "constant": 0, "fixed": 0, "nearly": 1, "mixed": 2, "free": 2}
    counts = Counter(kinds.get(layer.verdict, 3) for layer in layers)
    one = ("keeps its symmetry", "nearly does", "breaks it", "cannot be judged")
    many = ("keep their symmetry", "nearly do", "break it", "cannot be judged")
    said = [f"{counts[kind]} {one[kind] if counts[kind] == 1 else many[kind]}" for kind in range(4) if counts[kind]]
    return f"Of {len(layers)} layers, {', '.join(said)}."


def predicate(some: Sequence[LayerVerdict], brief: bool = False) -> str:
    """The verdict on layers that share it, to be read after their numbers; if it is not ``brief``, with the shares of the first."""
    first, many = some[0], len(some) > 1
    symmetry = _kept(first.keeps) if brief else _symmetry(first)
    are, have, its = ("are", "have", "their") if many else ("is", "has", "its")
    broken = first.keeps.group or " and ".join(first.breaks)
    share = _percent(first.share or 0.0)
    free = "" if brief else f" ({share} {f'break {broken}' if first.breaks else 'free'})"
    others = ", ", brief, "" if first.keeps.groups else "equivariant "
    match first.verdict:
        case "strict":
            return f"became {symmetry}{_groups(first, *others)}"
        case "nearly":
            return f"{are} nearly {symmetry}{free}{_groups(first, *others)}"
        case "mixed" if first.breaks:
            left = "equivariant" if first.keeps.equivariant else "invariant"
            return f"{are} {left} to translations{'' if brief else _up_to(first.shifts_up_to)}{_groups(first, ', ', brief)}"
        case "mixed":
            of_shifts = (first.keeps.equivariant or first.keeps.invariant) and not first.keeps.groups
            used = "position" if of_shifts else "what breaks the symmetry"
            return f"use{'' if many else 's'} {used}{free}{_groups(first, f' and {are} ', brief, 'equivariant ')}"
        case "held":
            return f"{have} {share} of {its} effective parameters {f'in paths that break {broken}' if first.breaks else 'free'}, held fixed"
        case "constant" if any(path.symmetric for path in first.paths):
            return f"became {symmetry}: {its} free paths are constant in space, by their lengthscales"
        case "constant":
            return f"became constant in space, by {its} lengthscales"
        case "guess":
            return "is not judged: the evidence is not better than guessing"
        case "failed":
            return "is not judged: the evidence must not be used"
        case "unused":
            return f"{have} too few effective parameters to judge (less than one)"
        case "unknown":
            return f"{have} a path that is frozen or learned nothing: the evidence says nothing about it"
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


def _beyond(layer: LayerVerdict) -> list[Step]:
    """The groups that the layer, as its verdict says, does not keep. Elsewhere the verdict itself is about all of its groups."""
    judged = layer.verdict in ("strict", "nearly", "mixed")
    left = () if layer.verdict == "mixed" and layer.breaks else layer.keeps
    return [step for step in layer.steps if judged and step.verdict != "strict" and step.group not in left]


def _groups(layer: LayerVerdict, lead: str, brief: bool, equivariant: str = "") -> str:
    """How far a layer is from each group that it does not keep, e.g. ", not to d4 (30 % break d4)"."""
    said = ""
    for verdict, word in (("nearly", "nearly"), ("mixed", "not")):
        steps = [step for step in _beyond(layer) if step.verdict == verdict]
        listed = "" if brief else f" ({', '.join(f'{_percent(step.share)} break {step.group}' for step in steps)})"
        said += f"{lead}{word} {equivariant}to {' or '.join(step.group for step in steps)}{listed}" if steps else ""
    return said


def _up_to(limits: Sequence[str]) -> str:
    return f" up to {' and '.join(limits)}" if limits else ""


def _percent(share: float) -> str:
    """To one decimal, as on the rest of the page."""
    return "less than 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f}".removesuffix(".0") + " %"


def invariance(ranges: Sequence[Mapping[str, Any]]) -> str:
    """One sentence for the transformations that a network averages over."""
    return f"The network averages over {', '.join(r['text'] for r in ranges)}." if ranges else ""


def started(ranges: Sequence[Mapping[str, Any]]) -> str:
    """One sentence for the ranges that learning started from; older files do not say which."""
    said = symmetrised.started(r.get("started", "") for r in ranges)
    return f"Ranges {said}." if said else ""


def whole(broken: Mapping[str, float]) -> str:
    """The share of all relaxed layers that is free, and the shares that break each group."""
    said = [f"{_percent(share)} {'are free' if name == 'free' else f'break {name}'}" for name, share in broken.items()]
    if not said:
        return ""
    usual = f"If the data have the symmetry, it is usually less than {_percent(WHOLE)}."
    return f"Of the effective parameters of all layers, {', '.join(said)}. {usual}"


def simplified(found: Mapping[str, Any] | None) -> str:
    """What ``simplify`` left out, what it kept, and what all of it is worth."""
    if not found:
        return ""
    paths, gone = found["paths"], [path for path in found["paths"] if path["left_out"]]
    least = f"{found['threshold']:g} nats of evidence"
    change = found["log_evidence_after"] - found["log_evidence_before"]
    if not gone:
        return f"Every path that breaks a symmetry is worth {least} or more: {_worth(paths)}."
    kept = [path for path in paths if not path["left_out"]]
    cost = (
        "changes the log evidence by less than 0.1 nats"
        if abs(change) < 0.1
        else f"changes the log evidence by {change:+.1f} nats"
    )
    said = f"Paths that break a symmetry and are worth less than {least} were left out, which {cost}: {_worth(gone)}."
    return f"{said} Kept: {_worth(kept)}." if kept else f"{said} None is left."


def _worth(paths: Sequence[Mapping[str, Any]]) -> str:
    """Paths by layer, each with its nats; without some there is no evidence at all."""
    return ", ".join(f"{path['path']} of {path['layer'] or 'the model'} ({_nats(path)})" for path in paths)


def _nats(path: Mapping[str, Any]) -> str:
    if path["nats"] is None:
        return "without it there is no evidence"
    value = f"{path['nats']:+.1f}" if abs(path["nats"]) >= 0.05 else "0.0"
    return f"{'about ' if path['estimated'] else ''}{value} nats"


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


def counted(quantities: int) -> str:
    """How many conserved quantities were found."""
    among = "among all that are linear or quadratic in positions and momenta"
    if not quantities:
        return f"No conserved quantity was found {among}."
    return f"{quantities} conserved {'quantity was' if quantities == 1 else 'quantities were'} found {among}."


UNDECIDED = {
    "evidence": "It does not change, but has too little evidence. More states (--points) may decide.",
    "unclear": "It changes a little, or noise hides whether it does. More or longer trajectories, shorter steps or less noise may decide.",
    "alike": "It is nearly the same along all trajectories, conserved or not. Trajectories from other starts would decide.",
}


def undecided(doubt: str) -> str:
    """Why a quantity is undecided, and what would decide."""
    return UNDECIDED[doubt]
