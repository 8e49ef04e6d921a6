"""The learned symmetry as numbers: for every layer and path its precision, effective parameters and share.

The share of a path is the part of its layer's effective parameters that it holds. Biases count: a free path whose spatial bias
is still in use breaks the symmetry. The share is NaN if the path is frozen, as a whole or in part, because the evidence does
not cover all of it. Shares of the other paths are then upper bounds. The share is also NaN in a layer without effective
parameters.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torch import nn

from autosym.bayes.priors import Prior
from autosym.curvature.owners import is_under
from autosym.evidence.cautions import Caution
from autosym.evidence.possible import Estimate
from autosym.evidence.record import Evidence, in_words
from autosym.linear.path import NOTHING, Kept, Path
from autosym.linear.sparse import Sparse
from autosym.nn import symmetrised
from autosym.nn.layers import Relaxed
from autosym.nn.symmetrised import Range
from autosym.runtime.tables import table

WHOLE = 0.05  # share of a network: as a rule paths that break a planted symmetry hold less (docs/findings.md)


@dataclass(frozen=True)
class PathShare:
    """One path of one layer. A free path ``keeps`` nothing.

    ``precision`` is by name of its parts (weights, biases, factors, omega). ``omega`` holds the inverse lengthscales of a
    sparse path: 0 is constant in space. With a prior on omega (``learned_omega``) a layer becomes symmetric through omega, not
    through its share: look at ``equivariance_error``.
    """

    layer: str
    path: str
    symmetric: bool
    precision: dict[str, float]
    parameters: int
    effective_parameters: float
    share: float
    omega: dict[str, float]
    keeps: Kept = NOTHING
    learned_omega: bool = False


@dataclass(frozen=True)
class Symmetry:
    """Shares of every relaxed layer, in order, and learned ranges of transformations (``averaging``). Prints as a table."""

    paths: tuple[PathShare, ...]
    ranges: tuple[Range, ...] = ()
    cautions: tuple[Caution, ...] = ()  # read them before relying on shares and ranges
    simplified: bool = False  # whether ``simplify`` dropped the paths that the data do not support
    relaxed: bool = False  # whether the model is one that ``relax`` returned
    limits: Mapping[str, tuple[str, ...]] = field(default_factory=dict, repr=False)  # of the symmetry, by layer
    nothing_gained: bool = False  # whether ``fit`` returned the model as it was given
    evidence: Evidence | None = field(default=None, repr=False)  # of the fit

    def __iter__(self) -> Iterator[PathShare]:
        return iter(self.paths)

    def free_share(self) -> dict[str, float]:
        """By layer, the share of all its free paths together: 0 is strictly symmetric."""
        return self._by_layer(self._breaking(None))

    def broken_share(self, group: str) -> dict[str, float]:
        """By layer, the share of all paths that are not equivariant to ``group``. Some path must have this group.

        A plain convolution beside a group convolution breaks the group; a convolution over a larger group keeps it. A symmetric
        path that does not say what it keeps is assumed to keep it too.
        """
        return self._by_layer(self._breaking(group))

    def network_share(self, group: str | None = None) -> float:
        """The part of all relaxed layers' effective parameters that lies in free paths, or in all paths that break ``group``.

        NaN if any share is NaN, or if there are no effective parameters.
        """
        if any(math.isnan(path.share) for path in self.paths):
            return math.nan
        whole = sum(path.effective_parameters for path in self.paths)
        return sum(path.effective_parameters for path in self._breaking(group)) / whole if whole else math.nan

    def broken(self) -> dict[str, float]:
        """``network_share`` of "free" paths, and for each group that every layer has a path for.

        Empty if shares are not informative: if one is NaN, or with a prior on omega, which makes paths symmetric at any share.
        """
        if math.isnan(self.network_share()) or any(path.learned_omega for path in self.paths):
            return {}
        layers = {path.layer for path in self.paths}
        full = [g for g in self._groups() if {path.layer for path in self.paths if g in path.keeps} == layers]
        return {"free": self.network_share(), **{group: self.network_share(group) for group in full}}

    def optional(self) -> list[PathShare]:
        """The paths that break a symmetry which another path of their layer keeps, and whose share is known (``simplify``)."""

        def breaks(path: PathShare, other: PathShare) -> bool:
            kept = path.symmetric and (not other.keeps.group or other.keeps.group in path.keeps)
            return other.layer == path.layer and other.symmetric and not kept

        return [path for path in self if not math.isnan(path.share) and any(breaks(path, other) for other in self)]

    def _groups(self) -> list[str]:
        return list(dict.fromkeys(path.keeps.group for path in self.paths if path.keeps.group))

    def _breaking(self, group: str | None) -> list[PathShare]:
        if group is not None and group not in self._groups():
            raise ValueError(f"no layer has a path for {group!r}; groups with a path: {', '.join(self._groups()) or 'none'}")
        return [path for path in self.paths if not (path.symmetric and (group is None or group in path.keeps))]

    def _by_layer(self, some: Sequence[PathShare]) -> dict[str, float]:
        shares = dict.fromkeys((path.layer for path in self.paths), 0.0)
        for path in some:
            shares[path.layer] += path.share
        return shares

    def as_dicts(self) -> list[dict]:
        """Ready for JSON: a share of NaN becomes None."""
        return [
            asdict(path)
            | {"share": None if math.isnan(path.share) else path.share}
            | {"keeps": asdict(path.keeps) | {"groups": list(path.keeps.groups)}}
            for path in self.paths
        ]

    def __str__(self) -> str:
        said = [f"averaged over {'; '.join(map(str, self.ranges))}"] if self.ranges else []
        said += filter(None, [symmetrised.started(found.started for found in self.ranges)])
        if self.paths or not self.ranges:
            said.append(self._table())
        if self.evidence:
            said.append(in_words(float(self.evidence.log_evidence), self.evidence.samples))
        if self.nothing_gained:
            said.append(
                "Nothing was gained: training found no more evidence than the given model has, which is returned as it was."
            )
        return "\n".join([*said, *(f"Caution: {caution}" for caution in self.cautions)])

    def _kind(self, path: PathShare) -> str:
        """A word for what a path is in its layer: free, symmetric, or which group it breaks that another path keeps."""
        groups = [p.keeps.group for p in self.paths if p.layer == path.layer and p.keeps.group]
        broken = [group for group in groups if group not in path.keeps]
        return "free" if not path.symmetric else f"breaks {broken[-1]}" if broken else "symmetric"

    def _table(self) -> str:
        if not self.paths and self.relaxed:
            return (
                "no relaxed layer: autosym.relax found nothing to relax, model.relaxation says why; take a network with "
                "convolutions, or build one by autosym.nn.build"
            )
        if not self.paths:
            return "no relaxed layer: make them by autosym.relax(model, example), or build a network by autosym.nn.build"
        rows = [("layer", "path", "", "precision", "effective / all", "share")]
        for p in self.paths:
            precision = "  ".join(f"{name} {value:.3g}" for name, value in p.precision.items())
            precision += "".join(f"  (omega of {name}: {value:.3g})" for name, value in p.omega.items())
            count = f"{p.effective_parameters:.1f} / {p.parameters}"
            rows.append((p.layer, p.path, self._kind(p), precision, count, f"{p.share:.1%}"))
        broken = [f"{share:.1%} {'free' if name == 'free' else f'break {name}'}" for name, share in self.broken().items()]
        said = [f"of all effective parameters: {', '.join(broken)}"] if broken else []
        if not self.simplified and self.optional() and max(self.broken().values(), default=0.0) >= WHOLE:
            said.append("to see what they are worth: autosym.simplify(fit, data)")
        return "\n".join([table(rows, "<<<<>>"), *said])


def from_dicts(rows: Sequence[Mapping[str, Any]]) -> tuple[PathShare, ...]:
    """The paths that ``Symmetry.as_dicts`` wrote: None becomes NaN."""
    found = []
    for row in rows:
        known = {field.name: row[field.name] for field in fields(PathShare) if field.name in row}
        numbers = {name: math.nan if known[name] is None else known[name] for name in ("share", "effective_parameters")}
        keeps = Kept(**{**known["keeps"], "groups": tuple(known["keeps"]["groups"])})
        found.append(PathShare(**{**known, **numbers, "keeps": keeps}))
    return tuple(found)


@dataclass(frozen=True)
class Effective:
    """By name of path: effective parameters, how many parameters the evidence covers, and how many the model has."""

    gammas: Mapping[str, float]
    covered: Mapping[str, float]
    present: Mapping[str, int]

    def share(self, layer: str, *stems: str) -> float:
        """gamma of everything under ``stems``, over gamma of their layer; NaN if the evidence does not cover all of it."""
        total = _under(self.gammas, layer)
        known = total > 0 and 0 < _under(self.covered, *stems) == _under(self.present, *stems)
        return _under(self.gammas, *stems) / total if known else math.nan


def _under(numbers: Mapping[str, float], *stems: str) -> float:
    return sum(number for name, number in numbers.items() if any(is_under(name, stem) for stem in stems))


def effective(model: nn.Module, prior: Prior, at: Estimate) -> Effective:
    """Effective parameters of a model under ``prior``."""
    gammas, sizes = (dict(zip(at.names, t.tolist(), strict=True)) for t in (at.effective_parameters(prior), at.sizes))
    return Effective(gammas, sizes, {name: parameter.numel() for name, parameter in model.named_parameters()})


def symmetry(model: nn.Module, prior: Prior, at: Estimate) -> Symmetry:
    """The shares of every relaxed layer of ``model`` under ``prior``."""
    found = effective(model, prior, at)
    precision = prior.precision()
    rows = []
    for layer, module in model.named_modules():
        if not isinstance(module, Relaxed):
            continue
        for path in module:
            stem = f"{layer}.{path}".lstrip(".")
            names = [name for name in found.gammas if is_under(name, stem)]
            deltas = {name[len(stem) + 1 :].replace(".basis", "") or path: precision[name] for name in names}
            sparse = {part or path: m for part, m in module[path].named_modules() if isinstance(m, Sparse)}
            omega = {part: float(m.basis.omega.detach()) for part, m in sparse.items()}
            learned = any(m.basis.omega.requires_grad for m in sparse.values())
            counts = int(_under(found.covered, stem)), _under(found.gammas, stem), found.share(layer, stem)
            symmetric = path in module.symmetric
            rows.append(PathShare(layer, path, symmetric, deltas, *counts, omega, module.keeps(path), learned))
    relaxed = any(hasattr(module, "relaxation") for module in model.modules())
    return Symmetry(tuple(rows), tuple(symmetrised.ranges(model).values()), relaxed=relaxed, limits=limits(model))


def limits(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Why symmetric paths are only approximately equivariant, by relaxed layer: borders, strides, interpolation."""
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        parts = [part for path in module.symmetric for part in module[path].modules()] if isinstance(module, Relaxed) else []
        if own := {limit for part in parts if isinstance(part, Path) for limit in part.limits()}:
            found[name] = tuple(sorted(own))
    return found
