"""Table 1 in miniature: digits in one of four quadrants. It takes minutes and needs no download.

"Which digit?" is symmetric under translation; "which digit, in which quadrant?" is not. A convolutional network suits only
the first question. No fixed network suits both: the learned network has to find out.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autosym.nn import nets
from autosym.papers import datasets, measuring
from autosym.papers.measuring import METHODS, train_and_measure
from autosym.report.drawing import (
    COLOURS,
    OTHER_SYMMETRIC,
    draw_shares,
    new_figure,
    open_frame,
    print_table,
    save_figure,
    show_symmetry,
)
from autosym.runtime.provenance import provenance
from autosym.runtime.workers import workers
from autosym.training.schedule import Schedule

TASKS = {"digit": 10, "digit+quadrant": 40}
MODELS = ("fc", "conv", "f-fc+conv")
LEARNED = ("f-fc+conv", "evidence")


@dataclass(frozen=True)
class Run(measuring.Run):
    """One cell of the table. Seed 1 was fixed first; the rate was chosen on seeds 0, 2 and 3, and epochs to save time."""

    task: str = "digit"
    model: str = "f-fc+conv"
    seed: int = 1
    epochs: int = 60
    lr: float = 0.1
    width: int = 12
    jitter: int = 2
    test: int = 360

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return f"quadrant-digits/{self.task}/{self.model}/{self.method}"


RUNS = {run.name: run for run in (Run(t, m, k) for t in TASKS for m in MODELS for k in METHODS)}
RUNS["quadrant-digits"] = Run()
DEMO = [(t, m, k) for m, k in (LEARNED, ("f-fc+conv", "map"), ("fc", "map"), ("conv", "map")) for t in TASKS]  # longest first


def tensors(run: Run) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Training and test pairs, placed with different seeds and normalised by the training images.

    Data and network are float64, so that a run can be repeated. In float32 the rounding of sums depends on the machine and on the
    number of processes. It soon changes the polyphase grid of some sample, and with it the rest of the run.
    """
    images, labels = datasets.digits()
    images = images.double()
    parts = []
    for part, indices in enumerate(datasets.split(len(images), run.test, run.seed)):
        canvas, quadrant = datasets.in_quadrants(images[indices], run.jitter, 2 * run.seed + part)
        parts.append((canvas, labels[indices] + (10 * quadrant if run.task == "digit+quadrant" else 0)))
    pixels = parts[0][0].numpy()  # NumPy's sums do not depend on the number of threads
    mean, std = pixels.mean(), pixels.std(ddof=1)
    (x, y), (x_test, y_test) = parts
    return ((x - mean) / std, y), ((x_test - mean) / std, y_test)


def execute(run: Run, progress: bool = False, out: Path | None = None, resume: bool = False) -> dict[str, Any]:
    """Train and measure one cell."""
    train, test = tensors(run)
    build = partial(nets.build, run.model, (1, 16, 16), TASKS[run.task], run.width, (1, 2, 4, 8), (2, 2, 2, 2), hidden=8)
    schedule = Schedule(epochs=run.epochs, lr=run.lr, step=METHODS[run.method])
    return train_and_measure(build, train, test, schedule, run, progress, out, resume)


def execute_all(runs: Sequence[Run], jobs: int) -> Iterator[dict[str, Any]]:
    """Results of all cells, ``jobs`` at a time, in the order they finish."""
    with workers(jobs) as pool:
        for done in as_completed([pool.submit(execute, run) for run in runs]):
            yield done.result()


def summarise(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table, the learned symmetry, and the learned model compared with the better fixed one, paired by test image."""
    order = [(t, m, k) for t in TASKS for m in MODELS for k in METHODS]
    by_cell = {(r["row"]["task"], r["row"]["model"], r["row"]["method"]): r for r in results}
    comparisons = []
    for task in TASKS:
        fixed = [by_cell[task, m, k] for m in ("fc", "conv") for k in METHODS if (task, m, k) in by_cell]
        learned = by_cell.get((task, *LEARNED))
        if not fixed or learned is None:
            continue
        best = max(fixed, key=lambda r: r["row"]["accuracy"])
        difference = 100 * (torch.tensor(learned["correct"]) - torch.tensor(best["correct"])).double()
        mean, error = difference.mean().item(), difference.std().item() / math.sqrt(len(difference))
        comparisons.append(
            {
                "task": task,
                "best_fixed": f"{best['row']['model']} ({best['row']['method']})",
                "difference": mean,
                "standard_error": error,
                "within_two_standard_errors_or_above": mean >= -2 * error,
            }
        )
    return {
        "rows": [by_cell[cell]["row"] for cell in order if cell in by_cell],
        "comparison": comparisons,
        "symmetry": {task: by_cell[task, *LEARNED]["symmetry"] for task in TASKS if (task, *LEARNED) in by_cell},
        "configs": [by_cell[cell]["config"] for cell in order if cell in by_cell],
        "provenance": provenance(),
    }


def show(summary: Mapping[str, Any]) -> None:
    """A table for each task, the learned symmetry, and the comparison, in the terminal."""
    columns = ("model", "by", "test accuracy (%)", "test NLL", "log evidence / N", "parameters", "seconds")
    tasks = list(dict.fromkeys(row["task"] for row in summary["rows"]))
    for task in tasks:
        rows = [
            (
                {"fc": "dense", "conv": "convolution"}.get(row["model"], f"learned ({row['model']})"),
                row["method"],
                f"{row['accuracy']:.1f} ± {row['standard_error']:.1f}",
                f"{row['nll']:.3f}",
                f"{row['evidence']:.3f}",
                f"{row['parameters']:,}",
                f"{row['seconds']:.0f}",
            )
            for row in summary["rows"]
            if row["task"] == task
        ]
        print_table(f"Task: {task.replace('+', ' and ')}", columns, rows)
    for task, symmetry in summary["symmetry"].items():
        show_symmetry(task, symmetry)
    for c in summary["comparison"]:
        verdict = "within two standard errors of it, or above" if c["within_two_standard_errors_or_above"] else "below it"
        print(
            f"{c['task']}: learned with evidence against the better fixed model, {c['best_fixed']}: "
            f"{c['difference']:+.1f} ± {c['standard_error']:.1f} points (paired), {verdict}."
        )


def figure(result: Mapping[str, Any], path: Path) -> None:
    """Accuracy of every model on both tasks, and the symmetry the learned one found."""
    shown = [("fc", "map"), ("conv", "map"), ("f-fc+conv", "map"), LEARNED]
    names = ["dense", "convolution", "learned,\nno evidence", "learned,\nevidence"]
    colours = [COLOURS["fc"], COLOURS["conv"], "#999999", OTHER_SYMMETRIC]
    figure = new_figure(13, 3.8)
    axes = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    rows = {(row["task"], row["model"], row["method"]): row for row in result["rows"]}
    for place, (cell, name, colour) in enumerate(zip(shown, names, colours, strict=True)):
        for group, task in enumerate(TASKS):
            row = rows[task, *cell]
            at = group + 0.2 * (place - 1.5)
            axes[0].bar(at, row["accuracy"], 0.18, yerr=row["standard_error"], color=colour, label=None if group else name)
            axes[0].text(at, row["accuracy"] + 3, f"{row['accuracy']:.0f}", ha="center", fontsize=9)
    axes[0].set_xticks([0, 1], ["which digit?", "which digit, in which quadrant?"])
    axes[0].set_ylim(0, 119)
    axes[0].set_yticks(range(0, 101, 25))
    axes[0].set_ylabel("test accuracy (%)")
    axes[0].legend(ncols=4, loc="upper center", frameon=False, fontsize=8, columnspacing=1, handlelength=1.2)
    open_frame(axes[0])
    titles = ("Learned for “which digit?”", "Learned for “digit, quadrant”")
    for axis, symmetry, title in zip(axes[1:], result["symmetry"].values(), titles, strict=True):
        draw_shares(axis, symmetry, title)
    axes[2].set_ylabel("")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False, fontsize=9)
    save_figure(figure, path, 120)
