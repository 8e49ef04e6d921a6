"""What evidence can be: the most that log p(D) can be, and when an estimate of it has failed.

    log p(D) <= -log(C! / (C - seen)!)          for labels of C classes, of which ``seen`` occur

If the prior does not know which class is which, all relabellings of the data have the same probability. There are
C! / (C - seen)! of them, and they exclude each other. For one logit the same holds for its sign: the bound is -log 2.

The bound holds where permuting the outputs of the network is a symmetry of its prior. That is so if the last layer is linear,
and if all of it is learned with one precision for all outputs of a path: ``curvature.verification`` tests this. Layers below may be
frozen or pretrained, and precisions and noise may be learned. A Student-t prior is no exception: scales of rows are integrated out,
by a lower bound. If a part of the last layer is frozen, or if classes differ by fixed numbers, it is only known that p(D) <= 1.
Densities have no bound.

Laplace needs a mode, and a network that explains the labels cannot be at one without effective parameters. At a mode the prior and the
data pull equally at the weights w of the last layer: delta |w|^2 = sum (1 - p) m, with m the margins of the logits and p the
probabilities of the labels. The curvature along w is sum p (1 - p) m^2 / |w|^2, so this direction alone has gamma = pm / (1 + pm),
with pm the mean of p m: at least 0.7 if labels are explained evenly to 90 %. A softmax that is saturated has no curvature left:
gamma is next to 0, the posterior is taken to be as wide as the prior, and the evidence is too large.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.evidence.cautions import Failed, Impossible, Saturated
from autosym.evidence.record import Evidence

EXPLAINED = 0.9  # part of what guessing leaves to explain: with more, the labels are explained
FEWEST = 0.5  # effective parameters: with fewer, labels that are explained are not explained by a mode


class Estimate(Protocol):
    """An estimate of the evidence at fixed weights, as a function of the prior: ``Laplace``, ``Kernel`` or ``Whole``."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def sizes(self) -> Tensor: ...

    @property
    def likelihood(self) -> Likelihood: ...

    @property
    def outputs(self) -> int: ...

    def __call__(self, prior: Prior) -> Evidence: ...

    def effective_parameters(self, prior: Prior) -> Tensor: ...


def most(likelihood: Likelihood, outputs: int, seen: int = 0) -> float:
    """The most that log p(D) can be if ``seen`` classes occur whose outputs are alike under the prior (0: not known).

    It is -log(C! / (C - seen)!) for classes; infinite if targets are not classes.
    """
    classes = likelihoods.classes(likelihood, outputs)
    return math.inf if classes is None else math.lgamma(classes - seen + 1) - math.lgamma(classes + 1)


def failure(at: Estimate, prior: Prior) -> Failed | None:
    """Why the evidence ``at(prior)`` must not be used, or None. It needs no data."""
    with torch.no_grad():
        record, gamma = at(prior), float(at.effective_parameters(prior).sum())
    classes = likelihoods.classes(at.likelihood, at.outputs)
    return reason(float(record.log_evidence), float(record.log_likelihood), record.samples, record.most, classes, gamma)


def reason(
    log_evidence: float,
    log_likelihood: float,
    samples: int,
    most: float,
    classes: int | None,
    effective_parameters: float,
    lr: float | None = None,
) -> Failed | None:
    """Why evidence with these numbers, of a network trained at the rate ``lr``, must not be used, or None."""
    if not log_evidence <= most:  # NaN too
        return Impossible(log_evidence, most, lr)
    if classes is None or classes < 2:
        return None
    explained = 1 + log_likelihood / (samples * math.log(classes))
    if explained > EXPLAINED and effective_parameters < FEWEST:
        return Saturated(effective_parameters, explained, lr)
    return None
