"""Which model do the data support? Posterior probabilities of models, from their evidence.

    p(M_i | D) = E_e p(D | M_i) e^e_i / sum_j p(D | M_j) e^e_j          under equal prior odds

One nat is a factor of e in the odds. The numbers are only as good as the approximation of the evidence, so the odds are a mean over its
errors e: of the estimator, of what training is short of, and of what it moved the evidence by when it ended. Another seed may change it by
more than that: ``discover`` trains several. Models with different
data or likelihoods are refused. A model whose evidence has failed (``evidence.possible``) is listed last, and not ranked. A
warning beside a model names anything else that may mislead.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from autosym.answer import margins
from autosym.bayes import likelihoods
from autosym.bayes.priors import Prior
from autosym.curvature.owners import sites
from autosym.curvature.passes import TARGETS, Pass, alike
from autosym.evidence import possible, verdicts
from autosym.evidence.cautions import Failed
from autosym.evidence.laplace import Laplace
from autosym.evidence.record import nats, per_sample
from autosym.evidence.whole import Whole
from autosym.linear.normalisation import NORMALISATIONS
from autosym.linear.path import Path
from autosym.runtime import arithmetic
from autosym.runtime.batching import Data
from autosym.runtime.tables import table
from autosym.training.fitted import Fit
from autosym.training.fitting import fit
from autosym.training.guarding import PARTS


@dataclass(frozen=True)
class Compared:
    """One model of a comparison. ``difference`` is to the best, in nats, never positive. ``probability`` assumes equal prior odds.

    It is a mean over errors, of which ``error`` is the standard deviation, in nats; without them it would be ``at_face_value``.

    If its evidence must not be used, ``failed`` says why, and both are NaN.
    ``short_of_mode`` estimates how many nats the log posterior would still rise (None without data to measure it): to the mode of the
    linearised network if the evidence is that of the whole network, else by one Newton step with Kronecker factors.
    ``unlearned`` estimates how many nats the evidence would rise if precisions took one more closed-form step at these weights.
    ``standard_error`` is that of evidence estimated by probes (0: exact for the whole network; None: of Kronecker factors, not known).
    """

    name: str
    log_evidence: float
    per_sample: float
    difference: float
    probability: float
    short_of_mode: float | None
    unlearned: float
    warnings: tuple[str, ...]
    failed: Failed | None = None
    standard_error: float | None = None
    error: float = 0.0
    at_face_value: float = math.nan


@dataclass(frozen=True)
class Comparison:
    """Models ordered by their evidence, the best first, failed ones last; prints as a table. ``fits`` holds each fit by name."""

    models: tuple[Compared, ...]
    fits: Mapping[str, Fit] = field(repr=False)

    def __iter__(self) -> Iterator[Compared]:
        return iter(self.models)

    @property
    def best(self) -> Compared:
        """The model with the most evidence. A ValueError if the evidence of every model has failed."""
        best = self.models[0]
        if best.failed:
            raise ValueError(f"no model is the best, as the evidence of none can be used; {best.name}: {best.failed}")
        return best

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Ready for JSON. Of a model whose evidence has failed, NaN becomes None."""
        rows = [{**vars(m), "warnings": list(m.warnings), "failed": m.failed is not None} for m in self.models]
        unknown = dict.fromkeys(("difference", "probability", "at_face_value"))
        return [row | (unknown if row["failed"] else {}) for row in rows]

    @property
    def warnings(self) -> tuple[str, ...]:
        """All warnings, each with the name of its model."""
        return tuple(f"{model.name}: {warning}" for model in self.models for warning in model.warnings)

    def __str__(self) -> str:
        rows = [("model", "log evidence", "per sample", "difference", "probability", "short of a mode")]
        for m in self.models:
            short = "?" if m.short_of_mode is None else f"{m.short_of_mode:.3g}"
            ranks = ("failed", "-") if m.failed else (f"{m.difference:.2f}", f"{m.probability:.3g}")
            error = f" +- {m.error:.2g}" if m.error >= 0.005 else ""
            numbers = (f"{nats(m.log_evidence)}{error}", per_sample(m.per_sample), *ranks, short)
            rows.append((m.name, *numbers))
        return "\n".join([table(rows, "<>>>>>"), *(f"! {warning}" for warning in self.warnings)])


def compare(
    candidates: Mapping[str, Fit | nn.Module] | Sequence[Fit | nn.Module],
    data: Data | None = None,
    curvature: Literal["kronecker", "whole"] | None = None,
    **options: Any,
) -> Comparison:
    """p(M_i | D) of several fits, or models, of the same data, by name (or numbered from 0).

    Fits are compared as they are. A model is first trained, in place, by ``fit(model, data, **options)``. ``data`` must be the
    data of every candidate. With them, compare also measures how far the weights are from a mode of the posterior, where the
    Laplace approximation holds.

    With the ``curvature`` "whole" all fits are refined first (``Fit.refine``), so that the evidence is that of the whole network. By
    default this is done if there are data and it takes no more work than each fit did. "kronecker" leaves it be.
    """
    if curvature not in (None, "kronecker", "whole"):
        raise ValueError(f"curvature must be 'kronecker', 'whole' or None, got {curvature!r}")
    if curvature == "whole" and data is None:
        raise ValueError("the evidence of the whole network needs the data of the fits: compare(fits, data, curvature='whole')")
    if isinstance(candidates, (Fit, nn.Module, str)) or not hasattr(candidates, "__iter__"):
        raise TypeError(
            f"compare takes several fits or models, got one {type(candidates).__name__}: give a list, or a dict by name, e.g. "
            "compare({'one': fit, 'two': other})"
        )
    named = dict(candidates) if isinstance(candidates, Mapping) else {str(i): c for i, c in enumerate(candidates)}
    if len(named) < 2:
        raise ValueError(f"a comparison needs at least two fits or models, got {len(named)}")
    wrong = [name for name, candidate in named.items() if not isinstance(candidate, (Fit, nn.Module))]
    if wrong:
        raise TypeError(f"{wrong[0]!r} is a {type(named[wrong[0]]).__name__}: give what autosym.fit returns, or a torch model")
    models = [name for name, candidate in named.items() if not isinstance(candidate, Fit)]
    if models and data is None:
        raise ValueError(
            f"{', '.join(models)}: a model is trained before it is compared, so give its data: compare(models, data)"
        )
    if options and not models:
        raise TypeError(f"{', '.join(options)}: options are for training models, but these are fits already: leave them out")
    fits = {name: c if isinstance(c, Fit) else fit(c, _given(data), **options) for name, c in named.items()}
    return judged(_refined(fits, data, curvature), data)


def _refined(fits: Mapping[str, Fit], data: Data | None, curvature: str | None) -> Mapping[str, Fit]:
    """The fits with the evidence of the whole network, if that is asked for, or takes no more work than each of them did."""
    if data is None or curvature == "kronecker":
        return fits
    if curvature is None and not all(isinstance(f.estimate, Whole) or f.affords_whole(data) for f in fits.values()):
        return fits
    return {name: f if isinstance(f.estimate, Whole) else f.refine(data) for name, f in fits.items()}


def judged(fits: Mapping[str, Fit], data: Data | None = None) -> Comparison:
    """p(M_i | D) of one or more fits by name, after the checks of ``compare``."""
    _refuse_other_fits(fits)
    values = {name: float(f.evidence.log_evidence) for name, f in fits.items()}
    short = {name: None if data is None else short_of_mode(f, data) for name, f in fits.items()}
    failed = {name: why for name, f in fits.items() if (why := possible.failure(f.estimate, f.prior))}
    order = sorted((name for name in values if name not in failed), key=lambda name: -values[name])
    compared = []
    unlearned_by = {name: _unlearned(f) for name, f in fits.items()}
    errors = {name: _error(fits[name], short[name], unlearned_by[name]) for name in order}
    chances, sure = margins.chances({n: values[n] for n in order}, errors), probabilities([values[n] for n in order])
    for place, name in enumerate(order):
        margin = values[order[0]] - values[order[place or 1]] if len(order) > 1 else math.inf
        unlearned = unlearned_by[name]
        warnings = [*_unlike(name, fits), *_unconverged(fits[name], margin, short[name], unlearned)]
        pair = [fits[n] for n in (name, order[0 if place else len(order) > 1])]
        error = math.hypot(*(f.evidence.standard_error or 0.0 for f in pair))
        truncation = sum(f.estimate.truncation for f in pair if isinstance(f.estimate, Whole))
        if margin < 2 * error + truncation:
            warnings.append(
                f"the margin, {margin:.3g} nats, is less than twice the error of the estimate, {error:.2g}, and truncation, "
                f"{truncation:.2g}: refine with fewer nats"
            )
        difference, samples = values[name] - values[order[0]], fits[name].evidence.samples
        row = (name, values[name], values[name] / samples, difference, chances[name], short[name], unlearned, tuple(warnings))
        known: dict[str, Any] = {"error": errors[name], "at_face_value": sure[place]}
        compared.append(Compared(*row, standard_error=fits[name].evidence.standard_error, **known))
    for name, why in failed.items():
        per_sample = values[name] / fits[name].evidence.samples
        row = (name, values[name], per_sample, math.nan, math.nan, short[name], unlearned_by[name], (why.unranked(),))
        compared.append(Compared(*row, why))
    return Comparison(tuple(compared), fits)


def _error(fitted: Fit, short: float | None, unlearned: float) -> float:
    """The standard deviation of what may be wrong with the log evidence of a fit, in nats.

    Of the estimator: its standard error and truncation, or, of Kronecker factors, what the whole evidence differs by from them
    (``guarding.PARTS`` of the effective parameters). Of training: what it is short of, and how far the evidence moved in its last steps.
    """
    if isinstance(fitted.estimate, Whole):
        estimator = math.hypot(fitted.evidence.standard_error or 0.0, fitted.estimate.truncation / math.sqrt(12))
    elif isinstance(fitted.estimate, Laplace):
        gamma = float(fitted.laplace.effective_parameters(fitted.prior).detach().sum())
        estimator = (PARTS[1] - PARTS[0]) / math.sqrt(12) * gamma
    else:
        estimator = 0.0
    missing = 0.0 if short is None or math.isnan(short) else short  # up to all of which more training may gain
    missing += unlearned if fitted.schedule.step != "none" else 0.0
    steps = [line["log_evidence"] for line in fitted.history if line.get("log_evidence") is not None]
    late = steps[-max(2, len(steps) // 4) :]
    moved = statistics.stdev(late) if len(late) > 1 else 0.0
    return math.hypot(estimator, missing / math.sqrt(12), moved)


def probabilities(log_evidences: Sequence[float]) -> list[float]:
    """Posterior probabilities of models with equal prior probabilities, as if their evidence had no errors."""
    return torch.tensor(log_evidences, dtype=torch.float64).softmax(0).tolist()


def short_of_mode(fitted: Fit, data: Data) -> float:
    """By how many nats the log joint density is larger at the nearest mode. ``data`` must be the data of the fit."""
    return fitted.mode(data).gain if isinstance(fitted.estimate, Whole) else _newton_gain(fitted, data)


def _newton_gain(fitted: Fit, data: Data) -> float:
    """1/2 g^T H^-1 g, with g the gradient of the log posterior and H its Kronecker-factored curvature: a Newton step's gain, in nats.

    To second order, the log joint at the nearest mode is larger by this amount, and so is the Laplace evidence. H treats paths as
    independent, so the gain is a sum over paths. It is exact if the curvature is.
    """
    gradients = _likelihood_gradients(fitted, data)
    precision, scale = fitted.prior.precision(), float(fitted.likelihood.scale().detach())
    total = 0.0
    for name, (products, U, V) in fitted.laplace.curvature.eigenvectors(fitted.prior.scales).items():
        w = fitted.laplace.parameters[name]
        g = scale * gradients[name] - precision[name] * (fitted.prior.scale_of(name, w) * w).double()
        rotated = U.mT @ g.reshape(*U.shape[:2], -1) @ V
        total += 0.5 * float((rotated.square() / (scale * products + precision[name])).sum())
    return total


@arithmetic.true_float32()
def _likelihood_gradients(fitted: Fit, data: Data) -> dict[str, Tensor]:
    """The gradient of the log-likelihood of all data at unit scale, by path name."""
    owned = {site.name: site.parameter for site in sites(fitted.model)}
    fitted.check_weights()
    sums = {name: torch.zeros_like(weight, dtype=torch.float64) for name, weight in owned.items()}
    shown = Pass(fitted.model, data, fitted.likelihood, 256, alone=True, allow_partial=True)
    for x, y, _, _ in shown:
        fitted.likelihood.check(fitted.laplace.outputs, y)
        with torch.enable_grad():
            loss = fitted.likelihood.loss(fitted.model(x), y)
        for total, part in zip(sums.values(), torch.autograd.grad(loss, list(owned.values())), strict=True):
            total -= part
    shown.finish()
    at = fitted.laplace.curvature
    if shown.samples != at.samples or not alike(shown.fingerprint, at.fingerprint):
        raise ValueError(
            f"these {shown.samples} samples are not the {at.samples} that the evidence was computed on: pass the data that every "
            "candidate was fitted to, or no data"
        )
    return sums


def _unlearned(fitted: Fit) -> float:
    """How much the evidence would gain at these weights from one closed-form step of all precisions (the noise stays)."""
    gamma, norms = fitted.laplace.effective_parameters(fitted.prior), fitted.laplace.square_norms
    prior = Prior(list(fitted.prior.names), 1.0, fitted.prior.nu)
    prior.scales, prior.mixture_bound = fitted.prior.scales, fitted.prior.mixture_bound
    with torch.no_grad():
        known = (gamma > 0) & (norms > 0)
        target = (gamma / norms.where(known, 1)).where(known, 1).log()
        prior.log_precision.copy_(target.where(known, fitted.prior.log_precision))
        return max(0.0, float(fitted.laplace(prior).log_evidence - fitted.laplace(fitted.prior).log_evidence))


def _refuse_other_fits(fits: Mapping[str, Fit]) -> None:
    (first, one), *others = fits.items()
    for name, other in others:
        if one.likelihood.name != other.likelihood.name:
            raise ValueError(
                f"{first} has a {one.likelihood.name} likelihood, {name} a {other.likelihood.name} one: a density and a probability "
                "cannot be compared; fit both with one likelihood"
            )
        counts = [(f.evidence.samples, f.laplace.curvature.outputs) for f in (one, other)]
        classes = likelihoods.classes(one.likelihood, counts[0][1])  # models may have outputs for classes that the data lack
        if counts[0][0] != counts[1][0] or (classes is None and counts[0][1] != counts[1][1]):
            raise ValueError(
                f"{first} was fitted to {counts[0][0]} samples with {counts[0][1]} outputs, {name} to {counts[1][0]} with "
                f"{counts[1][1]}: evidence can be compared only on the same data; fit both to them"
            )
        if not alike(one.laplace.fingerprint, other.laplace.fingerprint, TARGETS):
            raise ValueError(
                f"{first} and {name} were fitted to different targets: evidence can be compared only on the same data; fit both to them"
            )


def _unlike(name: str, fits: Mapping[str, Fit]) -> Iterator[str]:
    """What sets a fit apart from the others, and why that matters."""
    own = fits[name]
    others = {other: f for other, f in fits.items() if other != name}

    def rest(same: Any) -> list[str]:
        return [other for other, f in others.items() if same(f) != same(own)]

    def factored(f: Fit) -> bool:
        return any(path.factored for path in _paths(f))

    def scales(f: Fit, learned: bool) -> bool:
        norms = [module for module in f.model.modules() if type(module) in NORMALISATIONS]
        return any(p.requires_grad == learned for norm in norms for p in norm.parameters())

    def understated(f: Fit) -> list[str]:
        return sorted({type(path).__name__ for path in _paths(f) if path.understated})

    if own.schedule.sampled_end and rest(lambda f: f.schedule.sampled_end):
        yield "its curvature is sampled (sampled_end), which makes the evidence too large: fit it with sampled_end=False"
    if isinstance(own.estimate, Whole) and rest(lambda f: isinstance(f.estimate, Whole)):
        yield "its evidence is that of the whole network, but others have that of Kronecker factors, which is lower: refine all of them"
    if scales(own, True) and any(scales(f, False) for f in others.values()):
        yield "it learned scales or shifts of normalisation layers; others have frozen ones and pay nothing for them: treat all alike"
    elif scales(own, False) and any(scales(f, True) for f in others.values()):
        yield "its normalisation layers are frozen, so it pays nothing for them; others learned theirs and do: treat all alike"
    if own.evidence.bound_of and rest(lambda f: f.evidence.bound_of):
        yield f"its value is a lower bound of {own.evidence.bound_of}; other models have an estimate: fit all with the same nu"
    if own.schedule.step == "none" and rest(lambda f: f.schedule.step):
        yield "its precisions were not learned (step='none'), but other models learned theirs: learn them too, or its prior may decide"
    if factored(own) and rest(factored):
        yield "it has maps that are products of two factors, others have none, and Laplace sees that: rely on large differences only"
    if understated(own) and rest(understated):
        kinds = ", ".join(understated(own))
        yield f"the Kronecker curvature of {kinds}, relative to the exact one, is smaller than in other models: refine all of them"
    if not all(alike(own.laplace.fingerprint, f.laplace.fingerprint) for f in others.values()):
        yield "its inputs differ from the inputs of other models (scaled or cropped?): make sure that they are the same samples"


def _paths(fitted: Fit) -> list[Path]:
    return [module for module in fitted.model.modules() if isinstance(module, Path)]


def _unconverged(fitted: Fit, margin: float, short: float | None, unlearned: float) -> Iterator[str]:
    """Warnings if the model learned nothing, or if more training could gain more than ``margin``.

    ``margin`` is the distance to the best model; for the best one, its lead over the second.
    """
    classes = likelihoods.classes(fitted.likelihood, fitted.laplace.curvature.outputs)
    if classes is not None:
        part = verdicts.gained(float(fitted.evidence.log_evidence), fitted.evidence.samples, classes)
        if part < 0:
            yield f"its evidence is lower than for guessing one of {classes} classes, so it explains nothing (yet): train longer"
        elif part < verdicts.LITTLE:
            yield f"its evidence is only {part:.0%} better than guessing one of {classes} classes: train longer, or a simpler model may win"
    if short is not None and (short > max(margin, 1.0) or math.isnan(short)):
        yield f"its weights are about {short:.3g} nats short of a mode, more than the margin of {margin:.3g} nats: train longer"
    if fitted.schedule.step != "none" and unlearned > max(margin, 1.0):
        yield f"its precisions could still gain {unlearned:.3g} nats, more than the margin of {margin:.3g} nats: train longer"


def _given(data: Data | None) -> Data:
    assert data is not None
    return data
