"""fit: weights by MAP, symmetry by evidence, one run.

    w <- prox(w - lr * momentum(grad of the mean negative log-likelihood))         every batch
    delta <- towards gamma / |w|^2, or along d log p(D) / d log delta              every few epochs, after burn-in

The prior's part of a weight step is proximal, w <- w / (1 + kappa), kappa = lr delta / (N (1 - momentum)): stable at any
precision, and its fixed point is the MAP. Only the likelihood's gradient is ever clipped.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path as File
from typing import Any, Literal

import torch
from torch import Tensor, nn

from autosym import likelihoods
from autosym.batching import Data, batches, size_of
from autosym.curvature import kfac
from autosym.evidence import laplace
from autosym.evidence.laplace import Laplace
from autosym.evidence.record import Evidence
from autosym.likelihoods import Gaussian, Likelihood
from autosym.predictive import Link, Predictive, predictive
from autosym.priors import Prior
from autosym.sites import sites
from autosym.symmetry import Symmetry, symmetry

Step = Literal["mackay", "gradient", "none"]


@dataclass(frozen=True)
class Schedule:
    """How a fit proceeds. ``step`` is the evidence step: "mackay" (closed form, damped), "gradient" (Adam) or "none" (MAP)."""

    epochs: int = 100
    batch_size: int = 64
    optimiser: Literal["adam", "sgd"] = "adam"
    lr: float = 0.005
    momentum: float = 0.9
    warmup: float = 0.05  # the part of the run over which the rate rises from 0, before it falls as a cosine
    clip: float = math.inf
    step: Step = "mackay"
    burn_in: int = 10
    every: int = 2
    damping: float = 1.0
    trust: float = 0.5
    hyper_steps: int = 20
    hyper_lr: float = 0.1
    sampled: bool = True  # one backward pass in all instead of one for each output
    subset: int | None = None
    start_cap: float = 1.0  # with evidence, precisions start no higher: weights must hear the data before they are judged

    def __post_init__(self) -> None:
        if self.step not in ("mackay", "gradient", "none"):
            raise ValueError(f"step must be 'mackay', 'gradient' or 'none', got {self.step!r}")
        if self.epochs < 1 or self.batch_size < 1 or self.every < 1 or self.burn_in < 0:
            raise ValueError(f"epochs, batch_size and every must be at least 1 and burn_in 0 or more: {self}")
        if not (self.lr > 0 and 0 <= self.momentum < 1 and 0 < self.damping <= 1):
            raise ValueError(f"lr must be positive, momentum in [0, 1) and damping in (0, 1]: {self}")


@dataclass(frozen=True)
class Fit:
    """A fitted model: its prior and noise, the history of the run, and its evidence at the end."""

    model: nn.Module
    prior: Prior
    likelihood: Likelihood
    schedule: Schedule
    history: list[dict[str, Any]]
    evidence: Evidence
    laplace: Laplace
    data: Data = field(repr=False)

    def symmetry(self) -> Symmetry:
        """For every layer and path: precision, effective parameters, relative share. Prints as a table."""
        return symmetry(self.model, self.prior, self.laplace)

    def predictive(self, x: Tensor, link: Link = "probit", samples: int = 256, seed: int = 0) -> Predictive:
        """The posterior predictive of the linearised model at ``x``; ``link`` averages the softmax of a classifier."""
        return predictive(self.model, x, self._eigenvectors, self.prior, self.likelihood, link, samples, seed)

    @cached_property
    def _eigenvectors(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        return kfac(self.model, self.data, self.likelihood).eigenvectors()


def fit(
    model: nn.Module,
    data: Data,
    likelihood: str | Likelihood = "categorical",
    *,
    schedule: Schedule | None = None,
    prior_precision: float | Mapping[str, float] = 1.0,
    evidence_data: Data | None = None,
    seed: int = 0,
    progress: bool = False,
    history: str | File | None = None,
    log: Callable[[dict[str, Any]], None] | None = None,
    **changes: Any,
) -> Fit:
    """Train ``model`` on ``data`` and learn, from the same data, how much of every path they want.

    ``data`` is a pair of tensors, a dataset or a loader; ``evidence_data`` is what the evidence is taken on where the training
    data are augmented (the same by default). ``changes`` are fields of ``Schedule``: ``fit(model, data, epochs=50,
    step="none")`` is plain MAP at ``prior_precision``. ``history`` names a JSON-lines file; ``log`` is called with every line.
    """
    schedule = replace(schedule or Schedule(), **changes)
    likelihood = likelihoods.of(likelihood)
    evidence_data = data if evidence_data is None else evidence_data
    owned = sites(model)
    prior = Prior([site.name for site in owned], prior_precision)
    if schedule.step != "none":
        prior.log_precision.data.clamp_(max=math.log(schedule.start_cap))
    count = size_of(data) or sum(len(x) for x, _ in batches(data, schedule.batch_size))
    weights = Weights([site.parameter for site in owned], schedule, count)
    shuffle = torch.Generator().manual_seed(seed)
    lines: list[dict[str, Any]] = []
    start = time.perf_counter()
    with _progress_bar(progress, schedule.epochs) as show, _json_lines(history) as write:
        for epoch in range(1, schedule.epochs + 1):
            loss = seen = 0.0
            for x, y in batches(data, schedule.batch_size, shuffle):
                progress_made = (epoch - 1 + min(seen / count, 1.0)) / schedule.epochs
                loss += weights.step(model, likelihood, prior, x, y, progress_made)
                seen += len(x)
            if not math.isfinite(loss):
                raise ValueError(f"the loss is {loss} in epoch {epoch}: lower lr (now {schedule.lr}), or rescale the inputs")
            line: dict[str, Any] = {"epoch": epoch, "loss": loss / max(seen, 1)}
            if schedule.step != "none" and epoch > schedule.burn_in and (epoch - schedule.burn_in) % schedule.every == 0:
                at = evidence_step(model, evidence_data, likelihood, prior, schedule, seed + epoch)
                line |= _summary(model, likelihood, prior, at)
            line["seconds"] = time.perf_counter() - start
            lines.append(line)
            for consumer in filter(None, (show, write, log)):
                consumer(line)
    at = laplace.at(model, evidence_data, likelihood, sampled=schedule.sampled, seed=seed)
    with torch.no_grad():
        return Fit(model, prior, likelihood, schedule, lines, at(prior), at, evidence_data)


class Weights:
    """Proximal Adam or SGD with a cosine rate, at unit likelihood scale (a small noise does not blow up the step).

    The likelihood's gradient g moves the weights by lr M^-1 g (M: the square root of Adam's second moment, or 1 - momentum);
    the prior's proximal step in the same metric, w <- w / (1 + lr delta / (N M)), leaves g = - delta w / N, the MAP, fixed.
    """

    def __init__(self, parameters: list[nn.Parameter], schedule: Schedule, count: int):
        self.parameters, self.schedule, self.count = parameters, schedule, count
        self.optimiser: torch.optim.Optimizer
        if schedule.optimiser == "adam":
            self.optimiser = torch.optim.Adam(parameters, schedule.lr, betas=(schedule.momentum, 0.999))
        else:
            self.optimiser = torch.optim.SGD(parameters, schedule.lr, momentum=schedule.momentum)

    def step(self, model: nn.Module, likelihood: Likelihood, prior: Prior, x: Tensor, y: Tensor, done: float) -> float:
        """One step on a batch, ``done`` of the way through the run; returns the loss summed over the batch."""
        like = self.parameters[0]
        x, y = x.to(like), y.to(like) if y.is_floating_point() else y.to(like.device)
        outputs = model(x)
        likelihood.check(outputs, y)
        loss = likelihood.loss(outputs, y)
        self.optimiser.zero_grad(set_to_none=True)
        (loss / len(x)).backward()
        if self.schedule.clip < math.inf:
            nn.utils.clip_grad_norm_(self.parameters, self.schedule.clip)
        warm = min(1.0, (done + 1e-3) / self.schedule.warmup) if self.schedule.warmup else 1.0
        lr = self.schedule.lr * warm * max(0.5 * (1 + math.cos(math.pi * done)), 1e-4)
        self.optimiser.param_groups[0]["lr"] = lr
        self.optimiser.step()
        with torch.no_grad():
            kappa = (lr / (likelihood.scale() * self.count) * prior.log_precision.exp()).tolist()
            for parameter, k in zip(self.parameters, kappa, strict=True):
                parameter.div_(1 + k / self._metric(parameter))
        return float(loss.detach())

    def _metric(self, parameter: nn.Parameter) -> Tensor | float:
        if self.schedule.optimiser == "sgd":
            return 1 - self.schedule.momentum
        state = self.optimiser.state[parameter]
        return (state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))).sqrt_().add_(1e-8)


def evidence_step(model: nn.Module, data: Data, likelihood: Likelihood, prior: Prior, schedule: Schedule, seed: int) -> Laplace:
    """One expensive pass, then a damped closed-form step, or gradient steps, on precisions and noise."""
    at = laplace.at(model, data, likelihood, sampled=schedule.sampled, subset=schedule.subset, seed=seed)
    if schedule.step == "mackay":
        at.mackay(prior, schedule.damping, schedule.trust)
        return at
    optimiser = torch.optim.Adam([*prior.parameters(), *likelihood.parameters()], schedule.hyper_lr)
    for _ in range(schedule.hyper_steps):
        optimiser.zero_grad()
        (-at(prior).log_evidence).backward()
        optimiser.step()
    return at


def _summary(model: nn.Module, likelihood: Likelihood, prior: Prior, at: Laplace) -> dict[str, Any]:
    """What a line of the history says of an evidence step: evidence, its parts, precisions, shares."""
    with torch.no_grad():
        record = at(prior)
        summary: dict[str, Any] = {
            "log_evidence": float(record.log_evidence),
            "log_likelihood": float(record.log_likelihood),
            "occam": float(record.occam),
            "precision": prior.precision(),
            "free_share": symmetry(model, prior, at).free_share(),
        }
        if isinstance(likelihood, Gaussian):
            summary["sigma_noise"] = math.exp(float(likelihood.log_variance) / 2)
        return summary


@contextmanager
def _json_lines(path: str | File | None) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    if path is None:
        yield None
        return
    File(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        yield lambda line: print(json.dumps(line), file=file, flush=True)


@contextmanager
def _progress_bar(wanted: bool, epochs: int) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """A bar with loss, evidence per sample's worth and the free paths' shares; needs the extra ``cli`` (rich)."""
    if not wanted:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("epoch"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns) as bar:
        task = bar.add_task("", total=epochs)
        shown = {"evidence": "", "shares": ""}

        def show(line: dict[str, Any]) -> None:
            if "log_evidence" in line:
                shown["evidence"] = f"  log evidence {line['log_evidence']:.0f}"
                shares = " ".join(f"{share:.0%}" for share in line["free_share"].values())
                shown["shares"] = f"  free paths {shares}" if shares else ""
            bar.update(
                task, completed=line["epoch"], description=f"loss {line['loss']:.3f}{shown['evidence']}{shown['shares']}"
            )

        yield show
