"""Tables 1 to 3 of Learning Invariant Weights, with a Laplace row for each: how much of a transformation do images tolerate?

    invariance-1    random Fourier features on MNIST turned by +-180, +-90, 0 degrees: fixed ranges, ranges learned from several
                    starts (Fig. 2), and point estimates, also with a hidden layer of ReLU (Fig. 5)
    invariance-2    a hidden layer of ReLU on MNIST that is rotated, translated, scaled, or regular, with each transformation
    invariance-3    the same on CIFAR-10

The published runs are variational in the last layer (``papers.last_layer``), with transformed weights. Laplace runs train a small
convolutional network by ``fit``, averaged over transformations of its input.
"""

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosym.evidence.predictive import calibration_error
from autosym.nn.symmetrised import described, symmetrise
from autosym.papers import datasets, last_layer, learned_ranges, measuring
from autosym.papers.images import RESULTS, file_of, keep, stored
from autosym.papers.last_layer import RandomFeatures, ReluFeatures
from autosym.papers.measuring import cell_of, train_and_measure
from autosym.report import findings, run_files
from autosym.report.drawing import print_table
from autosym.runtime.provenance import provenance
from autosym.training.schedule import Schedule

Pair = tuple[Tensor, Tensor]
FEATURES, FREQUENCY, COPIES = 1024, 0.3, 32  # the paper's
COPIES_LAPLACE = {1: 31, 3: 20}  # by channels, of MNIST and of CIFAR-10
# The initial prior precision, by channels, is near its learned value. On MNIST, learning it from 1 takes long. On CIFAR-10, |phi|^2 of
# ReLU is 17 times as large: starting at 0.02, outputs are wild for epochs, and widths grow until nothing can be recognised.
PRECISION = {1: 0.02, 3: 1.0}
MEMORY = 6.0  # GiB of an evidence step: several runs share a GPU


@dataclass(frozen=True, kw_only=True)
class Run(measuring.Run):
    """One cell: features on a variant of a dataset, with initial widths in radians, half sides or log factors."""

    table: str
    method: str = "elbo"  # or "point-estimate", or "laplace"
    network: str = "relu"  # or "rff", random Fourier features; Laplace runs are convolutional
    symmetry: str = ""  # none if empty, or the name of a transformation or of a set of them
    start: float = 0.1
    learn: bool = True
    epochs: int = 40
    batch_size: int = 6000  # for random features: q converges faster with larger batches
    lr: float = 1e-3
    range_lr: float = 0.35
    samples: int | None = None  # of the training set; all by default

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return f"{self.table}/{self.task}/{self.model}"

    file = property(file_of)


ANGLES = (5, 45, 90, 135, 175)
TURNED = ("full", "half", "regular")
CHANGED = ("rotated", "translated", "scaled", "regular")
TABLES = ("invariance-1", "invariance-2", "invariance-3")


LAPLACE: dict[str, Any] = {"method": "laplace", "epochs": 20, "batch_size": 256, "lr": 0.05, "range_lr": 0.25}

TRAINED: dict[str, Any] = {"epochs": 25, "batch_size": 500, "lr": 3e-3}  # on MNIST, if the hidden layer is trained too
CIFAR_LR = 3e-4  # a step of Adam moves an output by lr sum |x|, which is much larger for normalised colours than for digits
LEARNED: dict[str, Any] = {**TRAINED, "start": 0.2, "range_lr": 0.5}  # learns widths before the hidden layer moves much
POINT: dict[str, Any] = {"method": "point-estimate", "start": math.radians(5)}


def _first() -> list[Run]:
    """The runs, the most important first: if they are stopped early, the learned ranges exist."""
    cell = partial(Run, table="invariance-1", symmetry="rotation", network="rff")
    models: list[dict[str, Any]] = [
        {"model": "learned", "start": math.radians(5)},
        {"model": "point-estimate", **POINT, "lr": 0.05},
        {"model": "point-estimate-relu", **POINT, **TRAINED, "network": "relu"},
        *({"model": f"fixed-{a}", "start": math.radians(a), "learn": False} for a in ANGLES),
        *({"model": f"learned-from-{a}", "start": math.radians(a)} for a in ANGLES[1:]),
        {"model": "laplace", "start": 0.5, **LAPLACE},
    ]
    return [cell(task=task, **model) for model in models for task in TURNED]


def _others(table: str, laplace: bool) -> list[Run]:
    learned = ("affine", "rotation", "translation", "scale")
    models: list[dict[str, Any]] = (
        [{"model": "laplace+affine", "symmetry": "affine", **LAPLACE}]
        if laplace
        else [*({"model": f"mlp+{name}", "symmetry": name, **LEARNED} for name in learned), {"model": "mlp", **TRAINED}]
    )
    if table == "invariance-3" and not laplace:
        models = [model | {"lr": CIFAR_LR} for model in models]
    return [Run(task, table=table, **model) for model in models for task in CHANGED]


RUNS = {
    run.name: run
    for run in (*_first(), *(run for laplace in (False, True) for table in TABLES[1:] for run in _others(table, laplace)))
}

PAPER: dict[str, dict[str, tuple[float, ...]]] = {
    "invariance-1": {
        "fixed-5": (79.29, 86.71, 96.00),
        "fixed-45": (87.35, 91.13, 95.93),
        "fixed-90": (90.33, 91.69, 94.69),
        "fixed-135": (91.19, 91.04, 92.13),
        "fixed-175": (91.57, 90.47, 90.97),
        "learned": (91.72, 92.34, 96.40),
    },
    "invariance-2": {
        "mlp": (90.35, 89.34, 96.61, 98.10),
        "mlp+rotation": (98.05, 94.08, 97.62, 98.64),
        "mlp+translation": (93.59, 97.87, 97.98, 98.76),
        "mlp+scale": (93.80, 94.30, 98.06, 98.35),
        "mlp+affine": (98.14, 97.66, 98.31, 98.93),
    },
    "invariance-3": {
        "mlp": (41.24, 40.75, 46.56, 54.49),
        "mlp+rotation": (46.04, 40.71, 46.77, 54.72),
        "mlp+translation": (40.99, 45.20, 47.44, 55.79),
        "mlp+scale": (40.92, 41.22, 49.28, 54.72),
        "mlp+affine": (46.12, 45.77, 48.81, 55.44),
    },
}
PAPER_ELBO = {  # of table 1, per sample
    "fixed-5": (-1.07, -0.80, -0.36),
    "fixed-45": (-0.63, -0.49, -0.26),
    "fixed-90": (-0.52, -0.44, -0.30),
    "fixed-135": (-0.45, -0.45, -0.36),
    "fixed-175": (-0.43, -0.47, -0.45),
    "learned": (-0.43, -0.42, -0.26),
}


def tensors(run: Run, folder: Path | None) -> tuple[Pair, Pair]:
    """Training and test pairs: MNIST in [0, 1], CIFAR-10 normalised, so that 0 is the background; each part changed by its own draws."""
    (x, y), test = _variant(run.table == "invariance-3", run.task, run.seed, folder)
    return (x[: run.samples], y[: run.samples]), test


@lru_cache(4)  # all variants of one dataset: many runs in one process read and change images once
def _variant(cifar: bool, task: str, seed: int, folder: Path | None) -> tuple[Pair, Pair]:
    parts = []
    for part, (images, labels) in enumerate(datasets.cifar10(folder) if cifar else datasets.mnist(folder)):
        x = datasets.as_floats(images)
        x = datasets.normalised(x, *datasets.CIFAR10) if cifar else x
        parts.append((datasets.CHANGES[task](x, 2 * seed + part), labels))
    return parts[0], parts[1]


def features(run: Run, shape: Sequence[int]) -> nn.Module:
    """phi of a run: random Fourier features or a hidden layer, with its weights averaged over transformations if it has any."""
    inputs = math.prod(shape)
    rff = run.network == "rff"
    inner = RandomFeatures(inputs, FEATURES, FREQUENCY, run.seed) if rff else ReluFeatures(inputs, FEATURES)
    if not run.symmetry:
        return inner
    return symmetrise(inner, {run.symmetry: run.start}, COPIES, "weights", learn=run.learn)


def convolutional(run: Run, shape: Sequence[int]) -> nn.Module:
    """A small tanh network of two convolutions and two dense layers, averaged over transformations of its input."""
    channels, height, width = shape
    flat = 32 * math.ceil(height / 4) * math.ceil(width / 4)
    net = nn.Sequential(
        *(nn.Conv2d(channels, 16, 5, stride=2, padding=2), nn.Tanh()),
        *(nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(flat, 64), nn.Tanh(), nn.Linear(64, 10)),
    )
    return symmetrise(net, {run.symmetry: run.start}, COPIES_LAPLACE[channels], learn=run.learn)


def execute(
    run: Run,
    progress: bool = False,
    out: Path | None = None,
    resume: bool = False,
    data_dir: Path | None = None,
    results: Path = RESULTS,
) -> dict[str, Any]:
    """Train and measure one cell, on a GPU if there is one; keep its result and the labels it predicts in ``results``.

    ``resume`` returns the result of a finished run. An unfinished Laplace run continues from its checkpoint. An unfinished variational
    run starts anew and says so: it takes seconds, so it keeps no checkpoint.
    """
    if resume and (found := _finished(run, results)) is not None:
        return found
    train, test = tensors(run, data_dir)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if run.method == "laplace":
        schedule = Schedule(
            run.epochs,
            run.batch_size,
            lr=run.lr,
            every=1,
            burn_in=1,
            hyper_lr=run.range_lr,
            subset=min(len(train[0]), 10_000),
            sampled_end=True,
        )
        build = partial(convolutional, run, train[0].shape[1:])
        result = train_and_measure(build, train, test, schedule, run, progress, out, resume, device, memory=MEMORY)
    else:
        if resume and progress:
            print(f"{run.name} keeps no checkpoint: it starts anew", file=sys.stderr, flush=True)
        result = _variational(run, train, test, device, progress)
    keep(result, results / run.file)
    return result


def _finished(run: Run, results: Path) -> dict[str, Any] | None:
    """The result of a run with the same settings, if there is one."""
    file = (results / run.file).with_name(f"{run.file.name}.json")
    found = run_files.read(file) if file.exists() else {}
    return found if found.get("config") == asdict(run) else None


def _variational(run: Run, train: Pair, test: Pair, device: str, progress: bool) -> dict[str, Any]:
    start = time.perf_counter()
    torch.manual_seed(run.seed)
    phi = features(run, train[0].shape[1:]).to(device)

    def say(line: dict[str, Any]) -> None:
        if progress and line["epoch"] % max(1, run.epochs // 20) == 0:
            found = ", ".join(f"{name} {value:.3g}" for name, value in line["ranges"].items())
            bound = line["bound"] / len(train[0])
            print(f"epoch {line['epoch']}/{run.epochs}  bound per sample {bound:.3f}  {found}", file=sys.stderr, flush=True)

    pair = train[0].to(device), train[1].to(device)
    fitted = last_layer.learn(
        phi,
        pair,
        10,
        epochs=run.epochs,
        batch_size=run.batch_size,
        lr=run.lr,
        range_lr=run.range_lr,
        precision=PRECISION[train[0].shape[1]],
        point_estimate=run.method == "point-estimate",
        seed=run.seed,
        log=say,
    )
    logits = torch.cat([fitted(part.to(device)).cpu() for part in test[0].split(500)])
    predicted, y = logits.argmax(1), test[1]
    correct = (predicted == y).double()
    return {
        "row": {
            **cell_of(run),
            "accuracy": 100 * correct.mean().item(),
            "standard_error": 100 * correct.std().item() / math.sqrt(len(y)),
            "nll": F.cross_entropy(logits, y).item(),
            "calibration_error": calibration_error(logits.softmax(1), y),
            "evidence": None if fitted.evidence is None else fitted.evidence.log_evidence.item() / len(train[0]),
            "parameters": sum(p.numel() for p in (*phi.parameters(), *fitted.head.parameters())),
            "seconds": time.perf_counter() - start,
        },
        "config": asdict(run),
        "symmetry": [],
        "ranges": described(phi),
        "filter_banks": [learned_ranges.packed(bank) for bank in findings.banks(phi)],
        "history": fitted.history,
        "correct": correct.int().tolist(),
        "predicted": predicted.tolist(),
        "provenance": provenance(device),
    }


def rows(table: str, results: Path = RESULTS) -> list[dict[str, Any]]:
    """One row for every cell: means over the seeds that were run, the first seed's ranges, the paper's numbers; None if missing."""
    found = stored(table, results, Run)
    tasks = TURNED if table == "invariance-1" else CHANGED
    return [_row(run, found.get(name, []), tasks.index(run.task)) for name, run in RUNS.items() if run.table == table]


def _row(run: Run, several: Sequence[Mapping[str, Any]], place: int) -> dict[str, Any]:
    cells = [result["row"] for result in several]
    accuracy, elbo = PAPER[run.table].get(run.model), PAPER_ELBO.get(run.model)
    ranges = several[0]["ranges"] if several else ()
    return {
        "name": run.name,
        "task": run.task,
        "model": run.model,
        **{k: statistics.fmean(c[k] for c in cells) if cells else None for k in ("accuracy", "nll", "seconds")},
        "evidence": statistics.fmean(c["evidence"] for c in cells) if cells and run.method != "point-estimate" else None,
        "seeds": [result["config"]["seed"] for result in several],
        "ranges": {r["name"]: {"value": r["value"], "unit": r["unit"]} for r in ranges} if several else None,
        "paper_accuracy": accuracy[place] if accuracy else None,
        "paper_evidence": elbo[place] if elbo and run.table == "invariance-1" else None,
    }


SHORT = {"degrees": "°", "pixels": " px", "factor": "x"}  # of units


def show(table: str, cells: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows; a dash if not run or not published."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    def learned(cell: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} {r['value']:.3g}{SHORT[r['unit']]}" for name, r in (cell["ranges"] or {}).items()) or "-"

    lines = [
        (
            f"{c['task']}: {c['model']}",
            number(c["accuracy"], 2),
            number(c["paper_accuracy"], 2),
            number(c["evidence"], 3),
            number(c["paper_evidence"], 2),
            learned(c),
            number(c["seconds"], 0),
        )
        for c in cells
    ]
    columns = ("run", "accuracy (%)", "paper", "evidence/N", "paper ", "range", "seconds")
    tasks = " Digits are turned by up to 180 (full), 90 (half) and 0 (regular) degrees." if table == "invariance-1" else ""
    print_table(f"{table}: ours and the paper's (- is not run, or not published).{tasks}", columns, lines)


def figure(table: str, path: Path, results: Path = RESULTS) -> None:
    """Learned ranges over training for each task and start (Figs. 2 and 5), and filter banks (Figs. 3, 4, 6)."""
    found = [several[0] for several in stored(table, results, Run).values() if several[0].get("history")]
    found = [result for result in found if result["config"]["learn"] and result["ranges"]]
    if not found:
        raise FileNotFoundError(f"{results / table} holds no run with learned ranges: run one first")
    learned_ranges.draw(found, path)
