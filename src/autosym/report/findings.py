"""The contents of a report, as one plain dictionary that is strict JSON.

Pages and pictures need nothing else. So a report can be made again later, or on another machine, without the model.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosym.answer.comparison import Comparison, judged
from autosym.answer.margins import chances
from autosym.bayes import likelihoods
from autosym.evidence import verdicts
from autosym.evidence.cautions import Impossible
from autosym.evidence.record import Evidence
from autosym.evidence.shares import from_dicts, limits
from autosym.linear.dense import Dense
from autosym.linear.groups import Group
from autosym.linear.path import Path
from autosym.nn.layers import Relaxed
from autosym.nn.symmetrised import Symmetrised, described
from autosym.report.measured import GROUPS_SHOWN, kind, measured
from autosym.runtime.batching import Data, check_repeatable
from autosym.runtime.provenance import provenance
from autosym.surgery.simplifying import Simplification
from autosym.training.fitted import Fit
from autosym.training.schedule import Schedule

PICTURES, SIDE = 8, 16  # pictures of a path at most, pixels a side at most
LINES = 120  # of a history at most
EVIDENCE = ("log_evidence", "log_likelihood", "log_prior", "complexity", "occam", "most")
Alternatives = Comparison | Mapping[str, Fit | Evidence | float]
UNCHECKED = "it was given as a number, so nobody checked that it is from the same data: pass its fit to have that checked"
BANK = 7  # a filter is shown at so many points of the range of a transformation


@torch.no_grad()
def contents(
    fit: Fit,
    data: Data | None = None,
    *,
    compare: Alternatives | None = None,
    groups: Sequence[str | Group] = GROUPS_SHOWN,
    title: str = "A fit by autosym",
    measured_on: str = "",
) -> dict[str, Any]:
    """Everything a report says about ``fit``.

    ``data`` are labelled samples, best held out: they serve to measure equivariance under ``groups``, and calibration. Without data
    the report says that neither was measured. ``measured_on`` names the data, "training" or "held out". By default training data are
    recognised by their sums, and any other data are called "given". ``compare`` is the evidence of alternatives on the same training
    data: what ``autosym.compare`` returns, or fits, evidences or nats by name.
    """
    check_repeatable(data)
    fit.check_weights()
    gammas = fit.estimate.effective_parameters(fit.prior)
    symmetry = fit.symmetry()
    found = {
        "title": title,
        "likelihood": fit.likelihood.name,
        "class_count": likelihoods.classes(fit.likelihood, fit.estimate.outputs),
        "hyperparameters": fit.likelihood.figures(),
        "samples": fit.evidence.samples,
        "outputs": fit.estimate.outputs,
        "fingerprint": _as_list(fit.estimate.fingerprint),
        "parameters": sum(p.numel() for p in fit.model.parameters()),
        "effective_parameters": float(gammas.sum()),
        "evidence": {name: float(getattr(fit.evidence, name)) for name in EVIDENCE} | {"bound_of": fit.evidence.bound_of},
        "symmetry": symmetry.as_dicts(),
        "broken": symmetry.broken(),
        "simplification": simplification(fit),
        "ranges": described(fit.model),
        "banks": banks(fit.model),
        "approximate": {name: list(found) for name, found in limits(fit.model).items()},
        "history": thinned(fit.history),
        "epoch": fit.epoch,
        "filters": filters(fit.model),
        "compare": None if compare is None else alternatives(compare, title, fit),
        "schedule": settings(fit.schedule),
        "config": {"seed": fit.seed, "nu": repr(fit.prior.nu)},
        "command": _call(fit),
        "provenance": provenance(_device(fit.model)),
    }
    found |= {key: value for key, value in fit.likelihood.figures().items() if key not in found}
    if data is not None:
        found |= {**measured(fit, data, groups), "measured_on": measured_on or kind(fit, data)}
    return finite(found)


def simplification(fit: Fit) -> dict[str, Any] | None:
    """What ``simplify`` left out and what every path that it looked at is worth; None if it was not called, or the fit was loaded."""
    done = getattr(fit.model, "simplification", None) if fit.simplified else None
    if not isinstance(done, Simplification):
        return None
    before, after = done.log_evidence
    return {
        "threshold": done.threshold,
        "log_evidence_before": before,
        "log_evidence_after": after,
        "seconds": done.seconds,
        "paths": [asdict(path) for path in done.paths],
    }


def _as_list(fingerprint: Tensor | None) -> list[float] | None:
    return None if fingerprint is None else fingerprint.tolist()


def settings(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON: numbers that may be infinite become text."""
    return asdict(schedule) | {"clip": repr(schedule.clip), "trust": repr(schedule.trust)}


def _call(fit: Fit) -> str:
    """The call that repeats the fit, with the options that are not defaults."""
    changed = {f.name: getattr(fit.schedule, f.name) for f in fields(Schedule) if getattr(fit.schedule, f.name) != f.default}
    changed |= {"nu": fit.prior.nu} if math.isfinite(fit.prior.nu) else {}
    changed["seed"] = fit.seed
    options = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    others = "  # with the same model, data, prior_precision, augment and evidence_data"
    kind = type(fit.likelihood)
    named = repr(fit.likelihood.name) if kind is likelihoods.LIKELIHOODS.get(fit.likelihood.name) else f"{kind.__name__}(...)"
    return f"autosym.fit(model, data, {named}, {options}){others}"


def _device(model: nn.Module) -> str:
    return str(next((p.device for p in model.parameters()), "cpu"))


# ---- filters


def filters(model: nn.Module) -> list[dict[str, Any]]:
    """The filters with the largest norm of every path of a relaxed layer, as levels: 127 is the largest weight shown."""
    found = []
    for layer, module in model.named_modules():
        if not isinstance(module, Relaxed):
            continue
        parts = [(path, part, p) for path in module for part, p in module[path].named_modules() if isinstance(p, Path)]
        for path, part, weights in parts:
            maps = weights.pictures()
            if maps is None or maps[0].numel() < 2:  # a single weight makes no picture
                continue
            shown = strongest(maps.detach().double().cpu())
            scale = float(shown.abs().max())
            levels = (shown * (127 / scale if scale > 0 else 0.0)).round().int().tolist()
            found.append({"layer": layer, "path": path, "part": part, "of": len(maps), "scale": scale, "pictures": levels})
    return found


@torch.no_grad()
def banks(model: nn.Module) -> list[dict[str, Any]]:
    """The strongest weight image of a first dense layer, moved by each transformation across its range (Figs. 3, 4, 6)."""
    found = []
    for module in model.modules():
        if not isinstance(module, Symmetrised):
            continue
        part = module.transformations
        layers = [m for m in module.model.modules() if isinstance(m, (nn.Linear, Dense))]
        if not part.names or part.size is None or not layers:
            continue
        weight = layers[0].weight.detach().cpu().double().flatten(0, -2)
        if weight.shape[1] % (part.size[0] * part.size[1]):
            continue
        image = weight[weight.norm(dim=1).argmax()].reshape(1, -1, *part.size).mean(1, keepdim=True)
        still = copy.deepcopy(part).cpu()
        for index, name in enumerate(part.names):
            draws = torch.zeros(BANK, len(part.names), dtype=torch.float64)
            draws[:, index] = torch.linspace(-1, 1, BANK)
            moved = still(image, draws)[0, :, 0]
            scale = float(moved.abs().max()) or 1.0
            found.append({"name": name, "pictures": (moved * (127 / scale)).round().int().tolist()})
    return found


def strongest(maps: Tensor) -> Tensor:
    """The ``PICTURES`` maps with the largest norm, in order; large maps are averaged down to ``SIDE`` pixels."""
    chosen = maps[maps.flatten(1).norm(dim=1).argsort(descending=True, stable=True)[:PICTURES]]
    sides = (min(chosen.shape[-2], SIDE), min(chosen.shape[-1], SIDE))
    return chosen if tuple(chosen.shape[-2:]) == sides else F.adaptive_avg_pool2d(chosen[:, None], sides)[:, 0]


# ---- evidence of alternatives


def alternatives(compare: Alternatives, title: str, fit: Fit) -> list[dict[str, Any]]:
    """Log evidence, posterior probability (equal prior probabilities) and warnings of this fit and the alternatives, best first.

    Fits are checked as in ``autosym.compare``. A plain number cannot be checked: it may be from other data.
    """
    if isinstance(compare, Comparison) and any(other.weights is fit.weights for other in compare.fits.values()):
        return compare.rows
    if not isinstance(compare, (Comparison, Mapping)):
        raise TypeError(
            f"compare takes what autosym.compare returns, or fits or evidence by name, got a {type(compare).__name__}"
        )
    given: Mapping[str, Any] = compare.fits if isinstance(compare, Comparison) else compare
    fits = {name: value for name, value in given.items() if isinstance(value, Fit)}
    if all(other.weights is not fit.weights for other in fits.values()):  # which a refined fit shares
        if title in given:
            raise ValueError(f"this fit and an alternative are both called {title!r}: give the report another title")
        fits = {title: fit, **fits}
    rows = judged(fits).rows
    for name, value in given.items():
        if not isinstance(value, Fit):
            nats, failed = _nats(name, value, fit.evidence), isinstance(value, Evidence) and not value.possible
            warning = Impossible(nats, value.most).unranked() if failed else UNCHECKED
            rows.append({"name": name, "log_evidence": nats, "failed": failed, "warnings": [warning]})
    return ranked(rows)


def _nats(name: str, value: Any, record: Evidence) -> float:
    if isinstance(value, Evidence) and value.samples != record.samples:
        raise ValueError(f"{name} has the evidence of {value.samples} samples, this fit of {record.samples}: not comparable")
    value = float(value.log_evidence) if isinstance(value, Evidence) else value
    if not isinstance(value, (int, float)):
        raise TypeError(f"compare takes fits, evidences or nats by name, but {name} is a {type(value).__name__}")
    return float(value)


def ranked(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best first, with posterior probabilities (equal prior probabilities); failed ones last, without."""
    usable = sorted((row for row in rows if not row.get("failed")), key=lambda row: -row["log_evidence"])
    values = {str(place): row["log_evidence"] for place, row in enumerate(usable)}
    errors = {
        str(place): row.get("error") or 0.0 for place, row in enumerate(usable)
    }  # of numbers that are given none is known
    known = zip(usable, chances(values, errors).values(), strict=True) if usable else ()
    return [row | {"probability": p} for row, p in known] + [row | {"probability": None} for row in rows if row.get("failed")]


# ---- typed values again


def class_count(contents: Mapping[str, Any]) -> int | None:
    """How many classes the targets have (0: not known); None if they are not classes. Older files give only the likelihood."""
    return contents.get("class_count", contents.get("outputs") or 0 if contents.get("likelihood") == "categorical" else None)


def known(contents: Mapping[str, Any]) -> verdicts.Known:
    """What the numbers of a report say, beside shares."""
    schedule, evidence = contents.get("schedule") or {}, contents.get("evidence") or {}
    return verdicts.Known(
        evidence.get("log_evidence"),
        contents.get("samples"),
        class_count(contents),
        contents.get("fingerprint"),
        schedule.get("step") != "none",
        schedule.get("lr"),
        contents.get("history") or (),
        evidence.get("log_likelihood"),
        evidence.get("most"),
        contents.get("effective_parameters"),
        contents.get("epoch"),
    )


def decided(contents: Mapping[str, Any]) -> verdicts.Verdict:
    """The verdict that follows from the numbers of a report."""
    return verdicts.verdict(from_dicts(contents["symmetry"]), known(contents), contents.get("approximate"))


# ---- plain data


def thinned(history: Sequence[Mapping[str, Any]], most: int = LINES) -> list[dict[str, Any]]:
    """At most ``most`` lines with an evidence step and as many without, evenly spread; the first and last of each are kept."""
    kept: list[dict[str, Any]] = []
    for with_evidence in (True, False):
        lines = [dict(line) for line in history if ("log_evidence" in line) is with_evidence]
        last = len(lines) - 1
        kept += lines if len(lines) <= most else [lines[round(i * last / (most - 1))] for i in range(most)]
    return sorted(kept, key=lambda line: line["epoch"])


def finite(value: Any) -> Any:
    """The same value, with None for every number that is not finite: strict JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
