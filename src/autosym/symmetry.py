"""The learned symmetry as numbers: for every layer and path its precision, effective parameters and share.

The share of a path is the part of its layer's effective parameters that it holds, biases included: a free path whose own
spatial bias is still in use breaks the symmetry, so it counts. It is not a number (NaN) for a frozen path, of which the evidence
says nothing, and in a layer without effective parameters.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from torch import nn

from autosym import averaging
from autosym.averaging import Range
from autosym.evidence.laplace import Laplace
from autosym.layers import Relaxed
from autosym.priors import Prior


@dataclass(frozen=True)
class PathShare:
    """One path of one layer. ``precision`` is by name of its parts (weights, biases, factors, omega).

    ``omega`` holds the inverse lengthscales of a sparse path: 0 is constant in space. A prior on omega makes a layer symmetric by omega,
    not by its share: look at ``equivariance_error``.
    """

    layer: str
    path: str
    symmetric: bool
    precision: dict[str, float]
    parameters: int
    effective_parameters: float
    share: float
    omega: dict[str, float]


@dataclass(frozen=True)
class Symmetry:
    """Shares of every relaxed layer, in order, and the learned ranges of transformations (``averaging``); prints as a table."""

    paths: tuple[PathShare, ...]
    ranges: tuple[Range, ...] = ()

    def __iter__(self) -> Iterator[PathShare]:
        return iter(self.paths)

    def free_share(self) -> dict[str, float]:
        """By layer, the share of all its free paths together: 0 is strictly symmetric."""
        shares: dict[str, float] = {}
        for path in self.paths:
            shares[path.layer] = shares.get(path.layer, 0.0) + (0.0 if path.symmetric else path.share)
        return shares

    def as_dicts(self) -> list[dict]:
        """Ready for JSON: a share that is not a number is None."""
        return [asdict(path) | {"share": None if math.isnan(path.share) else path.share} for path in self.paths]

    def __str__(self) -> str:
        if self.ranges:
            invariant = f"averaged over {'; '.join(map(str, self.ranges))}"
            return "\n".join([invariant, *([str(Symmetry(self.paths))] if self.paths else [])])
        if not self.paths:
            return "no relaxed layer: build one by autosym.nets.build or autosym.layers.Relaxed"
        rows = [("layer", "path", "", "precision", "effective / all", "share")]
        for p in self.paths:
            precision = "  ".join(f"{name} {value:.3g}" for name, value in p.precision.items())
            precision += "".join(f"  (omega of {name}: {value:.3g})" for name, value in p.omega.items())
            count = f"{p.effective_parameters:.1f} / {p.parameters}"
            rows.append((p.layer, p.path, "symmetric" if p.symmetric else "free", precision, count, f"{p.share:.1%}"))
        widths = [max(len(row[i]) for row in rows) for i in range(6)]
        align = ("<", "<", "<", "<", ">", ">")
        lines = ["  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, align, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def symmetry(model: nn.Module, prior: Prior, laplace: Laplace) -> Symmetry:
    """The shares of every relaxed layer of ``model`` under ``prior``."""
    gammas = dict(zip(laplace.names, laplace.effective_parameters(prior).tolist(), strict=True))
    sizes = dict(zip(laplace.names, laplace.sizes.tolist(), strict=True))
    precision = prior.precision()
    rows = []
    for layer, module in model.named_modules():
        if not isinstance(module, Relaxed):
            continue
        parts = {path: _under(f"{layer}.{path}".lstrip("."), gammas) for path in module}
        total = sum(gammas[name] for names in parts.values() for name in names)
        for path, names in parts.items():
            gamma = sum(gammas[name] for name in names)
            stem = len(f"{layer}.{path}".lstrip(".")) + 1
            deltas = {name[stem:].replace(".basis", "") or path: precision[name] for name in names}
            omega = {
                n.removesuffix(".basis.omega"): float(t) for n, t in module[path].state_dict().items() if n.endswith(".omega")
            }
            size = int(sum(sizes[name] for name in names))
            share = gamma / total if total > 0 and names else math.nan
            rows.append(PathShare(layer, path, path in module.symmetric, deltas, size, gamma, share, omega))
    return Symmetry(tuple(rows), tuple(averaging.ranges(model).values()))


def _under(stem: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name == stem or name.startswith(f"{stem}.")]
