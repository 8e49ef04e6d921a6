"""Results of ``discover`` on data with a known answer, as a table: errors with intervals, calibration, agreement of seeds.

A result has ``config`` (task, images, seed), ``right`` (symmetry: is it there? None: nobody knows), ``answer`` (``Answer.as_dict``),
``layers`` (``broken_layers``), ``seconds`` and ``provenance``; of real images also ``test`` (accuracy of the network that is returned)
and ``candidates`` (that of the best network of each hypothesis). Results of one task and number of images differ by their seed.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from autosym.answer.answers import Answer
from autosym.answer.hypotheses import SHIFTS
from autosym.evidence.shares import WHOLE
from autosym.runtime.tables import table
from truth import interval

HEAD = (
    "task",
    "images",
    "seed",
    "symmetry",
    "there?",
    "verdict",
    "",
    "breaking gains",
    "the tie is worth",
    "broken in",
    "fits",
    "seconds",
)
CLOSE = 0.3  # points of accuracy
BINS = {"below 0.99": (0.0, 0.99), "0.99 to 0.999": (0.99, 0.999), "0.999 and more": (0.999, 1.1)}


def broken_layers(answer: Answer) -> dict[str, dict[str, float]]:
    """By symmetry and layer: the share of effective parameters in paths that break it, in the network that ``discover`` returns."""
    paths = list(answer.fit.symmetry())
    found = {}
    for symmetry in (verdict.symmetry for verdict in answer.verdicts):
        shares = dict.fromkeys((path.layer for path in paths), 0.0)
        for path in paths:
            keeps = path.symmetric and (symmetry == SHIFTS or symmetry in path.keeps)
            shares[path.layer] += 0.0 if keeps or math.isnan(path.share) else path.share
        found[symmetry] = shares
    return found


def judged(result: dict[str, Any]) -> list[tuple[str, bool | None, dict[str, Any]]]:
    """Of every symmetry that was asked for: its name, whether the data have it (None: nobody knows), and the verdict."""
    return [(v["symmetry"], result["right"][v["symmetry"]], v) for v in result["answer"]["verdicts"]]


def kind(right: bool | None, judgement: str) -> str:
    """right, undecided, false yes, false no; or not scored."""
    if right is None:
        return "not scored"
    if judgement == "undecided":
        return "undecided"
    return "right" if (judgement == "yes") is right else f"false {judgement}"


def rows(results: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each verdict."""
    found = []
    for result in results:
        config = result["config"]
        for symmetry, right, verdict in judged(result):
            said = {True: "yes", False: "no", None: "?"}[right], verdict["judgement"], kind(right, verdict["judgement"])
            nats = (f"{_nats(verdict[key])}" for key in ("breaking", "tie"))
            layers = _broken(result, symmetry)
            where = "?" if layers is None else f"{len(layers)} of {len(result['layers'][symmetry])}"
            cost = f"{result['answer']['cost']:.1f}", f"{result['seconds']:.0f}"
            found.append((config["task"], f"{config['images']:,}", str(config["seed"]), symmetry, *said, *nats, where, *cost))
    return found


def _nats(margin: dict[str, float | None]) -> str:
    return "?" if margin["nats"] is None else f"{margin['nats']:+.0f} +- {margin['error'] or 0:.0f}"


def _broken(result: dict[str, Any], symmetry: str) -> frozenset[str] | None:
    """The layers with a share of at least 5 % in paths that break the symmetry; None if the result does not say."""
    if "layers" not in result:
        return None
    return frozenset(layer for layer, share in result["layers"][symmetry].items() if share >= WHOLE)


def ahead(result: dict[str, Any]) -> float | None:
    """By how many points the network that is returned is more accurate on test data than the most accurate candidate.

    That one is the best of several on the same test data, so a little behind it is where another seed would be, too.
    """
    others = [scores["accuracy"] for scores in result.get("candidates", {}).values() if "accuracy" in scores]
    return result["test"]["accuracy"] - max(others) if others else None


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts with Wilson's intervals, agreement of seeds in pairs, and how often answers of a stated probability are right."""
    scored = [(right, verdict) for result in results for _, right, verdict in judged(result) if right is not None]
    kinds = [kind(right, verdict["judgement"]) for right, verdict in scored]
    counts = {
        name: (kinds.count(name), *interval(kinds.count(name), len(kinds)))
        for name in ("right", "undecided", "false yes", "false no")
    }
    decided = [
        (v["probability"], kind(right, v["judgement"]) == "right") for right, v in scored if v["judgement"] != "undecided"
    ]
    bins = {name: [right for p, right in decided if low <= p < high] for name, (low, high) in BINS.items()}
    return {
        "verdicts": len(kinds),
        "counts": counts,
        "agreeing pairs": _agreeing([(r, s, v["judgement"]) for r in results for s, _, v in judged(r)]),
        "same layers": _agreeing([(r, s, _broken(r, s)) for r in results for s, _, _ in judged(r)]),
        "ahead": [points for result in results if (points := ahead(result)) is not None],
        "calibration": {name: (sum(some), len(some)) for name, some in bins.items()},
    }


def _agreeing(said: Sequence[tuple[dict[str, Any], str, Any]]) -> tuple[int, int]:
    """How many pairs of seeds of (result, symmetry, what was said) say the same, and how many pairs there are."""
    seeds: dict[tuple[str, int, str], list[Any]] = {}
    for result, symmetry, what in said:
        if what is not None:
            seeds.setdefault((result["config"]["task"], result["config"]["images"], symmetry), []).append(what)
    pairs = [one == other for some in seeds.values() for one, other in itertools.combinations(some, 2)]
    return sum(pairs), len(pairs)


def print_table(results: Sequence[dict[str, Any]], tasks: Sequence[str]) -> None:
    """All rows, in the order of ``tasks``, and the summary."""
    order = {task: place for place, task in enumerate(tasks)}
    found = sorted(results, key=lambda r: (order.get(r["config"]["task"], 99), r["config"]["images"], r["config"]["seed"]))
    print(table([HEAD, *rows(found)], "<>><<<<>>>>>"))
    total = summary(results)
    print(f"\n{total['verdicts']} verdicts are scored:")
    for name, (count, low, high) in total["counts"].items():
        print(f"  {name}: {count} ({100 * low:.0f} to {100 * high:.0f} %)")
    for key, what in (
        ("agreeing pairs", "the same verdict"),
        ("same layers", "the same layers broken (a share of 5 % or more)"),
    ):
        print("{} of {} pairs of seeds have {}.".format(*total[key], what))
    if total["ahead"]:
        behind, count = sum(points < -CLOSE for points in total["ahead"]), len(total["ahead"])
        print(
            f"In {behind} of {count} the network that is returned is more than {CLOSE} points less accurate than the best candidate "
            f"(by {max(0.0, -min(total['ahead'])):.2f} at most)."
        )
    for name, (right, count) in total["calibration"].items():
        print(f"Right at a probability {name}: {right} of {count}.")
    print(f"Commits: {', '.join(sorted({str(r['provenance'].get('commit')) for r in results}))}.")
