"""A network with some of its paths left out, or beside others: the weights and precisions of one given to the other.

    1/n sum_i path_i(x)   =   1/m sum_i (m/n) path_i(x)        the paths that both have; those that only the target has compute zero

A path that is scaled by c has a precision divided by c^2: the prior of what it computes stays as it was. So a fit goes on from where the
other ended, and the evidence at its start is that of the given network, without the paths that are gone.
"""

import copy
import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from autosym.curvature.owners import sites
from autosym.linear.path import Path
from autosym.nn.layers import Branch, Relaxed

NEW = 1.0  # the precision of a path that was not there


def without(model: nn.Module, stems: Collection[str]) -> nn.Module:
    """A copy of ``model`` without the named paths (LAYER.PATH) of its relaxed layers; it computes the same as with them at zero."""
    made, left = copy.deepcopy(model), set(stems)
    for name, layer in relaxed(made).items():
        gone = [path for path in layer if f"{name}.{path}".lstrip(".") in left]
        left -= {f"{name}.{path}".lstrip(".") for path in gone}
        if len(gone) == len(layer):
            raise ValueError(f"{name} would have no path left: keep one of {', '.join(layer)}")
        if not gone:
            continue
        before = len(layer)
        for path in gone:
            del layer[path]
        layer.symmetric = tuple(path for path in layer.symmetric if path not in gone)
        layer.free = tuple(path for path in layer.free if path not in gone)
        _scale(layer, len(layer) / before)
    if left:
        raise ValueError(f"no relaxed layer has the path {sorted(left)[0]}")
    return made


@torch.no_grad()
def hand_over(source: nn.Module, target: nn.Module, precision: Mapping[str, float] | None = None) -> dict[str, float]:
    """Give ``target`` the weights of ``source``, in place; returns the precisions to go on with, by the names of the target.

    Both have relaxed layers of the same names. A path that only the target has computes zero then. ``precision`` are those of ``source``.
    """
    ours, theirs = relaxed(target), relaxed(source)
    new: set[int] = set()
    for name, layer in ours.items():
        if name not in theirs:
            raise ValueError(f"{name or 'the model'} is a relaxed layer of the target only: hand over between networks of one form")
        for path in layer:
            if path not in theirs[name]:
                silence(layer[path])
                new |= {id(parameter) for parameter in layer[path].parameters()}
    given, owned = dict(source.named_parameters()), dict(target.named_parameters())
    scales = {id(parameter): len(ours[name]) / len(theirs[name]) for name in ours for parameter in _outer(ours[name])}
    lacking = [name for name, parameter in owned.items() if id(parameter) not in new and name not in given]
    if lacking:
        raise ValueError(f"the source lacks {lacking[0]}: hand over between networks of one form")
    for name, parameter in owned.items():
        if id(parameter) not in new:
            parameter.copy_(given[name] * scales.get(id(parameter), 1.0))
    buffers = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffer.copy_(buffers[name])
    if precision is None:
        return {}
    return {
        site.name: NEW if id(site.parameter) in new else precision[site.name] / scales.get(id(site.parameter), 1.0) ** 2
        for site in sites(target)
    }


@torch.no_grad()
def silence(path: nn.Module) -> None:
    """Make a path compute zero; its last factor remembers the size that it had, the unit of its steps."""
    for module, _ in _last(path):
        if isinstance(module, Path):
            module.start_size = module.size()
        module.get_parameter("weight").zero_()


@torch.no_grad()
def wake(path: nn.Module, size: float) -> None:
    """Give a path that computes zero random weights of ``size`` times those with which its outputs would be as large as others'."""
    module, _ = next(_last(path))
    if isinstance(module, Path) and not bool(module.weight.any()) and module.start_size:
        module.weight.normal_().mul_(size * module.start_size)


def relaxed(model: nn.Module) -> dict[str, Relaxed]:
    """The relaxed layers, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Relaxed)}


def _last(path: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules whose weights scale what a path computes, the map before the bias, with their names in the path."""
    parts = path.parts() if isinstance(path, (Branch, Path)) else {"weights": ("",)}
    for name in (parts["weights"][-1], *parts.get("bias", ())):
        yield path.get_submodule(name), name


def _outer(layer: Relaxed) -> Iterator[nn.Parameter]:
    for path in layer.values():
        for module, _ in _last(path):
            yield module.get_parameter("weight")


@torch.no_grad()
def _scale(layer: Relaxed, factor: float) -> None:
    if not math.isclose(factor, 1.0):
        for parameter in _outer(layer):
            parameter.mul_(factor)
