"""What breaks a symmetry best? Networks that differ in their free path, on tasks that need position and on tasks that do not.

    python benchmarks/breaking.py                        the small runs without a result (embedded digits; needs scikit-learn, no GPU)
    python benchmarks/breaking.py --data DIR             those on 10,000 images of MNIST and CIFAR-10 too, on a GPU if there is one
    python benchmarks/breaking.py --only 'digit-*-1'     some of them; --seconds 500 starts no new run after 500 seconds
    python benchmarks/breaking.py --list                 the runs, and which are done
    python benchmarks/breaking.py --table                results by task and network: means over seeds, and each seed's evidence

Each run is one ``fit`` of a network of ``nets.build`` by its defaults (``start`` 0.3). DIR holds MNIST and CIFAR-10 in their official
layouts. Results are in benchmarks/results/breaking, one file a run. A killed run goes on from its checkpoint in --work. Several copies may
run side by side.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autosym.evidence.shares import Symmetry, from_dicts
from autosym.nn import nets
from autosym.papers import images, measuring, quadrant_digits
from autosym.runtime.tables import table
from autosym.training.schedule import Schedule
from real_tasks import Pair
from resumable import run_each, stored

OUT = Path(__file__).parent / "results" / "breaking"


@dataclass(frozen=True)
class Task:
    """``symmetric`` is the answer of an expert, before any run: does the label stay the same under the symmetry in question?

    It is None where nobody knows. ``breaks`` names the group in question, "" for translations. ``source`` names the images, a key of
    ``SOURCES``.
    """

    source: str
    question: str
    classes: int
    symmetric: bool | None
    breaks: str = ""


@dataclass(frozen=True)
class Shape:
    """Sizes of a network, as ``nets.build`` takes them, and how long it is trained."""

    width: int
    channels: tuple[int, ...] = (1, 2, 2, 4, 4, 8, 8, 16)
    strides: tuple[int, ...] = (1, 2, 1, 2, 1, 2, 2, 2)
    hidden: int = 64
    epochs: int = 60
    lr: float | None = None


@dataclass(frozen=True)
class Family:
    """Networks that are compared on the same tasks."""

    tasks: tuple[str, ...]
    networks: tuple[str, ...]
    shape: Shape
    seeds: tuple[int, ...] = (1, 2, 3)


TASKS = {
    "digit": Task("digits", "digit", 10, True),
    "place": Task("digits", "digit+quadrant", 40, False),
    "mnist-digit": Task("mnist", "digit", 10, True),
    "mnist-place": Task("mnist", "digit+quadrant", 40, False),
    "mnist-translated": Task("mnist", "translated-mnist", 10, True),
    "mnist-rotated": Task("mnist", "rotated-mnist", 10, True, "c4"),
    "mnist-regular": Task("mnist", "mnist", 10, None, "c4"),  # no digit is turned in these data, so no answer is planted
    "cifar-rotated": Task("cifar10", "rotated-cifar-10", 10, True, "c4"),
    "cifar-regular": Task("cifar10", "cifar-10", 10, None, "c4"),
}
TRANSLATIONS = ("where+conv", "where:8+conv", "f-fc+conv", "conv")
CHAINS = ("where+turn:c4+gconv:c4", "f-fc+conv+gconv:c4")  # the second as in Table 3
FAMILIES = (
    Family(("digit", "place"), TRANSLATIONS, Shape(12, (1, 2, 4, 8), (2, 2, 2, 2), hidden=8, lr=0.1)),
    Family(("mnist-digit", "mnist-place"), TRANSLATIONS, Shape(10)),
    Family(("mnist-translated", "mnist-rotated", "mnist-regular", "cifar-rotated", "cifar-regular"), CHAINS, Shape(2)),
)
IMAGES = 10_000


@dataclass(frozen=True)
class Cell(measuring.Run):
    """One run: ``model`` on ``task``."""

    shape: Shape = FAMILIES[0].shape

    @property
    def name(self) -> str:
        return f"{self.task}-{self.model.replace(':', '').replace('+', '_')}-{self.seed}"


CELLS = [
    Cell(task, network, seed=seed, epochs=family.shape.epochs, shape=family.shape)
    for family in FAMILIES
    for seed in family.seeds
    for task in family.tasks
    for network in family.networks
]


# ---- one run


def digits(cell: Cell, _: Path | None) -> tuple[Pair, Pair]:
    """scikit-learn's digits in quadrants, as in ``autosym demo``."""
    return quadrant_digits.tensors(quadrant_digits.Run(TASKS[cell.task].question, cell.model, seed=cell.seed))


def published(cell: Cell, folder: Path | None) -> tuple[Pair, Pair]:
    """MNIST and CIFAR-10 as in Tables 1 and 3, on fewer images."""
    (x, y), test, _ = images.DATASETS[TASKS[cell.task].question](folder, 2 * cell.seed)
    return (x[:IMAGES], y[:IMAGES]), test


SOURCES = {"digits": digits, "mnist": published, "cifar10": published}


def run(cell: Cell, data: Path | None, work: Path) -> dict[str, Any]:
    """Fit and measure one network; ``broken`` is the part of its effective parameters that breaks the symmetry in question."""
    task, shape = TASKS[cell.task], cell.shape
    train, test = SOURCES[task.source](cell, data)
    sizes = (shape.width, shape.channels, shape.strides, shape.hidden)
    build = partial(nets.build, cell.model, train[0].shape[1:], task.classes, *sizes)
    device = "cuda" if torch.cuda.is_available() and task.source != "digits" else "cpu"
    schedule = Schedule(epochs=cell.epochs) if shape.lr is None else Schedule(epochs=cell.epochs, lr=shape.lr)
    result = measuring.train_and_measure(build, train, test, schedule, cell, out=work, resume=True, device=device)
    broken = Symmetry(from_dicts(result["symmetry"])).network_share(task.breaks or None)
    kept = {key: result[key] for key in ("row", "config", "symmetry", "cautions", "schedule", "provenance")}
    return kept | {"broken": broken if math.isfinite(broken) else None, "samples": len(train[0])}


def run_all(cells: Sequence[Cell], data: Path | None, results: Path, work: Path, seconds: float = math.inf) -> int:
    """Run what has no result and no other copy is at; returns how many failed."""
    return run_each(cells, lambda cell, own: run(cell, data, own), lambda result: rows([result]), results, work, seconds)


# ---- the table


def rows(results: Sequence[dict[str, Any]]) -> str:
    """A row for each task and network, in the order of ``TASKS`` and of evidence."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in sorted(results, key=lambda r: r["config"]["seed"]):
        cells.setdefault((result["config"]["task"], result["config"]["model"]), []).append(result)

    def mean(found: Sequence[dict[str, Any]], key: str) -> float:
        return statistics.fmean(one["row"][key] for one in found)

    order = sorted(cells, key=lambda cell: ([*TASKS, cell[0]].index(cell[0]), -mean(cells[cell], "evidence")))
    lines = [
        ("task", "symmetric", "network", "log evidence", "of seeds", "accuracy (%)", "broken (%)", "parameters", "seconds")
    ]
    for task, model in order:
        found = cells[task, model]
        nats = [one["row"]["evidence"] * one["samples"] for one in found]
        broken = [100 * one["broken"] for one in found if one["broken"] is not None]
        lines.append(
            (
                task,
                {True: "yes", False: "no", None: "?"}[TASKS[task].symmetric if task in TASKS else None],
                model,
                f"{statistics.fmean(nats):.0f}",
                " ".join(f"{value:.0f}" for value in nats),
                f"{mean(found, 'accuracy'):.1f}",
                " ".join(f"{value:.1f}" for value in broken) or "?",
                f"{found[0]['row']['parameters']:,}",
                f"{mean(found, 'seconds'):.0f}",
            )
        )
    return table(lines, "<<<>>>>>>")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of MNIST and CIFAR-10")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="runs whose names match, as in 'place-where_conv-*'")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no new run after so many")
    parser.add_argument("--epochs", type=int, help="fewer than by default: to try it out")
    parser.add_argument("--results", type=Path, default=OUT, help="the folder of results")
    parser.add_argument("--work", type=Path, default=Path("runs/breaking"), help="the folder of runs that are not done")
    for name, what in (("list", "name the runs"), ("table", "print the table")):
        parser.add_argument(f"--{name}", action="store_true", help=what)
    options = parser.parse_args()
    cells = [replace(cell, epochs=options.epochs or cell.epochs) for cell in CELLS if fnmatch(cell.name, options.only)]
    if options.table:
        print(rows(stored(options.results)))
        return 0
    if options.list:
        for cell in cells:
            print(f"{cell.name:36s} {'done' if (options.results / f'{cell.name}.json').exists() else ''}".rstrip())
        return 0
    if options.data is None:
        cells = [cell for cell in cells if TASKS[cell.task].source == "digits"]
    if not cells:
        parser.error(f"no run is called {options.only}, or it needs --data DIR")
    return int(run_all(cells, options.data, options.results, options.work, options.seconds) > 0)


if __name__ == "__main__":
    sys.exit(main())
