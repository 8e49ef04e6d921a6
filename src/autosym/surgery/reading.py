"""What a subclass of torch's Linear or convolution computes, read off a call of it.

    layer(x)  =  W * pad(x) + b          W, b and the padding as one call of the layer shows them

Weight-standardised convolutions and those that pad by themselves are of this form. Weights that a layer computes (from a gain, by
standardisation) become weights of their own, at their present values. A subclass that computes anything else is not read.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autosym.surgery.checking import same
from autosym.surgery.observation import Seen

KINDS: dict[type[nn.Module], Any] = {nn.Linear: F.linear, nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


@dataclass(frozen=True)
class Read:
    """A torch layer that computes what a subclass of its kind does, or None; and what to say of it.

    If the padding differs by side, ``layer`` has it for ``form_of`` alone and ``runs`` is False: torch has no such convolution.
    """

    layer: nn.Module | None
    note: str
    runs: bool = True
    one_size: bool = False  # whether it padded by itself, which depends on the size of its input


class _Calls(TorchFunctionMode):
    """The arguments of every call of one function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.found: list[dict[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is self.function:
            self.found.append({**dict(zip(ARGUMENTS, args, strict=False)), **(kwargs or {})})
        return result


@torch.no_grad()
def read(layer: nn.Module, x: Tensor) -> Read:
    """The torch layer that computes what ``layer`` does, judged on its input ``x`` (B, ...) and on another one of that shape."""
    name = type(layer).__name__
    kind = next(kind for kind in KINDS if isinstance(layer, kind))
    not_read = Read(None, f"{name} is not the {kind.__name__} that it is a subclass of: the evidence does not cover it")
    with _Calls(KINDS[kind]) as calls:
        y = layer(x)
    if len(calls.found) != 1:
        return not_read
    given = calls.found[0]
    sides = _padding(x, given["input"], _mode(layer))
    if sides is None:
        return not_read
    plain: Any = _linear(layer, given) if kind is nn.Linear else _convolution(layer, kind, given, sides)
    other = x.mean() + x.std(correction=0) * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
    for inputs, wanted in ((x, y), (other, layer(other))):  # weights that depend on the input would differ in the second
        if not same(_apply(plain, inputs), wanted):
            return not_read
    symmetric = kind is nn.Linear or tuple(plain._reversed_padding_repeated_twice) == _sides(plain.padding)
    own = f", padded as for maps {tuple(x.shape[2:])}" if any(sides) else ""
    return Read(plain, f"the present weights of {name}{own}", symmetric, any(sides))


def as_convolution(linear: Any, seen: Seen) -> tuple[nn.Module, Seen]:
    """A dense layer on the last axis of maps (B, ..., C) as the 1x1 convolution of (B, C, ...) that it is, and what it would have seen."""
    axes = len(seen.in_shape) - 1
    kind: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[axes]
    conv = kind(linear.in_features, linear.out_features, 1, bias=linear.bias is not None, device="meta")
    conv.weight, conv.bias = nn.Parameter(linear.weight.detach().reshape(conv.weight.shape)), linear.bias
    in_shape, out_shape = ((shape[-1], *shape[:-1]) for shape in (seen.in_shape, seen.out_shape))
    assert seen.x is not None
    return conv, replace(seen, in_shape=in_shape, out_shape=out_shape, x=seen.x.movedim(-1, 1))


def _apply(plain: Any, x: Tensor) -> Tensor:
    """What the layer computes, with its padding as ``form_of`` reads it."""
    if isinstance(plain, nn.Linear):
        return plain(x)
    padded = F.pad(x, plain._reversed_padding_repeated_twice, _mode(plain))
    function = next(function for kind, function in KINDS.items() if isinstance(plain, kind))
    return function(padded, plain.weight, plain.bias, plain.stride, 0, plain.dilation, plain.groups)


def _linear(layer: nn.Module, given: dict[str, Any]) -> nn.Linear:
    weight, bias = given["weight"], given.get("bias")
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    return _with(made, layer, weight, bias)


def _convolution(layer: nn.Module, kind: Any, given: dict[str, Any], sides: Sequence[int]) -> nn.Module:
    """torch's convolution with the weights and the form of a call; ``sides`` is what its input was padded by before."""
    weight, bias, groups = given["weight"], given.get("bias"), given.get("groups", 1)
    form = [
        _tuple(given.get(key, default), weight.dim() - 2) for key, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    ]
    shape = (weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]))
    made = kind(*shape, *form, groups, bias is not None, device="meta")
    padding = [a + b for a, b in zip(made._reversed_padding_repeated_twice, sides, strict=True)]
    if padding[::2] == padding[1::2]:
        made = kind(
            *shape, form[0], tuple(padding[::-2]), form[2], groups, bias is not None, _name(layer, sides), device="meta"
        )
    else:
        made.padding_mode = _name(layer, sides)
    made._reversed_padding_repeated_twice = padding
    return _with(made, layer, weight, bias)


def _with(made: Any, layer: nn.Module, weight: Tensor, bias: Tensor | None) -> Any:
    """The layer with copies of these weights, trained if those of the given layer were."""
    trained = any(parameter.requires_grad for parameter in layer.parameters())
    made.weight = nn.Parameter(weight.detach().clone(), trained)
    made.bias = None if bias is None else nn.Parameter(bias.detach().clone(), trained)
    return made.train(layer.training)


def _padding(x: Tensor, padded: Tensor, mode: str) -> tuple[int, ...] | None:
    """The numbers for F.pad that make ``padded`` of x, or None."""
    if padded is x:
        return (0,) * (2 * (x.dim() - 2))
    totals = [b - a for a, b in zip(x.shape, padded.shape, strict=False)]
    if padded.dim() != x.dim() or any(totals[:2]) or min(totals) < 0:
        return None
    for before in itertools.product(*(range(total + 1) for total in reversed(totals[2:]))):
        sides = tuple(n for left, total in zip(before, reversed(totals[2:]), strict=True) for n in (left, total - left))
        if torch.equal(F.pad(x, sides, mode), padded):
            return sides
    return None


def _mode(layer: Any) -> str:
    """How the layer pads, as F.pad names it."""
    return "constant" if getattr(layer, "padding_mode", "zeros") == "zeros" else layer.padding_mode


def _name(layer: Any, sides: Sequence[int]) -> str:
    """How torch's convolution is to pad: in zeros, unless the layer itself padded in another way."""
    return layer.padding_mode if any(sides) else "zeros"


def _tuple(value: Any, axes: int) -> Any:
    return (value,) * axes if isinstance(value, int) else value


def _sides(padding: Any) -> tuple[int, ...] | None:
    """Padding by axis, (vertical, horizontal), in the order of F.pad."""
    return None if isinstance(padding, str) else tuple(n for axis in reversed(padding) for n in (axis, axis))
