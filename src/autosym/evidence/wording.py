"""What was learned, in words: one verdict for each layer, one sentence for the network, what a difference of evidence means.

    free share < 1 %: symmetric        < 5 %: nearly so        else: mixed

The share is that of a layer's effective parameters which its free paths hold; in a layer without free paths that has plain convolutions
beside group convolutions, that of the plain ones, and the symmetry is that of the group. A free sparse path whose inverse lengthscales
were learned and are all below 0.01 is constant in space: it is symmetric by omega, whatever its share. Where the evidence is not above
that of guessing, or a layer has less than one effective parameter, shares are of nothing, and nothing is said of them.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from autosym.linear.groups import PLAIN, keeps

STRICT, NEARLY, CONSTANT = 0.01, 0.05, 0.01
WHOLE = 0.05  # of a network: what was in paths that break a planted symmetry, as a rule (docs/findings.md)
FEWEST = 1.0  # effective parameters of a layer that can be judged
RISING = (
    0.05  # of the whole range of the evidence: a rise by more than that within the last quarter of its steps is not settled
)
UNSTEADY = 0.02  # of the evidence: by so much, and by 3 nats, may the end be worse than an earlier step (of sampled curvature)
LITTLE = 0.2  # better than guessing: planted comparisons above it were right, many of those below were not (docs/findings.md)
APPROXIMATE = "change along held-out trajectories, or have no evidence without those that do"  # of conserved quantities
TRANSLATIONS = {"conv": "translation-equivariant", "s-conv": "translation-equivariant", "pool": "translation-invariant"}


def summary(contents: Mapping[str, Any]) -> dict[str, Any]:
    """All there is to say of what a report holds: ``headline``, ``layers``, and ``cautions``, which belong beside it."""
    symmetry, history = contents["symmetry"], contents.get("history") or []
    learned = (contents.get("schedule") or {}).get("step") != "none"
    approximate, guess = contents.get("approximate") or {}, guessing(contents) if learned else ""
    ranges = contents.get("ranges") or []
    said = headline(symmetry, learned, approximate) if symmetry or not ranges else invariance(ranges)
    return {
        "headline": guess or said,
        "layers": layers(symmetry, learned, approximate, bool(guess)),
        "cautions": []
        if guess or not learned
        else [*dead(contents), *little(contents), *(cautions(contents) if symmetry else []), *widening(history)],
    }


def gained(evidence: float, samples: int, classes: int) -> float:
    """1 - log p(D) / N log(1/K): the part of what guessing one of K classes leaves to explain that a model explains."""
    return 1 - evidence / (-samples * math.log(classes)) if classes > 1 else 1.0


def _gained(contents: Mapping[str, Any]) -> float:
    """The same of a report's contents; all where it is not of classes, or not known."""
    evidence, samples = (contents.get("evidence") or {}).get("log_evidence"), contents.get("samples")
    classes = _classes(contents)
    return 1.0 if evidence is None or not samples or not classes else gained(evidence, samples, classes)


def _classes(contents: Mapping[str, Any]) -> int | None:
    """How many classes targets are of; None where they are not classes. Files of earlier versions say it by likelihood and outputs."""
    return contents.get("class_count", contents.get("outputs") if contents.get("likelihood") == "categorical" else None)


def one_class(contents: Mapping[str, Any]) -> str:
    """What says that all labels are the same, if so: N sum y^2 = (sum y)^2, by the fingerprint of the data."""
    found, samples = contents.get("fingerprint"), contents.get("samples")
    if not _classes(contents) or not found or not samples or samples * found[1] != found[0] ** 2:
        return ""
    return f"Nothing can be learned: all {samples} labels are of class {found[0] / samples:.0f}, so there is nothing to tell apart."


def guessing(contents: Mapping[str, Any]) -> str:
    """What says that classes were not told apart, if so: there is one only, or the evidence is not above that of guessing one of K."""
    if one := one_class(contents):
        return one
    if _gained(contents) > 0:
        return ""
    samples, classes = contents["samples"], _classes(contents) or 1
    own, chance = contents["evidence"]["log_evidence"] / samples, -math.log(classes)
    figures = f"{own:.3f} nats per sample, is not above that of guessing one of {classes} classes, {chance:.3f}"
    remedy = ", though accuracy may be; train longer, or on more data."
    return f"Nothing is established yet: the log evidence, {figures}{f'. {gone[0]}' if (gone := dead(contents)) else remedy}"


def dead(contents: Mapping[str, Any]) -> list[str]:
    """Which layers have no effective parameters at all, so that their shares are not numbers: steps, or inputs, were too large."""
    found = [layer for layer in layers(contents.get("symmetry") or []) if _held(layer, "parameters")]
    gone = [layer["name"] for layer in found if not _held(layer, "effective_parameters")]
    if not gone:
        return []
    have = f"{_by_name(gone)} {'has' if len(gone) == 1 else 'have'} no effective parameters, so no shares"
    return [f"{have}: the network died, or the data ask for nothing. Try {_slower(contents)}, and standardised inputs."]


def _slower(contents: Mapping[str, Any]) -> str:
    lr = (contents.get("schedule") or {}).get("lr")
    return f"a smaller learning rate (lr={lr / 3:.2g} for {lr:.2g})" if lr else "a smaller learning rate"


def unused(contents: Mapping[str, Any]) -> list[str]:
    """Which layers have too few effective parameters for their shares to be judged, in the words of a headline."""
    few = [layer for layer in layers(contents.get("symmetry") or []) if layer["verdict"] == "unused"]
    return [f"{_by_name([layer['name'] for layer in few])} {_predicate(few)}."] if few else []


def _by_name(names: Sequence[str]) -> str:
    return f"Layer{'' if len(names) == 1 else 's'} {', '.join(names)}"


def _held(layer: Mapping[str, Any], what: str) -> float:
    return sum(path[what] or 0 for path in layer["paths"])  # None: not a number


def little(contents: Mapping[str, Any]) -> list[str]:
    """Whether the evidence is hardly above that of guessing: what the data say so little of is called symmetric."""
    part = _gained(contents)
    if not 0 < part < LITTLE:
        return []
    return [
        f"The evidence is {part:.0%} better than guessing, which is little: a model that does not try to tell some classes apart may "
        "then have more evidence than one that does. Train longer, or on more data, before you rely on a symmetry."
    ]


def cautions(contents: Mapping[str, Any]) -> list[str]:
    """Whether the evidence was still rising when precisions were learned for the last time, or had been better before."""
    steps = [line for line in contents.get("history") or [] if line.get("log_evidence") is not None]
    values = [line["log_evidence"] for line in steps]
    if not values:
        return []
    if len(values) == 1:
        return ["Precisions were learned in one step only: train longer before you rely on the shares."]
    best, last = max(steps, key=lambda line: line["log_evidence"]), values[-1]
    behind, few = max(values) - last, max(3.0, UNSTEADY * abs(max(values)))
    end = (contents.get("evidence") or {}).get("log_evidence")  # after the last step, so better where all is well
    lost = behind if end is None else min(behind, max(values) - end)
    if lost > few:
        return [
            f"The evidence was unsteady: epoch {best['epoch']} had {lost:.3g} nats more than the end. Try {_slower(contents)} before you "
            "rely on the shares."
        ]
    late = values[-max(2, len(values) // 4) :]
    half = len(late) // 2  # means, as each value is of sampled curvature
    rise = sum(late[half:]) / (len(late) - half) - sum(late[:half]) / half
    if rise <= max(1.0, RISING * (max(values) - min(values))) or behind > few:
        return []
    return [
        f"The evidence was still rising when precisions were learned for the last time, by {rise:.3g} nats over the last of its "
        "steps: train longer before you rely on the shares."
    ]


def widening(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which learned ranges still moved when they were learned for the last time."""
    found = [line["ranges"] for line in history if line.get("ranges")]
    moved = []
    for name, last in found[-1].items() if len(found) > 3 else ():
        before = found[-1 - len(found) // 4][name]
        if abs(last - before) > RISING * abs(last):
            moved.append(f"{name} went from {before:.3g} to {last:.3g}")
    if not moved:
        return []
    return [
        f"Over the last quarter of its steps {', '.join(moved)}: train longer, or take more or longer steps (every=1, hyper_lr)."
    ]


def doubts(contents: Mapping[str, Any]) -> list[str]:
    """What belongs beside every table of shares and ranges: that nothing is established, or not yet settled.

    A headline says of which layers too little is known to judge them; a table has none.
    """
    if (contents.get("schedule") or {}).get("step") == "none":
        return list(filter(None, [one_class(contents)]))
    guess, history = guessing(contents), contents.get("history") or []
    return (
        [guess] if guess else [*dead(contents), *unused(contents), *little(contents), *cautions(contents), *widening(history)]
    )


def layers(
    symmetry: Sequence[Mapping[str, Any]],
    learned: bool = True,
    approximate: Mapping[str, Sequence[str]] | None = None,
    guess: bool = False,
) -> list[dict[str, Any]]:
    """The relaxed layers in order: number, name, paths, share of the free ones (None: not known), verdict, symmetry, words.

    Where precisions were not ``learned``, or the network is no better than a ``guess``, a share is no verdict. Of layers in
    ``approximate`` the symmetric paths are so only up to what it says.
    """
    found = []
    for number, (name, group) in enumerate(groupby(symmetry, key=lambda path: path["layer"]), 1):
        paths = list(group)
        verdict, share = _verdict(paths, learned, guess)
        limits = (approximate or {}).get(name, ())
        nested = all(path["symmetric"] for path in paths) and bool(_breaking(paths))
        turned = [path["path"].removeprefix("gconv:") for path in paths if path["path"].startswith("gconv:")]
        found.append(
            {
                "number": number,
                "name": name,
                "paths": paths,
                "verdict": verdict,
                "free_share": share,
                "nested": f"equivariant to translations{_up_to(_of_shifts(limits))}" if nested else "",
                "groups": turned if nested else [],
                "symmetry": _symmetry(paths, limits),
            }
        )
    return [layer | {"words": _predicate([layer])} for layer in found]


def whole(broken: Mapping[str, float]) -> str:
    """How much of all relaxed layers is free, and breaks the groups they could be equivariant to."""
    said = [f"{100 * share:.3g} % {'are free' if name == 'free' else f'break {name}'}" for name, share in broken.items()]
    if not said:
        return ""
    rule = f"where the symmetry was planted, in networks of nets.build, as a rule less than {100 * WHOLE:.0f} %"
    return f"Of all effective parameters {', '.join(said)}; {rule}."


def _verdict(paths: Sequence[Mapping[str, Any]], learned: bool, guess: bool) -> tuple[str, float | None]:
    breaking = _breaking(paths)
    if all(path["symmetric"] for path in paths) and not breaking:
        return "fixed", 0.0
    if any(path["share"] is None for path in paths):
        return "unknown", None
    share = sum(path["share"] for path in breaking)
    if len(breaking) == len(paths):
        return "free", share
    if not learned:
        return "held", share
    if guess or sum(path["effective_parameters"] for path in paths) < FEWEST:
        return "guess" if guess else "unused", share
    if not breaking:
        return "constant", share
    return ("strict" if share < STRICT else "nearly" if share < NEARLY else "mixed"), share


def _breaking(paths: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The free paths, or, if there are none, the convolutions beside a group convolution: they break its group."""
    if any(not path["symmetric"] for path in paths):
        return [path for path in paths if not path["symmetric"] and not _is_constant(path)]
    plain = [path for path in paths if path["path"] in PLAIN]
    return plain if any(path["path"].startswith("gconv:") for path in paths) else []


def _is_constant(path: Mapping[str, Any]) -> bool:
    """Whether a sparse path learned that nothing varies in space."""
    learned = any(part.endswith("omega") for part in path["precision"])
    return learned and bool(path["omega"]) and all(abs(omega) < CONSTANT for omega in path["omega"].values())


def _symmetry(paths: Sequence[Mapping[str, Any]], limits: Sequence[str]) -> str:
    """To what a layer is equivariant if its free paths are gone, and up to what: what all symmetric paths in use have in common."""
    breaking = _breaking(paths)
    symmetric = [path for path in paths if path["symmetric"] and path not in breaking]
    used = [path["path"] for path in symmetric if path["share"] is None or path["share"] >= STRICT] or [
        path["path"] for path in symmetric
    ]
    for name in used if all(name.startswith("gconv:") for name in used) else ():
        group = name.removeprefix("gconv:")
        if all(keeps(other, group) for other in used):
            return f"equivariant to translations and {group}{_up_to(limits)}"
    kinds = {TRANSLATIONS["conv"] if name.startswith("gconv:") else TRANSLATIONS.get(name, "symmetric") for name in used}
    return f"{kinds.pop() if len(kinds) == 1 else 'symmetric'}{_up_to(_of_shifts(limits))}"


def _of_shifts(limits: Sequence[str]) -> list[str]:
    return [limit for limit in limits if limit != "interpolation"]  # which translations have none of


def _up_to(limits: Sequence[str]) -> str:
    return f" up to {' and '.join(limits)}" if limits else ""


def headline(
    symmetry: Sequence[Mapping[str, Any]],
    learned: bool = True,
    approximate: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """One sentence for the network; ``learned`` is whether precisions were learned at all."""
    found = layers(symmetry, learned, approximate)
    if not found:
        return "No layer had a choice: the model has no relaxed layer."
    if all(layer["verdict"] == "fixed" for layer in found):
        return f"No layer had a choice: all of them are {_common(found)} by construction."
    if all(layer["verdict"] == "free" for layer in found):
        return "No layer had a choice: none of them has a symmetric path."
    if not learned:
        return "Symmetry was not learned: prior precisions were held fixed, so shares say little of what the data want."
    clauses: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for layer in found:
        alike = layer["symmetry"] if layer["verdict"] != "mixed" else ""
        clauses.setdefault((layer["verdict"], alike, layer["nested"], *layer["groups"]), []).append(layer)
    words = "; ".join(f"{named([layer['number'] for layer in some])} {_predicate(some)}" for some in clauses.values())
    return f"{words[0].upper()}{words[1:]}."


def invariance(ranges: Sequence[Mapping[str, Any]]) -> str:
    """One sentence for the transformations that a network averages over."""
    return f"The network averages over {', '.join(r['text'] for r in ranges)}." if ranges else ""


def _common(found: Sequence[Mapping[str, Any]]) -> str:
    kinds = {layer["symmetry"] for layer in found}
    return kinds.pop() if len(kinds) == 1 else "symmetric"


def _predicate(some: Sequence[Mapping[str, Any]]) -> str:
    """What can be said of layers with one verdict, to follow their numbers."""
    verdict, symmetry = some[0]["verdict"], some[0]["symmetry"]
    many = len(some) > 1
    are = "are" if many else "is"
    where = "in plain convolutions" if some[0]["nested"] else "free"
    if verdict == "strict":
        return f"became {symmetry}"
    if verdict == "nearly":
        return f"{are} nearly {symmetry} ({_shares(some)} {where})"
    if verdict == "mixed" and some[0]["nested"]:
        return f"{are} {some[0]['nested']}, not to {' or '.join(some[0]['groups'])} ({_shares(some)} {where})"
    if verdict == "mixed":
        position = "position" if symmetry.startswith("translation-") else "what breaks the symmetry"
        return f"use{'' if many else 's'} {position} ({_shares(some)} free)"
    if verdict == "held":
        have, its = ("have", "their") if many else ("has", "its")
        return f"{have} {_shares(some)} of {its} effective parameters {where}, at fixed precisions"
    if verdict == "constant":
        its = "their" if many else "its"
        if any(path["symmetric"] for path in some[0]["paths"]):
            return f"became {symmetry}: {its} free paths are constant in space, by their lengthscales"
        return f"became constant in space, by {its} lengthscales"
    if verdict == "guess":
        return f"{are} part of a network that tells no classes apart"
    if verdict == "unused":
        return f"{'have' if many else 'has'} less than one effective parameter, too little to judge by"
    if verdict == "unknown":
        return f"{'have' if many else 'has'} a frozen or unused path, of which the evidence says nothing"
    return f"{are} {symmetry} by construction" if verdict == "fixed" else f"{'have' if many else 'has'} no symmetric path"


def _shares(some: Sequence[Mapping[str, Any]]) -> str:
    low, high = (f"{100 * pick(layer['free_share'] for layer in some):.3g}" for pick in (min, max))
    return f"{high} %" if low == high else f"{low} to {high} %"


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
    """e^nats : 1, as many figures as it deserves."""
    if nats < math.log(1e6):
        return f"{math.exp(nats):.3g} : 1"
    return f"{power_of_ten(round(nats / math.log(10)))} : 1"


def power_of_ten(exponent: int) -> str:
    """10 with a raised exponent."""
    return f"10{str(exponent).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
