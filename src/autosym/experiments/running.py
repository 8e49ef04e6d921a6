"""One run of any experiment: build, fit, measure, write."""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autosym import findings, processes
from autosym.averaging import described
from autosym.batching import Augment
from autosym.predictive import Scores, scores
from autosym.provenance import provenance
from autosym.schedules import Schedule, Step
from autosym.training import fit

CHECKPOINT = "checkpoint.safetensors"
METHODS: dict[str, Step] = {"map": "none", "evidence": "mackay"}


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
        "cautions": list(learned.cautions),
        "ranges": described(net),
        "schedule": findings.settings(schedule),
        "correct": (predicted == y).int().tolist(),
        "predicted": predicted.tolist(),
        "provenance": provenance(device),
    }


def at_a_time(call: Callable[..., None], todo: Sequence[tuple], jobs: int) -> None:
    """``call`` with each of ``todo``, by processes that take the next when they are done with one; those that fail are named at the end.

    The first of the arguments is a name. A process that is killed (out of memory, say) takes the others with it: what they left undone is
    begun once more, one after the other.
    """
    failed: list[str] = []
    undone = _together(call, todo, jobs, failed)
    for arguments in undone:
        failed += [unfinished[0] for unfinished in _together(call, [arguments], 1, failed)]
    if failed:
        raise ValueError(f"{len(failed)} of {len(todo)} runs failed: {', '.join(failed)}")


def _together(call: Callable[..., None], todo: Sequence[tuple], jobs: int, failed: list[str]) -> list[tuple]:
    """Run ``todo``; names of those that fail are added to ``failed``, those that were ended by another are returned."""
    undone = []
    with workers(jobs, initializer=_share_cores, initargs=(jobs,)) as pool:
        running = {pool.submit(call, *arguments): arguments for arguments in todo}
        for future in as_completed(running):
            name, error = running[future][0], future.exception()
            if isinstance(error, BrokenProcessPool):
                undone.append(running[future])
            elif error:
                failed.append(name)
                print(f"{name} failed ({type(error).__name__}: {error})", file=sys.stderr, flush=True)
    return undone


@contextmanager
def workers(jobs: int, **options: Any) -> Iterator[ProcessPoolExecutor]:
    """Processes that end where this one is interrupted: a pool by itself would first work off all that waits."""
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), **options)
    try:
        yield pool
    except BaseException:
        running = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in running:
            process.terminate()
        raise
    pool.shutdown()


def _share_cores(jobs: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))


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
    if not processes.first():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=indent, allow_nan=False) + "\n")
    temporary.replace(path)
