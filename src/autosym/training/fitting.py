"""fit: weights by MAP, symmetry by evidence, one run.

    w <- prox(w - lr M^-1 grad of the mean negative log-likelihood)                every batch
    delta <- towards gamma / |w|^2, or along d log p(D) / d log delta              every few epochs, after burn-in

The prior's part of a weight step is proximal, in the optimiser's own metric M. It is stable at any precision, and its fixed point is
the MAP. Only the likelihood's part of a step is ever clipped. The last part of a run is at fixed precisions, so that the evidence at
the end is taken near a mode.

A fit is prepared (everything that can be wrong is found before the first step), begun (what the given model is worth), trained under
guard (a collapse is undone), and concluded (at the snapshot with the most evidence).
"""

import copy
import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path as File
from typing import Any, Literal

import torch
from torch import nn

from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.input_shapes import explained
from autosym.curvature.owners import Site, frames, sizes
from autosym.curvature.verification import Verified, verified
from autosym.evidence.laplace import Laplace
from autosym.runtime import arithmetic, processes, room
from autosym.runtime.arithmetic import NotFinite
from autosym.runtime.batching import (
    Augment,
    Data,
    Stream,
    batches,
    check_loader,
    check_module,
    check_repeatable,
    check_seen,
    checksum,
    size_of,
    tensors_of,
    to_model,
)  # fmt: skip
from autosym.runtime.graphs import Captured
from autosym.training import callbacks as told
from autosym.training import evidence_steps
from autosym.training.callbacks import Callback
from autosym.training.checkpoint import Keeper
from autosym.training.fitted import Fit
from autosym.training.guarding import choose, fallen, lost, recover, settle, stopped_rising, worth_keeping
from autosym.training.ranges import Ranges
from autosym.training.running import Run
from autosym.training.schedule import Schedule
from autosym.training.starting import begin
from autosym.training.steps import Weights

LATE = 0.75  # of an epoch of so many steps at least: the loss from there on tells of a collapse, which the mean may hide
LONG = 16
LITTLE = 0.02  # nats for each effective parameter: an evidence step that gains less moves precisions by 0.3 or so


def fit(
    model: nn.Module,
    data: Data,
    likelihood: str | Likelihood = "categorical",
    *,
    schedule: Schedule | Literal["paper"] | None = None,
    prior_precision: float | Mapping[str, float] | None = None,
    nu: float = math.inf,
    evidence_data: Data | None = None,
    augment: Augment | None = None,
    curvature: Literal["kronecker", "whole"] | None = None,
    memory: float | None = None,
    capture: bool = True,
    bf16: bool = False,
    deterministic: bool = False,
    seed: int = 0,
    progress: bool | str = False,
    history: str | File | None = None,
    tensorboard: str | File | None = None,
    log: Callback | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | File | None = None,
    checkpoint_seconds: float = 60.0,
    resume: bool = False,
    **changes: Any,
) -> Fit:
    """Train ``model``, in place, on ``data`` and learn, from the same data, how much of every path they want.

    ``data`` is a pair of tensors, a dataset or a loader. Where a loader augments or drops samples, ``evidence_data`` are the same samples,
    once each, as they are; ``augment(x, generator)`` changes training batches only. Dropout and batch normalisation must be in eval mode.
    ``changes`` are fields of ``Schedule``: ``fit(model, data, epochs=50)``; ``epochs`` is a bound. With ``step="none"`` it is MAP at
    ``prior_precision``; with evidence precisions start there. A model that was trained before does not end below where it began. The
    end is chosen by the evidence of the whole network where that takes a quarter of the work at most; ``curvature`` "kronecker" never
    does, "whole" always (``Fit.chosen_by`` says which). With ``bf16`` steps of the weights compute in bfloat16, evidence does not.

    ``callbacks`` and ``log`` are called with every line of the history; ``progress`` shows it, ``history`` and ``tensorboard`` keep it.
    ``resume`` goes on from the file ``checkpoint``, bit for bit. Every argument is in docs/fit-options.md.
    """
    if curvature not in (None, "kronecker", "whole"):
        raise ValueError(f"curvature must be 'kronecker', 'whole' or None, got {curvature!r}")
    schedule, seed = Schedule.of(schedule, changes), operator.index(seed)
    if curvature == "whole" and (schedule.kernel is not None or math.isfinite(nu)):
        raise ValueError(
            "the evidence of the whole network is for Gaussian priors and not for kernels: leave out curvature, or kernel and nu"
        )
    run = prepare(model, data, likelihood, schedule, prior_precision, nu, evidence_data, augment, memory, capture, seed, bf16)
    if bf16:
        run.state.config["bf16"] = True
    if checkpoint:
        run.state.config["checksum of the data"] = checksum(data)
    keeper = Keeper(run.state, checkpoint, checkpoint_seconds)
    keeper.begin(resume)
    lines = run.progress.lines
    with (
        arithmetic.no_denormals(),
        room.kept(),
        arithmetic.deterministic(deterministic),
        told.opened(progress, history, tensorboard, [log, *callbacks], run.schedule.epochs, lines, run.count) as tell,
    ):
        if run.progress.start is None:
            begin(run)
        told.announce(progress, run.forecast)
        train(run, tell, keeper)
        return conclude(run, curvature)


def prepare(
    model: nn.Module,
    data: Data,
    likelihood: str | Likelihood,
    schedule: Schedule,
    prior_precision: float | Mapping[str, float] | None = None,
    nu: float = math.inf,
    evidence_data: Data | None = None,
    augment: Augment | None = None,
    memory: float | None = None,
    capture: bool = True,
    seed: int = 0,
    bf16: bool = False,
) -> Run:
    """Find out before the first step what would end the run after the last, and set everything up for it."""
    schedule.evidence_epochs()  # refuses a run without one
    check_module(model)
    model = processes.unwrapped(model)
    processes.make_same(model)
    likelihood = copy.deepcopy(likelihoods.of(likelihood))
    evidence_data = data if evidence_data is None else evidence_data
    count, known = _check(model, data, evidence_data, likelihood, schedule)
    prior = Prior([site.name for site in known.sites], 1.0 if prior_precision is None else prior_precision, nu)
    if schedule.step != "none":
        prior.log_precision.data.clamp_(max=math.log(schedule.start_cap))
    weights = _weights(known.sites, count, schedule, nu, bf16)
    part, parts = processes.rank(), processes.count()
    stream = Stream(data, schedule.batch_size, model, partial(likelihood.check, known.outputs), seed, augment, part, parts)
    evidence_data = stream.data if evidence_data is data else evidence_data
    if bf16:
        x, y = next(batches(evidence_data, schedule.batch_size, torch.Generator()))
        weights.check_bf16(model, likelihood, *to_model(x, y, model, "the first batch"))
    step = Captured(partial(weights.step, model, likelihood), capture and parts == 1)
    ranges = Ranges(model, schedule.hyper_lr)
    if schedule.step != "none":
        ranges.begin()
    if ranges.learned and schedule.kernel is not None:
        raise ValueError("ranges of transformations are learned by Laplace evidence: fit without kernel=")
    if ranges.learned and schedule.every is None:
        schedule = replace(schedule, every=1)  # a range takes one step at each: few would not take it far
    search, given = schedule.lr is None, prior_precision is not None
    schedule = schedule.for_steps(schedule.epochs * math.ceil(count / stream.together))
    settings = (count, seed, memory, search, given)
    run = Run(model, prior, likelihood, schedule, stream, evidence_data, weights, step, known, ranges, *settings)
    with processes.agreeing():
        run.forecast.check()
    return run


def train(run: Run, tell: Callback, keeper: Keeper) -> None:
    """Every epoch weights, and evidence in those that the schedule names; the history is told and kept."""
    progress, clock = run.progress, time.perf_counter()
    clock -= progress.lines[-1]["seconds"] if progress.lines else 0.0
    while not run.ended():
        line = _epoch(run, len(progress.lines) + 1)
        line["seconds"] = time.perf_counter() - clock
        progress.lines.append(line)
        tell(line)
        keeper.keep(run.ended())


def conclude(run: Run, curvature: Literal["kronecker", "whole"] | None = None) -> Fit:
    """The fit, at the end of the run or where it had more evidence, of Kronecker factors or of the whole network."""
    at, epoch, by = choose(run, curvature)
    progress, start = run.progress, run.progress.start
    with torch.no_grad():
        found = (run.model, run.prior, run.likelihood, run.schedule, progress.lines, at(run.prior), at, run.seed)
        return Fit(
            *found,
            augmented=run.stream.augment is not None or run.evidence_data is not run.stream.data,
            start=start,
            recoveries=progress.recoveries,
            epoch=epoch,
            chosen_by=by,
            forecast=run.forecast,
            given=progress.snapshots[0].model() if start and start.explains else {},
        )


def _epoch(run: Run, epoch: int) -> dict[str, Any]:
    """One epoch of weights, and of precisions if it is time; after a collapse, back to the last good snapshot."""
    progress, due = run.progress, run.due(epoch)
    if epoch == run.settles_after() + 1:
        settle(run)
    loss, late = _train_weights(run, epoch)
    line: dict[str, Any] = {"epoch": epoch, "loss": loss if math.isfinite(loss) else None}
    why, value = lost(run, late), None
    if due and not why:
        try:
            value = _learn_prior(run, epoch, line, due)
            why = fallen(run, line)
        except NotFinite as error:
            why = str(error)
    if why:
        return {"epoch": epoch, "loss": line["loss"], **recover(run, why)}
    keeps = value is not None or (not progress.best and epoch % run.schedule.pause == 0)  # none before the first evidence step
    if keeps and worth_keeping(run, late, value):
        progress.keep(run.state.snapshot(epoch, value))
    if due and run.may_stop and processes.agreed(stopped_rising([*progress.lines, line], len(run.schedule.evidence_epochs()))):
        progress.stopped = epoch
    return line


def _train_weights(run: Run, epoch: int) -> tuple[float, float]:
    """One epoch of weight steps; returns the mean loss of its samples, and of those of its last quarter."""
    early, shown, long = 0.0, 0, run.steps() >= LONG * run.schedule.epochs
    run.weights.set_prior(run.prior, run.likelihood)
    for number, (x, y) in enumerate(run.stream.epoch(epoch), 1):
        run.ranges.redraw(run.seed, epoch, number)
        if long and not shown and run.stream.shown >= LATE * run.count:
            early, shown = float(run.weights.loss), run.stream.shown
        run.weights.lr.fill_(run.rate(epoch - 1 + min(run.stream.shown / run.count, 1.0)))
        run.step(x, y)
    total = run.weights.take_loss()
    return total / max(run.stream.shown, 1), (total - early) / max(run.stream.shown - shown, 1)


def _learn_prior(run: Run, epoch: int, line: dict[str, Any], due: int) -> float | None:
    """One evidence step of precisions, noise and ranges, told in the ``line``; returns the log evidence, or None if it has failed.

    Precisions and noise go as far as the ``due`` steps of the schedule would: their closed form costs nothing beside the pass.
    """
    seed, how = run.seed + epoch, run.schedule.evidence_step
    run.ranges.redraw(run.seed, epoch, 0)
    at = run.estimate(how, seed)
    gained = processes.agreed(evidence_steps.improved(run.prior, run.likelihood, at, how, due))
    if isinstance(at, Laplace):
        run.ranges.step(run.evidence_data, run.prior, at, how.sampled, how.subset, seed, run.memory)
    line |= evidence_steps.summary(run.model, run.likelihood, run.prior, at) | run.ranges.summary()
    line["steps"] = due
    line["little"] = gained < LITTLE * processes.agreed(sum(line["effective_parameters"].values()))
    return run.value(at)


def _check(
    model: nn.Module, data: Data, evidence_data: Data, likelihood: Likelihood, schedule: Schedule
) -> tuple[int, Verified]:
    """Refuse data that the run could not use to its end; returns the number of samples, and what is known of the model."""
    check_repeatable(data, evidence_data)
    check_loader(evidence_data)
    count = size_of(data) or sum(len(x) for x, _ in batches(data, schedule.batch_size))
    other = size_of(evidence_data)
    if other is not None and other != count:
        raise ValueError(f"evidence_data holds {other} samples, data {count}: they must be the same samples (or use subset=)")
    batch = next(batches(evidence_data, schedule.batch_size, torch.Generator()), None)
    check_seen(0 if batch is None else count, data, allow_partial=True)
    assert batch is not None
    if schedule.step == "mackay":
        copy.deepcopy(likelihood).update(torch.ones((), dtype=torch.float64), 1.0)  # refuses one that has no closed form
    tensors = tensors_of(evidence_data)
    targets = (batch[1], "in the first batch: no other was read") if tensors is None else (tensors[1], "")
    with explained(model, batch[0] if tensors is None else tensors[0][: max(2, len(batch[0]))]):
        return count, verified(model, batch[0][:2], batch[1][:2], likelihood, *targets)


def _weights(owned: Sequence[Site], count: int, schedule: Schedule, nu: float, bf16: bool) -> Weights:
    """The optimiser of all weights, in the units and coordinates that their paths ask for."""
    units = sizes(owned) if schedule.relative else None
    even = frames(owned, nu < math.inf) if schedule.relative and schedule.optimiser == "adam" else {}
    for frame in even.values():
        processes.make_same(frame)
    parameters = {site.name: site.parameter for site in owned}
    return Weights(parameters, count, schedule.optimiser, schedule.momentum, schedule.clip, units, even, bf16)
