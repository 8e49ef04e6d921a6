"""harden: turn a relaxed model back into ordinary torch layers, with only the paths that it needs.

A part of a relaxed layer is the weights of a path, or a bias that breaks its symmetry. It is dropped if its share of the layer's
effective parameters is at most the tolerance. Given data, the outputs of the whole model must also change by at most that:

    share = gamma_part / gamma_layer          change = |f - f_hardened| / |f - mean f|

The remaining parts of a layer are merged (``plain``).
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autosym.bayes.likelihoods import Categorical, Gaussian, Likelihood
from autosym.curvature.verification import refuse_batch_dependence
from autosym.evidence.shares import Effective, effective
from autosym.linear.path import Path
from autosym.nn.layers import Branch, Relaxed
from autosym.runtime.batching import Data, batches, check_module, to_model
from autosym.runtime.tables import table
from autosym.surgery.merging import LAYERS, plain
from autosym.surgery.observation import Observation, observe
from autosym.training.fitted import Fit


@dataclass(frozen=True)
class PartNote:
    """One part of a path: its share of the layer's effective parameters, and how much the outputs change if only it is dropped.

    ``share`` is NaN without a fit, or if the path was frozen in it. ``change`` is NaN without data. A part that ``stays``, a bias that
    merges into its layer, is never dropped, so its change is not measured.
    """

    layer: str
    path: str
    part: str
    share: float
    change: float
    dropped: bool
    stays: bool = False


@dataclass(frozen=True)
class Cost:
    """What hardening costs, measured on ``samples``.

    ``change`` is the change of the outputs. ``loss`` is the mean negative log-likelihood before and after. ``accuracy`` is also
    (before, after), or None if targets are not classes.
    """

    samples: int
    change: float
    loss: tuple[float, float]
    accuracy: tuple[float, float] | None


@dataclass(frozen=True)
class Hardening:
    """All parts of relaxed layers, and which were dropped; the new layers by name, parameters before and after, and the cost.

    ``cost`` is None without data.
    """

    tolerance: float
    parts: tuple[PartNote, ...]
    layers: dict[str, str]
    parameters: tuple[int, int]
    cost: Cost | None

    def __str__(self) -> str:
        rows = [("layer", "path", "part", "share of layer", "outputs change by", "")]
        for p in self.parts:
            share, change = ("?" if math.isnan(value) else f"{value:.2%}" for value in (p.share, p.change))
            kept = "always kept" if p.stays else "kept"
            rows.append((p.layer, p.path, p.part, share, "-" if p.stays else change, "dropped" if p.dropped else kept))
        lines = [table(rows, "<<<>><")]
        lines += [f"{layer} is now {what}" for layer, what in self.layers.items()]
        lines.append(f"parameters: {self.parameters[0]} before, {self.parameters[1]} after")
        if self.cost is not None:
            lines.append(f"on {self.cost.samples} samples: outputs changed by {self.cost.change:.2%} of their spread,")
            lines.append("  negative log-likelihood {:.4f} before, {:.4f} after".format(*self.cost.loss))
            if self.cost.accuracy is not None:
                lines.append("  accuracy {:.2%} before, {:.2%} after".format(*self.cost.accuracy))
        return "\n".join(lines)


def harden(fitted: Fit | nn.Module, data: Data | None = None, tolerance: float = 0.05) -> nn.Module:
    """A copy of a fitted or relaxed model in ordinary torch layers, without the parts that matter less than ``tolerance``.

    With ``data`` (pairs, read once and held in memory), a part is kept if dropping it too changes the outputs by more than
    ``tolerance`` of their spread over the samples. This is the only test for a model without a fit, and for a path that was
    frozen in the fit. Every layer keeps the weights of at least one path. Print ``hardening`` of the returned model to see
    what was done.
    """
    model = fitted.model if isinstance(fitted, Fit) else fitted
    check_module(model)
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance is {tolerance}: it must be a fraction in [0, 1)")
    if data is None and (not isinstance(fitted, Fit) or fitted.schedule.step == "none"):
        raise ValueError(
            "a model without a fit, or with a fit at fixed precisions (step='none'), can only be judged by its outputs: pass data, "
            "or a Fit with learned precisions, as autosym.fit returns"
        )
    if not any(isinstance(module, LAYERS) for module in model.modules()):
        raise ValueError("the model has no autosym path, so there is nothing to harden: use it as it is")
    if isinstance(fitted, Fit):
        fitted.check_weights()
    refuse_batch_dependence(model)
    seen = None if data is None else _Outputs(model, data, fitted.likelihood if isinstance(fitted, Fit) else None)
    hardened = copy.deepcopy(model)
    parts = _parts(hardened, effective(model, fitted.prior, fitted.estimate) if isinstance(fitted, Fit) else None)
    if seen is None:
        _drop_by_share(parts, tolerance)
    else:
        _drop_by_change(hardened, parts, tolerance, seen)
    shapes = Observation() if seen is None else observe(hardened, seen.batches[0][0][:1])
    layers = _replace_all(hardened, parts, shapes)
    if isinstance(hardened, LAYERS):
        hardened = plain("the model", hardened, _dropped(parts, ""), shapes.of(hardened).in_shape)
    for told in ("relaxation", "lifting"):
        if hasattr(hardened, told):
            delattr(hardened, told)
    cost = None if seen is None else seen.cost(hardened)
    notes = tuple(PartNote(p.layer, p.path, p.part, p.share, p.change, p.dropped, p.stays) for p in parts)
    sizes = tuple(sum(p.numel() for p in m.parameters()) for m in (model, hardened))
    hardened.hardening = Hardening(tolerance, notes, layers, (sizes[0], sizes[1]), cost)  # type: ignore[assignment]
    return hardened


@dataclass
class _Part:
    layer: str
    path: str
    part: str
    weights: list[nn.Parameter]  # with these at zero, the part adds nothing to the outputs
    share: float = math.nan
    stays: bool = False  # whether it is never dropped
    silent: bool = False  # whether its path computes zero, so that dropping it changes nothing
    change: float = math.nan
    dropped: bool = False
    before: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def drop(self) -> None:
        self.before, self.dropped = [weight.clone() for weight in self.weights], True
        for weight in self.weights:
            weight.zero_()

    @torch.no_grad()
    def restore(self) -> None:
        self.dropped = False
        for weight, before in zip(self.weights, self.before, strict=True):
            weight.copy_(before)


def _parts(model: nn.Module, found: Effective | None) -> list[_Part]:
    """The parts of every relaxed layer. The weights of all paths may be dropped, and biases of free paths or that break a group.

    Other biases stay: they merge into the layer.
    """
    parts = []
    for layer, module in model.named_modules():
        if not isinstance(module, Relaxed):
            continue
        silent = module.silent()
        for path, branch in module.items():
            stem = f"{layer}.{path}".lstrip(".")
            for part, names in branch.parts().items() if isinstance(branch, (Branch, Path)) else ():
                inside = [inner for name in names for inner in branch.get_submodule(name).modules() if isinstance(inner, Path)]
                stays = part != "weights" and path not in module.free and all(inner.keeps.every for inner in inside)
                stems = [f"{stem}.{name}".rstrip(".") for name in names]
                weights = [inner.weight for inner in inside]
                share = found.share(layer, *stems) if found else math.nan
                parts.append(_Part(layer, path, part, weights, share, stays, path in silent))
    return parts


def _drop_by_share(parts: Sequence[_Part], tolerance: float) -> None:
    for part in sorted((p for p in parts if not (p.stays or math.isnan(p.share))), key=lambda part: part.share):
        if part.share <= tolerance and _may_go(part, parts):
            part.drop()


def _drop_by_change(model: nn.Module, parts: Sequence[_Part], tolerance: float, seen: "_Outputs") -> None:
    """Drop the part with the least change first, as long as all dropped parts together change the outputs by at most ``tolerance``."""
    may = [part for part in parts if not part.stays]
    for part in may:
        if part.silent:
            part.change = 0.0
            continue
        part.drop()
        part.change = seen.change(model)
        part.restore()
    for part in sorted(may, key=lambda part: part.change):
        if part.change <= tolerance and not part.share > tolerance and _may_go(part, parts):
            part.drop()
            if not part.silent and seen.change(model) > tolerance:
                part.restore()


def _may_go(part: _Part, parts: Sequence[_Part]) -> bool:
    """Whether the part may be dropped: a layer must keep the weights of one path."""
    others = [p for p in parts if p.layer == part.layer and p.part == "weights" and p is not part and not p.dropped]
    return part.part == "bias" or bool(others)


def _dropped(parts: Sequence[_Part], layer: str) -> set[tuple[str, str]]:
    return {(part.path, part.part) for part in parts if part.dropped and part.layer == layer}


def _replace_all(model: nn.Module, parts: Sequence[_Part], shapes: Observation) -> dict[str, str]:
    """Replace autosym's layers by plain ones, under every name; returns a description of each."""
    made: dict[nn.Module, nn.Module] = {}
    layers: dict[str, str] = {}

    def visit(parent: nn.Module, stem: str) -> None:
        for name, child in list(parent._modules.items()):  # one parent may hold a layer under two names
            full = f"{stem}{name}"
            if child is None:
                continue
            if not isinstance(child, LAYERS):
                visit(child, f"{full}.")
                continue
            if child not in made:
                made[child] = plain(full, child, _dropped(parts, full), shapes.of(child).in_shape)
                layers[full] = _describe(made[child])
            parent._modules[name] = made[child]

    if not isinstance(model, LAYERS):
        visit(model, "")
    return layers


def _describe(module: nn.Module) -> str:
    inner = list(module.children())
    return type(module).__name__ + (f"({', '.join(map(_describe, inner))})" if inner else "")


class _Outputs:
    """The batches held in memory, the outputs of the model before hardening, and their scores."""

    def __init__(self, model: nn.Module, data: Data, likelihood: Likelihood | None):
        self.batches = [to_model(x, y, model, "the data") for x, y in batches(data, 256)]
        if not self.batches:
            raise ValueError("the data are empty, no batch has a sample: pass at least one")
        self.targets = torch.cat([y for _, y in self.batches])
        self.likelihood = likelihood or (Gaussian() if self.targets.is_floating_point() else Categorical())
        self.before = self.of(model)
        if not torch.isfinite(self.before.norm()):
            raise ValueError(
                "the outputs of the model on the data are not finite, or overflow, so their change cannot be measured: check the "
                "weights, or rescale the inputs"
            )
        self.likelihood.check(self.before.shape[1], self.targets)
        spread = (self.before - self.before.mean(0)).norm()
        self.spread = spread if spread > 0 else self.before.norm()

    @torch.no_grad()
    def of(self, model: nn.Module) -> Tensor:
        return torch.cat([model(x) for x, _ in self.batches])

    def change(self, model: nn.Module) -> float:
        """|f - f'| / |f - mean f|."""
        difference = float((self.of(model) - self.before).norm())
        return difference / float(self.spread) if self.spread > 0 else math.inf if difference else 0.0

    def cost(self, model: nn.Module) -> Cost:
        after = self.of(model)
        before, later = self._accuracy(self.before), self._accuracy(after)
        accuracy = None if before is None or later is None else (before, later)
        return Cost(len(after), self.change(model), (self._loss(self.before), self._loss(after)), accuracy)

    @torch.no_grad()
    def _loss(self, f: Tensor) -> float:
        return -float(self.likelihood.log_likelihood(self.likelihood.statistic(f, self.targets), f.numel())) / len(f)

    def _accuracy(self, f: Tensor) -> float | None:
        logits = self.likelihood.logits(f)
        return None if logits is None else float((logits.argmax(1) == self.targets.flatten()).double().mean())
