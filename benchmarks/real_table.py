"""The table of real.py: what happened to trained networks, a row for each cell."""

import statistics
from collections import Counter
from collections.abc import Sequence

from autosym.evidence.shares import WHOLE
from autosym.runtime.tables import table
from real_tasks import TASKS

STAGES = ("before", "fit", "simplified", "hardened")
HEADS = ("cell", "runs", "accuracy (%)", "log evidence / N", "recoveries", "cautions", "free (%)", "shifts", "seconds", "")
LEGEND = """Means over seeds. Accuracy before -> after fit -> simplify -> harden; evidence before -> after fit -> simplify; free part of the
network after fit -> simplify; whether shifts keep the label, as the expert says -> as found; seconds of fit, simplify, harden.
"""


def print_table(results: Sequence[dict]) -> Counter[str]:
    """A row for each cell and a line of counts; returns the counts."""
    cells: dict[tuple, list[dict]] = {}
    for result in sorted(results, key=lambda r: [r["config"][k] for k in ("images", "network", "task", "seed")]):
        kind = tuple(result["config"][k] for k in ("network", "task", "images"))
        cells.setdefault((*kind, result["config"].get("paths", "f-fc")), []).append(result)
    wrong = [faults(runs) for runs in cells.values()]
    rows = [[*row(runs), ", ".join(+found)] for runs, found in zip(cells.values(), wrong, strict=True)]
    counts = sum(wrong, Counter())
    commits = sorted({str(result["provenance"]["commit"])[:9] for result in results})
    print(LEGEND)
    print(table([HEADS, *rows], "<>>>><>>><"))
    print(
        f"\n{len(results)} runs of {len(cells)} cells: {counts['collapse']} runs collapsed; {counts['worse']} cells are less accurate "
        f"after fit or harden; {counts['less evidence']} runs have less evidence than before; {counts['answer']} cells have another "
        f"answer than the expert. Commits: {', '.join(commits)}."
    )
    return counts


def row(runs: Sequence[dict]) -> list[str]:
    """The columns of one cell, from its runs."""
    config, task = runs[0]["config"], TASKS[runs[0]["config"]["task"]]
    fits = [one["fit"] for one in runs]
    recoveries = [fit["recoveries"] for fit in fits if fit["recoveries"] is not None]
    cautions = Counter(caution for fit in fits for caution in fit["cautions"])
    words = {True: "yes", False: "no", None: "?"}
    return [
        f"{config['network']} {config['task']} {config['images']} {config.get('paths', 'f-fc')}",
        str(len(runs)),
        arrows([mean(runs, stage, "accuracy") for stage in STAGES], ".2f"),
        arrows([mean(runs, stage, "log_evidence") for stage in STAGES[:3]], ".4f", config["images"]),
        str(sum(recoveries)) if recoveries else "?",
        ", ".join(f"{number} {name}" for name, number in cautions.items()) or "-",
        arrows([mean(runs, stage, "network_share") for stage in STAGES[1:3]], ".1f", 0.01),
        f"{words[task.symmetric]} -> {words[answer(runs)]}",
        " ".join(f"{mean(runs, stage, 'seconds'):.0f}" for stage in STAGES[1:]),
    ]


def faults(runs: Sequence[dict]) -> Counter[str]:
    """What went wrong in a cell, and in how many of its runs."""
    task = TASKS[runs[0]["config"]["task"]]
    before, fit, _, hardened = (mean(runs, stage, "accuracy") for stage in STAGES)
    return Counter(
        {
            "collapse": sum(map(collapsed, runs)),
            "worse": int(min(fit, hardened) < before - task.allowance),
            "less evidence": sum(map(lost_evidence, runs)),
            "answer": int(answer(runs) is not task.symmetric),
        }
    )


def collapsed(result: dict) -> bool:
    """Five points lost by the fit, or close to guessing: at most twice as good."""
    before, after = (result[stage]["accuracy"] for stage in STAGES[:2])
    return after < before - 5 or after <= 200 / TASKS[result["config"]["task"]].classes


def lost_evidence(result: dict) -> bool:
    """Less evidence after the fit than before, by more than a nat and a thousandth: rounding is less."""
    before, after = (result[stage]["log_evidence"] for stage in STAGES[:2])
    return after < before - max(1.0, 1e-3 * abs(before))


def answer(runs: Sequence[dict]) -> bool | None:
    """Whether shifts keep the label: less than a twentieth of the network is free after simplify, or after fit if that refused."""
    shares = [mean(runs, stage, "network_share") for stage in STAGES[2:0:-1]]
    return next((share < WHOLE for share in shares if share is not None), None)


def mean(runs: Sequence[dict], stage: str, key: str) -> float | None:
    """Over the seeds of a cell; None if one of them has no such number."""
    values = [one[stage].get(key) for one in runs]
    return None if None in values else statistics.fmean(values)


def arrows(values: Sequence[float | None], form: str, unit: float = 1.0) -> str:
    return " -> ".join("?" if value is None else f"{value / unit:{form}}" for value in values)
