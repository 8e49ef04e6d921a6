"""Paths as ordinary torch layers: convolutions merge into one convolution, dense maps into one dense layer.

    1/n sum_i (W_i x + b_i)  =  (1/n sum_i W_i) x + 1/n sum_i b_i

Six small modules below cover what torch has no layer for. All export with ``torch.export`` and to ONNX.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autosym.linear.path import Path
from autosym.linear.plain import Convolution, Factors, Matrix, Modulated, Plain, Pooled, units
from autosym.linear.where import modulated
from autosym.nn.layers import Branch, Relaxed

LAYERS = (Relaxed, Branch, Path)  # the modules with a plain form
KINDS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}  # by the dimensions of a map
PADDING: dict[str, dict[int, Any]] = {
    "zeros": {1: nn.ZeroPad1d, 2: nn.ZeroPad2d, 3: nn.ZeroPad3d},
    "circular": {1: nn.CircularPad1d, 2: nn.CircularPad2d, 3: nn.CircularPad3d},
    "reflect": {1: nn.ReflectionPad1d, 2: nn.ReflectionPad2d, 3: nn.ReflectionPad3d},
    "replicate": {1: nn.ReplicationPad1d, 2: nn.ReplicationPad2d, 3: nn.ReplicationPad3d},
}


class Polyphase(nn.Module):
    """The polyphase grid of (B, C, H, W) with the largest norm, chosen for each sample (``layers.polyphase``)."""

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


class Modulation(nn.Module):
    """y(p) = sum_k phi_k(p) x_k(p): waves of position, fixed, times the outputs of a convolution, by group, then k.

    ``phi`` is (K, *size): it takes maps of that size only.
    """

    phi: Tensor

    def __init__(self, phi: Tensor, groups: int):
        super().__init__()
        self.register_buffer("phi", phi.detach().clone())
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2:] != self.phi.shape[1:]:
            made_for, found = tuple(self.phi.shape[1:]), tuple(x.shape[2:])
            raise ValueError(f"this layer was hardened for maps of {made_for}, got {found}: resize the inputs")
        return modulated(x, self.phi, self.groups)

    def extra_repr(self) -> str:
        return f"waves={len(self.phi)}, size={tuple(self.phi.shape[1:])}"


class Sum(nn.ModuleList):
    """y = sum_i part_i(x)."""

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = [part(x) for part in self]
        return sum(rest, first)


class ChannelsLast(nn.Module):
    """A layer of maps (B, C, ...), for maps whose channels are the last axis, (B, ..., C)."""

    def __init__(self, maps: nn.Module):
        super().__init__()
        self.maps = maps

    def forward(self, x: Tensor) -> Tensor:
        return self.maps(x.movedim(-1, 1)).movedim(1, -1)


@torch.no_grad()
def plain(
    name: str, layer: nn.Module, dropped: Collection[tuple[str, str]] = (), in_shape: tuple[int, ...] | None = None
) -> nn.Module:
    """The layer as torch layers, without the ``dropped`` parts: pairs of a path and "weights" or "bias".

    ``in_shape`` is the shape of one input, if known.
    """
    relaxed = layer if isinstance(layer, Relaxed) else Relaxed({}, {"alone": layer})
    if relaxed.channels_last and in_shape:
        in_shape = (in_shape[-1], *in_shape[:-1])
    own = [branch.in_shape for branch in relaxed.values() if isinstance(branch, (Branch, Path))]
    in_shape = in_shape or max(filter(None, own), key=len, default=None)  # a shorter one leaves out axes that share weights
    values: tuple[list[Plain], list[Plain]] = ([], [])  # symmetric paths, free paths
    biases: tuple[list[Tensor | None], list[Tensor | None]] = ([], [])
    for path, branch in relaxed.items():
        known = branch if isinstance(branch, (Branch, Path)) else None
        kept, free = (path, "weights") not in dropped, path not in relaxed.symmetric
        value = known.plain(in_shape) if known is not None and kept else None
        if known is None or (kept and value is None):
            raise ValueError(
                f"harden has no plain form for {path} of {name} ({type(branch).__name__}): replace it first; or, if it is a Path or "
                "a Branch, pass data to show the shape of its inputs, or write its plain() method"
            )
        if value is not None:
            values[free].append(value)
        if (path, "bias") not in dropped:
            biases[free].append(known.offset())
    inner, outer = _sum(biases[0]), _sum(biases[1])
    if not any(values):
        raise ValueError(f"every path of {name} would be dropped, but a layer needs at least one: keep one")
    if relaxed.stride > 1 and not values[0] and not _by_channel(inner):
        raise ValueError(
            f"the symmetric paths of {name} would be dropped, but not their bias, which depends on position: use a smaller tolerance"
        )
    with next(layer.parameters()).device:  # whatever torch.set_default_device says
        made = _mean(*values, inner, outer, relaxed.stride, 1 / len(relaxed))
    made = _channels_last(made) if relaxed.channels_last else made
    return made.to(next(layer.parameters())).train(layer.training)


def _channels_last(made: nn.Module) -> nn.Module:
    """The layer for maps (B, ..., C): a dense layer of the last axis, if it is a convolution of single positions."""
    if not isinstance(made, (nn.Conv1d, nn.Conv2d)):
        return ChannelsLast(made)
    if math.prod((*made.kernel_size, *made.stride, made.groups)) > 1 or any(made._reversed_padding_repeated_twice):
        return ChannelsLast(made)
    linear = nn.Linear(made.in_channels, made.out_channels, bias=made.bias is not None)
    _set(linear, made.weight, made.bias, 1.0)
    return linear


def _mean(
    symmetric: list[Plain], free: list[Plain], inner: Tensor | None, outer: Tensor | None, stride: int, scale: float
) -> nn.Module:
    """scale (polyphase(sum of symmetric + inner) + sum of free + outer), in as few layers as possible."""
    if stride == 1 or not symmetric:  # a lone bias that is constant over positions is the same on every grid
        return _whole(*_merge([*symmetric, *free], inner, outer, scale), scale)
    chosen = nn.Sequential(_whole(*_merge(symmetric, inner, None, scale), scale), Polyphase(stride))
    others, left = _merge(free, None, outer, scale)
    return _whole([chosen, *others], left, scale)


def _whole(parts: Sequence[nn.Module], offset: Tensor | None, scale: float) -> nn.Module:
    whole = parts[0] if len(parts) == 1 else Sum(parts)
    return whole if offset is None else nn.Sequential(whole, Offset(scale * offset))


def _merge(
    values: Sequence[Plain], inner: Tensor | None, outer: Tensor | None, scale: float
) -> tuple[list[nn.Module], Tensor | None]:
    """Layers and a bias: sum of layers + scale bias = scale (sum of values + inner + outer).

    The bias is None unless no layer can hold it.
    """
    convs = [v for v in values if isinstance(v, Convolution)]
    pools = [v for v in values if isinstance(v, Pooled)]
    factors = [v for v in values if isinstance(v, Factors) and not _smaller_as_dense(v)]
    waves = [v for v in values if isinstance(v, Modulated)]
    dense: list[Plain] = [v for v in values if isinstance(v, (Matrix, Factors)) and v not in factors]
    in_shape = max((v.in_shape for v in dense if isinstance(v, Matrix)), key=len, default=None)
    if in_shape is not None:  # merged into a dense map, a convolution needs no more weights
        dense, convs, waves = [*dense, *convs, *waves], [], []
    if waves:
        made, convs, rest = _modulated(waves, convs, _sum([inner, outer]), scale)
        others = [v for v in values if v in convs or not isinstance(v, (Convolution, Modulated))]
        parts, left = _merge(others, None, rest, scale)
        return [*made, *parts], left
    if not convs or not _by_channel(inner):
        inner, outer = None, _sum([inner, outer])
    elif _by_channel(outer):
        inner, outer = _sum([inner, outer]), None
    parts = [_convolutions(convs, inner, scale)] if convs else []
    if dense:
        shared = [v for v in dense if isinstance(v, Matrix) and v.in_shape != in_shape]  # over positions
        whole = [v for v in dense if v not in shared]
        parts.append(_dense([*whole, *pools, *factors], in_shape, outer, scale))
        parts += [_dense([v], v.in_shape, None, scale) for v in shared]
    elif pools:
        parts.append(_pooled(pools, outer, scale))
    else:
        parts += [_two_factors(v, None if i else outer, scale) for i, v in enumerate(factors)]
    return parts, None if dense or pools or factors else outer


def _dense(values: Sequence[Plain], in_shape: tuple[int, ...] | None, bias: Tensor | None, scale: float) -> nn.Module:
    """One dense layer; on maps, between a Flatten and an Unflatten."""
    first = values[0]
    assert isinstance(first, (Matrix, Factors))
    out_shape = first.out_shape
    weight = torch.stack([_matrix(v, in_shape) for v in values]).sum(0)
    constants = [v.constant for v in values if isinstance(v, (Matrix, Factors))]
    full = None if bias is None else bias if bias.numel() == len(weight) else bias.expand(out_shape)
    bias = _sum([None if full is None else full.flatten(), *constants])
    linear = nn.Linear(weight.shape[1], len(weight), bias=bias is not None)
    _set(linear, weight, bias, scale)
    if len(out_shape) == 1 and in_shape is not None and len(in_shape) == 1:
        return linear
    start = 1 if in_shape is None else -len(in_shape)  # earlier axes are positions that share the weights
    return nn.Sequential(nn.Flatten(start), linear, nn.Unflatten(-1, out_shape))


def _pooled(pools: Sequence[Pooled], bias: Tensor | None, scale: float) -> nn.Module:
    """A dense layer on flattened maps, averaged over as many positions as all of them average over."""
    positions = math.gcd(*(v.positions for v in pools))
    weight = torch.stack(
        [v.weight.repeat_interleave(v.positions // positions, 1) * positions / v.positions for v in pools]
    ).sum(0)
    linear = nn.Linear(weight.shape[1], len(weight), bias=bias is not None)
    _set(linear, weight, bias, scale)
    if positions == 1:
        return linear
    maps = (weight.shape[1], positions)
    return nn.Sequential(nn.Unflatten(1, maps), nn.AdaptiveAvgPool1d(1), nn.Flatten(1), linear)


def _two_factors(v: Factors, bias: Tensor | None, scale: float) -> TwoFactors:
    return TwoFactors(v.theta_2, v.b_2, scale * v.theta_1, None if bias is None else scale * bias, v.out_shape)


def _convolutions(convs: Sequence[Convolution], bias: Tensor | None, scale: float) -> nn.Module:
    """One convolution for each form."""
    merged: dict[tuple, Tensor] = {}
    for conv in convs:
        merged[conv.form] = merged.get(conv.form, 0) + conv.filters
    parts: list[nn.Module] = []
    for form, filters in merged.items():
        parts.append(_convolution(form, filters, None if parts else bias, scale))
    return parts[0] if len(parts) == 1 else Sum(parts)


def _convolution(form: tuple, filters: Tensor, bias: Tensor | None, scale: float) -> nn.Module:
    """torch's convolution of that form. If its padding differs by side, and is not torch's "same", a padding layer comes first."""
    kernel, stride, padding, dilation, groups, mode = form
    dims, before = len(kernel), None

    def make(padding: str | tuple[int, ...]) -> nn.Conv1d | nn.Conv2d | nn.Conv3d:
        shape = (filters.shape[1] * groups, len(filters), kernel, stride, padding, dilation, groups)
        return KINDS[dims](*shape, bias=bias is not None, padding_mode=mode)

    if padding[::2] == padding[1::2]:
        conv = make(padding[::-2])  # torch names the first axis first
    elif set(stride) == {1} and tuple(make("same")._reversed_padding_repeated_twice) == padding:
        conv = make("same")
    else:
        conv, before = make((0,) * dims), PADDING[mode][dims](padding)
    _set(conv, filters, None if bias is None else bias.expand(len(filters), *bias.shape[1:]).flatten(), scale)
    return conv if before is None else nn.Sequential(before, conv)


def _modulated(
    waves: Sequence[Modulated], convs: Sequence[Convolution], bias: Tensor | None, scale: float
) -> tuple[list[nn.Module], list[Convolution], Tensor | None]:
    """One convolution and its waves for each form; convolutions of such a form are the constant wave. Also what is left over.

    The first convolution takes the bias, if waves of it make the bias; else the bias is left over.
    """
    made: list[nn.Module] = []
    for form in dict.fromkeys(v.convolution.form for v in waves):
        groups, own = form[4], [v for v in waves if v.convolution.form == form]
        still = [conv.filters for conv in convs if conv.form == form]
        convs = [conv for conv in convs if conv.form != form]
        phi, filters = [v.phi for v in own], [v.convolution.filters.unflatten(0, (groups, len(v.phi), -1)) for v in own]
        if still:
            phi = [torch.ones_like(phi[0][:1]), *phi]
            filters = [torch.stack(still).sum(0).unflatten(0, (groups, 1, -1)), *filters]
        both, basis = torch.cat(filters, 1), torch.cat(phi)
        coefficients, bias = _on_waves(bias, basis, groups, both.shape[2])
        conv = _convolution(form, both.flatten(0, 2), coefficients, scale)
        made.append(nn.Sequential(conv, Modulation(basis, groups)))
    return made, list(convs), bias


def _on_waves(bias: Tensor | None, phi: Tensor, groups: int, out: int) -> tuple[Tensor | None, Tensor | None]:
    """The bias as a sum of waves, for a convolution's outputs by group, then wave; or None and the bias, if it is no such sum."""
    if bias is None:
        return None, None
    full = bias.expand(groups * out, *phi.shape[1:]).flatten(1).double().cpu()
    basis = phi.flatten(1).to(full)
    on = torch.linalg.lstsq(basis.mT, full.mT).solution  # (K, C'); on a GPU it would refuse waves that two paths share
    if not (full - on.mT @ basis).norm() <= 32 * torch.finfo(bias.dtype).eps * full.norm():
        return None, bias
    ones = (1,) * (phi.dim() - 1)
    return on.unflatten(1, (groups, out)).transpose(0, 1).reshape(-1, *ones).to(bias), None


def _set(layer: nn.Module, weight: Tensor, bias: Tensor | None, scale: float) -> None:
    own = layer.get_parameter("weight")
    own.data = scale * weight.reshape(own.shape)
    if bias is not None:
        layer.get_parameter("bias").data = scale * bias


def _smaller_as_dense(v: Factors) -> bool:
    outputs, inputs = v.theta_1.shape[0] * v.theta_1.shape[1], v.theta_2.shape[0] * v.theta_2.shape[2]
    return (inputs + 1) * outputs <= v.theta_2.numel() + v.b_2.numel() + v.theta_1.numel()


def _matrix(v: Plain, in_shape: tuple[int, ...] | None) -> Tensor:
    """The matrix (out, in) of a linear map of flat inputs."""
    if isinstance(v, Matrix):
        return v.weight
    if isinstance(v, Pooled):
        return v.weight.repeat_interleave(v.positions, 1) / v.positions
    if isinstance(v, Factors):
        return torch.einsum("dtc,cds->dtcs", v.theta_1, v.theta_2).flatten(2).flatten(0, 1)
    assert in_shape is not None
    conv = v.convolution if isinstance(v, Modulated) else v
    y = _convolution(conv.form, conv.filters, None, 1.0).to(conv.filters)(units(in_shape, conv.filters))
    return (modulated(y, v.phi.to(y), conv.groups) if isinstance(v, Modulated) else y).flatten(1).mT


def _by_channel(bias: Tensor | None) -> bool:
    """Whether the bias is the same at every position."""
    return bias is None or math.prod(bias.shape[1:]) == 1


def _sum(terms: Sequence[Tensor | None]) -> Tensor | None:
    found = [term for term in terms if term is not None]
    return sum(found[1:], found[0]) if found else None
