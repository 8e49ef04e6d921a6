"""Relaxed layers: the mean of named paths, and downsampling that keeps equivariance.

    y = 1/n sum_i path_i(x)          (Eq. 4, with a mean instead of the sum)

Free paths output the smaller map directly. Symmetric (convolutional) paths run at stride 1. Of their sum, every sample keeps
one polyphase grid: the one with the largest L2 norm. A choice per path would break equivariance if two paths are convolutional.
A choice per batch would make a sample's output depend on the rest of its batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add, and_

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from autosym.linear.contrasts import BiasContrast, GroupContrast
from autosym.linear.conv import CONVOLUTIONS, Conv
from autosym.linear.dense import Bias, Dense
from autosym.linear.factored import FactoredIn, FactoredOut
from autosym.linear.grids import Grid, largest_grid, on_grid
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import Group
from autosym.linear.path import NOTHING, Kept, Path
from autosym.linear.plain import Factors, Plain, matrix_of
from autosym.linear.sparse import SparseConv, SparseIn, SparseOut
from autosym.linear.where import Where, WhereBias, fitting_waves
from autosym.runtime.graphs import beside

# the symmetries that torch's own layers keep
TORCH: dict[type[nn.Module], Kept] = {nn.Linear: NOTHING} | dict.fromkeys(CONVOLUTIONS, Conv.keeps)


class Branch(nn.Module):
    """y = W x + b, made of paths that each have a prior: one term of the mean that a relaxed layer computes.

    A subclass has its paths as children, in the order in which they are applied, and a ``forward``. In plain torch it becomes a
    dense matrix; override ``plain`` to give a smaller form.
    """

    constant = ""  # the name of the ``Bias`` (or ``BiasContrast``) that is added last, or ""

    def parts(self) -> dict[str, tuple[str, ...]]:
        """The parts that a relaxed layer may drop, with the names of their paths: "weights", and the "bias" added last."""
        paths = [name for name, child in self.named_children() if any(isinstance(part, Path) for part in child.modules())]
        weights = {"weights": tuple(name for name in paths if name != self.constant)}
        return weights | {"bias": (self.constant,)} if self.constant else weights

    @property
    def in_shape(self) -> tuple[int, ...] | None:
        """The shape of one input, as its first path says; None if several are possible."""
        return getattr(self.get_submodule(self.parts()["weights"][0]), "in_shape", None)

    @property
    def lifted(self) -> Group | None:
        """The group, if the output's channels are its fields, as its last path says."""
        return getattr(self.get_submodule(self.parts()["weights"][-1]), "lifted", None)

    def offset(self) -> Tensor | None:
        """The bias that is added last, in a shape that broadcasts to the output; None without one."""
        if not self.constant:
            return None
        bias = self.get_submodule(self.constant)
        if not isinstance(bias, (Bias, BiasContrast)):
            raise TypeError(f"the constant of {type(self).__name__} must name a Bias, but its {self.constant} is not one")
        each = bias.values()
        if self.lifted is None or each.dim() < 4:
            return each
        return each.expand(-1, len(self.lifted), -1, -1).flatten(0, 1)  # one number for all channels of a field

    def plain(self, in_shape: Sequence[int] | None) -> Plain | None:
        """The same map in plain torch, without the bias that is added last; see ``Path.plain``."""
        return matrix_of(self, in_shape, self.offset())


class Affine(Branch):
    """y = linear(x) + bias(x): two paths, two priors."""

    constant = "bias"

    def __init__(self, linear: Path, bias: Bias | BiasContrast):
        super().__init__()
        self.linear = linear
        self.bias = bias

    def forward(self, x: Tensor, grid: Grid | None = None) -> Tensor:
        """With a ``grid``, which ``thins`` allows, only what samples keep of the map."""
        if grid is not None:
            return self.linear(x, grid=grid) + self.bias(x, grid=grid)
        y = self.linear(x)
        return y + self.bias(y if self.bias.any_size else x).reshape(
            y.shape
        )  # for lifted features the bias has an extra axis, the group

    @property
    def thins(self) -> bool:
        """Whether it can compute one polyphase grid: of an equivariant convolution with one number for each channel."""
        linear, bias = self.linear, self.bias
        channelwise = type(bias) is Bias and bias.shape[1:] == (1, 1)
        equivariant = type(linear) is Conv and linear.dims == 2 and linear.keeps_size and linear.is_equivariant
        return channelwise and equivariant and _is_untouched(self, linear, bias)

    def plain(self, in_shape: Sequence[int] | None) -> Plain | None:
        return self.linear.plain(in_shape)


class Factored(Branch):
    """F-FC, y = theta_1 (theta_2 x + b_2) + b_1 (Eq. 5): a fully connected layer, factored into input and output."""

    constant = "b_1"

    def __init__(self, in_shape: Sequence[int], out_shape: Sequence[int]):
        super().__init__()
        self.theta_2 = FactoredIn(in_shape, out_shape[0])
        self.b_2 = Bias((out_shape[0], 1), (out_shape[0], in_shape[0]))
        self.theta_1 = FactoredOut(in_shape[0], out_shape)
        self.b_1 = Bias((1, *out_shape[1:]), out_shape)

    def forward(self, x: Tensor) -> Tensor:
        h = self.theta_2(x) + self.b_2(x)
        return self.theta_1(h) + self.b_1(h)

    def plain(self, in_shape: Sequence[int] | None) -> Factors:
        """theta_1, theta_2 and b_2."""
        return Factors(self.theta_2.weight, self.b_2.values(), self.theta_1.weight, self.theta_1.out_shape)


class SparseFactored(Branch):
    """S-FC, y = u_1 (u_2 x + b_2) (Eq. 7): F-FC on anchor points. At omega = 0 it is constant in space, hence equivariant."""

    def __init__(
        self, in_shape: Sequence[int], out_shape: Sequence[int], in_anchors: int, out_anchors: int, learn_omega: bool = False
    ):
        super().__init__()
        self.u_2 = SparseIn(in_shape, out_shape[0], in_anchors, learn_omega)
        self.b_2 = Bias((out_shape[0], 1), (out_shape[0], in_shape[0]))
        self.u_1 = SparseOut(in_shape[0], out_shape, out_anchors, learn_omega)

    def forward(self, x: Tensor) -> Tensor:
        return self.u_1(self.u_2(x) + self.b_2(x))

    def plain(self, in_shape: Sequence[int] | None) -> Factors:
        """The factors on the positions of their bases."""
        theta_1 = torch.einsum("dpc,pt->dtc", self.u_1.weight, self.u_1.basis())
        return Factors(self.u_2.weight @ self.u_2.basis(), self.b_2.values(), theta_1, self.u_1.out_shape)


def fc(in_shape: Sequence[int], out_shape: Sequence[int]) -> Affine:
    """FC (Eq. 1) with one bias per output."""
    return Affine(Dense(in_shape, out_shape), Bias(out_shape))


def conv(in_shape: Sequence[int], out_shape: Sequence[int], kernel_size: int = 3) -> Affine:
    """CONV (Eq. 3) at stride 1 with circular padding and one bias per channel: exactly equivariant."""
    full = (out_shape[0], *in_shape[1:])
    return Affine(Conv(in_shape[0], out_shape[0], kernel_size), Bias((out_shape[0], 1, 1), full))


def where(in_shape: Sequence[int], out_shape: Sequence[int], waves: int | None = None, kernel_size: int = 3) -> Affine:
    """WHERE: a convolution times each of the ``waves`` lowest waves of position, summed, with a bias of the same kind.

    Default: the lowest wave along each axis, 4 on images. It only breaks equivariance: a convolution beside it shares nothing with it. Of
    maps that are smaller than its inputs it computes every stride-th position.
    """
    size = tuple(out_shape[1:])
    waves = fitting_waves(size) if waves is None else waves
    stride = tuple(full // n for full, n in zip(in_shape[1:], size, strict=True))
    linear = Where(in_shape[0], out_shape[0], size, waves, kernel_size, stride, dims=len(size))
    return Affine(linear, WhereBias(out_shape, waves))


def waves_of(name: str) -> int | None:
    """8 of "where:8", a number of waves; None for any other name."""
    kind, _, count = name.partition(":")
    return int(count) if kind == "where" and count.isdecimal() and int(count) > 0 else None


def s_conv(
    in_shape: Sequence[int], out_shape: Sequence[int], anchors: int, learn_omega: bool = False, kernel_size: int = 3
) -> Affine:
    """S-CONV (Eq. 6): a convolution whose filters are sums of ``anchors`` basis functions."""
    full = (out_shape[0], *in_shape[1:])
    linear = SparseConv(in_shape[0], out_shape[0], kernel_size, anchors, learn_omega)
    return Affine(linear, Bias((out_shape[0], 1, 1), full))


def gconv(in_shape: Sequence[int], out_shape: Sequence[int], group: Group, lift: bool, kernel_size: int = 3) -> Affine:
    """GCONV: a convolution over translations and ``group``, with one bias per field of |G| channels."""
    fields = out_shape[0] // len(group)
    channels = in_shape[0] if lift else in_shape[0] // len(group)
    bias = Bias((fields, 1, 1, 1), (fields, len(group), *in_shape[1:]))
    return Affine(GroupConv(group, channels, fields, kernel_size, lift), bias)


def turn(
    in_shape: Sequence[int],
    out_shape: Sequence[int],
    group: Group,
    lift: bool,
    breaks: Group | None = None,
    keeps: Group | None = None,
    kernel_size: int = 3,
) -> Affine:
    """TURN: what breaks ``breaks`` (default: ``group``) and keeps ``keeps`` among all convolutions on fields of ``group``.

    Orthogonal to ``gconv`` and to the other steps of a chain of groups. Its bias breaks the group too: one number for each field
    and contrast, so that together with ``gconv`` every convolution with a bias for each channel is there.
    """
    fields = out_shape[0] // len(group)
    channels = in_shape[0] if lift else in_shape[0] // len(group)
    linear = GroupContrast(group, channels, fields, kernel_size, lift, breaks, keeps)
    return Affine(linear, BiasContrast(group, fields, breaks, keeps))


class Relaxed(nn.ModuleDict):
    """The mean of named paths. ``symmetric`` paths output the full map; one polyphase choice downsamples their sum."""

    channels_last = False  # whether inputs and outputs are maps (B, ..., C); its paths always see (B, C, ...)

    def __init__(
        self,
        symmetric: Mapping[str, nn.Module],
        free: Mapping[str, nn.Module],
        stride: int = 1,
        lifted: Group | None = None,
    ):
        super().__init__({**symmetric, **free})
        if len(self) != len(symmetric) + len(free) or not self:
            raise ValueError("a relaxed layer needs at least one path, and a different name for each")
        self.symmetric, self.free, self.stride = tuple(symmetric), tuple(free), stride
        self.lifted = lifted  # the group, if the output's channels are its fields

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(-1, 1) if self.channels_last else x
        free = beside(lambda: [self[name](x) for name in self.free], x)
        outputs = [self._downsampled(x)] if self.symmetric else []
        outputs += free()
        y = sum(outputs[1:], outputs[0]) / len(self)
        return y.movedim(1, -1) if self.channels_last else y

    def _downsampled(self, x: Tensor) -> Tensor:
        """The sum of symmetric paths, on one polyphase grid. If there is a graph, it holds no more than that grid."""
        paths = [self[name] for name in self.symmetric]
        thin = [path for path in paths if isinstance(path, Affine) and path.thins]
        graph = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not torch.is_autocast_enabled(x.device.type)
        if self.stride == 1 or not graph or len(thin) < len(paths):
            return polyphase(reduce(add, (path(x) for path in paths)), self.stride)
        with torch.no_grad():
            full = [path.linear.forward(x) for path in thin]
            total = reduce(add, (y + path.bias.values() for y, path in zip(full, thin, strict=True)))
            chosen = largest_grid(total, self.stride)
        return reduce(add, (path(x, grid=Grid(self.stride, chosen, y)) for y, path in zip(full, thin, strict=True)))

    def keeps(self, name: str) -> Kept:
        """What a path keeps: nothing if free, else what all its parts keep; if they name no symmetry, ``Kept(every=True)``."""
        if name in self.free:
            return NOTHING
        parts = [part for part in self[name].modules() if isinstance(part, Path) or type(part) in TORCH]
        said = [part.keeps if isinstance(part, Path) else TORCH[type(part)] for part in parts]
        kept = reduce(and_, said) if said else NOTHING
        if any(isinstance(part, Path) and self.lifted and part.lifted and not self.lifted.nests(part.lifted) for part in parts):
            kept = replace(kept, groups=())  # its group moves the channels of these fields in another way
        return Kept(every=True) if kept == NOTHING else kept

    def silent(self) -> tuple[str, ...]:
        """The paths whose function is zero: their last weights and the bias added last are. Their other factors may be anything."""
        return tuple(name for name in self if not any(bool(weight.detach().any()) for weight in _last(self[name])))

    def extra_repr(self) -> str:
        return f"symmetric={self.symmetric}, free={self.free}, stride={self.stride}"


def silent(model: nn.Module) -> tuple[str, ...]:
    """The paths of relaxed layers whose function is zero, by name in the model. Without them it computes the same."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Relaxed)]
    return tuple(f"{name}.{path}".lstrip(".") for name, layer in layers for path in layer.silent())


def _last(path: nn.Module) -> Iterator[Tensor]:
    """The parameters that are applied last: if they are zero, so is the path's function."""
    if not isinstance(path, Branch):
        return path.parameters()
    parts = path.parts()
    last = (parts["weights"][-1], *parts.get("bias", ()))
    return (parameter for name in last for parameter in path.get_submodule(name).parameters())


def _is_untouched(*modules: nn.Module) -> bool:
    """Whether nobody changes, or looks at, what these modules compute, but hooks that know of grids (of curvature)."""
    hooks = [
        hook for module in modules for kind in (module._forward_hooks, module._forward_pre_hooks) for hook in kind.values()
    ]
    return all(getattr(hook, "knows_grids", False) for hook in hooks) and not any(map(is_parametrized, modules))


def polyphase(y: Tensor, stride: int) -> Tensor:
    """For every sample of (B, ..., H, W) the polyphase grid with the largest L2 norm: (B, ..., H/stride, W/stride).

    A circular shift of the input permutes the grids, and the choice follows it (Chaman & Dokmanic 2021).
    """
    return y if stride == 1 else on_grid(y, stride, largest_grid(y, stride))
