"""Sites: which path owns which parameter of a model, and the hooks that show each path its inputs and cotangents.

autosym's paths own their weight; torch's Linear, Conv1d and Conv2d are read as paths without being changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from autosym.linear.conv import Conv, form_of
from autosym.linear.dense import Bias, Dense
from autosym.linear.frames import Frame
from autosym.linear.path import Definition, Path
from autosym.runtime.batching import check_module


@dataclass(frozen=True)
class Site:
    """A parameter of the model that a path owns, and the module whose inputs and outputs that path sees."""

    name: str
    module: nn.Module
    parameter: nn.Parameter
    path: Callable[[Tensor, Tensor], Definition]  # given an input and its output: torch's layers do not know their map's size


def sites(model: nn.Module, expand_bias: bool = False) -> list[Site]:
    """Every trainable parameter with the path that owns it; frozen ones are point estimates, outside the evidence.

    Paths own their weight; torch's Linear, Conv1d and Conv2d are read as Dense or Conv and Bias. Anything else is refused.
    """
    check_module(model)
    found: dict[int, Site] = {}
    owners: dict[int, str] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=isinstance(module, Path)):
            full = f"{module_name}.{name}".lstrip(".")
            if owners.get(id(parameter)) == full:  # of a part of a path, which the path owns
                continue
            if not parameter.requires_grad:
                continue
            check_parameter(full, parameter, owners)
            path = _path_of(module, name, expand_bias)
            if path is None:
                raise ValueError(
                    f"no path owns the parameter {full} of {type(module).__name__}: the evidence covers autosym's paths, "
                    "nn.Linear, nn.Conv1d and nn.Conv2d; freeze it by requires_grad_(False) to keep it as a point estimate outside of it"
                )
            own_weight = isinstance(module, Path) and name == "weight"
            found[id(parameter)] = Site(module_name if own_weight else full, module, parameter, path)
    if not found:
        raise ValueError(
            "the model has no trainable parameter, so there is nothing to integrate over: unfreeze some by requires_grad_(True)"
        )
    return list(found.values())


def parameter_of(model: nn.Module, name: str) -> nn.Parameter:
    """The parameter that a site is named after: its own name, or that of the path whose weight it is."""
    module = model.get_submodule(name) if name in dict(model.named_modules()) else None
    return model.get_parameter(name) if module is None else module.get_parameter("weight")


def check_parameter(name: str, parameter: nn.Parameter, owners: dict[int, str]) -> None:
    """Refuse a parameter that is trained under two names, in half precision, or not finite; ``owners``, names by id, gets it."""
    other = owners.setdefault(id(parameter), name)
    if other != name and parameter.requires_grad:
        raise ValueError(
            f"{name} and {other} are the same parameter: the curvature of tied weights is not the sum of its parts; untie them, or "
            "freeze them by requires_grad_(False)"
        )
    if parameter.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} is {parameter.dtype}: curvature needs float32 or float64; use model.float()")
    if not torch.isfinite(parameter).all():
        raise ValueError(f"{name} holds values that are not finite (NaN or Inf): load or initialise it anew")


def is_under(name: str, stem: str) -> bool:
    """Whether a dotted name is ``stem``, or of something that it holds; the model itself, "", holds all."""
    return not stem or name == stem or name.startswith(f"{stem}.")


def sizes(sites: Sequence[Site]) -> dict[str, float]:
    """The size of every parameter, in units of which relative steps are: its root mean square, but for what a path says of its own."""
    return {
        site.name: site.module.size()
        if isinstance(site.module, Path) and site.parameter is site.module.weight
        else float(site.parameter.detach().square().mean().sqrt())
        for site in sites
    }


def frames(sites: Sequence[Site], scaled_rows: bool = False) -> dict[str, Frame]:
    """The coordinates that steps are even in, of paths that have some: those of all else are the weights themselves.

    Where rows have scales of their own (a Student-t prior) those across rows are left out: the prior would not be diagonal there.
    """
    found = {s.name: s.module.frame() for s in sites if isinstance(s.module, Path) and s.parameter is s.module.weight}
    return {name: frame for name, frame in found.items() if frame is not None and (frame.across or not scaled_rows)}


def _path_of(module: nn.Module, name: str, expand_bias: bool) -> Callable[[Tensor, Tensor], Definition] | None:
    """How to read a parameter of a module as a path: ours are paths, torch's are adopted."""
    if isinstance(module, Bias) and name == "weight" and expand_bias:
        return lambda *_: _definition(Bias, module.shape, module.out_shape, True)
    if isinstance(module, Path):
        own = module.definition(name)
        return None if own is None else lambda x, _: own(x)
    if type(module) is nn.Linear and name == "weight":
        return lambda *_: _definition(Dense, (module.in_features,), (module.out_features,))
    if type(module) is nn.Linear and name == "bias":
        return lambda _, y: _definition(Bias, (1,) * (y.dim() - 2) + (y.shape[-1],), tuple(y.shape[1:]), expand_bias)
    if isinstance(module, (nn.Conv1d, nn.Conv2d)) and type(module) in (nn.Conv1d, nn.Conv2d):  # not a subclass
        if name == "weight":
            return lambda *_: _definition(Conv, *form_of(module))
        return lambda _, y: _definition(Bias, (y.shape[1],) + (1,) * (y.dim() - 2), tuple(y.shape[1:]), expand_bias)
    return None


@cache
def _definition(kind: Callable[..., Path], *arguments: object) -> Path:
    """A path without weights: its columns and rows are all that curvature asks for."""
    with torch.device("meta"):
        return kind(*arguments)
