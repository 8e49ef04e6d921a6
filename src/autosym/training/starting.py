"""The start of a run: what the given model explains, its evidence, and the rate that it bears.

A network from scratch has to move far; one that was trained before is undone by the same rate. So the rate of a trained one is found:
short trials, each from the given weights and undone at its end, at the default rate and at smaller ones, until one does no harm.
"""

import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import torch
from torch import Tensor

from autosym.bayes.likelihoods import Gaussian
from autosym.evidence.kernel import Kernel
from autosym.evidence.laplace import LOG_PRECISION_RANGE, Laplace
from autosym.evidence.possible import FEWEST
from autosym.runtime import processes
from autosym.training import evidence_steps
from autosym.training.running import Run
from autosym.training.snapshots import Start

OFF = 10.0  # times the loss of guessing, or of numbers with deviation 1: what is larger, or smaller, wants other units
EXPLAINED = 0.1  # of the loss of guessing, or of a nat: what a trained model explains at least
STEPS = 100  # of a trial
SLOWER = 3.0  # by this factor rates are lowered, in trials and after a collapse
TRIALS = 5
HARM = 0.05  # part of what the model explains: a trial that loses more does harm
CLOSED_FORM = 30  # steps of precisions and noise at fixed weights: nearly to the end


def begin(run: Run) -> None:
    """Measure the given model; if it was trained before, find its rate, and start at its best precisions and noise."""
    loss, guess, seconds = _losses(run)
    run.timed(seconds)
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss of the given model is {loss}, before the first step: rescale the inputs, or initialise it anew"
        )
    unit = abs(guess) if run.likelihood.hyperparameters() else min(abs(guess), 1.0)  # with noise to learn, losses have no unit
    start = Start(loss, guess, run.schedule.peak, EXPLAINED * unit)
    if isinstance(run.likelihood, Gaussian) and not start.explains and processes.first():
        _look_at_units(loss, guess, run.verified.outputs)
    if start.explains:
        run.progress.low = loss
        start = replace(start, log_evidence=_measure(run) if run.schedule.step != "none" else None)
        bound = run.schedule.step == "none" and run.given_precision  # a prior may take from a model what it explains
        run.progress.pace = _bearable(run, start) if run.search and not bound else 1.0
    run.progress.start = replace(start, lr=start.lr * run.progress.pace)
    run.progress.keep(run.state.snapshot(0, start.log_evidence))


def _look_at_units(loss: float, guess: float, outputs: int) -> None:
    """Warn if targets are far from the first outputs of a new network, or of another size: E|f - y|^2 / 2 against Var(y) / 2."""
    deviation = math.sqrt(2 * guess / outputs)
    if loss > OFF * guess > 0 or not 1 / OFF < deviation**2 < OFF:
        warnings.warn(
            f"targets have a standard deviation of {deviation:.3g}, and are {math.sqrt(2 * loss / outputs):.3g} away from the outputs of "
            "this network, which was not trained. Standardise them, y = (y - y.mean(0)) / y.std(0): else free paths, which learn scale "
            "and offset first, look as if they were needed",
            stacklevel=4,
        )


def _measure(run: Run) -> float | None:
    """The evidence of the given weights. Leaves precisions and noise where the run begins with them."""
    precision, noise = run.prior.log_precision.data, {name: t.data for name, t in run.likelihood.hyperparameters().items()}
    given, given_noise = precision.clone(), {name: t.clone() for name, t in noise.items()}
    at = floor(run)
    failed = (
        processes.agreed(float(at.effective_parameters(run.prior).detach().sum())) < FEWEST
    )  # as nothing can be explained by
    log_evidence = None if failed else run.value(at)
    as_given = run.given_precision or log_evidence is None
    precision.copy_(given if as_given else torch.where(run.silent(), given, precision))
    for name, t in noise.items() if as_given else ():
        t.copy_(given_noise[name])
    return log_evidence


def floor(run: Run) -> Laplace | Kernel:
    """The evidence of the present weights, at precisions and noise that are learned for them, in place. Silent paths are gone."""
    at, how = run.at_end(), run.schedule.evidence_step
    for _ in range(CLOSED_FORM):
        evidence_steps.improve(run.prior, run.likelihood, at, replace(how, damping=1.0, trust=math.inf))
    run.prior.log_precision.data.masked_fill_(run.silent(), LOG_PRECISION_RANGE[1])
    return at


def _losses(run: Run) -> tuple[float, float, float]:
    """The mean loss of the given model on some batches, that of the best constant output for their targets, and seconds for a sample."""
    targets, total = [], torch.zeros_like(run.weights.loss)
    with run.state.trying(), torch.no_grad():
        begun = time.perf_counter()
        for x, y in _batches(run, STEPS, epochs=1):
            total += run.likelihood.loss(run.model(x), y) if len(x) else 0.0
            targets.append(y)
        float(total)  # a GPU has finished then
        seconds = time.perf_counter() - begun
        run.weights.loss.zero_()
    own = torch.cat(targets)
    sums = torch.stack([total, *total.new_tensor([_guess(run, own) * len(own), len(own)])])
    processes.add(sums)
    return float(sums[0] / sums[2]), float(sums[1] / sums[2]), seconds / float(sums[2])


def _guess(run: Run, targets: Tensor) -> float:
    """The mean loss of the best constant output."""
    output = torch.zeros(run.verified.outputs, dtype=torch.float64, device=targets.device, requires_grad=True)
    search = torch.optim.LBFGS([output], max_iter=50, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        y = targets.double() if targets.is_floating_point() else targets
        found = run.likelihood.loss(output.expand(len(targets), -1), y) / max(len(targets), 1)
        found.backward()
        return found

    with torch.enable_grad():
        search.step(loss)
        return float(loss().detach())


def _bearable(run: Run, start: Start) -> float:
    """The largest part of the rate at which a trial loses next to nothing of what the model explains."""
    most = start.loss + HARM * (start.guess - start.loss)
    paces = [SLOWER**-trial for trial in range(TRIALS)]
    return next((pace for pace in paces[:-1] if _trial(run, pace) <= most), paces[-1])


def _trial(run: Run, pace: float) -> float:
    """The loss at the end of a short run at ``pace``, which is undone."""
    steps = min(STEPS, run.steps())
    late, seen = steps - max(1, steps // 4), torch.zeros_like(run.weights.loss)
    with run.state.trying():
        run.weights.set_prior(run.prior, run.likelihood)
        for number, (x, y) in enumerate(_batches(run, steps)):
            if number == late:
                run.weights.take_loss()
                seen.zero_()
            run.weights.lr.fill_(pace * run.schedule.rate(number / steps))
            run.step(x, y)
            seen += len(x)
        processes.add(seen)
        loss = run.weights.take_loss() / max(float(seen), 1.0)
    return loss if math.isfinite(loss) else math.inf


def _batches(run: Run, left: int, epochs: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """The first batches of the run, of so many epochs at most."""
    for epoch in count(1) if epochs is None else range(1, epochs + 1):
        number = 0
        for number, batch in enumerate(run.stream.epoch(epoch), 1):
            run.ranges.redraw(run.seed, epoch, number)
            yield batch
            left -= 1
            if not left:
                return
        if not number:
            raise ValueError(f"the data show no batch in pass {epoch}: give a dataset that can be read again, not an iterator")
