"""fit: weights by MAP, symmetry by evidence, one run.

    w <- prox(w - lr M^-1 grad of the mean negative log-likelihood)                every batch
    delta <- towards gamma / |w|^2, or along d log p(D) / d log delta              every few epochs, after burn-in

The prior's part of a weight step is proximal, in the optimiser's own metric M: stable at any precision, and its fixed point is
the MAP. Only the likelihood's gradient is ever clipped. The last part of a run is at fixed precisions, so that the evidence at the
end is taken near a mode.
"""

import copy
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path as File
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import TensorDataset

from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.kronecker import kfac
from autosym.curvature.owners import frames, sites, sizes
from autosym.evidence.laplace import Laplace
from autosym.runtime import processes
from autosym.runtime.batching import (
    Augment,
    Data,
    Stream,
    batches,
    check_loader,
    check_repeatable,
    check_seen,
    is_pair,
    size_of,
)
from autosym.runtime.graphs import Captured
from autosym.training import callbacks
from autosym.training.checkpoint import State
from autosym.training.evidence_steps import _at, _summary, evidence_step
from autosym.training.fitted import Fit
from autosym.training.ranges import Ranges
from autosym.training.schedule import Schedule
from autosym.training.steps import Weights


def fit(
    model: nn.Module,
    data: Data,
    likelihood: str | Likelihood = "categorical",
    *,
    schedule: Schedule | Literal["paper"] | None = None,
    prior_precision: float | Mapping[str, float] = 1.0,
    nu: float = math.inf,
    evidence_data: Data | None = None,
    augment: Augment | None = None,
    memory: float | None = None,
    capture: bool = True,
    deterministic: bool = False,
    seed: int = 0,
    progress: bool | str = False,
    history: str | File | None = None,
    tensorboard: str | File | None = None,
    log: Callable[[dict[str, Any]], None] | None = None,
    checkpoint: str | File | None = None,
    checkpoint_seconds: float = 60.0,
    resume: bool = False,
    **changes: Any,
) -> Fit:
    """Train ``model``, in place, on ``data`` and learn, from the same data, how much of every path they want.

    ``data`` is a pair of tensors, a dataset or a loader; ``evidence_data`` is what the evidence is taken on where the training
    loader augments or drops samples (the same samples, once each; ``data`` by default). Dropout and batch normalisation must be in
    eval mode: the prior regularises, and a sample's output must not depend on its batchmates. With finite ``nu`` the prior is
    Student-t (``priors``). ``changes`` are fields of ``Schedule``: ``fit(model, data, epochs=50, step="none")`` is plain MAP at
    ``prior_precision``; with evidence that is where precisions start, but no higher than ``start_cap``. Ranges of a model by
    ``symmetrise`` are learned at evidence steps too. ``history`` names a
    JSON-lines file, ``tensorboard`` a folder of event files; ``log`` is called with every line.

    ``augment(x, generator)`` is applied to training batches on the model's device; the evidence is that of the data as they are. On a GPU
    tensors stay there and steps are recorded as CUDA graphs, unless ``capture`` is False: forward() then runs in Python only a few
    times. ``memory`` (GiB) bounds the batches of evidence steps, as in ``curvature.kfac``. ``schedule`` is "paper" for the published one.

    ``progress`` shows a bar on a terminal (on stderr), and a line every tenth of the run elsewhere; a name shows such lines, begun by it.

    ``checkpoint`` names a file that is written at the start, every ``checkpoint_seconds`` at the end of an epoch, and at the end of the
    run: a run that was interrupted can always go on. With ``resume`` it goes on from the file, if it is there, as if it had never stopped:
    the same arguments on the same machine give the same weights, precisions and history, bit for bit on the CPU and, with
    ``deterministic``, on a GPU.

    Several processes (``torch.distributed``: torchrun, DDP) take a part of every batch and of the evidence each: ``batch_size`` is that
    of all together, and all return the same fit. The first of them writes, shows and logs.
    """
    unknown = set(changes) - {field.name for field in fields(Schedule)}
    if unknown:
        raise TypeError(f"fit got {', '.join(sorted(unknown))}; a schedule has {', '.join(f.name for f in fields(Schedule))}")
    if schedule == "paper":
        schedule = Schedule.paper(**changes)
    elif isinstance(schedule, str):
        raise ValueError(f"schedule {schedule!r} is not known: 'paper', or a Schedule")
    else:
        schedule = replace(schedule or Schedule(), **changes)
    evidence_epochs = schedule.evidence_epochs()
    model = processes.unwrapped(model)
    processes.make_same(model)
    likelihood = copy.deepcopy(likelihoods.of(likelihood))
    evidence_data = data if evidence_data is None else evidence_data
    owned = sites(model)
    prior = Prior([site.name for site in owned], prior_precision, nu)
    if schedule.step != "none":
        prior.log_precision.data.clamp_(max=math.log(schedule.start_cap))
    count, outputs = _check(model, data, evidence_data, likelihood, schedule)
    parameters = {site.name: site.parameter for site in owned}
    units = sizes(owned) if schedule.relative else None
    even = frames(owned, nu < math.inf) if schedule.relative and schedule.optimiser == "adam" else {}
    for frame in even.values():
        processes.make_same(frame)
    weights = Weights(parameters, count, schedule.optimiser, schedule.momentum, schedule.clip, units, even)
    part, parts = processes.rank(), processes.count()
    stream = Stream(data, schedule.batch_size, model, partial(likelihood.check, outputs), seed, augment, part, parts)
    evidence_data = stream.data if evidence_data is data else evidence_data
    step = Captured(partial(weights.step, model, likelihood), capture and parts == 1)
    ranges = Ranges(model, schedule.hyper_lr)
    if ranges.learned and schedule.every is None:
        schedule = replace(schedule, every=1)  # a range takes one step at each: few would not take it far
        evidence_epochs = schedule.evidence_epochs()
    if ranges.learned and schedule.kernel is not None:
        raise ValueError("ranges of transformations are learned by Laplace evidence: fit without kernel=")
    schedule = schedule.for_steps(schedule.epochs * math.ceil(count / stream.together))
    config = {"schedule": repr(schedule), "seed": seed, "samples": count}
    config |= {"checksum of the data": _checksum(data) if checkpoint else None}
    state = State(model, prior, likelihood, weights, stream, config, ranges.tensors())
    lines = state.read(File(checkpoint)) if checkpoint and resume and File(checkpoint).exists() else []
    if checkpoint and not lines:
        state.write(File(checkpoint), lines)  # over that of an earlier run, which a resumed one must not go on from
    saved = time.perf_counter()
    start = saved - (lines[-1]["seconds"] if lines else 0.0)
    with (
        _no_denormals(),
        _determinism(deterministic),
        callbacks.progress_bar(progress if part == 0 else False, schedule.epochs) as show,
        callbacks.json_lines(history if part == 0 else None, lines) as write,
        callbacks.tensorboard(tensorboard if part == 0 else None, len(lines), count) as scalars,
    ):
        for epoch in range(len(lines) + 1, schedule.epochs + 1):
            weights.set_prior(prior, likelihood)
            for number, (x, y) in enumerate(stream.epoch(epoch), 1):
                ranges.redraw(seed, epoch, number)
                weights.lr.fill_(schedule.rate((epoch - 1 + min(stream.shown / count, 1.0)) / schedule.epochs))
                step(x, y)
            loss = weights.take_loss()
            if not math.isfinite(loss):
                raise ValueError(f"the loss is {loss} in epoch {epoch}: lower lr (now {schedule.lr}), or rescale the inputs")
            line: dict[str, Any] = {"epoch": epoch, "loss": loss / max(stream.shown, 1)}
            if epoch in evidence_epochs:
                ranges.redraw(seed, epoch, 0)
                at = evidence_step(model, evidence_data, likelihood, prior, schedule, seed + epoch, memory)
                if isinstance(at, Laplace):
                    ranges.step(evidence_data, prior, at, schedule.sampled, schedule.subset, seed + epoch, memory)
                line |= _summary(model, likelihood, prior, at) | ranges.summary()
            line["seconds"] = time.perf_counter() - start
            lines.append(line)
            for consumer in filter(None, (show, write, scalars, log if part == 0 else None)):
                consumer(line)
            if checkpoint and (epoch == schedule.epochs or time.perf_counter() - saved > checkpoint_seconds):
                state.write(File(checkpoint), lines)
                saved = time.perf_counter()
        ranges.settle()
        at = _at(model, evidence_data, likelihood, prior, schedule, schedule.sampled_end, None, seed, memory)
    with torch.no_grad():
        return Fit(model, prior, likelihood, schedule, lines, at(prior), at, seed)


def _check(model: nn.Module, data: Data, evidence_data: Data, likelihood: Likelihood, schedule: Schedule) -> tuple[int, int]:
    """Find out before the first step what would end the run after the last; returns the numbers of samples and outputs."""
    check_repeatable(data, evidence_data)
    check_loader(evidence_data)
    count = size_of(data) or sum(len(x) for x, _ in batches(data, schedule.batch_size))
    other = size_of(evidence_data)
    if other is not None and other != count:
        raise ValueError(f"evidence_data holds {other} samples, data {count}: they must be the same samples (or use subset=)")
    batch = next(batches(evidence_data, schedule.batch_size, torch.Generator()), None)
    check_seen(0 if batch is None else count, data, allow_partial=True)
    assert batch is not None
    return count, kfac(model, (batch[0][:2], batch[1][:2]), likelihood, sampled=True).outputs


def _checksum(data: Data) -> int | None:
    """Of the bytes of tensors, in their order, which a resumed run needs too; None of data that are not at hand as tensors."""
    tensors = data if is_pair(data) else data.tensors if type(data) is TensorDataset else ()
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data, found)
    return found if tensors else None


@contextmanager
def _no_denormals() -> Iterator[None]:
    """Numbers below 1e-38 count as zero: the weights of a path that is going through them are many times slower on a CPU."""
    already = float(torch.tensor(1e-310, dtype=torch.float64) * 1) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


@contextmanager
def _determinism(wanted: bool) -> Iterator[None]:
    """The same sums in the same order every time, on a GPU too (where cuBLAS needs a setting, which stays)."""
    if not wanted:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = benchmark
