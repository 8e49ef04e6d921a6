"""One run of any experiment: build, fit, measure, write."""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosym.experiments.provenance import provenance
from autosym.predictive import calibration_error
from autosym.training import Schedule, fit


def train_and_measure(
    build: Callable[[], nn.Module],
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    schedule: Schedule,
    run: Any,
    progress: bool = False,
    out: Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Fit a network made after seeding, on one thread: the numbers do not depend on the number of cores.

    ``run`` is a frozen dataclass with task, model, method and seed; it is written beside the result. ``out`` is the folder of the run's
    history and checkpoint.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start = time.perf_counter()
    try:
        torch.manual_seed(run.seed)
        net = build()
        fitted = fit(
            net,
            train,
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
            logits = net(x)
    finally:
        torch.set_num_threads(threads)
    correct = (logits.argmax(1) == y).double()
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
            "seconds": time.perf_counter() - start,
        },
        "config": asdict(run),
        "symmetry": fitted.symmetry().as_dicts(),
        "correct": correct.int().tolist(),
        "provenance": provenance(),
    }


def write(result: Mapping[str, Any], path: Path) -> None:
    """A result as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n")
    temporary.replace(path)
