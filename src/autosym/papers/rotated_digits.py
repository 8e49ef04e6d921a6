"""How much rotation do digits tolerate? Evidence learns the range of rotations that a network is averaged over.

    full    every digit turned by its own angle, uniform in +-180 degrees
    half    the same in +-90 degrees
    none    digits as they were written

The range is a hyperparameter, learned by the Laplace evidence of the training data: it needs no validation data.
The digits come with scikit-learn.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autosym.nn.symmetrised import Symmetrised, started, symmetrise
from autosym.papers import datasets, measuring
from autosym.papers.measuring import train_and_measure, write
from autosym.report.drawing import print_table
from autosym.runtime.provenance import provenance
from autosym.runtime.workers import workers
from autosym.training.schedule import Schedule

VARIANTS = {"full": 180.0, "half": 90.0, "none": 0.0}


@dataclass(frozen=True)
class Run(measuring.Run):
    """One variant. All share network, schedule and start, which were chosen by the evidence of the training digits."""

    task: str = "full"
    model: str = "mlp"
    seed: int = 1
    epochs: int = 80
    lr: float = 0.1
    hyper_lr: float = 0.15
    start: float = 0.5  # radians
    copies: int = 15
    hidden: int = 40
    test: int = 360

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return f"rotated-digits/{self.task}"


RUNS = {run.name: run for run in map(Run, VARIANTS)}


def tensors(run: Run) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test pairs (N, 1, 8, 8), each part with its own angles. The background is 0, and so is the outside of a frame."""
    images, labels = datasets.digits()
    parts = []
    for part, indices in enumerate(datasets.split(len(images), run.test, run.seed)):
        x = images[indices][:, None]
        degrees = VARIANTS[run.task]
        parts.append((datasets.rotated(x, 2 * run.seed + part, degrees) if degrees else x, labels[indices]))
    return parts[0], parts[1]


def build(run: Run) -> Symmetrised:
    """One hidden layer of tanh, averaged over rotations."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, run.hidden), nn.Tanh(), nn.Linear(run.hidden, 10))
    return symmetrise(net, {"rotation": run.start}, run.copies)


def execute(run: Run, progress: bool | str = False, out: Path | None = None, resume: bool = False) -> dict[str, Any]:
    """Train and measure one variant."""
    train, test = tensors(run)
    schedule = Schedule(epochs=run.epochs, lr=run.lr, every=1, hyper_lr=run.hyper_lr)
    return train_and_measure(partial(build, run), train, test, schedule, run, progress, out, resume)


def run_all(out: Path, epochs: int | None = None, seed: int | None = None, progress: bool = False) -> dict[str, Any]:
    """All variants, in parallel, at most one per core; writes result.json and the files of every run to ``out``."""
    runs = [replace(run, epochs=epochs or run.epochs, seed=run.seed if seed is None else seed) for run in RUNS.values()]
    with workers(min(len(runs), os.cpu_count() or 1)) as pool:
        results = list(pool.map(partial(_execute, progress), runs, [out / run.task for run in runs]))
    rows = [
        {
            "variant": r["row"]["task"],
            "degrees": r["ranges"][0]["value"],
            "started": r["ranges"][0]["started"],
            **r["row"],
            "cautions": r["cautions"],
        }
        for r in results
    ]
    summary = {"rows": rows, "configs": [result["config"] for result in results], "provenance": provenance()}
    write(summary, out / "result.json")
    return summary


def _execute(progress: bool, run: Run, out: Path) -> dict[str, Any]:
    result = execute(run, run.task if progress else False, out)
    write(result, out / "result.json")
    return result


def show(summary: Mapping[str, Any]) -> None:
    """The learned degrees of every variant, in the terminal."""
    rows = [
        (
            row["variant"],
            f"±{VARIANTS[row['variant']]:.0f}",
            f"±{row['degrees']:.0f}",
            f"{row['accuracy']:.1f} ± {row['standard_error']:.1f}",
            f"{row['evidence']:.3f}",
            f"{row['seconds']:.0f}",
        )
        for row in summary["rows"]
    ]
    columns = ("variant", "turned by (degrees)", "learned range (degrees)", "test accuracy (%)", "log evidence / N", "seconds")
    print_table("How much rotation do the data ask for?", columns, rows)
    print(f"All {started(dict.fromkeys(row['started'] for row in summary['rows']))}.")
    for row in summary["rows"]:
        for caution in row["cautions"]:
            print(f"Caution, {row['variant']}: {caution}")
