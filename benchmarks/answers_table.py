"""The tables of ``discover`` on data with a known answer, from the results of truth_planted.py and truth_real.py."""

from collections.abc import Callable, Sequence
from typing import Any

from findings import QUESTIONS, folder, made, markdown, span
from truth_real_tasks import TASKS
from truth_table import judged, kind, summary

KINDS = ("right", "undecided", "false yes", "false no")


def counts() -> str:
    """All verdicts of each suite, by what they are, with 95 % intervals."""
    planted, real = folder("truth_planted"), folder("truth_real")
    suites = {f"planted, {span([r['config']['images'] for r in planted], ',.0f')} samples": planted}
    for images in sorted({result["config"]["images"] for result in real}):
        suites[f"MNIST and CIFAR-10, {images:,} images"] = [r for r in real if r["config"]["images"] == images]
    rows = []
    for name, results in suites.items():
        total = summary(results)
        cells = [f"{n} ({100 * low:.0f} to {100 * high:.0f} %)" for n, low, high in (total["counts"][key] for key in KINDS)]
        agree = ["{} of {}".format(*total[key]) if total[key][1] else "" for key in ("agreeing pairs", "same layers")]
        rows.append((name, total["verdicts"], *cells, *agree, span([r["answer"]["cost"] for r in results], ".1f")))
    header = ("data", "verdicts", *KINDS, "two seeds: same verdict", "same layers broken", "cost (fits)")
    return markdown(header, rows) + made(planted + real, "python benchmarks/truth_planted.py; python benchmarks/truth_real.py")


def planted() -> str:
    """By question."""
    results = folder("truth_planted")
    rows = []
    for question, words in QUESTIONS.items():
        own = [result for result in results if result["config"]["task"].startswith(question)]
        rows.append((words, *_said(own, True), *_said(own, False)))
    parts = ("right", "undecided", "wrong")
    return markdown(("planted", *(f"there: {p}" for p in parts), *(f"not there: {p}" for p in parts)), rows)


def real() -> str:
    """By task: what was said of each seed."""
    results = folder("truth_real")
    rows = []
    for task, about in TASKS.items():
        for symmetry, right in about.answers.items():
            own = [r for r in results if r["config"]["task"] == task]
            row = [f"{task}: {symmetry}", {True: "yes", False: "no", None: "?"}[right]]
            for images in (2_000, 10_000, None):
                some = [
                    r for r in own if r["config"]["images"] == images or (images is None and r["config"]["images"] > 10_000)
                ]
                row.append(", ".join(v["judgement"] for r in some for name, _, v in judged(r) if name == symmetry))
            rows.append(row)
    return markdown(("task and symmetry", "there?", "2,000 images", "10,000", "all"), rows)


def _said(results: Sequence[dict[str, Any]], there: bool) -> tuple[int, int, int]:
    """How many verdicts are right, undecided and wrong."""
    kinds = [kind(right, v["judgement"]) for result in results for _, right, v in judged(result) if right is there]
    return kinds.count("right"), kinds.count("undecided"), sum(name.startswith("false") for name in kinds)


TABLES: dict[str, Callable[[], str]] = {"discover-counts": counts, "discover-planted": planted, "discover-real": real}
