"""What every estimator returns."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Evidence:
    """log p(D) ~ log_likelihood + log_prior - complexity, in nats over all ``samples``.

    ``complexity`` is minus the log of the posterior's volume. ``occam`` (log_prior - complexity) is the price of the
    parameters; it is never positive for Laplace at a mode. If the value is a lower bound, ``bound_of`` says of what.
    """

    log_likelihood: Tensor
    log_prior: Tensor
    complexity: Tensor
    samples: int
    bound_of: str | None = None

    @property
    def occam(self) -> Tensor:
        return self.log_prior - self.complexity

    @property
    def log_evidence(self) -> Tensor:
        return self.log_likelihood + self.occam

    def __str__(self) -> str:
        value, fit, occam = (float(t.detach()) for t in (self.log_evidence, self.log_likelihood, self.occam))
        return (
            f"log evidence {value:.3f} nats over {self.samples} samples = log likelihood {fit:.3f} + Occam factor {occam:.3f}"
        )
