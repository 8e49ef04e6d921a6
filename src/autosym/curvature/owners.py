"""Sites: which path owns which parameter of a model, and the hooks that show each path its inputs and cotangents.

autosym's paths own their weight. torch's Linear, Conv1d, Conv2d, Conv3d and normalisation layers are read as paths; the modules are
not changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from autosym.linear.conv import CONVOLUTIONS, Conv, form_of
from autosym.linear.dense import Bias, Dense
from autosym.linear.frames import Frame
from autosym.linear.normalisation import NORMALISATIONS, WIDEST, Scale, affine_shape, normalised, too_wide
from autosym.linear.path import Definition, Path
from autosym.runtime.batching import all_finite, check_module


@dataclass(frozen=True)
class Site:
    """A parameter of the model that a path owns, and the module whose inputs and outputs that path sees."""

    name: str
    module: nn.Module
    parameter: nn.Parameter
    path: Callable[[Tensor, Tensor], Definition]  # takes (input, output): torch's layers do not store their output's shape


def sites(model: nn.Module, expand_bias: bool = False) -> list[Site]:
    """Every trainable parameter with the path that owns it. Frozen parameters are point estimates, outside the evidence.

    Paths own their weight. torch's Linear and convolutions are read as Dense or Conv, and Bias; BatchNorm, LayerNorm and GroupNorm
    as Scale and Bias. Anything else is refused.
    """
    check_module(model)
    found: dict[int, Site] = {}
    owners: dict[int, str] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=isinstance(module, Path)):
            full = f"{module_name}.{name}".lstrip(".")
            if owners.get(id(parameter)) == full:  # part of a path that was listed before
                continue
            if not parameter.requires_grad:
                continue
            check_parameter(full, parameter, owners)
            path = _path_of(module, name, expand_bias)
            if path is None:
                raise ValueError(
                    f"no path owns the parameter {full} of {type(module).__name__}: the evidence covers autosym's paths, "
                    "nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, BatchNorm, LayerNorm and GroupNorm; freeze it by "
                    "requires_grad_(False) to keep it as a point estimate"
                )
            if type(module) in NORMALISATIONS and too_wide(module):
                raise ValueError(
                    f"{full} of {type(module).__name__} has {parameter.numel()} numbers: its exact block of curvature would be too large "
                    f"(at most {WIDEST} are covered); freeze it by requires_grad_(False) to keep it as a point estimate"
                )
            own_weight = isinstance(module, Path) and name == "weight"
            found[id(parameter)] = Site(module_name if own_weight else full, module, parameter, path)
    if not found:
        raise ValueError(
            "the model has no trainable parameter, so there is nothing to integrate over: unfreeze some by requires_grad_(True)"
        )
    return list(found.values())


def check_parameter(name: str, parameter: nn.Parameter, owners: dict[int, str]) -> None:
    """Refuse a parameter that is trained under two names, in half precision, or not finite. Adds its name to ``owners``."""
    other = owners.setdefault(id(parameter), name)
    if other != name and parameter.requires_grad:
        raise ValueError(
            f"{name} and {other} are the same parameter: the curvature of tied weights is not the sum of its parts; "
            "untie them, or freeze them by requires_grad_(False)"
        )
    if parameter.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} is {parameter.dtype}: curvature needs float32 or float64; use model.float()")
    if not all_finite(parameter.detach()):
        raise ValueError(f"{name} holds values that are not finite (NaN or Inf): load or initialise it anew")


def is_under(name: str, stem: str) -> bool:
    """Whether a dotted name is ``stem`` or lies inside it. The model itself is "", and holds everything."""
    return not stem or name == stem or name.startswith(f"{stem}.")


def sizes(sites: Sequence[Site]) -> dict[str, float]:
    """The root mean square of every parameter, the unit of relative steps. A path may override it for its weight."""
    return {
        site.name: site.module.size()
        if isinstance(site.module, Path) and site.parameter is site.module.weight
        else float(site.parameter.detach().square().mean().sqrt())
        for site in sites
    }


def frames(sites: Sequence[Site], scaled_rows: bool = False) -> dict[str, Frame]:
    """The coordinates in which steps are even, for paths that define them. All other steps are in the weights themselves.

    With ``scaled_rows`` (a Student-t prior) coordinates that mix rows are left out: the prior would not be diagonal in them.
    """
    found = {s.name: s.module.frame() for s in sites if isinstance(s.module, Path) and s.parameter is s.module.weight}
    return {name: frame for name, frame in found.items() if frame is not None and (frame.across or not scaled_rows)}


def _path_of(module: nn.Module, name: str, expand_bias: bool) -> Callable[[Tensor, Tensor], Definition] | None:
    """How to read a parameter of a module as a path: autosym's paths as they are, torch's layers as Dense, Conv and Bias."""
    if type(module) is Bias and name == "weight" and expand_bias:
        return lambda _, y: _definition(Bias, module.shape, tuple(y.shape[1:]) if module.any_size else module.out_shape, True)
    if isinstance(module, Path):
        own = module.definition(name)
        return None if own is None else lambda x, _: own(x)
    if type(module) is nn.Linear and name == "weight":
        return lambda *_: _definition(Dense, (module.in_features,), (module.out_features,))
    if type(module) is nn.Linear and name == "bias":
        return lambda _, y: _definition(Bias, (1,) * (y.dim() - 2) + (y.shape[-1],), tuple(y.shape[1:]), expand_bias)
    if isinstance(module, CONVOLUTIONS) and type(module) in CONVOLUTIONS:  # not a subclass
        if name == "weight":
            return lambda *_: _definition(Conv, *form_of(module))
        return lambda _, y: _definition(Bias, (y.shape[1],) + (1,) * (y.dim() - 2), tuple(y.shape[1:]), expand_bias)
    if type(module) in NORMALISATIONS and name == "weight":
        return lambda x, _: Scale(normalised(module, x), affine_shape(module, x))
    if type(module) in NORMALISATIONS:
        return lambda _, y: _definition(Bias, affine_shape(module, y), tuple(y.shape[1:]), expand_bias)
    return None


@cache
def _definition(kind: Callable[..., Path], *arguments: object) -> Path:
    """A path without weights: curvature needs only its columns and rows."""
    with torch.device("meta"):
        return kind(*arguments)
