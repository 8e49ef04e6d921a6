"""Fitting on without some paths: a network as it would be if they had been left out, not only as it is without them.

A path that is left out takes with it what the others could do as well. So the rest is trained on for a few epochs, from the weights,
precisions and noise that are there: from precisions of 1 a refit loses hundreds of nats.
"""

import copy
import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.owners import is_under
from autosym.evidence.laplace import LOG_PRECISION_RANGE
from autosym.runtime.batching import Data
from autosym.surgery.handing_over import hand_over, without
from autosym.training.fitted import Fit
from autosym.training.fitting import fit

PART, LEAST = 0.1, 5  # of the epochs that the fit took, and at least so many


def enough(fitted: Fit) -> int:
    """The epochs after which prices tell what paths are worth; 0 for a fit on augmented data, which are not at hand."""
    return 0 if fitted.augmented else max(LEAST, math.ceil(PART * (len(fitted.history) or fitted.schedule.epochs)))


def fitted_on(
    fitted: Fit, stems: Collection[str], data: Data, epochs: int, memory: float | None = None
) -> tuple[nn.Module, Prior, Likelihood]:
    """The model, prior and noise of a fit after so many more epochs without the named paths, which then compute zero.

    The rate is the one that the trained network bears. The result is never below its start in evidence, as in any fit.
    """
    smaller = without(fitted.model, stems)
    precision = hand_over(fitted.model, smaller, fitted.prior.precision())
    schedule = replace(fitted.schedule, epochs=epochs, lr=None, burn_in=None, every=None, start_cap=math.inf)
    options: dict[str, Any] = {"schedule": schedule, "prior_precision": precision, "seed": fitted.seed, "memory": memory}
    found = fit(smaller, data, fitted.likelihood, **options)
    model = copy.deepcopy(fitted.model)
    prior = Prior(fitted.prior.names, hand_over(smaller, model, found.prior.precision()))
    with torch.no_grad():
        for index, name in enumerate(prior.names):
            if any(is_under(name, stem) for stem in stems):
                prior.log_precision[index] = LOG_PRECISION_RANGE[1]
    return model, prior, found.likelihood
