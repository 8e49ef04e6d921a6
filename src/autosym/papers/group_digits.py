"""Table 3 in miniature: which group do the data ask for? Digits are shifted at random, upright or turned by multiples of 90 degrees.

The network has a free path, a convolution and a group convolution over C4 in every layer. The position of a digit says nothing
about its class, so free paths should go. If digits are also turned, filters shared over rotations need fewer parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autosym.nn import nets
from autosym.papers import datasets, measuring
from autosym.papers.measuring import train_and_measure
from autosym.report.drawing import print_table, show_symmetry
from autosym.training.schedule import Schedule

TASKS = ("upright", "turned")


@dataclass(frozen=True)
class Run(measuring.Run):
    """One dataset. Both datasets use the same network and schedule, which were chosen on this seed (docs/lab/evidence.md)."""

    task: str = "turned"
    model: str = "f-fc+conv+gconv:c4"
    seed: int = 1
    epochs: int = 120
    trust: float = 2.0
    width: int = 3
    test: int = 360

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return f"group-digits/{self.task}"


RUNS = {run.name: run for run in map(Run, TASKS)}


def tensors(run: Run) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Training and test pairs of 8x8 digits, normalised by the training images; each part has its own shifts and turns."""
    images, labels = datasets.digits()
    parts = []
    for part, indices in enumerate(datasets.split(len(images), run.test, run.seed)):
        x = datasets.shifted(images[indices], 2 * run.seed + part)
        parts.append((datasets.turned(x, 2 * run.seed + part) if run.task == "turned" else x, labels[indices]))
    (x, y), (x_test, y_test) = parts
    mean, std = x.mean(), x.std()
    return ((x[:, None] - mean) / std, y), ((x_test[:, None] - mean) / std, y_test)


def execute(run: Run, progress: bool = False, out: Path | None = None, resume: bool = False) -> dict[str, Any]:
    """Train and measure on one dataset."""
    train, test = tensors(run)
    build = partial(nets.build, run.model, (1, 8, 8), 10, run.width, (1, 2, 4), (2, 2, 2), hidden=8)
    return train_and_measure(
        build, train, test, Schedule(epochs=run.epochs, lr=run.lr, trust=run.trust, every=2), run, progress, out, resume
    )


def show(results: Mapping[str, Mapping[str, Any]], shares: Mapping[str, Mapping[str, float]]) -> None:
    """Print the learned symmetry of every dataset, and the mean shares side by side."""
    for task, result in results.items():
        show_symmetry(task, result["symmetry"])
    columns = ("digits", "test accuracy (%)", *(f"mean share of {path}" for path in shares["turned"]))
    rows = [(t, f"{results[t]['row']['accuracy']:.1f}", *(f"{share:.0%}" for share in shares[t].values())) for t in shares]
    print_table("Which group do the data ask for?", columns, rows)
    more = shares["turned"]["gconv:c4"] - shares["upright"]["gconv:c4"]
    print(
        f"The rotation path holds {100 * more:+.0f} points of the effective parameters on turned digits against upright ones."
    )
