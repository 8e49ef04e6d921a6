"""What a fit returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path as File
from typing import Any, ClassVar

from torch import Tensor, nn

from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.evidence import verdicts
from autosym.evidence.kernel import Kernel
from autosym.evidence.laplace import Laplace
from autosym.evidence.predictive import Link, Predictive, predictive
from autosym.evidence.record import Evidence
from autosym.evidence.shares import Symmetry, symmetry
from autosym.training.schedule import Schedule


@dataclass(frozen=True, repr=False)
class Fit:
    """A fitted model, its prior and noise, the history of the run, and the evidence at the end, at which ``estimate`` was taken."""

    model: nn.Module
    prior: Prior
    likelihood: Likelihood
    schedule: Schedule
    history: list[dict[str, Any]]
    evidence: Evidence
    estimate: Laplace | Kernel
    seed: int = 0

    # Pages are made from fits, so their room comes after this one: autosym/__init__.py gives the methods that write them.
    report: ClassVar[Callable[..., File]]
    """``fit.report(path, data=None, **options)``: what was learned as one HTML file (``report.writing.write``)."""
    plot: ClassVar[Callable[..., Any]]
    """``fit.plot()``: shares, evidence and precisions as a figure of matplotlib (``report.drawing.plot``)."""

    def __repr__(self) -> str:
        found = (
            f"log evidence {float(self.evidence.log_evidence):.2f} of {self.evidence.samples} samples ({self.likelihood.name})"
        )
        return f"<Fit of {type(self.model).__name__}: {found}, {len(self.history)} epochs>"

    def symmetry(self) -> Symmetry:
        """For every layer and path: precision, effective parameters, relative share. Prints as a table."""
        found = symmetry(self.model, self.prior, self.estimate)
        return with_cautions(found, self.evidence, self.estimate, self.likelihood, self.schedule, self.history)

    def predictive(self, x: Tensor, link: Link = "probit", samples: int = 256, seed: int = 0) -> Predictive:
        """The posterior predictive of the linearised model at ``x``; ``link`` averages the softmax of a classifier."""
        return predictive(self.model, x, self._eigenvectors, self.prior, self.likelihood, link, samples, seed)

    @property
    def laplace(self) -> Laplace:
        """The estimate with its Kronecker factors."""
        if isinstance(self.estimate, Kernel):
            raise ValueError("this fit was made with kernel evidence, which has no Kronecker factors: fit without kernel=")
        return self.estimate

    @cached_property
    def _eigenvectors(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        return self.laplace.curvature.eigenvectors(self.prior.scales)


def with_cautions(
    found: Symmetry,
    evidence: Evidence,
    estimate: Laplace | Kernel,
    likelihood: Likelihood,
    schedule: Schedule,
    history: Sequence[Mapping],
) -> Symmetry:
    """The same table, with what belongs beside it: that nothing is established, or not yet settled."""
    known = verdicts.Known(
        float(evidence.log_evidence),
        evidence.samples,
        verdicts.classes(likelihood.name, estimate.outputs),
        None if estimate.fingerprint is None else estimate.fingerprint.tolist(),
        schedule.step != "none",
        schedule.lr,
        history,
    )
    return replace(found, cautions=verdicts.cautions(found.paths, known))
