"""What a fit returns, and how it is saved and loaded."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path as File
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import LIKELIHOODS, Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature import Curvature, Factors
from autosym.curvature.owners import parameter_of
from autosym.evidence import verdicts
from autosym.evidence.kernel import Kernel
from autosym.evidence.laplace import Laplace
from autosym.evidence.predictive import Link, Predictive, predictive
from autosym.evidence.record import Evidence
from autosym.evidence.shares import Symmetry, symmetry
from autosym.runtime.records import pack, unpack
from autosym.training import checkpoint
from autosym.training.schedule import Schedule

FILE, KIND = "fit.safetensors", "autosym fit"
KINDS = {kind.__name__: kind for kind in (Schedule, Evidence, Laplace, Kernel, Curvature, Factors)}
PRIOR = ("names", "nu", "log_precision", "scales", "mixture_bound")
ON_DEVICE = ("estimate/curvature/factors/", "estimate/eigenvalues/", "model/", "prior/scales/")  # the model's


@dataclass(frozen=True, repr=False)
class Fit:
    """A fitted model, its prior and noise, the history of the run, and the evidence at the end, at which ``estimate`` was taken.

    ``model`` is the one that was given to ``fit``. What depends on its weights is refused once they have changed (by another fit of the
    same model, say): ``restore()`` puts those of this fit back.
    """

    model: nn.Module
    prior: Prior
    likelihood: Likelihood
    schedule: Schedule
    history: list[dict[str, Any]]
    evidence: Evidence
    estimate: Laplace | Kernel
    seed: int = 0
    simplified: bool = False  # whether paths without evidence were left out (``simplify``)

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
        found = replace(symmetry(self.model, self.prior, self.estimate), simplified=self.simplified)
        return with_cautions(found, self.evidence, self.estimate, self.likelihood, self.schedule, self.history)

    def predictive(self, x: Tensor, link: Link = "probit", samples: int = 256, seed: int = 0) -> Predictive:
        """The posterior predictive of the linearised model at ``x``; ``link`` is "probit" (closed form) or "monte-carlo"."""
        self.check_weights()
        return predictive(self.model, x, self._eigenvectors, self.prior, self.likelihood, link, samples, seed)

    def check_weights(self) -> None:
        """Refuse a model whose weights are not those of the fit any more: the evidence is of the weights before."""
        moved = [n for n, weight in self.estimate.parameters.items() if not torch.equal(parameter_of(self.model, n), weight)]
        if moved:
            raise ValueError(
                f"the weights of {moved[0]} were changed after the fit (by another fit of the same model?), and its evidence is of the "
                "weights before that: put them back by fit.restore(), or train a copy.deepcopy(model) next time"
            )

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights of this fit back into its model."""
        for name, weight in self.estimate.parameters.items():
            parameter_of(self.model, name).copy_(weight)

    def save(self, folder: str | File) -> File:
        """Write everything but the model's code to ``folder``, as one file of safetensors and JSON; ``autosym.load`` reads it."""
        self.check_weights()
        path, tensors = File(folder) / FILE, {f"model/{name}": t for name, t in self.model.state_dict().items()}
        prior, learned = self.prior, self.likelihood.hyperparameters()
        state = {
            "schedule": pack(self.schedule, "schedule", tensors),
            "history": pack(self.history, "history", tensors),
            "evidence": pack(self.evidence, "evidence", tensors),
            "estimate": pack(self.estimate, "estimate", tensors, leave_out=("likelihood", "parameters")),
            "prior": pack({key: getattr(prior, key) for key in PRIOR}, "prior", tensors),
            "likelihood": {"name": self.likelihood.name, "learned": pack(dict(learned), "likelihood", tensors)},
            "seed": self.seed,
            "simplified": self.simplified,
        }
        checkpoint.write(path, tensors, state, KIND)
        return path

    @property
    def laplace(self) -> Laplace:
        """The estimate with its Kronecker factors."""
        if isinstance(self.estimate, Kernel):
            raise ValueError("this fit was made with kernel evidence, which has no Kronecker factors: fit without kernel=")
        return self.estimate

    @cached_property
    def _eigenvectors(self) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        return self.laplace.curvature.eigenvectors(self.prior.scales)


def load(folder: str | File, model: nn.Module, likelihood: Likelihood | None = None) -> Fit:
    """The fit that ``Fit.save`` wrote to ``folder``; it can do what it could before.

    ``model`` is one of the same layers (relaxed in the same way, say); it is given the weights of the fit, in place. A ``likelihood`` of
    your own must be given, too.
    """
    path = File(folder) / FILE
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: name a folder that fit.save(folder) wrote")
    tensors, state = checkpoint.read(path, KIND)
    name = (state.get("likelihood") or {}).get("name")
    if likelihood is None and isinstance(name, str) and name not in LIKELIHOODS:
        raise ValueError(f"{path} has a likelihood of your own, {name!r}: give it too, as in load(folder, model, likelihood)")
    device = next(model.parameters()).device
    tensors = {name: t.to(device) if name.startswith(ON_DEVICE) else t for name, t in tensors.items()}
    own = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
    try:
        found = _unpacked(state, tensors, own, model, likelihood)
        found_again = float(found.estimate(found.prior).log_evidence.detach())
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged, or of another version ({type(error).__name__}: {error}): save the fit again"
        ) from error
    if not math.isclose(found_again, float(found.evidence.log_evidence), rel_tol=1e-6, abs_tol=1e-3):
        raise ValueError(f"{path} is damaged: its evidence is not what its curvature and prior give; save the fit again")
    checkpoint.load_into(model.state_dict(), own, path)
    return found


def _unpacked(
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    model: nn.Module,
    likelihood: Likelihood | None,
) -> Fit:
    """The fit of a file, whose model's tensors are ``own``."""
    likelihood = LIKELIHOODS[state["likelihood"]["name"]]() if likelihood is None else copy.deepcopy(likelihood)
    with torch.no_grad():
        for name, value in unpack(state["likelihood"]["learned"], tensors, {}).items():
            likelihood.hyperparameters()[name].copy_(value)
    known = unpack(state["prior"], tensors, {})
    prior = Prior(known["names"], 1.0, known["nu"])
    prior.log_precision.data.copy_(known["log_precision"])
    prior.scales, prior.mixture_bound = known["scales"], known["mixture_bound"]
    parts = {key: unpack(state[key], tensors, KINDS) for key in ("schedule", "history", "evidence")}
    weights = {name: own[name] if name in own else own[f"{name}.weight"] for name in known["names"]}
    estimate = unpack(state["estimate"], tensors, KINDS, likelihood=likelihood, parameters=weights)
    return Fit(model, prior, likelihood, **parts, estimate=estimate, seed=state["seed"], simplified=state["simplified"])


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
        likelihoods.classes(likelihood, estimate.outputs),
        None if estimate.fingerprint is None else estimate.fingerprint.tolist(),
        schedule.step != "none",
        schedule.lr,
        history,
    )
    return replace(found, cautions=verdicts.cautions(found.paths, known))
