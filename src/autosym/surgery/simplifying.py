"""simplify: the same fit without the paths that break a symmetry and have no evidence for them.

    nats = log Z(all paths) - log Z(all but this one)

Both are Laplace evidence at the weights of the fit, each at the precisions and the noise that are best for it: what a path is worth to this
network as it is trained, which trained longer, or without the path, may need it more or less. A share tells how many of the effective
parameters of its layer a path holds, and those may be few: on its way out, where the evidence is nearly flat, a path may hold half of them
and be worth less than nothing.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autosym.curvature.owners import is_under
from autosym.curvature.passes import alike
from autosym.evidence import laplace
from autosym.evidence.cautions import Caution
from autosym.evidence.laplace import LOG_PRECISION_RANGE, Laplace
from autosym.runtime.batching import Data, check_repeatable
from autosym.runtime.tables import table
from autosym.training.fitted import Fit

STEPS = 20  # of precisions and noise, in closed form: each network is judged at its best ones


@dataclass(frozen=True)
class PathWorth:
    """One path that breaks a symmetry: its share of its layer before, and the evidence that is lost without it alone."""

    layer: str
    path: str
    share: float
    nats: float
    left_out: bool


@dataclass(frozen=True)
class Simplification:
    """What every path that breaks a symmetry is worth, which were left out, and the log evidence before and after; prints as a table.

    A path that is worth little by itself is kept if it is worth the threshold once others are left out.
    """

    paths: tuple[PathWorth, ...]
    log_evidence: tuple[float, float]  # at the best precisions and noise of each
    cautions: tuple[Caution, ...] = ()  # those of the fit

    def __str__(self) -> str:
        rows = [("layer", "path", "share", "nats", "")]
        rows += [(p.layer, p.path, f"{p.share:.1%}", f"{p.nats:+.1f}", "left out" if p.left_out else "") for p in self.paths]
        found = "log evidence {:.1f} before, {:.1f} after, precisions learned again in both".format(*self.log_evidence)
        return "\n".join([table(rows, "<<>><"), found, *(f"Caution: {caution}" for caution in self.cautions)])


def simplify(fitted: Fit, data: Data, nats: float = 10.0, **options: Any) -> Fit:
    """A fit of a copy of the model without paths that break a symmetry and are worth less than ``nats`` of evidence.

    ``data`` are those of the fit. Of the paths that break a symmetry which another of their layer keeps, those are left out, the one
    with the least evidence for it first, without which the log evidence falls by less: their weights are zero, their precisions 1e12.
    Each is tried once. Other weights are as they were; precisions and noise are learned again. It takes a pass of the evidence for each
    such path, and another for each that is tried. A sparse path that is constant in space by its omega breaks nothing, but is tried too.
    The record is ``simplification`` of the model of the fit returned; print it. ``options`` are those of ``autosym.curvature.kfac``.
    """
    if not isinstance(fitted, Fit):
        raise TypeError(
            f"simplify takes the Fit that autosym.fit returned, got a {type(fitted).__name__}: of a model, it is "
            "simplify(autosym.fit(model, data), data)"
        )
    if fitted.schedule.step == "none":
        raise ValueError("simplify compares evidence at learned precisions: fit without step='none'")
    if math.isfinite(fitted.prior.nu):
        raise ValueError("simplify compares evidence under Gaussian priors, not the bound of Student-t ones: fit without nu")
    if not isinstance(fitted.estimate, Laplace):
        raise ValueError("simplify compares evidence by Kronecker factors: fit without kernel=")
    fitted.check_weights()
    check_repeatable(data)
    found = fitted.symmetry()
    candidates = {f"{path.layer}.{path.path}".lstrip("."): path for path in found.optional()}
    if not candidates:
        raise ValueError(
            "no path that has a share breaks a symmetry which another of its layer keeps, so there is nothing to leave out"
        )
    simplest = _without(fitted, (), data, options)
    _refuse_other_data(fitted, simplest)
    before = _log_evidence(simplest)
    worth = {stem: before - _log_evidence(_without(fitted, (stem,), data, options)) for stem in candidates}
    gone: tuple[str, ...] = ()
    for stem in sorted(candidates, key=worth.__getitem__):
        if worth[stem] >= nats:
            break
        tried = _without(fitted, (*gone, stem), data, options)
        if _log_evidence(simplest) - _log_evidence(tried) < nats:
            gone, simplest = (*gone, stem), tried
    rows = tuple(PathWorth(p.layer, p.path, p.share, worth[stem], stem in gone) for stem, p in candidates.items())
    simplest.model.simplification = Simplification(rows, (before, _log_evidence(simplest)), found.cautions)  # type: ignore[assignment]
    return simplest


def _log_evidence(fitted: Fit) -> float:
    return float(fitted.evidence.log_evidence)


@torch.no_grad()
def _without(fitted: Fit, stems: Sequence[str], data: Data, options: Mapping[str, Any]) -> Fit:
    """The fit with the paths of these names at zero, and its evidence."""
    model, prior = copy.deepcopy(fitted.model), copy.deepcopy(fitted.prior)
    for name, parameter in model.named_parameters():
        if any(is_under(name, stem) for stem in stems):
            parameter.zero_()
    for index, name in enumerate(prior.names):
        if any(is_under(name, stem) for stem in stems):
            prior.log_precision[index] = LOG_PRECISION_RANGE[1]
    estimate = laplace.at(model, data, copy.deepcopy(fitted.likelihood), **options)
    for _ in range(STEPS):
        estimate.mackay(prior)
    schedule = replace(fitted.schedule, sampled_end=bool(options.get("sampled", False)))
    evidence, likelihood = estimate(prior), estimate.likelihood
    return replace(
        fitted,
        model=model,
        prior=prior,
        likelihood=likelihood,
        schedule=schedule,
        estimate=estimate,
        evidence=evidence,
        simplified=True,
    )


def _refuse_other_data(fitted: Fit, again: Fit) -> None:
    same = alike(fitted.estimate.fingerprint, again.estimate.fingerprint)
    if fitted.evidence.samples != again.evidence.samples or not same:
        raise ValueError(
            f"the fit was to {fitted.evidence.samples} samples and these are {again.evidence.samples}, or others: pass the data of the fit "
            "(its evidence_data, where it had some)"
        )
