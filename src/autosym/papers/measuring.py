"""One run of any experiment: build, fit, measure, write."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autosym.evidence.predictive import Scores, scores
from autosym.nn.symmetrised import described
from autosym.report import findings
from autosym.runtime import files, processes
from autosym.runtime.arithmetic import one_thread
from autosym.runtime.batching import Augment, Data
from autosym.runtime.provenance import provenance
from autosym.training.fitted import Fit
from autosym.training.fitting import fit
from autosym.training.schedule import Schedule, Step

CHECKPOINT = "checkpoint.safetensors"
METHODS: dict[str, Step] = {"map": "none", "evidence": "mackay"}


def check_results(rows: Sequence[Mapping[str, Any]], folder: Path, table: str) -> None:
    """Refuse a table without any result of ours: it would show only dashes beside the paper's numbers."""
    if all(row.get(key) is None for row in rows for key in ("accuracy", "negative_elbo")):
        raise FileNotFoundError(
            f"{folder.resolve() / table} holds no result of this table: a checkout of the repository has them in results/, but the "
            f"installed package does not; pass that folder by --results FOLDER, or make results by `autosym run {table} --all`"
        )


@dataclass(frozen=True)
class Run:
    """The settings that every run has. An experiment adds the others that it varies."""

    task: str
    model: str
    method: str = "evidence"
    seed: int = 0
    epochs: int = 100
    lr: float = 0.05

    @property
    def name(self) -> str:
        """Its name on the command line."""
        raise NotImplementedError


def train_and_measure(
    build: Callable[[], nn.Module],
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    schedule: Schedule,
    run: Run,
    progress: bool | str = False,
    out: Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    augment: Augment | None = None,
    memory: float | None = None,
) -> dict[str, Any]:
    """Seed, build a network in the precision of the inputs, fit it, and measure it.

    A CPU uses one thread, so that results do not depend on the number of cores. ``run`` is written beside the result. ``out`` is the
    folder for the history, the checkpoint and report.json, which holds what a report needs beyond the result.
    """
    seen = [time.perf_counter()]  # when the last epoch ended
    with one_thread(device == "cpu"):
        torch.manual_seed(run.seed)
        net = build().to(device, train[0].dtype)
        options: dict[str, Any] = {"augment": augment, "memory": memory, "progress": progress}
        options["log"] = lambda line: seen.append(time.perf_counter())
        fitted = fit_in(out, net, train, schedule, run.seed, resume, **options)
        logits = outputs_of(net, test[0])
        seconds = fitted.history[-1]["seconds"] + time.perf_counter() - seen[-1]
        if out is not None:
            contents = findings.contents(fitted, test, title=run.name, measured_on="held out")
            write(contents | {"command": _command(run)}, out / "report.json", indent=None)
    symmetry, predicted = fitted.symmetry(), logits.argmax(1)
    return {
        "row": {
            **cell_of(run),
            **in_percent(scores(logits, test[1])),
            "evidence": fitted.evidence.log_evidence.item() / len(train[0]),
            "parameters": sum(p.numel() for p in net.parameters()),
            "seconds": seconds,
            "evidence_seconds": _evidence_seconds(fitted.history),
        },
        "config": asdict(run),
        "symmetry": symmetry.as_dicts(),
        "cautions": list(map(str, symmetry.cautions)),
        "ranges": described(net),
        "schedule": findings.settings(schedule),
        "correct": (predicted == test[1]).int().tolist(),
        "predicted": predicted.tolist(),
        "provenance": provenance(device),
    }


def fit_in(out: Path | None, net: nn.Module, train: Data, schedule: Schedule, seed: int, resume: bool, **options: Any) -> Fit:
    """``fit``, with its history and checkpoint in the folder ``out``. Removes results of an earlier run, unless it is resumed."""
    kept: dict[str, Any] = {}
    if out is not None:
        if not (resume and (out / CHECKPOINT).exists()):
            for name in ("result.json", "report.json", "report.html", "fit.safetensors"):
                (out / name).unlink(missing_ok=True)
        kept = {"history": out / "history.jsonl", "checkpoint": out / CHECKPOINT, "checkpoint_seconds": 10}
    return fit(net, train, schedule=schedule, seed=seed, resume=resume, **kept, **options)


@torch.no_grad()
def outputs_of(net: nn.Module, x: Tensor) -> Tensor:
    """The outputs for all of x, on the CPU."""
    device = next(net.parameters()).device
    return torch.cat([net(part.to(device)).cpu() for part in x.split(1000)])


def cell_of(run: Any) -> dict[str, str]:
    """The first entries of a row of results."""
    return {"task": run.task, "model": run.model, "method": run.method}


def in_percent(found: Scores) -> dict[str, float]:
    """Scores as in rows of results: accuracy and its standard error in percent."""
    return asdict(found) | {"accuracy": 100 * found.accuracy, "standard_error": 100 * found.standard_error}


def _command(run: Run) -> str:
    """The command that repeats a run; the experiment's other settings are written beside it."""
    samples = getattr(run, "samples", None)
    part = "" if samples is None else f" --samples {samples}"
    return f"autosym run {run.name} --seed {run.seed} --epochs {run.epochs}{part}"


def _evidence_seconds(history: Sequence[Mapping[str, Any]]) -> float | None:
    """The extra time of epochs with an evidence step, compared with epochs of weight steps only."""
    times = [later["seconds"] - earlier["seconds"] for earlier, later in pairwise([{"seconds": 0.0}, *history])]
    plain = [t for t, line in zip(times, history, strict=True) if "log_evidence" not in line]
    if not plain:
        return None
    return sum(t - statistics.median(plain) for t, line in zip(times, history, strict=True) if "log_evidence" in line)


def write(result: Mapping[str, Any], path: Path, indent: int | None = 1) -> None:
    """Write a result as JSON, whole or not at all; if there are several processes, only the first writes."""
    if processes.first():
        files.write(path, json.dumps(result, indent=indent, allow_nan=False) + "\n")
