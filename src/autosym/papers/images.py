"""What the published tables share: dataset variants, a run, its result on disk, and the rows of a table."""

import io
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autosym.nn import nets
from autosym.papers import datasets, measuring
from autosym.papers.measuring import METHODS, train_and_measure, write
from autosym.report import run_files
from autosym.report.drawing import draw_precisions, draw_shares, new_figure, print_table, save_figure
from autosym.runtime import files, processes
from autosym.training.schedule import Schedule

Pair = tuple[Tensor, Tensor]
RESULTS = Path("results")
CLOSE = 0.5  # points of accuracy that a cell may be below the paper


def file_of(run: Any) -> Path:
    """Path of a cell's result, without suffix: letters, digits, '.', '_' and '-' only."""
    part = "" if run.samples is None else f"-samples{run.samples}"
    stem = f"{run.name.removeprefix(run.table + '/')}{part}-seed{run.seed}"
    return Path(run.table) / "".join(c if c.isalnum() or c in ".-_" else "_" for c in stem)


@dataclass(frozen=True, kw_only=True)
class Run(measuring.Run):
    """One cell of a table: a network on a dataset variant, by MAP or evidence. Width, batch and priors are the paper's."""

    table: str
    prior: str = "theta"
    trust: float = 2.0
    every: int | None = None
    batch_size: int = 128
    width: int = 10
    samples: int | None = None  # of the training set; all by default
    start: float = 1.0  # as in ``nets.build``; in Tables 1 and 2 all paths start alike

    @property
    def name(self) -> str:
        """Its name on the command line."""
        model = [] if self.table == "table3" else [self.model]  # table 3 has one model,
        task = [] if self.table == "table2" else [self.task]  # table 2 has one task
        prior = [] if self.prior == "theta" else [self.prior]
        return "/".join([self.table, *task, *model, *prior, self.method])

    file = property(file_of)


def tensors(run: Run, folder: Path | None) -> tuple[Pair, Pair, int]:
    """Training and test pairs, normalised, and the number of classes; each part has its own random transformations."""
    return DATASETS[run.task](folder, 2 * run.seed)


def _quadrants(folder: Path | None, seed: int, with_quadrant: bool) -> tuple[Pair, Pair, int]:
    parts = []
    for part, (images, labels) in enumerate(datasets.mnist(folder)):
        x, quadrant = datasets.quadrants(datasets.as_floats(images), seed + part)
        parts.append((datasets.normalised(x, *datasets.MNIST), labels + (10 * quadrant if with_quadrant else 0)))
    return parts[0], parts[1], 40 if with_quadrant else 10


def _mnist(folder: Path | None, seed: int, change: str) -> tuple[Pair, Pair, int]:
    parts = []
    for part, (images, labels) in enumerate(datasets.mnist(folder)):
        x = datasets.resized(datasets.as_floats(images))
        parts.append((datasets.normalised(datasets.CHANGES[change](x, seed + part), *datasets.MNIST), labels))
    return parts[0], parts[1], 10


def _cifar10(folder: Path | None, seed: int, change: str) -> tuple[Pair, Pair, int]:
    parts = []
    for part, (images, labels) in enumerate(datasets.cifar10(folder)):
        x = datasets.CHANGES[change](datasets.as_floats(images), seed + part)
        parts.append((datasets.normalised(x, *datasets.CIFAR10), labels))
    return parts[0], parts[1], 10


DATASETS = {
    "digit": partial(_quadrants, with_quadrant=False),
    "digit+quadrant": partial(_quadrants, with_quadrant=True),
    "mnist": partial(_mnist, change="regular"),
    "translated-mnist": partial(_mnist, change="translated"),
    "rotated-mnist": partial(_mnist, change="rotated"),
    "cifar-10": partial(_cifar10, change="regular"),
    "rotated-cifar-10": partial(_cifar10, change="rotated"),
}


def execute(
    run: Run,
    progress: bool = False,
    out: Path | None = None,
    resume: bool = False,
    data_dir: Path | None = None,
    results: Path = RESULTS,
) -> dict[str, Any]:
    """Train and measure one cell, on a GPU if there is one; keep its result and the labels it predicts in ``results``."""
    train, test, classes = tensors(run, data_dir)
    if run.samples is not None:
        train = train[0][: run.samples], train[1][: run.samples]
    build = partial(
        nets.build,
        run.model,
        train[0].shape[1:],
        classes,
        run.width,
        prior="omega" if run.prior == "omega" else "u",
        start=run.start,
    )
    schedule = Schedule(
        epochs=run.epochs, batch_size=run.batch_size, lr=run.lr, trust=run.trust, every=run.every, step=METHODS[run.method]
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    augment = datasets.flip_and_crop if "cifar" in run.task else None
    result = train_and_measure(build, train, test, schedule, run, progress, out, resume, device, augment)
    keep(result, results / run.file)
    return result


def keep(result: dict[str, Any], file: Path) -> None:
    """Write a result to ``file``.json; move its predicted labels out of it to ``file``.npy.

    A shorter run does not replace the result of a longer one: a short trial could delete hours of work.
    """
    predicted = [result.pop(key) for key in ("correct", "predicted")][1]
    kept = file.with_name(f"{file.name}.json")
    if not processes.first():
        return
    if kept.exists() and run_files.read(kept)["config"]["epochs"] > result["config"]["epochs"]:
        warnings.warn(f"{kept} is of a longer run, and is not replaced: this result is in the folder of its run", stacklevel=2)
        return
    np.save(labels := io.BytesIO(), np.asarray(predicted, dtype=np.uint8))
    files.write(file.with_name(f"{file.name}.npy"), labels.getvalue())
    write(result, kept)


def rows(
    table: str, runs: Mapping[str, Run], paper: Mapping[tuple[str, ...], Mapping[str, Any]], results: Path = RESULTS
) -> list[dict[str, Any]]:
    """One row for every cell of a table: means over the seeds that were run, the paper's numbers, None if missing.

    Parameters, epochs and device come from the first seed.
    """
    found = stored(table, results, Run)
    return [
        _row(run, found.get(name, []), paper.get((run.task, run.model, run.prior, run.method), {}))
        for name, run in runs.items()
    ]


def stored(table: str, results: Path, kind: Callable[..., Any]) -> dict[str, list[dict[str, Any]]]:
    """The results of a table by run name, sorted by seed; ``kind`` is the class of a run."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((results / table).glob("*.json")):
        result = run_files.read(path)
        with run_files.of_this_version(path):
            if result["config"]["samples"] is None:  # a run on a part of the data is a trial, not a cell
                found.setdefault(kind(**result["config"]).name, []).append(result)
    return {name: sorted(several, key=lambda result: result["config"]["seed"]) for name, several in found.items()}


def figure(table: str, runs: Mapping[str, Run], path: Path, results: Path = RESULTS) -> None:
    """Shares and precisions by layer, for every network with several kinds of path trained by evidence (first seed)."""
    found = stored(table, results, Run)
    first = [found[name][0] for name, run in runs.items() if name in found and run.method == "evidence"]
    learned = [result for result in first if len({p["path"] for p in result["symmetry"]}) > 1]
    if not learned:
        raise FileNotFoundError(f"{results / table} holds no network with a choice that was trained by evidence: run one first")
    bands = math.ceil(len(learned) / 3)  # rows of two or three networks, so that they fit on a page
    columns = math.ceil(len(learned) / bands)
    figure = new_figure(6 * columns, 7.5 * bands)
    axes = figure.subplots(2 * bands, columns, squeeze=False)
    pairs = [axes[2 * band : 2 * band + 2, column] for band in range(bands) for column in range(columns)]
    for axis in (axis for pair in pairs[len(learned) :] for axis in pair):
        axis.axis("off")
    for (above, below), result in zip(pairs, learned, strict=False):
        run, accuracy = result["config"], result["row"]["accuracy"]
        prior = {"theta": "", "u": ", prior on u", "omega": ", prior on omega"}[run["prior"]]
        title = f"{run['task'].replace('+', ' and ')}: {run['model']}{prior}, {accuracy:.1f} %"
        draw_shares(above, result["symmetry"], title)
        draw_precisions(below, result["symmetry"], "")
    legend = {label: bar for axis in axes[::2].flat for bar, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, path)


def _row(run: Run, results: Sequence[dict], paper: Mapping[str, Any]) -> dict[str, Any]:
    cells = [result["row"] for result in results]
    mean = {
        key: statistics.fmean(cell[key] for cell in cells) if cells else None
        for key in ("accuracy", "nll", "evidence", "seconds")
    }
    accuracies = [cell["accuracy"] for cell in cells]
    return {
        "name": run.name,
        "task": run.task,
        "dataset": run.task,
        "model": run.model,
        "prior": run.prior,
        "method": run.method,
        **mean,
        "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "seeds": [result["config"]["seed"] for result in results],
        "parameters": cells[0]["parameters"] if cells else None,
        "epochs": results[0]["config"]["epochs"] if results else None,
        "device": results[0]["provenance"]["device"] if results else None,
        "shares": mean_shares([path for result in results for path in result["symmetry"]]) if results else None,
        **{f"paper_{key}": paper.get(key) for key in ("accuracy", "nll", "evidence", "shares")},
    }


def show(number: str, found: Sequence[Mapping[str, Any]]) -> None:
    """Our numbers beside the paper's; a dash if not run."""

    def cell(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    def percent(shares: Mapping[str, float] | None, path: str) -> float | None:
        return None if shares is None else 100 * shares[path]

    shown = []
    for row in found:
        spread = "" if row["spread"] is None else f" ± {row['spread']:.2f}"
        shown.append(
            {
                "data": row["task"],
                "model": row["model"],
                "prior": row["prior"],
                "by": row["method"],
                "accuracy (%)": cell(row["accuracy"], 2) + spread,
                "paper": cell(row["paper_accuracy"], 2),
                "NLL": cell(row["nll"], 3),
                "paper ": cell(row["paper_nll"], 3),
                "evidence/N": cell(row["evidence"], 3),
                "paper  ": cell(row["paper_evidence"], 3),
                "epochs": cell(row["epochs"], 0),
                "seconds": cell(row["seconds"], 0),
            }
        )
    wanted = [c for c in shown[0] if not c.startswith("paper ") or any(row[c] != "-" for row in shown)]
    wanted = [c for c in wanted if c not in ("data", "model", "prior") or len({row[c] for row in shown}) > 1]
    lines = [[row[c] for c in wanted] for row in shown]
    print_table(f"Table {number}: ours and the paper's (- is not run, or not published)", wanted, lines)
    for row in found:
        if row["accuracy"] is not None and row["accuracy"] < (row["paper_accuracy"] or -math.inf) - CLOSE:
            what = " ".join(row[key] for c, key in (("data", "task"), ("model", "model"), ("prior", "prior")) if c in wanted)
            print(
                f"{what} by {row['method']}: {row['paper_accuracy'] - row['accuracy']:.1f} points below the paper, after "
                f"{row['epochs']} of its {'4,000' if 'cifar' in row['task'] else '1,000'} epochs"
            )
    chosen = [row for row in found if row["paper_shares"]]
    if chosen:
        paths = list(chosen[0]["paper_shares"])
        lines = [
            [row["task"], *(cell(percent(row[key], p), 0) for p in paths for key in ("shares", "paper_shares"))]
            for row in chosen
        ]
        title = "Learned by evidence: share of each path in the effective parameters of a layer, mean over layers (%)"
        print_table(title, ["data", *(column for p in paths for column in (p, "paper"))], lines)


def mean_shares(symmetry: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The share of each path, averaged over layers (of all networks, if there are several)."""
    shares: dict[str, list[float]] = {}
    for path in symmetry:
        shares.setdefault(path["path"], []).append(path["share"] or 0.0)
    return {path: statistics.fmean(values) for path, values in shares.items()}
