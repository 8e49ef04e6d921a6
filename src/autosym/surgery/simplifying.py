"""simplify: drop the free paths that the data do not support.

    nats = log Z(all paths) - log Z(all but this one)

Both are Laplace evidence, each at its own best precisions and noise, after both were fitted on for a few epochs. Without them the rest
has had no time to take over what the path did, and a path may seem worth hundreds of nats that the data do not ask for.

A share is different: it tells how many of the layer's effective parameters a path holds, and those may be few. While a path vanishes, the
evidence is nearly flat: the path may hold half of them and still lower the evidence.
"""

import copy
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from autosym.curvature.owners import is_under
from autosym.curvature.passes import alike
from autosym.evidence import laplace
from autosym.evidence.cautions import Caution
from autosym.evidence.kernel import Kernel
from autosym.evidence.laplace import LOG_PRECISION_RANGE
from autosym.evidence.record import nats
from autosym.runtime import processes
from autosym.runtime.arithmetic import NotFinite
from autosym.runtime.batching import Data, check_repeatable
from autosym.runtime.tables import table
from autosym.surgery.refitting import enough, fitted_on
from autosym.surgery.screening import screen
from autosym.training.fitted import Fit
from autosym.training.guarding import NothingLearned

IDLE = 0.01  # effective parameters: a path with fewer computes next to nothing
STEPS = 20  # closed-form steps of precisions and noise: each network is judged at its best ones


@dataclass(frozen=True)
class PathWorth:
    """One path that breaks a symmetry: its share of its layer before, and the evidence lost if only it is left out."""

    layer: str
    path: str
    share: float
    nats: float
    left_out: bool
    put_back: bool = False  # it was left out, but all such paths together gave up more than was allowed
    estimated: bool = False  # nats are those of ``screening``, which left no doubt on which side of the threshold they are


@dataclass(frozen=True)
class Simplification:
    """The worth of each path that breaks a symmetry, which were left out, and the log evidence before and after; prints as a table.

    A path worth little by itself is kept if it becomes worth the threshold once others are left out.
    """

    paths: tuple[PathWorth, ...]
    log_evidence: tuple[float, float]  # before and after, each at its best precisions and noise
    cautions: tuple[Caution, ...] = ()  # from the fit
    curvature: Literal["kronecker", "whole"] = "kronecker"  # whose evidence this is
    refit: int = 0  # epochs that the rest was fitted on for, before it was priced
    threshold: float = 10.0  # nats: what is worth less by itself may be left out
    seconds: float = field(default=0.0, compare=False)  # that it took

    @property
    def given_up(self) -> float:
        """The nats of evidence that all paths together took with them; negative if the evidence is larger without them."""
        before, after = self.log_evidence
        return before - after

    def __str__(self) -> str:
        rows = [("layer", "path", "share", "nats", "")]
        for p in self.paths:
            done = "left out" if p.left_out else "put back" if p.put_back else ""
            rows.append((p.layer, p.path, f"{p.share:.1%}", f"{'~' if p.estimated else ''}{p.nats:+.1f}", done))
        before, after = self.log_evidence
        of = " of the whole network" if self.curvature == "whole" else ""
        changed = f"{self.given_up:.1f} nats given up" if self.given_up > 0 else f"{-self.given_up:.1f} nats gained"
        refit = f" (after {self.refit} more epochs)" if self.refit else ""
        changed = "nothing given up" if abs(self.given_up) < 0.05 else f"{changed} in all"
        found = f"log evidence{of} {nats(before)} before{refit}, {nats(after)} after: {changed}; precisions were learned again for both"
        how = (
            f"after {self.refit} more epochs without it"
            if self.refit
            else "with the other weights as they are; simplify(..., refit=10) lets them adjust first"
        )
        return "\n".join([table(rows, "<<>><"), found, f"each path is priced {how}", *(f"Caution: {c}" for c in self.cautions)])


def simplify(
    fitted: Fit,
    data: Data,
    nats: float = 10.0,
    curvature: Literal["kronecker", "whole"] | None = None,
    total: float = math.inf,
    fast: bool = False,
    refit: int | None = None,
    progress: bool = False,
    **options: Any,
) -> Fit:
    """A fit of a copy of the model, without the paths that break a symmetry and are worth less than ``nats`` of evidence.

    ``data`` must be the data of the fit. A path is a candidate if it breaks a symmetry that another path of its layer keeps. All
    candidates worth less than ``nats`` by themselves are left out together, if the log evidence then falls by less than ``nats``; if not,
    the half of them that is worth least is tried, then the other half, and so on down to single paths. The weights of a path that is left
    out become zero and its precisions 1e12. Precisions and noise are learned again. So ``nats`` holds for each such step. If all steps give
    up more than ``total`` together, paths are put back one after the other, the one worth most by itself first, until they do not.

    Before it is priced, a network is fitted on for ``refit`` epochs, with all paths and without some: by default a tenth of those of the
    fit, 5 at least. The weights that are left change by that. With 0 they stay as they are, and a path may seem worth hundreds of nats
    that the others could do as well; so it is for a fit on augmented data by default, as they are not at hand, and for a path with next
    to no effective parameters: it does nothing that others could do.

    There is one such run for each candidate, one for all, and one for each step and each path put back; mostly there is one step. If
    ``fast``, other weights stay as they are, one pass without curvature estimates what all candidates are worth (``surgery.screening``),
    and evidence is computed only for those that are near ``nats``, and for all of them if they cannot be left out together; what is left
    out has its price in evidence. Estimated nats are marked by ~.

    A sparse path whose omega makes it constant in space breaks nothing, but is a candidate too. With ``curvature`` "whole" all evidence is
    that of the whole network, with the same probes for all where there are probes (``Fit.refine``), with "kronecker" that of factors; by
    default the former where all of it takes no more work than the fit did, curvature is neither sampled nor of a subset, and it is not
    ``fast``. ``progress`` writes a line for each path to stderr, ``options`` go to ``autosym.curvature.kfac``. Print ``simplification`` of
    the returned fit's model to see what was done.
    """
    begun = time.perf_counter()
    _refuse(fitted, curvature, total, fast, refit)
    refit = refit if refit is not None else 0 if fast else enough(fitted)
    fitted.check_weights()
    check_repeatable(data)
    found = fitted.symmetry()
    candidates = {f"{path.layer}.{path.path}".lstrip("."): path for path in found.optional()}
    if not candidates:
        raise ValueError(
            "no path with a share breaks a symmetry that another path of its layer keeps, so there is nothing to leave out"
        )
    if curvature is None:
        fewer = options.get("sampled") or options.get("subset")  # whoever asks for less wants no more work than that
        each = 2 if total == math.inf else 3  # alone, beside others, and put back
        affords = not fewer and not fast and fitted.affords_whole(data, times=each * len(candidates) + 1)
        curvature = "whole" if affords else "kronecker"
    without = partial(_without, fitted, data=data, options=options, refined=curvature == "whole")
    simplest = without(())  # nothing is trained on data that are not those of the fit
    _refuse_other_data(fitted, simplest)
    tell = partial(print, file=sys.stderr, flush=True) if progress and processes.first() else lambda text: None
    worth: dict[str, float] = {}
    known: dict[str, float] = {}

    def price(stems: Iterable[str]) -> None:
        for stem in stems:
            worth[stem] = _log_evidence(simplest) - _log_evidence(without((stem,)))
            known.pop(stem, None)
            tell(f"without {stem}: {worth[stem]:+.1f} nats")

    if refit:
        price(stem for stem, path in candidates.items() if path.effective_parameters < IDLE)
        refit = refit if len(worth) < len(candidates) else 0
    if refit:
        try:
            simplest = without((), refit=refit)
        except (NotFinite, NothingLearned):
            refit = 0  # then all networks are compared as they are
    without = partial(without, refit=refit)
    before = _log_evidence(simplest)
    known |= _screened(simplest, data, tuple(candidates), nats, options) if fast else {}
    worth |= known
    price([stem for stem in candidates if stem not in worth])
    gone, simplest = _tried(without, simplest, worth, known, nats, price)
    back: tuple[str, ...] = ()
    while gone and before - _log_evidence(simplest) > total:
        gone, back = gone[:-1], (*back, gone[-1])  # they are in the order of their worth
        simplest = without(gone)
    rows = tuple(
        PathWorth(p.layer, p.path, p.share, worth[stem], stem in gone, stem in back, stem in known)
        for stem, p in candidates.items()
    )
    ends = (before, _log_evidence(simplest))
    done = Simplification(rows, ends, found.cautions, curvature, refit, nats, time.perf_counter() - begun)
    simplest.model.simplification = done  # type: ignore[assignment]
    return simplest


def _tried(
    without: Callable[[Sequence[str]], Fit],
    simplest: Fit,
    worth: Mapping[str, float],
    known: Mapping[str, float],
    nats: float,
    price: Callable[[Iterable[str]], None],
) -> tuple[tuple[str, ...], Fit]:
    """The paths that are left out, in the order of their worth, and the fit without them: all at once, or by halves.

    Where all at once cost too much, the order decides: then those whose worth is only estimated (``known``) get their ``price`` first.
    """
    gone: tuple[str, ...] = ()

    def cheap(stems: Iterable[str]) -> list[str]:
        return [stem for stem in sorted(stems, key=worth.__getitem__) if worth[stem] < nats]

    left = [cheap(worth)]
    while left:
        stems = left.pop()
        tried = without((*gone, *stems)) if stems else simplest
        if _log_evidence(simplest) - _log_evidence(tried) < nats:
            gone, simplest = (*gone, *stems), tried
            continue
        if estimated := [stem for stem in stems if stem in known]:
            price(estimated)
            dear, stems = len(stems), cheap(stems)
            if len(stems) < dear:
                left.append(stems)
                continue
        if len(stems) > 1:
            half = len(stems) // 2
            left += [stems[half:], stems[:half]]  # those worth least next
    return gone, simplest


def _screened(fitted: Fit, data: Data, stems: Sequence[str], nats: float, options: Mapping[str, Any]) -> dict[str, float]:
    """What the paths are worth whose estimates leave no doubt on which side of ``nats`` they are."""
    found = screen(fitted, data, stems, STEPS, options.get("batch_size"), options.get("memory"))
    return {stem: estimate.nats for stem, estimate in found.items() if estimate.decides(nats)}


def _refuse(fitted: Fit, curvature: str | None, total: float, fast: bool, refit: int | None) -> None:
    """Refuse what cannot be simplified, or not so."""
    if not isinstance(fitted, Fit):
        raise TypeError(
            f"simplify takes a Fit, as autosym.fit returns, got a {type(fitted).__name__}: for a model, call "
            "simplify(autosym.fit(model, data), data)"
        )
    if fitted.schedule.step == "none":
        raise ValueError("simplify compares evidence at learned precisions: fit without step='none'")
    if math.isfinite(fitted.prior.nu):
        raise ValueError(
            "simplify compares evidence under Gaussian priors, not the bound under Student-t priors: fit without nu"
        )
    if isinstance(fitted.estimate, Kernel):
        raise ValueError("simplify compares evidence from Kronecker factors: fit without kernel=")
    if curvature not in (None, "kronecker", "whole"):
        raise ValueError(f"curvature must be 'kronecker', 'whole' or None, got {curvature!r}")
    if fast and curvature == "whole":
        raise ValueError("fast estimates from Kronecker factors: leave out curvature='whole', or fast=True")
    if refit is not None and (not isinstance(refit, int) or refit < 0):
        raise ValueError(f"refit is a number of epochs, 0 to leave other weights as they are, got {refit!r}")
    if fast and refit:
        raise ValueError("fast leaves other weights as they are: leave out refit, or fast=True")
    if not total >= 0:
        raise ValueError(
            f"total must be a number of nats, not negative, got {total}: at 0 what is left out may cost nothing in all"
        )


def _log_evidence(fitted: Fit) -> float:
    return float(fitted.evidence.log_evidence)


@torch.no_grad()
def _without(fitted: Fit, stems: Sequence[str], data: Data, options: Mapping[str, Any], refined: bool, refit: int = 0) -> Fit:
    """The fit with the named paths at zero, and its evidence; the rest fitted on for ``refit`` epochs.

    If that fails the rest is left as it is, or without ``stems`` it is an error.
    """
    model, prior, likelihood = copy.deepcopy(fitted.model), copy.deepcopy(fitted.prior), copy.deepcopy(fitted.likelihood)
    if refit:
        with torch.enable_grad(), suppress(*((NotFinite, NothingLearned) if stems else ())):
            model, prior, likelihood = fitted_on(fitted, stems, data, refit, options.get("memory"))
    for name, parameter in model.named_parameters():
        if any(is_under(name, stem) for stem in stems):
            parameter.zero_()
    for index, name in enumerate(prior.names):
        if any(is_under(name, stem) for stem in stems):
            prior.log_precision[index] = LOG_PRECISION_RANGE[1]
    estimate = laplace.at(model, data, likelihood, **options)
    for _ in range(STEPS):
        estimate.mackay(prior)
    schedule = replace(fitted.schedule, sampled_end=bool(options.get("sampled", False)))
    evidence, likelihood = estimate(prior), estimate.likelihood
    found = replace(
        fitted,
        model=model,
        prior=prior,
        likelihood=likelihood,
        schedule=schedule,
        estimate=estimate,
        evidence=evidence,
        simplified=True,
        weights={},
    )
    return found.refine(data, memory=options.get("memory")) if refined else found


def _refuse_other_data(fitted: Fit, again: Fit) -> None:
    same = alike(fitted.estimate.fingerprint, again.estimate.fingerprint)
    if fitted.evidence.samples != again.evidence.samples or not same:
        raise ValueError(
            f"the fit had {fitted.evidence.samples} samples, these are {again.evidence.samples} samples, or other ones: pass the data "
            "of the fit (its evidence_data, if it had some)"
        )
