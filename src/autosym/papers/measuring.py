"""One run of any experiment: build, fit, measure, write."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autosym.evidence.predictive import Scores, scores
from autosym.nn.symmetrised import described
from autosym.report import findings
from autosym.runtime import files, processes
from autosym.runtime.batching import Augment
from autosym.runtime.provenance import provenance
from autosym.training.fitting import fit
from autosym.training.schedule import Schedule, Step

CHECKPOINT = "checkpoint.safetensors"
METHODS: dict[str, Step] = {"map": "none", "evidence": "mackay"}


def check_results(rows: Sequence[Mapping[str, Any]], folder: Path, table: str) -> None:
    """Refuse a table without any result of ours: it would be dashes beside the paper's numbers."""
    if all(row.get(key) is None for row in rows for key in ("accuracy", "negative_elbo")):
        raise FileNotFoundError(
            f"{folder.resolve() / table} holds no result of this table: a checkout of the repository has them in results/, the installed "
            f"package has none; name that folder by --results FOLDER, or make some by `autosym run {table} --all`"
        )


def train_and_measure(
    build: Callable[[], nn.Module],
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    schedule: Schedule,
    run: Any,
    progress: bool | str = False,
    out: Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    augment: Augment | None = None,
    memory: float | None = None,
) -> dict[str, Any]:
    """Fit a network made after seeding, in the precision of the inputs; on a CPU with one thread: the number of cores changes nothing.

    ``run`` is a frozen dataclass with name, task, model, method, epochs and seed; it is written beside the result. ``out`` is the
    folder of the run's history, checkpoint, and report.json: what a report needs beyond the result.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device == "cpu" else threads)
    seen = [time.perf_counter()]  # when the last epoch ended
    if out is not None:
        start_anew(out, resume)
    try:
        torch.manual_seed(run.seed)
        net = build().to(device, train[0].dtype)
        fitted = fit(
            net,
            train,
            augment=augment,
            memory=memory,
            schedule=schedule,
            seed=run.seed,
            progress=progress,
            history=out and out / "history.jsonl",
            checkpoint=out and out / CHECKPOINT,
            checkpoint_seconds=10,
            resume=resume,
            log=lambda line: seen.append(time.perf_counter()),
        )
        x, y = test
        with torch.no_grad():
            logits = torch.cat([net(part.to(device)).cpu() for part in x.split(1000)])
        seconds = fitted.history[-1]["seconds"] + time.perf_counter() - seen[-1]
        if out is not None:
            contents = findings.contents(fitted, test, title=run.name, measured_on="held out")
            write(contents | {"command": _command(run)}, out / "report.json", indent=None)
    finally:
        torch.set_num_threads(threads)
    predicted = logits.argmax(1)
    return {
        "row": {
            "task": run.task,
            "model": run.model,
            "method": run.method,
            **in_percent(scores(logits, y)),
            "evidence": fitted.evidence.log_evidence.item() / len(train[0]),
            "parameters": sum(p.numel() for p in net.parameters()),
            "seconds": seconds,
            "evidence_seconds": _evidence_seconds(fitted.history),
        },
        "config": asdict(run),
        "symmetry": (learned := fitted.symmetry()).as_dicts(),
        "cautions": list(map(str, learned.cautions)),
        "ranges": described(net),
        "schedule": findings.settings(schedule),
        "correct": (predicted == y).int().tolist(),
        "predicted": predicted.tolist(),
        "provenance": provenance(device),
    }


def in_percent(found: Scores) -> dict[str, float]:
    """Scores as rows of results have them."""
    return asdict(found) | {"accuracy": 100 * found.accuracy, "standard_error": 100 * found.standard_error}


def start_anew(out: Path, resume: bool) -> None:
    """Remove what an earlier run left in its folder and this one writes at its end, unless it goes on from there."""
    if not (resume and (out / CHECKPOINT).exists()):
        for name in ("result.json", "report.json", "report.html"):
            (out / name).unlink(missing_ok=True)


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
    """A result as JSON, whole or not at all; of several processes the first writes."""
    if processes.first():
        files.write(path, json.dumps(result, indent=indent, allow_nan=False) + "\n")
