"""One evidence step: the expensive pass at the present weights, then precisions and noise."""

import math
from typing import Any

import torch
from torch import nn

from autosym.bayes.likelihoods import Gaussian, Likelihood
from autosym.bayes.priors import Prior
from autosym.evidence import kernel, laplace
from autosym.evidence.kernel import Kernel
from autosym.evidence.laplace import Laplace
from autosym.evidence.shares import symmetry
from autosym.runtime.batching import Data
from autosym.training.schedule import Schedule


def evidence_step(
    model: nn.Module,
    data: Data,
    likelihood: Likelihood,
    prior: Prior,
    schedule: Schedule,
    seed: int,
    memory: float | None = None,
) -> Laplace | Kernel:
    """One expensive pass, then a damped closed-form step, or gradient steps, on precisions and noise."""
    at = _at(model, data, likelihood, prior, schedule, schedule.sampled, schedule.subset, seed, memory)
    if schedule.step == "mackay":
        at.mackay(prior, schedule.damping, schedule.trust)
        return at
    optimiser = torch.optim.Adam([*prior.parameters(), *likelihood.parameters()], schedule.hyper_lr)
    for _ in range(schedule.hyper_steps):
        optimiser.zero_grad()
        (-at(prior).log_evidence).backward()
        optimiser.step()
    return at


def _at(
    model: nn.Module,
    data: Data,
    likelihood: Likelihood,
    prior: Prior,
    schedule: Schedule,
    sampled: bool,
    subset: int | None,
    seed: int,
    memory: float | None,
) -> Laplace | Kernel:
    """The expensive pass of the estimator that the schedule asks for."""
    if schedule.kernel is not None:
        return kernel.at(model, data, likelihood, samples=schedule.kernel, outputs="one", seed=seed)
    at = laplace.at(model, data, likelihood, sampled=sampled, subset=subset, seed=seed, memory=memory)
    return at.with_scales(prior) if math.isfinite(prior.nu) else at


def _summary(model: nn.Module, likelihood: Likelihood, prior: Prior, at: Laplace | Kernel) -> dict[str, Any]:
    """What a line of the history says of an evidence step: evidence, its parts, precisions, effective parameters, shares."""
    with torch.no_grad():
        record = at(prior)
        summary: dict[str, Any] = {
            "log_evidence": float(record.log_evidence),
            "log_likelihood": float(record.log_likelihood),
            "occam": float(record.occam),
            "precision": prior.precision(),
            "effective_parameters": dict(zip(at.names, at.effective_parameters(prior).tolist(), strict=True)),
            "free_share": {k: None if math.isnan(v) else v for k, v in symmetry(model, prior, at).free_share().items()},
        }
        if isinstance(likelihood, Gaussian):
            summary["sigma_noise"] = math.exp(float(likelihood.log_variance) / 2)
        return summary
