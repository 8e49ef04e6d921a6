"""The tables of ``discover`` on data with a known answer: of truth_planted.py, truth_real.py, and ``autosym demo`` (demo.json)."""

from collections.abc import Callable, Sequence
from typing import Any

from findings import QUESTIONS, folder, made, markdown, read, span
from truth_real_tasks import TASKS
from truth_table import judged, kind, summary

WORDS = {  # of the tasks of truth_real.py
    "digit": "the digit, in any quadrant",
    "digit-quadrant": "the digit and its quadrant",
    "shifted": "digits moved around the torus",
    "ink": "how much ink (a number)",
    "height": "how high the ink is (a number)",
    "turned": "digits turned by quarters",
    "turned-side": "the digit, and whether it is upright or on its side",
    "mirrored": "digits, half of them mirrored",
    "mirrored-which": "the digit, and whether it is mirrored",
    "six-nine-apart": "digits turned by halves, 6 and 9 kept apart",
    "six-nine-merged": "the same, 6 and 9 one class",
    "pairs-by-themselves": "two digits, each turned by itself: which is above, which below",
    "pairs-together": "two digits, turned together: which two",
    "cifar-mirrored": "CIFAR-10, half of it mirrored",
    "cifar-upside-down": "CIFAR-10, half of it upside down",
    "cifar-which-side-up": "the class, and which side is up",
    "cifar-turned": "CIFAR-10 turned by quarters",
    "mnist": "MNIST as it is",
    "cifar": "CIFAR-10 as it is",
}
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
    """By task, as far as there are results: what was said of each seed."""
    results = folder("truth_real")
    sizes = sorted({result["config"]["images"] for result in results})
    rows = []
    for task, about in TASKS.items():
        own = [result for result in results if result["config"]["task"] == task]
        for symmetry, right in about.answers.items() if own else ():
            said = [
                ", ".join(
                    v["judgement"] for r in own if r["config"]["images"] == size for s, _, v in judged(r) if s == symmetry
                )
                for size in sizes
            ]
            rows.append((WORDS[task], symmetry, {True: "yes", False: "no", None: "?"}[right], *said))
    return markdown(("task", "symmetry", "there?", *(f"said, {size:,} images" for size in sizes)), rows)


def _said(results: Sequence[dict[str, Any]], there: bool) -> tuple[int, int, int]:
    """How many verdicts are right, undecided and wrong."""
    kinds = [kind(right, v["judgement"]) for result in results for _, right, v in judged(result) if right is there]
    return kinds.count("right"), kinds.count("undecided"), sum(name.startswith("false") for name in kinds)


def demo() -> str:
    """The two questions of ``autosym demo``; demo.json is the result.json that it writes."""
    asked = {"digit": "which digit?", "digit+quadrant": "which digit, in which quadrant?"}
    rows = []
    for result in read("demo")["answers"]:
        (found,) = result["answer"]["verdicts"]
        margins = [f"{m['nats']:+.0f} ± {m['error']:.0f}" for m in (found["breaking"], found["tie"])]
        broken = ", ".join(layer["layer"] for layer in found["layers"] if layer["breaks"])
        rows.append((asked[result["task"]], result["truth"], found["judgement"], *margins, broken))
    header = ("question", "shifts are a symmetry", "verdict", "breaking gains (nats)", "the tie is worth (nats)", "broken in")
    return markdown(header, rows) + made([read("demo")], "autosym demo")


TABLES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "discover-counts": counts,
    "discover-planted": planted,
    "discover-real": real,
}
