"""Layers over a group: how each kind of torch layer becomes one on fields of |G| channels, or why it cannot.

    channel = field * |G| + g        (g f)(c, h, p) = f(c, g^-1 h, g^-1 p)

Convolutions become group convolutions; normalisation treats the |G| channels of a field as one; dense layers see the mean over the
group and positions. A layer of stride s whose full map has M positions a side samples the grid 0, s, 2s, ...: that is symmetric about
the centre if s divides M - 1. If s divides M, a polyphase grid is chosen instead.
"""

import copy
import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autosym.linear.dense import Bias, Pool
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import Group
from autosym.nn.layers import Affine, Relaxed
from autosym.nn.sampling import Downsample, Grids, circular
from autosym.surgery.flow import FIELDS, IMAGE, INVARIANT, Trace

POOLS = (nn.MaxPool2d, nn.AvgPool2d)
KEPT = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)  # their windows are symmetric about the centre
PADS = (nn.ZeroPad2d, nn.ConstantPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d, nn.CircularPad2d)
WHY = {
    nn.LayerNorm: "it normalises by an axis, not by field; use nn.GroupNorm",
    nn.PReLU: "it has a slope for each channel; use nn.PReLU()",
    nn.Conv1d: "it acts on sequences",
    nn.Conv3d: "it acts on volumes",
    nn.ConvTranspose2d: "a transposed convolution has no form over a group here; use nn.Upsample and nn.Conv2d",
    nn.MultiheadAttention: "attention has no form over a group here",
    nn.InstanceNorm2d: "its scales or statistics are by channel; use nn.GroupNorm, or affine=False",
}

SCRATCH = "use a width that |G| divides, or weights='scratch'"


@dataclass(frozen=True)
class Made:
    """What a layer became (the module, and in words), a note, and what its output is."""

    module: nn.Module
    became: str
    note: str
    kind: str


class Sampler:
    """Makes the layers that downsample; those on maps of the same size share one choice of a grid."""

    def __init__(self) -> None:
        self.grids = Grids()
        self.made: dict[nn.Module, Downsample] = {}
        self.led: set[tuple[int, int, int]] = set()

    def polyphase(self, owner: nn.Module, size: tuple[int, int], stride: int) -> Downsample:
        made = self.made.setdefault(owner, Downsample(stride, self.grids, len(self.made)))
        key = (*size, stride)
        (made.follows if key in self.led and key not in made.leads else made.leads).add(key)
        self.led.add(key)
        return made


class OverGroup:
    """Layers over ``group``; ``finals`` are the convolutions whose maps are the output of the model, ``gates`` see ``Flow``."""

    def __init__(
        self, group: Group, match: str, projected: bool, padding: str | None, finals: Collection[nn.Module], gates: Collection
    ):
        self.group, self.order, self.match, self.projected, self.padding = group, len(group), match, projected, padding
        self.finals, self.gates, self.sampler = finals, gates, Sampler()

    def make(self, module: nn.Module, x: Tensor, trace: Trace) -> Made:
        """The layer in place of ``module`` for inputs like x. Raises a ValueError that says why there is none."""
        kind = type(module)
        if trace.kind == FIELDS and trace.channels % self.order:
            raise ValueError(f"its input has {trace.channels} channels, no whole fields: forward() takes a part of them")
        if trace.kind not in (IMAGE, FIELDS, INVARIANT):
            raise ValueError(f"its input is {trace.kind} (concatenated, added or multiplied in forward())")
        if isinstance(module, nn.Conv2d) and kind is nn.Conv2d:
            return self._conv(module, x, trace)
        if isinstance(module, nn.Linear) and kind is nn.Linear:
            return self._dense(module, x, trace)
        if isinstance(module, POOLS) and trace.kind == FIELDS:
            return self._pool(module, x)
        if isinstance(module, PADS):
            return Made(nn.CircularPad2d(module.padding), "CircularPad2d", "", trace.kind)
        if kind in (*POOLS, *KEPT) or (kind is nn.PReLU and module.num_parameters == 1):
            return Made(module, "kept", "", trace.kind)
        if trace.kind != FIELDS:
            return self._untouched(module, trace.kind)
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)):
            return self._norm(module, x, trace)
        if isinstance(module, nn.InstanceNorm2d) and not module.affine and not module.track_running_stats:
            module.num_features = x.shape[1]
            return Made(module, "kept", "each channel by itself", FIELDS)
        raise ValueError(WHY.get(kind, "no form over a group is known for this kind of layer"))

    def fields(self, channels: int) -> int:
        """How many fields stand for so many channels."""
        if self.match == "channels":
            return -(-channels // self.order)
        return max(1, round(channels / math.sqrt(self.order)))

    def _conv(self, conv: nn.Conv2d, x: Tensor, trace: Trace) -> Made:
        if trace.kind == INVARIANT:
            raise ValueError("its input no longer turns with the image")
        kernel, stride, dilation, padding = self._form(conv)
        lift, final = trace.kind == IMAGE, conv in self.finals
        fields_in = x.shape[1] if lift else x.shape[1] // self.order
        depthwise = conv.groups == conv.in_channels > 1 and not lift
        fields = conv.out_channels if final else self.fields(conv.out_channels)
        fields = fields_in * (conv.out_channels // conv.in_channels) if depthwise and not final else fields
        groups = fields_in if depthwise and not final else _divisor(math.gcd(fields_in, fields), conv.groups)
        mode = self.padding or conv.padding_mode
        path = GroupConv(self.group, fields_in, fields, kernel, lift, padding, dilation, groups, mode).to(conv.weight)
        height, width = (n + 2 * padding - dilation * (kernel - 1) for n in x.shape[-2:])
        bias = None
        if conv.bias is not None:
            bias = Bias((fields, 1, 1, 1), (fields, self.order, height, width)).to(conv.weight)
        if self.projected:
            self._project(conv, path, bias, final)
        name = f"gconv:{self.group.name}"
        layer: nn.Module = Relaxed({name: path if bias is None else Affine(path, bias)}, {}, lifted=self.group)
        of = "" if not lift else " channel" if fields_in == 1 else " channels"
        parts, notes = [layer], [f"{fields_in}{of} to {fields} fields"]
        if stride > 1:
            down, note = self._down(conv, (height, width), stride)
            parts.append(down)
            notes.append(note)
        if groups != conv.groups:
            notes.append(f"groups {groups}")
        if final:
            parts += [nn.Unflatten(1, (fields, self.order)), nn.AvgPool3d((self.order, 1, 1)), nn.Flatten(1, 2)]
            notes.append("then the mean over the group")
        module = layer if len(parts) == 1 else nn.Sequential(*parts)
        return Made(module, name, ", ".join(notes), INVARIANT if final else FIELDS)

    def _form(self, conv: nn.Conv2d) -> tuple[int, int, int, int]:
        """Kernel, stride, dilation and padding, each one number; anything else does not turn."""
        sides = tuple(conv._reversed_padding_repeated_twice)
        forms = conv.kernel_size, conv.stride, conv.dilation, sides
        if any(len(set(form)) > 1 for form in forms):
            raise ValueError(f"its kernel, stride, dilation or padding differs by side {forms}, so it cannot turn")
        if conv.kernel_size[0] % 2 == 0:
            raise ValueError(f"its kernel {conv.kernel_size} is even: a filter must turn about its centre; use an odd one")
        return conv.kernel_size[0], conv.stride[0], conv.dilation[0], sides[0]

    def _down(self, owner: nn.Module, size: tuple[int, int], stride: int) -> tuple[nn.Module, str]:
        """What follows a map at stride 1 in place of the stride."""
        if all((n - 1) % stride == 0 for n in size):
            return nn.MaxPool2d(1, stride), f"every {stride}. position"
        if all(n % stride == 0 for n in size):
            return self.sampler.polyphase(owner, size, stride), f"polyphase {stride}"
        raise ValueError(
            f"its full map of {size[0]}x{size[1]} has no grid of stride {stride} that the group keeps: use images whose sides are "
            "multiples of the total stride"
        )

    def _pool(self, pool: nn.MaxPool2d | nn.AvgPool2d, x: Tensor) -> Made:
        kernel, stride, dilation, padding = window(pool)
        reach = dilation * (kernel - 1)
        height, width = (n + 2 * padding - reach for n in x.shape[-2:])
        wrapped = bool(self.padding) and padding > 0 and 2 * padding == reach
        if all((n - 1) % stride == 0 for n in (height, width)) and not wrapped:
            return Made(pool, "kept", "its windows lie symmetric about the centre", FIELDS)
        down, note = self._down(pool, (height, width), stride)
        full = copy.copy(pool)  # it may be called again, on maps of another size
        full.stride, full.ceil_mode, full.padding = 1, False, 0 if wrapped else padding
        whole = circular(full, padding, padding) if wrapped else full
        return Made(nn.Sequential(whole, down), f"{type(pool).__name__} of stride 1", note, FIELDS)

    def _norm(self, norm: nn.Module, x: Tensor, trace: Trace) -> Made:
        fields = trace.channels // self.order
        if x.shape[1] != trace.channels:
            raise ValueError("it normalises every position of flattened maps by itself; put it before flattening")
        made: nn.Module
        note = f"{fields} fields"
        if isinstance(norm, nn.GroupNorm):
            groups = _divisor(fields, norm.num_groups)
            made = nn.GroupNorm(groups, fields, norm.eps, norm.affine)
            note += f", {groups} groups" if groups != norm.num_groups else ""
        else:
            assert isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d))
            kind = nn.BatchNorm3d if x.dim() == 4 else nn.BatchNorm1d
            made = kind(fields, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        made.to(x)
        if self.projected:
            self._project_norm(norm, made)
        parts = nn.Unflatten(1, (fields, self.order)), made, nn.Flatten(1, 2)
        return Made(nn.Sequential(*parts), f"{type(norm).__name__} by field", note, FIELDS)

    def _dense(self, dense: nn.Linear, x: Tensor, trace: Trace) -> Made:
        if trace.kind == IMAGE:
            raise ValueError(
                "it is a dense map of the image, which no turn leaves as it is; lift networks that begin with Conv2d"
            )
        if trace.kind == INVARIANT:
            return self._untouched(dense, INVARIANT)
        if x.dim() != 2 or x.shape[1] % trace.channels:
            raise ValueError(f"it acts on the last axis of {tuple(x.shape[1:])}, not on (B, features)")
        fields, positions = trace.channels // self.order, x.shape[1] // trace.channels
        if dense in self.gates:
            return self._gate(dense, fields, positions)
        path = Pool(fields, self.order * positions, dense.out_features, self.group).to(dense.weight)
        if self.projected:
            path.weight.data = self._by_field(dense.weight.mT, positions).sum(1).mT[None].contiguous()
        note = "sees the mean over the group"
        note += f" and over {positions} positions: a dense map of positions is not invariant" if positions > 1 else ""
        return Made(head(path, dense.bias, self.projected), "invariant dense", note, INVARIANT)

    def _gate(self, dense: nn.Linear, fields: int, positions: int) -> Made:
        """A dense layer whose outputs go back to maps: a group convolution of one position."""
        if positions > 1:
            raise ValueError("its outputs become maps again, but its inputs are flattened maps; use their mean over positions")
        out = self.fields(dense.out_features)
        path = GroupConv(self.group, fields, out, 1).to(dense.weight)
        bias = None if dense.bias is None else Bias((out, 1, 1, 1), (out, self.order, 1, 1)).to(dense.weight)
        if self.projected:
            self._project(dense, path, bias, False)
        name = f"gconv:{self.group.name}"
        layer = Relaxed({name: path if bias is None else Affine(path, bias)}, {}, lifted=self.group)
        parts = nn.Unflatten(1, (fields * self.order, 1, 1)), layer, nn.Flatten(1)
        return Made(nn.Sequential(*parts), name, f"{fields} to {out} fields, of one position", FIELDS)

    def _untouched(self, module: nn.Module, kind: str) -> Made:
        """A layer that no turn reaches: anew, unless trained weights are wanted or it sees the image."""
        reset = getattr(module, "reset_parameters", None)
        if not self.projected and kind == INVARIANT and reset is not None:
            reset()
        return Made(module, "kept", f"sees {'the image' if kind == IMAGE else 'invariant numbers'}", kind)

    @torch.no_grad()
    def _project(self, layer: nn.Conv2d | nn.Linear, path: GroupConv, bias: Bias | None, final: bool) -> None:
        """w = A^T K / |G|: filters are A w with A^T A = |G| I, so A w is the orthogonal projection of the trained K."""
        weight = layer.weight if layer.weight.dim() == 4 else layer.weight[:, :, None, None]
        shape = path.weight.shape if final else path.filters().shape
        weight = _in_fewer_groups(weight, getattr(layer, "groups", 1), path.groups)
        if weight.numel() != math.prod(shape):
            raise ValueError(f"its weights {tuple(weight.shape)} have no projection of shape {tuple(shape)}: {SCRATCH}")
        if final:  # the mean over the group that follows is the projection itself
            path.weight.copy_(weight.reshape(shape))
        else:
            with torch.enable_grad():
                (adjoint,) = torch.autograd.grad(path.filters(), path.weight, weight)
            path.weight.copy_(adjoint / self.order)
        if bias is not None and layer.bias is not None:
            own = layer.bias if final else self._by_field(layer.bias).mean(1)
            bias.weight.copy_(own.reshape(bias.weight.shape))

    @torch.no_grad()
    def _project_norm(self, norm: nn.Module, made: nn.Module) -> None:
        """Means over each field; the variance of a field is the mean of its channels' and the variance of their means."""
        for name in ("weight", "bias", "running_mean", "running_var"):
            if getattr(norm, name, None) is not None:
                getattr(made, name).copy_(self._by_field(getattr(norm, name)).mean(1))
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None:
            made.get_buffer("running_var").add_(self._by_field(norm.running_mean).var(1, correction=0))

    def _by_field(self, weights: Tensor, positions: int = 1) -> Tensor:
        """Weights (C |G| P, ...) of channels and positions as (C, |G| P, ...)."""
        if len(weights) % (self.order * positions):
            raise ValueError(f"its {len(weights) // positions} channels are not fields of {self.order}: {SCRATCH}")
        return weights.detach().unflatten(0, (-1, self.order * positions))


def head(path: Pool, bias: Tensor | None, keep: bool) -> Relaxed:
    """A dense layer of the mean of flattened maps, as a path, with a bias if the given one had one: its own, or zero."""
    if bias is None:
        return Relaxed({"pool": path}, {})
    own = Bias(tuple(bias.shape)).to(path.weight)
    if keep:
        own.weight.data = bias.detach().reshape(own.weight.shape).clone()
    return Relaxed({"pool": Affine(path, own)}, {})


def _in_fewer_groups(weight: Tensor, groups: int, fewer: int) -> Tensor:
    """The filters (C', C / groups, k, k) as those of a convolution of ``fewer`` groups, zero between the given ones."""
    if groups % fewer:
        raise ValueError(f"its {groups} groups have no projection onto {fewer} groups of fields: {SCRATCH}")
    each = groups // fewer
    blocks = weight.unflatten(0, (fewer, each, -1))  # (fewer, each, C' / groups, C / groups, k, k)
    whole = blocks[:, :, :, None] * torch.eye(each).to(weight)[None, :, None, :, None, None, None]
    return whole.flatten(3, 4).flatten(0, 2)


def _divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most ``most``."""
    return max(divisor for divisor in range(1, most + 1) if number % divisor == 0)


def window(pool: nn.MaxPool2d | nn.AvgPool2d) -> tuple[int, int, int, int]:
    """Window, stride, dilation and padding of a pool, if each is one number."""
    forms = [getattr(pool, name, 1) for name in ("kernel_size", "stride", "dilation", "padding")]
    if any(isinstance(form, tuple) and len(set(form)) > 1 for form in forms):
        raise ValueError("its window, stride or padding differs by side: give it one number each")
    kernel, stride, dilation, padding = (form[0] if isinstance(form, tuple) else form for form in forms)
    return kernel, stride, dilation, padding
