"""How often is the answer of discover right on real images? MNIST and CIFAR-10, made so that the right answer is known before.

    python benchmarks/truth_real.py --data DIR                           every run without a result, in benchmarks/results/truth_real
    python benchmarks/truth_real.py --data DIR --only 'turned-2000-*' --seconds 500    some of them; starts no new run after 500 seconds
    python benchmarks/truth_real.py --list                               the runs, the right answers, and which are done
    python benchmarks/truth_real.py --table                              verdicts, errors with intervals, agreement of seeds, calibration
    python benchmarks/truth_real.py --data DIR --try 3                   seeds that are not reported, to choose settings by

DIR holds MNIST and CIFAR-10 in their official layouts (``papers.datasets``). Only torch, numpy and safetensors are needed. Without a
checkout, set AUTOSYM_COMMIT to the commit. A run is one ``autosym.discover`` by its defaults, about the symmetries that its task asks for.
A killed run goes on from what it left in --work. Several copies may share a GPU: each takes runs that no other is at.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

import autosym
from autosym.evidence.predictive import scores
from autosym.papers import measuring
from autosym.runtime.provenance import provenance
from autosym.runtime.tables import table
from resumable import run_each, stored
from truth import interval
from truth_real_tasks import TASKS, tensors

OUT = Path(__file__).parent / "results" / "truth_real"
TELL_MOST = ("digit-quadrant", "turned", "cifar-turned")  # with all images
TRIED = 1000  # the first seed of runs that settings are chosen by


@dataclass(frozen=True)
class Case:
    """One run: a task with so many training images. The seed draws images, labels and networks."""

    task: str
    images: int
    seed: int = 0

    @property
    def name(self) -> str:
        """As the file of its result is called."""
        return f"{self.task}-{self.images}-{self.seed}"


CASES = [
    *(Case(task, 2_000, seed) for seed in range(3) for task in TASKS),
    *(Case(task, 10_000) for task in TASKS),
    *(Case(task, 50_000 if TASKS[task].source == "cifar10" else 60_000) for task in TELL_MOST),
]


def run(case: Case, data: Path, work: Path, **options: Any) -> dict[str, Any]:
    """Ask ``discover``; its answer, the right ones, and how good the network that it returns is on test data."""
    device, task = "cuda" if torch.cuda.is_available() else "cpu", TASKS[case.task]
    (x, y), (x_test, y_test) = tensors(case.task, case.images, case.seed, data)
    begun, likelihood = time.perf_counter(), "categorical" if task.classes else "gaussian"
    given = {"network": {"classes": task.classes}} if task.classes else {}
    answer = autosym.discover(
        "f-fc+conv",
        (x.to(device), y.to(device)),
        tuple(task.answers),
        likelihood,
        resume=work,
        progress=False,
        **given,
        **options,
    )
    seconds = time.perf_counter() - begun
    outputs = measuring.outputs_of(answer.fit.model, x_test)
    test = (
        measuring.in_percent(scores(outputs, y_test))
        if task.classes
        else {"squared error": float((outputs - y_test).square().mean())}
    )
    return {
        "config": {"task": case.task, "images": case.images, "seed": case.seed, **options},
        "right": dict(task.answers),
        "answer": answer.as_dict(),
        "test": test,
        "seconds": seconds,
        "provenance": provenance(device),
    }


def run_all(cases: Sequence[Case], data: Path, results: Path, work: Path, seconds: float, **options: Any) -> int:
    """Run what has no result and no other copy is at; returns how many failed."""

    def shown(result: dict[str, Any]) -> str:
        return "\n".join("  ".join(row) for row in rows([result]))

    return run_each(cases, lambda case, own: run(case, data, own, **options), shown, results, work, seconds)


# ---- the table


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
            cost = f"{result['answer']['cost']:.1f}", f"{result['seconds']:.0f}"
            found.append((config["task"], f"{config['images']:,}", str(config["seed"]), symmetry, *said, *nats, *cost))
    return found


def _nats(margin: dict[str, float | None]) -> str:
    return "?" if margin["nats"] is None else f"{margin['nats']:+.0f} +- {margin['error'] or 0:.0f}"


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts with Wilson's intervals, agreement of seeds in pairs, and how often answers of a stated probability are right."""
    scored = [(result, *one) for result in results for one in judged(result) if one[1] is not None]
    kinds = [kind(right, verdict["judgement"]) for _, _, right, verdict in scored]
    counts = {
        name: (kinds.count(name), *interval(kinds.count(name), len(kinds)))
        for name in ("right", "undecided", "false yes", "false no")
    }
    seeds: dict[tuple[str, int, str], list[str]] = {}
    for result in results:
        for symmetry, _, verdict in judged(result):
            key = result["config"]["task"], result["config"]["images"], symmetry
            seeds.setdefault(key, []).append(verdict["judgement"])
    pairs = [one == other for said in seeds.values() for one, other in itertools.combinations(said, 2)]
    decided = [(v["probability"], kind(r, v["judgement"]) == "right") for _, _, r, v in scored if v["judgement"] != "undecided"]
    bins = [[right for p, right in decided if low <= p < high] for low, high in ((0.0, 0.99), (0.99, 0.999), (0.999, 1.1))]
    calibration = {
        name: (sum(b), len(b)) for name, b in zip(("below 0.99", "0.99 to 0.999", "0.999 and more"), bins, strict=True)
    }
    return {"verdicts": len(kinds), "counts": counts, "agreeing pairs": (sum(pairs), len(pairs)), "calibration": calibration}


def print_table(results: Sequence[dict[str, Any]]) -> None:
    head = (
        "task",
        "images",
        "seed",
        "symmetry",
        "there?",
        "verdict",
        "",
        "breaking gains",
        "the tie is worth",
        "fits",
        "seconds",
    )
    order = {task: place for place, task in enumerate(TASKS)}
    found = sorted(results, key=lambda r: (order.get(r["config"]["task"], 99), r["config"]["images"], r["config"]["seed"]))
    print(table([head, *rows(found)], "<>><<<<>>>>"))
    total = summary(results)
    print(f"\n{total['verdicts']} verdicts are scored:")
    for name, (count, low, high) in total["counts"].items():
        print(f"  {name}: {count} ({100 * low:.0f} to {100 * high:.0f} %)")
    agreeing, pairs = total["agreeing pairs"]
    print(f"{agreeing} of {pairs} pairs of seeds have the same verdict.")
    for name, (right, count) in total["calibration"].items():
        print(f"Right at a probability {name}: {right} of {count}.")
    print(f"Commits: {', '.join(sorted({str(r['provenance'].get('commit')) for r in results}))}.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of MNIST and CIFAR-10")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="runs whose names match, as in 'turned-2000-*'")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no new run after so many")
    parser.add_argument("--epochs", type=int, help="of a full fit, other than by default")
    parser.add_argument("--images", type=int, help="no more training images than these: to try it out")
    parser.add_argument("--try", type=int, dest="tried", metavar="N", help="other seeds, so many; name --results too")
    parser.add_argument("--results", type=Path, default=OUT, help="the folder of results")
    parser.add_argument("--work", type=Path, default=Path("runs/truth_real"), help="the folder of runs that are not done")
    for name, what in (("list", "name the runs"), ("table", "print the table")):
        parser.add_argument(f"--{name}", action="store_true", help=what)
    options = parser.parse_args()
    cases = CASES if options.tried is None else [Case(t, 2_000, TRIED + s) for s in range(options.tried) for t in TASKS]
    most = options.images or max(case.images for case in cases)
    cases = [
        c for c in dict.fromkeys(Case(c.task, min(c.images, most), c.seed) for c in cases) if fnmatch(c.name, options.only)
    ]
    if options.table:
        print_table(stored(options.results))
    elif options.list:
        for case in cases:
            done = "done" if (options.results / f"{case.name}.json").exists() else ""
            right = ", ".join(
                f"{name}: {'?' if a is None else 'yes' if a else 'no'}" for name, a in TASKS[case.task].answers.items()
            )
            print(f"{case.name:36s} {right:44s} {done}".rstrip())
    elif not cases or options.data is None:
        parser.error("--data DIR is missing" if cases else f"no run is called {options.only}")
    elif options.tried is not None and options.results == OUT:
        parser.error("--try is for settings: name another folder by --results")
    else:
        more = {} if options.epochs is None else {"epochs": options.epochs}
        return int(run_all(cases, options.data, options.results, options.work, options.seconds, **more) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
