"""One run of any experiment: build, fit, measure, write."""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosym import findings
from autosym.averaging import described
from autosym.batching import Augment
from autosym.predictive import calibration_error
from autosym.provenance import provenance
from autosym.training import Schedule, Step, fit

METHODS: dict[str, Step] = {"map": "none", "evidence": "mackay"}


def train_and_measure(
    build: Callable[[], nn.Module],
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    schedule: Schedule,
    run: Any,
    progress: bool = False,
    out: Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    augment: Augment | None = None,
) -> dict[str, Any]:
    """Fit a network made after seeding; on a CPU with one thread: the numbers do not depend on the number of cores.

    ``run`` is a frozen dataclass with name, task, model, method, epochs and seed; it is written beside the result. ``out`` is the
    folder of the run's history, checkpoint, and report.json: what a report needs beyond the result.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device == "cpu" else threads)
    start = time.perf_counter()
    try:
        torch.manual_seed(run.seed)
        net = build().to(device)
        fitted = fit(
            net,
            train,
            augment=augment,
            schedule=schedule,
            seed=run.seed,
            progress=progress,
            history=out and out / "history.jsonl",
            checkpoint=out and out / "checkpoint.safetensors",
            checkpoint_seconds=10,
            resume=resume,
        )
        x, y = test
        with torch.no_grad():
            logits = torch.cat([net(part.to(device)).cpu() for part in x.split(1000)])
        seconds = time.perf_counter() - start
        if out is not None:
            write(
                findings.contents(fitted, test, title=run.name) | {"command": _command(run)}, out / "report.json", indent=None
            )
    finally:
        torch.set_num_threads(threads)
    predicted = logits.argmax(1)
    correct = (predicted == y).double()
    return {
        "row": {
            "task": run.task,
            "model": run.model,
            "method": run.method,
            "accuracy": 100 * correct.mean().item(),
            "standard_error": 100 * correct.std().item() / math.sqrt(len(y)),
            "nll": F.cross_entropy(logits, y).item(),
            "calibration_error": calibration_error(logits.softmax(1), y),
            "evidence": fitted.evidence.log_evidence.item() / len(train[0]),
            "parameters": sum(p.numel() for p in net.parameters()),
            "seconds": seconds,
            "evidence_seconds": _evidence_seconds(fitted.history),
        },
        "config": asdict(run),
        "symmetry": fitted.symmetry().as_dicts(),
        "ranges": described(net),
        "schedule": findings.settings(schedule),
        "correct": correct.int().tolist(),
        "predicted": predicted.tolist(),
        "provenance": provenance(device),
    }


def _command(run: Any) -> str:
    """What repeats a run with the experiment's other settings, which stand beside it."""
    samples = getattr(run, "samples", None)
    part = "" if samples is None else f" --samples {samples}"
    return f"autosym run {run.name} --seed {run.seed} --epochs {run.epochs}{part}"


def _evidence_seconds(history: Sequence[Mapping[str, Any]]) -> float | None:
    """The time that epochs with an evidence step took beyond the others, which have but weight steps."""
    times = [later["seconds"] - earlier["seconds"] for earlier, later in pairwise([{"seconds": 0.0}, *history])]
    plain = [t for t, line in zip(times, history, strict=True) if "log_evidence" not in line]
    if not plain:
        return None
    return sum(t - statistics.median(plain) for t, line in zip(times, history, strict=True) if "log_evidence" in line)


def write(result: Mapping[str, Any], path: Path, indent: int | None = 1) -> None:
    """A result as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=indent, allow_nan=False) + "\n")
    temporary.replace(path)
