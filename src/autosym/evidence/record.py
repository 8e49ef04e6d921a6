"""What every estimator returns, and how a log evidence is written: the same digits in every table, file and page."""

import math
from dataclasses import dataclass

from torch import Tensor


def nats(value: float, error: float = 0.0) -> str:
    """A log evidence over all samples: one decimal, three if it is below 1, none if its standard ``error`` is above 1."""
    return f"{value:.{0 if error > 1 else 1 if abs(value) >= 1 else 3}f}"


def per_sample(value: float) -> str:
    """A log evidence for each sample: four decimals."""
    return f"{value:.4f}"


def in_words(value: float, samples: int) -> str:
    """A log evidence in one line: in nats over all samples, and for each."""
    return f"log evidence {nats(value)} nats over {samples} samples ({per_sample(value / samples)} per sample)"


@dataclass(frozen=True)
class Evidence:
    """log p(D) ~ log_likelihood + log_prior - complexity, in nats over all ``samples``.

    ``complexity`` is minus the log of the posterior's volume. ``occam`` (log_prior - complexity) is the price of the
    parameters; it is never positive for Laplace at a mode. If the value is a lower bound, ``bound_of`` says of what. The true
    log p(D) is at most ``most``, by what is known of the data and the prior: an estimate above it is not ``possible``.
    ``standard_error`` is that of estimates by random probes, 0 without chance, None if it is not known.
    """

    log_likelihood: Tensor
    log_prior: Tensor
    complexity: Tensor
    samples: int
    bound_of: str | None = None
    most: float = math.inf
    standard_error: float | None = None

    @property
    def occam(self) -> Tensor:
        return self.log_prior - self.complexity

    @property
    def log_evidence(self) -> Tensor:
        return self.log_likelihood + self.occam

    @property
    def possible(self) -> bool:
        return float(self.log_evidence.detach()) <= self.most

    def __str__(self) -> str:
        value, fit, occam = (float(t.detach()) for t in (self.log_evidence, self.log_likelihood, self.occam))
        doubt = "" if self.possible else f"; it cannot be more than {nats(self.most)}, so the approximation has failed"
        error = f" +- {self.standard_error:.2g}" if self.standard_error else ""
        parts = f"log likelihood {nats(fit)} + Occam factor {nats(occam)}"
        of = "" if self.standard_error is None else " of the whole network"
        return f"log evidence{of} {nats(value)}{error} nats over {self.samples} samples = {parts}{doubt}"
