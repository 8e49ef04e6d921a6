"""Paths as ordinary layers of torch: convolutions merge into one convolution, dense maps into one dense layer.

    1/n sum_i (W_i x + b_i)  =  (1/n sum_i W_i) x + 1/n sum_i b_i

What torch has no layer for are the four small modules below; all export with ``torch.export`` and to ONNX.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autosym.linear.conv import Conv
from autosym.linear.dense import Dense, Pool
from autosym.linear.group_conv import GroupConv
from autosym.linear.path import Path
from autosym.linear.sparse import SparseConv
from autosym.nn.layers import Affine, Factored, Relaxed, SparseFactored

LAYERS = (Relaxed, Affine, Factored, SparseFactored, Path)  # what has a plain form
CONVOLUTIONS = (Conv, SparseConv, GroupConv)
PADDING = {
    (False, "zeros"): nn.ZeroPad2d,
    (False, "circular"): nn.CircularPad2d,
    (False, "reflect"): nn.ReflectionPad2d,
    (False, "replicate"): nn.ReplicationPad2d,
    (True, "zeros"): nn.ZeroPad1d,
    (True, "circular"): nn.CircularPad1d,
    (True, "reflect"): nn.ReflectionPad1d,
    (True, "replicate"): nn.ReplicationPad1d,
}


class Polyphase(nn.Module):
    """The polyphase grid of (B, C, H, W) with the largest norm, for every sample its own (``layers.polyphase``)."""

    def __init__(self, stride: int):
        super().__init__()
        self.stride = stride

    def forward(self, y: Tensor) -> Tensor:
        grids = y.unflatten(-1, (-1, self.stride)).unflatten(-3, (-1, self.stride))  # (B, C, H', s, W', s)
        grids = grids.permute(0, 3, 5, 1, 2, 4).flatten(1, 2)  # (B, s^2, C, H', W')
        norms = torch.linalg.vector_norm(torch.linalg.vector_norm(grids, dim=2), dim=(2, 3))
        chosen = norms.argmax(1)[:, None, None, None, None].expand(-1, 1, *grids.shape[2:])
        return grids.gather(1, chosen).squeeze(1)

    def extra_repr(self) -> str:
        return f"stride={self.stride}"


class TwoFactors(nn.Module):
    """y = theta_1 (theta_2 x + b_2) + bias: a dense map of maps, factored between input and output (F-FC, Eq. 5).

    theta_2: (C, C', P), b_2: (C', 1), theta_1: (C', P', C); ``bias`` broadcasts to ``out_shape``.
    """

    def __init__(self, theta_2: Tensor, b_2: Tensor, theta_1: Tensor, bias: Tensor | None, out_shape: Sequence[int]):
        super().__init__()
        self.theta_2, self.b_2, self.theta_1 = (nn.Parameter(t.detach().clone()) for t in (theta_2, b_2, theta_1))
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.out_shape = tuple(out_shape)

    def forward(self, x: Tensor) -> Tensor:
        h = (x.flatten(2).transpose(0, 1) @ self.theta_2.mT).permute(2, 1, 0)  # (C', B, C)
        y = ((h + self.b_2[:, None]) @ self.theta_1.mT).transpose(0, 1).unflatten(2, self.out_shape[1:])
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"out_shape={self.out_shape}"


class Offset(nn.Module):
    """y = x + offset: a bias that depends on position."""

    def __init__(self, offset: Tensor):
        super().__init__()
        self.offset = nn.Parameter(offset.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset

    def extra_repr(self) -> str:
        return f"shape={tuple(self.offset.shape)}"


class Sum(nn.ModuleList):
    """The sum of what its parts make of one input."""

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = [part(x) for part in self]
        return sum(rest, first)


@torch.no_grad()
def plain(name: str, layer: nn.Module, dropped: Collection[tuple[str, str]] = ()) -> nn.Module:
    """The layer without what is dropped, (path, "weights" or "bias"), as layers of torch's."""
    relaxed = layer if isinstance(layer, Relaxed) else Relaxed({}, {"alone": layer})
    linears: list[nn.Module] = []
    inner: list[Tensor | None] = []  # biases that take part in the choice of a polyphase grid
    outer: list[Tensor | None] = []
    for path, module in relaxed.items():
        linear, bias = split(module)
        if not isinstance(linear, (*CONVOLUTIONS, Dense, Pool, Factored, SparseFactored)):
            raise ValueError(f"harden has no plain form for {path} of {name} ({type(linear).__name__}): replace it before")
        if relaxed.stride > 1 and isinstance(linear, CONVOLUTIONS) != (path in relaxed.symmetric):
            raise ValueError(
                f"{path} of {name}: where a layer downsamples, convolutions must be its symmetric paths, and all of them"
            )
        if (path, "weights") not in dropped:
            linears.append(linear)
        if (path, "bias") not in dropped:
            (inner if path in relaxed.symmetric else outer).append(bias)
    if not linears:
        raise ValueError(f"every path of {name} would be dropped, but a layer needs one")
    made = _merge(linears, _sum(inner), _sum(outer), relaxed.stride, 1 / len(relaxed))
    return made.to(next(linears[0].parameters())).train(layer.training)


def split(module: nn.Module) -> tuple[nn.Module, Tensor | None]:
    """A path as its linear part, and its bias, if it has one, in a shape that broadcasts to the output."""
    if isinstance(module, Factored):
        return module, module.b_1.weight.view(module.b_1.shape)
    if not isinstance(module, Affine):
        return module, None
    bias = module.bias.weight.view(module.bias.shape)
    lifted = isinstance(module.linear, GroupConv)  # one bias for all channels of a field
    return module.linear, bias.expand(-1, module.bias.out_shape[1], -1, -1).flatten(0, 1) if lifted else bias


def _merge(linears: Sequence[nn.Module], inner: Tensor | None, outer: Tensor | None, stride: int, scale: float) -> nn.Module:
    """scale (polyphase(sum of convolutions + inner) + sum of the others + outer), in as few layers as it takes."""
    convs: list[nn.Module] = [m for m in linears if isinstance(m, CONVOLUTIONS)]
    pools = [m for m in linears if isinstance(m, Pool)]
    factored = [m for m in linears if isinstance(m, (Factored, SparseFactored)) and not _smaller_as_dense(m)]
    dense = [m for m in linears if m not in (*convs, *pools, *factored)]
    in_shape = next((m.in_shape for m in dense if isinstance(m, Dense)), None)
    if in_shape is not None and stride == 1:  # a convolution is a dense map too, and adds nothing to one
        dense, convs = dense + convs, []
    if not convs:
        inner, outer = None, _sum([inner, outer])
    elif stride == 1 and outer is not None and math.prod(outer.shape[1:]) == 1:
        inner, outer = _sum([inner, outer]), None
    parts: list[nn.Module] = []
    if dense:
        parts, outer = [_dense([*dense, *pools, *factored], in_shape, outer, scale)], None
    elif pools:
        parts, outer = [_pooled(pools, outer, scale)], None
    else:
        for module in factored:
            parts.append(_two_factors(module, outer, scale))
            outer = None
    if convs:
        parts.insert(0, _convolutions(convs, inner, stride, scale))
    whole = parts[0] if len(parts) == 1 else Sum(parts)
    return whole if outer is None else nn.Sequential(whole, Offset(scale * outer))


def _dense(linears: Sequence[nn.Module], in_shape: tuple[int, ...] | None, bias: Tensor | None, scale: float) -> nn.Module:
    """One dense layer; on maps, between flattening and its opposite."""
    first = linears[0]
    out_shape = first.out_shape if isinstance(first, Dense) else _factors(first)[3]
    weight = torch.stack([_matrix(m, in_shape) for m in linears]).sum(0)
    constants = [_constant(m) for m in linears if isinstance(m, (Factored, SparseFactored))]
    full = None if bias is None else bias if bias.numel() == len(weight) else bias.expand(out_shape)
    bias = _sum([None if full is None else full.flatten(), *constants])
    linear = nn.Linear(weight.shape[1], len(weight), bias=bias is not None)
    _set(linear, weight, bias, scale)
    flat = len(out_shape) == 1 and in_shape is not None and len(in_shape) == 1
    return linear if flat else nn.Sequential(nn.Flatten(1), linear, nn.Unflatten(1, out_shape))


def _pooled(pools: Sequence[Pool], bias: Tensor | None, scale: float) -> nn.Module:
    """A dense layer on the means over positions of flattened maps."""
    weight = torch.stack([m.weight[0] for m in pools]).sum(0)
    linear = nn.Linear(weight.shape[1], len(weight), bias=bias is not None)
    _set(linear, weight, bias, scale)
    maps = (weight.shape[1], pools[0].positions)
    return nn.Sequential(nn.Unflatten(1, maps), nn.AdaptiveAvgPool1d(1), nn.Flatten(1), linear)


def _two_factors(module: nn.Module, bias: Tensor | None, scale: float) -> TwoFactors:
    theta_2, b_2, theta_1, out_shape = _factors(module)
    return TwoFactors(theta_2, b_2, scale * theta_1, None if bias is None else scale * bias, out_shape)


def _convolutions(convs: Sequence[nn.Module], bias: Tensor | None, stride: int, scale: float) -> nn.Module:
    """One convolution for all paths of one form, and the choice of a polyphase grid of their sum."""
    merged: dict[tuple, Tensor] = {}
    for conv in convs:
        form = _form(conv)
        merged[form] = merged.get(form, 0) + conv.filters()  # type: ignore[operator]
    parts: list[nn.Module] = []
    for form, filters in merged.items():
        parts.append(_convolution(form, filters, None if parts else bias, scale))
    whole = parts[0] if len(parts) == 1 else Sum(parts)
    return whole if stride == 1 else nn.Sequential(whole, Polyphase(stride))


def _convolution(form: tuple, filters: Tensor, bias: Tensor | None, scale: float) -> nn.Module:
    """torch's convolution of that form; where its padding differs by side, and is not what torch calls "same", padded before."""
    kernel, stride, padding, dilation, groups, mode, sequences = form
    left, right, top, bottom = padding
    line = slice(1, None) if sequences else slice(None)
    sides = padding[:2] if sequences else padding

    def make(padding: str | tuple[int, ...]) -> nn.Conv1d | nn.Conv2d:
        kind: Any = nn.Conv1d if sequences else nn.Conv2d
        shape = (filters.shape[1] * groups, len(filters), kernel[line], stride[line], padding, dilation[line], groups)
        return kind(*shape, bias=bias is not None, padding_mode=mode)

    before = None
    if left == right and top == bottom:
        conv = make((left,) if sequences else (top, left))
    elif stride == (1, 1) and tuple(make("same")._reversed_padding_repeated_twice) == sides:
        conv = make("same")
    else:
        conv, before = make((0,) if sequences else (0, 0)), PADDING[sequences, mode](sides)
    _set(conv, filters, None if bias is None else bias.expand(len(filters), *bias.shape[1:]).flatten(), scale)
    return conv if before is None else nn.Sequential(before, conv)


def _set(layer: nn.Module, weight: Tensor, bias: Tensor | None, scale: float) -> None:
    own = layer.get_parameter("weight")
    own.data = scale * weight.reshape(own.shape)
    if bias is not None:
        layer.get_parameter("bias").data = scale * bias


def _form(conv: nn.Module) -> tuple:
    """What convolutions must have in common to be one."""
    if isinstance(conv, Conv):
        form = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode, conv.sequences)
        return form
    assert isinstance(conv, (SparseConv, GroupConv))
    k = conv.kernel_size
    return (k, k), (1, 1), (k // 2,) * 4, (1, 1), 1, "circular", False


def _factors(module: nn.Module) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """theta_2: (C, C', P), b_2: (C', 1), theta_1: (C', P', C) and the shape of the output, sparse ones on their positions."""
    assert isinstance(module, (Factored, SparseFactored))
    b_2 = module.b_2.weight.view(module.b_2.shape)
    if isinstance(module, Factored):
        return module.theta_2.weight, b_2, module.theta_1.weight, module.theta_1.out_shape
    theta_1 = torch.einsum("dpc,pt->dtc", module.u_1.weight, module.u_1.basis())
    return module.u_2.weight @ module.u_2.basis(), b_2, theta_1, module.u_1.out_shape


def _smaller_as_dense(module: nn.Module) -> bool:
    theta_2, b_2, theta_1, _ = _factors(module)
    outputs, inputs = theta_1.shape[0] * theta_1.shape[1], theta_2.shape[0] * theta_2.shape[2]
    return (inputs + 1) * outputs <= theta_2.numel() + b_2.numel() + theta_1.numel()


def _matrix(module: nn.Module, in_shape: tuple[int, ...] | None) -> Tensor:
    """(out, in) of a linear map of flat inputs."""
    if isinstance(module, Dense):
        return module.weight[0]
    if isinstance(module, Pool):
        return module.weight[0].repeat_interleave(module.positions, 1) / module.positions
    if isinstance(module, (Factored, SparseFactored)):
        theta_2, _, theta_1, _ = _factors(module)
        return torch.einsum("dtc,cds->dtcs", theta_1, theta_2).flatten(2).flatten(0, 1)
    assert in_shape is not None
    size = math.prod(in_shape)
    return module(torch.eye(size).to(next(module.parameters())).reshape(size, *in_shape)).flatten(1).mT


def _constant(module: nn.Module) -> Tensor:
    """What the inner bias of a factored path adds to every output, flat."""
    _, b_2, theta_1, _ = _factors(module)
    return (theta_1.sum(2) * b_2).flatten()


def _sum(terms: Sequence[Tensor | None]) -> Tensor | None:
    found = [term for term in terms if term is not None]
    return sum(found[1:], found[0]) if found else None
