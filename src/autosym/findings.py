"""What a report says, as one plain dictionary that is strict JSON: a fit in numbers, and a run from its files.

Pages and pictures are made from it alone, so that a report can be made anew, or elsewhere, without the model.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path as File
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autosym.batching import Data, batches, to_model
from autosym.equivariance import equivariance_error
from autosym.evidence import Evidence
from autosym.groups import GROUPS, Group
from autosym.layers import Relaxed
from autosym.likelihoods import Categorical, Gaussian
from autosym.paths import Conv, Dense, FactoredIn, FactoredOut, GroupConv, Path
from autosym.predictive import calibration_error, reliability
from autosym.provenance import provenance
from autosym.sparse import SparseConv, SparseIn, SparseOut
from autosym.training import Fit, Schedule

GROUPS_SHOWN = ("translations", "c4", "flip-horizontal")
PICTURES, SIDE = 8, 16  # of a path at most so many, of at most so many pixels a side
LINES = 120  # of a history
Alternatives = Mapping[str, Any] | Iterable[Mapping[str, Any] | tuple]
PATH = {
    "layer",
    "path",
    "symmetric",
    "precision",
    "parameters",
    "effective_parameters",
    "share",
    "omega",
}  # what is known of one


@torch.no_grad()
def contents(
    fit: Fit,
    data: Data | None = None,
    *,
    compare: Alternatives | None = None,
    groups: Sequence[str | Group] = GROUPS_SHOWN,
    title: str = "A fit by autosym",
) -> dict[str, Any]:
    """Everything a report says of ``fit``.

    On ``data``, labelled samples that are best held out, equivariance under ``groups`` and calibration are measured; without them
    the report says that they were not. ``compare`` is the evidence of alternatives on the same training data: fits, evidences or
    nats by name, or a list of dictionaries with ``name``, ``log_evidence`` and, if known, ``probability`` (or tuples of these).
    """
    gammas = fit.laplace.effective_parameters(fit.prior)
    record = fit.evidence
    found = {
        "title": title,
        "likelihood": fit.likelihood.name,
        "samples": record.samples,
        "parameters": sum(p.numel() for p in fit.model.parameters()),
        "effective_parameters": float(gammas.sum()),
        "evidence": {
            "log_evidence": float(record.log_evidence),
            "log_likelihood": float(record.log_likelihood),
            "log_prior": float(record.log_prior),
            "complexity": float(record.complexity),
            "occam": float(record.occam),
            "bound_of": record.bound_of,
        },
        "symmetry": fit.symmetry().as_dicts(),
        "approximate": approximate(fit.model),
        "history": thinned(fit.history),
        "filters": filters(fit.model),
        "compare": None if compare is None else alternatives(compare, title, record),
        "schedule": settings(fit.schedule),
        "config": {"seed": fit.seed, "nu": repr(fit.prior.nu)},
        "command": _call(fit),
        "provenance": provenance(_device(fit.model)),
    }
    if isinstance(fit.likelihood, Gaussian):
        found["sigma_noise"] = math.exp(float(fit.likelihood.log_variance) / 2)
    return finite(found | (measured(fit, data, groups) if data is not None else {}))


def settings(schedule: Schedule) -> dict[str, Any]:
    """A schedule as JSON takes it: what may be infinite is written out."""
    return asdict(schedule) | {"clip": repr(schedule.clip), "trust": repr(schedule.trust)}


def approximate(model: nn.Module) -> list[str]:
    """Relaxed layers with a convolution that is equivariant only up to borders (padding) or strides."""
    relaxed = [(name, module) for name, module in model.named_modules() if isinstance(module, Relaxed)]
    convs = [(name, part) for name, module in relaxed for path in module.symmetric for part in module[path].modules()]
    return list(dict.fromkeys(name for name, part in convs if isinstance(part, Conv) and not _is_exact(part)))


def _is_exact(conv: Conv) -> bool:
    left, right, top, bottom = conv.padding
    height, width = (d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True))
    return conv.stride == (1, 1) and conv.padding_mode == "circular" and (top + bottom, left + right) == (height, width)


def _call(fit: Fit) -> str:
    """The call that repeats it: whatever is not as it is by default."""
    changed = {f.name: getattr(fit.schedule, f.name) for f in fields(Schedule) if getattr(fit.schedule, f.name) != f.default}
    changed |= {"nu": fit.prior.nu} if math.isfinite(fit.prior.nu) else {}
    changed["seed"] = fit.seed
    options = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    others = "  # with the same model, data, prior_precision, augment and evidence_data"
    return f"autosym.fit(model, data, {fit.likelihood.name!r}, {options}){others}"


def _device(model: nn.Module) -> str:
    return str(next((p.device for p in model.parameters()), "cpu"))


# ---- what was measured on data


def measured(fit: Fit, data: Data, groups: Sequence[str | Group]) -> dict[str, Any]:
    """Equivariance errors where the inputs are images, and calibration where the targets are classes."""
    x = next(batches(data, 1), (torch.empty(0),))[0]
    fitting = [group for group in groups if _acts_on(group, x)]
    errors = [asdict(row) for row in equivariance_error(fit.model, fitting, data)] if fitting else None
    classes = isinstance(fit.likelihood, Categorical)
    return {"equivariance": errors, "calibration": calibration(fit.model, data) if classes else None}


def _acts_on(group: str | Group, x: Tensor) -> bool:
    """Whether a group moves such inputs: quarter turns need a square. An unknown name is refused by who measures."""
    if x.dim() != 4:
        return False
    found = GROUPS.get(group) if isinstance(group, str) else group
    try:
        if found is not None:
            found.check_size(x.shape[-2:])
    except ValueError:
        return False
    return True


@torch.no_grad()
def calibration(model: nn.Module, data: Data) -> dict[str, Any]:
    """Confidence against accuracy of the network's softmax, in bins; accuracy, and the mean negative log-likelihood."""
    outputs, labels = [], []
    for x, y in batches(data, 1000):
        x, y = to_model(x, y, model, "the report's data")
        outputs.append(model(x).cpu())
        labels.append(y.cpu())
    if not outputs:
        raise ValueError("the report's data hold no samples: pass labelled ones, or data=None")
    logits, y = torch.cat(outputs), torch.cat(labels)
    Categorical().check(logits.shape[1], y)
    probabilities = logits.softmax(1)
    return {
        "samples": len(y),
        "accuracy": float((logits.argmax(1) == y).double().mean()),
        "nll": float(F.cross_entropy(logits, y)),
        "error": calibration_error(probabilities, y),
        "bins": reliability(probabilities, y),
    }


# ---- filters


def filters(model: nn.Module) -> list[dict[str, Any]]:
    """Of every path of a relaxed layer the filters with the largest norm, as levels: 127 is the largest weight among them."""
    found = []
    for layer, module in model.named_modules():
        if not isinstance(module, Relaxed):
            continue
        parts = [(path, part, p) for path in module for part, p in module[path].named_modules() if isinstance(p, Path)]
        for path, part, weights in parts:
            maps = pictures(weights)
            if maps is None or maps[0].numel() < 2:  # one weight is no picture
                continue
            shown = strongest(maps)
            scale = float(shown.abs().max())
            levels = (shown * (127 / scale if scale > 0 else 0.0)).round().int().tolist()
            found.append({"layer": layer, "path": path, "part": part, "of": len(maps), "scale": scale, "pictures": levels})
    return found


@torch.no_grad()
def pictures(path: Path) -> Tensor | None:
    """The weights of a path as maps (n, height, width); None of one that has no positions."""
    weight = path.weight.detach().double().cpu()
    if isinstance(path, (Conv, GroupConv)):
        return path.filters().detach().double().cpu().flatten(0, 1)
    if isinstance(path, SparseConv):
        maps = weight.view(-1, path.in_channels, len(path.basis.z)) @ path.basis().double().cpu()
        return maps.reshape(-1, path.kernel_size, path.kernel_size)
    if isinstance(path, SparseIn):
        return (weight @ path.basis().double().cpu()).reshape(-1, *_size(path.basis.positions))
    if isinstance(path, SparseOut):
        return (weight.mT @ path.basis().double().cpu()).reshape(-1, *_size(path.basis.positions))
    if isinstance(path, FactoredIn) and len(path.in_shape) == 3:
        return weight.reshape(-1, *path.in_shape[1:])
    if isinstance(path, FactoredOut) and len(path.out_shape) == 3:
        return weight.mT.reshape(-1, *path.out_shape[1:])
    if isinstance(path, Dense) and len(path.in_shape) == 3:
        return weight.reshape(-1, *path.in_shape[1:])
    return None


def _size(positions: Tensor) -> tuple[int, int]:
    height, width = (positions.amax(0) - positions.amin(0) + 1).int().tolist()
    return height, width


def strongest(maps: Tensor) -> Tensor:
    """The ``PICTURES`` maps with the largest norm, in order; large ones averaged down to ``SIDE`` pixels."""
    chosen = maps[maps.flatten(1).norm(dim=1).argsort(descending=True, stable=True)[:PICTURES]]
    sides = (min(chosen.shape[-2], SIDE), min(chosen.shape[-1], SIDE))
    return chosen if tuple(chosen.shape[-2:]) == sides else F.adaptive_avg_pool2d(chosen[:, None], sides)[:, 0]


# ---- evidence of alternatives


def alternatives(compare: Alternatives, title: str, record: Evidence) -> list[dict[str, Any]]:
    """Log evidence and posterior probability, at equal prior ones, of this fit (unless it is among them) and the alternatives."""
    rows = []
    for item in compare.items() if isinstance(compare, Mapping) else compare:
        given = item if isinstance(item, Mapping) else dict(zip(("name", "log_evidence", "probability"), item, strict=False))
        name, value = given.get("name"), given.get("log_evidence")
        value = value.evidence if isinstance(value, Fit) else value
        if isinstance(value, Evidence) and value.samples != record.samples:
            raise ValueError(
                f"{name} has the evidence of {value.samples} samples, this fit of {record.samples}: not comparable"
            )
        value = float(value.log_evidence) if isinstance(value, Evidence) else value
        if not isinstance(name, str) or not isinstance(value, (int, float)):
            raise ValueError(f"compare takes evidence by name, or dictionaries with name and log_evidence, got {item!r}")
        rows.append({"name": name, "log_evidence": float(value), "probability": given.get("probability")})
    own = float(record.log_evidence)
    if all(row["log_evidence"] != own for row in rows):
        rows.insert(0, {"name": title, "log_evidence": own, "probability": None})
    return sorted(with_probabilities(rows), key=lambda row: -row["log_evidence"])


def with_probabilities(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Posterior probabilities at equal prior ones, unless every row came with its own."""
    if all(row["probability"] is not None for row in rows):
        return rows
    values = torch.tensor([row["log_evidence"] for row in rows], dtype=torch.float64)
    return [row | {"probability": p} for row, p in zip(rows, values.softmax(0).tolist(), strict=True)]


# ---- a run from its files


def load(run: File) -> dict[str, Any]:
    """What the files of a run say: result.json, with report.json and history.jsonl where they are; or one file of results."""
    folder, file = (run, run / "result.json") if run.is_dir() else (run.parent, run)
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist: name the folder of a run (by `autosym run NAME`), or its result.json")
    result = read_json(file)
    if not isinstance(result, dict) or not isinstance(result.get("symmetry"), list):
        several = " It is the summary of several runs, which `autosym table` shows." if _key(result, "rows") else ""
        raise ValueError(
            f"{file} is not the result of a run: it has no list of symmetry.{several} Make one by `autosym run NAME`"
        )
    unknown = [path for path in result["symmetry"] if not isinstance(path, dict) or not set(path) >= PATH]
    if unknown:
        raise ValueError(f"{file} is of another version: a path of its symmetry lacks some of {', '.join(sorted(PATH))}")
    more: dict[str, Any] = {}
    if run.is_dir() and (folder / "report.json").exists():
        more = read_json(folder / "report.json")
    elif run.is_dir() and (folder / "history.jsonl").exists():
        more = {"history": thinned(_read_lines(folder / "history.jsonl"))}
    if not isinstance(more, dict):
        raise ValueError(f"{folder / 'report.json'} is not what a run writes: delete it, or run it again")
    title = " · ".join(str(result["config"][key]) for key in ("task", "model", "method") if _key(result.get("config"), key))
    return finite({"title": title or str(run), **more, **result})


def compare_runs(run: File, others: Iterable[File]) -> list[dict[str, Any]]:
    """The evidence of several runs on the same task and as many samples, as ``alternatives`` gives it."""
    loaded = {str(one): load(one) for one in (run, *others)}
    rows, seen = [], {}
    for name, found in loaded.items():
        record, config = (found[key] if isinstance(found.get(key), dict) else {} for key in ("evidence", "config"))
        evidence = record.get("log_evidence")
        if not isinstance(evidence, float) or not found.get("samples"):
            raise ValueError(f"{name} does not say its evidence (its report.json is missing or older): run it again to compare")
        seen[name] = (str(found["samples"]), str(config.get("task")), str(config.get("seed")))
        rows.append({"name": found["title"], "log_evidence": evidence, "probability": None})
    if len(set(seen.values())) > 1:
        what = "; ".join(f"{name}: {n} samples, task {task}, seed {seed}" for name, (n, task, seed) in seen.items())
        raise ValueError(f"evidence can be compared only on the same data, which the seed draws: {what}")
    return sorted(with_probabilities(rows), key=lambda row: -row["log_evidence"])


def _key(value: Any, key: str) -> bool:
    return isinstance(value, dict) and key in value


def read_json(file: File) -> Any:
    """What a file of JSON holds; a ValueError that names it where it is none."""
    try:
        return json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}): it may have been cut off; run it again") from error


def _read_lines(file: File) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON lines ({error}): it may have been cut off; run it again") from error
    if not all(isinstance(line, dict) and isinstance(line.get("epoch"), int) for line in lines):
        raise ValueError(f"{file} is not a history, whose every line is of an epoch: run it again")
    return lines


# ---- plain data


def thinned(history: Sequence[Mapping[str, Any]], most: int = LINES) -> list[dict[str, Any]]:
    """At most ``most`` lines with an evidence step and as many without, evenly spread, the first and last of each kept."""
    kept: list[dict[str, Any]] = []
    for with_evidence in (True, False):
        lines = [dict(line) for line in history if ("log_evidence" in line) is with_evidence]
        last = len(lines) - 1
        kept += lines if len(lines) <= most else [lines[round(i * last / (most - 1))] for i in range(most)]
    return sorted(kept, key=lambda line: line["epoch"])


def finite(value: Any) -> Any:
    """The same with None for every number that is not finite: strict JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
