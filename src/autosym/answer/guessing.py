"""How much of the targets is explained: by how much the evidence is above that of a guess that knows no input.

    classes    1 - log p(D) / log p(guess)                  guess: by how frequent labels are
    numbers    1 - (p(guess) / p(D))^(2 / n)                guess: their mean and variance; as R^2, with evidence for squared errors

0 is as good as the guess, 1 is all. Targets of other likelihoods have no guess.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from autosym.bayes.likelihoods import Likelihood


def explained(targets: Tensor, likelihood: Likelihood, classes: bool) -> Callable[[float], float]:
    """The part that a network with some log evidence explains; 1 where there is no guess."""
    if classes:
        guess = -len(targets) * entropy(targets)
        return lambda log_evidence: 1 - log_evidence / guess if guess < 0 else 0.0
    if likelihood.name == "gaussian":
        count, variance = targets.numel(), float((targets - targets.mean(0)).double().square().mean())
        if variance > 0:
            normal = -count / 2 * math.log(2 * math.pi * math.e * variance)
            return lambda log_evidence: 1 - math.exp(min(2 * (normal - log_evidence) / count, 100.0))
    return lambda log_evidence: 1.0


def entropy(labels: Tensor) -> float:
    """Of labels, in nats a sample."""
    parts = torch.unique(labels, return_counts=True)[1].double() / labels.numel()
    return float(-(parts * parts.log()).sum())
