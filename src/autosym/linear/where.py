"""Convolutions times waves of position: what breaks translations, and nothing else.

    y(p) = sum_k phi_k(p) (W_k * x)(p)

phi_k are cosines and sines of the torus of output positions, without the constant: mean zero and mean square 1, lowest frequencies first.
The mean of T_g^-1 M T_g over all shifts g is the projection of a map M onto the equivariant ones. For circular padding and shifts
by the stride it maps phi_k W_k to mean(phi_k) W_k = 0, so such a path and a convolution share nothing. On data with the symmetry the
gradient of the path, averaged over shifts by the total stride, is zero at an equivariant network: nothing makes it run ahead.

With zero padding patches at the borders differ, and the projection keeps a part: 10 % of the norm of a 3x3 path on 8x8 maps, 5 % on
16x16 maps. Of the gradient 20 to 35 % is left in a network of two such layers of stride 2 on 12x12 images.
A convolution and all HW - 1 waves are a locally connected layer.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

from autosym.linear.conv import Conv
from autosym.linear.dense import Bias
from autosym.linear.path import NOTHING, Kept, Path
from autosym.linear.plain import Modulated


class Where(Conv):
    """y(p) = sum_k phi_k(p) (W_k * x)(p) with ``waves`` cosines and sines phi_k of the output torus; K = waves x groups blocks.

    ``size`` is the size of the output map that it is made for. Inputs of other sizes are taken too, if their maps have the same waves.
    Other arguments are as for ``Conv``. Columns are phi_k(s) patch(s); ``place`` sums over k.
    """

    keeps = NOTHING

    def __init__(self, in_channels: int, out_channels: int, size: Sequence[int], waves: int, *form: Any, **options: Any):
        super().__init__(in_channels, out_channels, *form, **options)
        check_waves(size, waves)
        groups, out, fan_in = self.weight.shape
        bound = math.sqrt(6 / (fan_in * waves))  # the sum over waves then has the variance of one convolution
        self.weight = nn.Parameter(torch.empty(waves * groups, out, fan_in).uniform_(-bound, bound))
        self.size_made_for, self.waves, self.kinds = tuple(size), waves, first_waves(size, waves)

    @classmethod
    def beside(cls, conv: Conv, out_shape: Sequence[int], waves: int) -> "Where":
        """A path of the form of ``conv``, whose output has ``out_shape`` (C', *size)."""
        form = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode, conv.dims)
        return cls(conv.in_channels, out_shape[0], out_shape[1:], waves, *form)

    def columns(self, x: Tensor) -> Tensor:
        phi = self.phi(x).flatten(1)  # (K, S)
        return (super().columns(x)[:, :, None] * phi.mT[:, :, None, None]).flatten(2, 3)

    def gram(self, x: Tensor) -> Tensor:
        """One product for each cosine, and no copy of (B, S, K, in).

        The squares of a cosine and its sine add up to 2, that of a Nyquist wave is 1: the rest follows from the convolution's own.
        """
        whole, phi, size = super().gram(x), self.phi(x).flatten(1), self.out_size(x.shape[2:])
        seen = self._rows_of_patches(x).unflatten(2, (len(x), -1))
        blocks: list[Tensor] = []
        for (frequency, sine), wave in zip(self.kinds, phi, strict=True):
            if sine:
                blocks.append(2 * whole - blocks[-1])
            elif is_nyquist(frequency, size):
                blocks.append(whole)
            else:
                t = (seen * wave).flatten(2)
                blocks.append(t @ t.mT)
        return torch.cat(blocks)

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return super().place(h.unflatten(2, (self.waves, self.groups)).sum(2), x)

    def rows(self, g: Tensor) -> Tensor:
        return super().rows(g)[:, :, None].expand(-1, -1, self.waves, -1, -1).flatten(2, 3)

    def filters(self) -> Tensor:
        """The filters of all waves as those of one convolution, by group, then wave: (groups K C' / groups, C / groups, ...)."""
        by_group = self.weight.unflatten(0, (self.waves, self.groups)).transpose(0, 1)
        return by_group.reshape(-1, self.in_channels // self.groups, *self.kernel_size)

    def limits(self) -> tuple[str, ...]:
        return ()  # it has no equivariance that borders could limit

    def plain(self, in_shape: Sequence[int] | None) -> Modulated:
        size = self.size_made_for if in_shape is None else self.out_size(in_shape[1:])
        return Modulated(self.convolution(), waves_on(size, self.kinds, self.weight))

    def phi(self, x: Tensor) -> Tensor:
        """The waves on the output map for an input x: (K, *size)."""
        return waves_on(self.out_size(x.shape[2:]), self.kinds, x)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # no grid: it breaks shifts
        y = self.convolved(x, self.filters())
        return modulated(y, waves_on(tuple(y.shape[2:]), self.kinds, y), self.groups)


class WhereBias(Bias):
    """y[c, p] = sum_k phi_k(p) b[k, c]: one number for each wave and channel; S = in = 1, so its blocks, one a wave, are exact."""

    keeps = Kept(invariant=True)  # it does not depend on the input
    any_size = True

    def __init__(self, out_shape: Sequence[int], waves: int):
        super().__init__((out_shape[0], *(1 for _ in out_shape[1:])), out_shape)
        check_waves(out_shape[1:], waves)
        self.weight = nn.Parameter(torch.zeros(waves, out_shape[0], 1))
        self.waves, self.kinds = waves, first_waves(out_shape[1:], waves)

    def columns(self, x: Tensor) -> Tensor:
        return x.new_ones(len(x), 1, self.waves, 1)

    def gram(self, x: Tensor) -> Tensor:
        return Path.gram(self, x)

    def place(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("bkc,ks->bcs", h[:, 0], self._phi(x).flatten(1)).unflatten(2, x.shape[2:])

    def rows(self, g: Tensor) -> Tensor:
        return torch.einsum("bcs,ks->bkc", g.flatten(2), self._phi(g).flatten(1))[:, None]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # no grid: it breaks shifts
        return self._values(self._phi(x)).expand(len(x), *(-1 for _ in self.out_shape))

    def values(self) -> Tensor:
        return self._values(waves_on(self.out_shape[1:], self.kinds, self.weight))

    def _phi(self, x: Tensor) -> Tensor:
        return waves_on(tuple(x.shape[2:]), self.kinds, x)

    def _values(self, phi: Tensor) -> Tensor:
        return (self.weight[:, :, 0].mT @ phi.flatten(1)).unflatten(1, phi.shape[1:])


def modulated(y: Tensor, phi: Tensor, groups: int = 1) -> Tensor:
    """sum_k phi_k(p) y_k(p): from (B, groups K C', *size), by group, then k, to (B, groups C', *size)."""
    return (y.unflatten(1, (groups, len(phi), -1)) * phi[:, None]).sum(2).flatten(1, 2)


# ---- waves


Wave = tuple[tuple[int, ...], bool]  # its frequency, in cycles along each axis, and whether it is the sine


def first_waves(size: Sequence[int], count: int) -> tuple[Wave, ...]:
    """The first ``count`` waves on a map of ``size``: each cosine, then its sine if it has one."""
    each = ((f, sine) for f, alone in frequencies(tuple(size), count) for sine in ((False,) if alone else (False, True)))
    return tuple(islice(each, count))


def waves_on(size: Sequence[int], kinds: tuple[Wave, ...], like: Tensor) -> Tensor:
    """These waves on a map: (count, *size), of the type and device of ``like``; mean 0 and mean square 1 over positions."""
    traced = torch.compiler.is_compiling()  # e.g. by torch.export: the cache must not keep a tensor of the trace
    return (_waves.__wrapped__ if traced else _waves)(tuple(size), kinds, like.dtype, like.device)


@lru_cache(maxsize=256)
def _waves(size: tuple[int, ...], kinds: tuple[Wave, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    for frequency, sine in kinds:  # a path made for another size: the waves stay the same functions, or there are none
        if any(2 * abs(f) > n for f, n in zip(frequency, size, strict=True)) or (sine and is_nyquist(frequency, size)):
            raise ValueError(
                f"a map of {'x'.join(map(str, size))} has no {'sine' if sine else 'cosine'} of frequency {frequency}, which this path was "
                "made with: use larger inputs, or relax the model for inputs of this size"
            )
    with torch.inference_mode(False), torch.device("cpu"):  # what is cached serves training too
        axes = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) / n for n in size), indexing="ij")
        return torch.stack([_wave(size, axes, *kind) for kind in kinds]).to(device, dtype)


def _wave(size: tuple[int, ...], axes: Sequence[Tensor], frequency: tuple[int, ...], sine: bool) -> Tensor:
    phase = 2 * math.pi * sum(f * p for f, p in zip(frequency, axes, strict=True))
    assert isinstance(phase, Tensor)
    return (phase.sin() if sine else phase.cos()) * (1 if is_nyquist(frequency, size) else math.sqrt(2))


def is_nyquist(frequency: Sequence[int], size: Sequence[int]) -> bool:
    """Whether f and -f are the same on this map: its cosine is 1 and -1 in turn, and it has no sine."""
    return all(2 * f % n == 0 for f, n in zip(frequency, size, strict=True))


@lru_cache(maxsize=256)
def frequencies(size: tuple[int, ...], most: int) -> tuple[tuple[tuple[int, ...], bool], ...]:
    """Frequencies in cycles along each axis, lowest sum of squares first: enough for ``most`` waves. True: no sine (Nyquist).

    f and -f are the same cosine, so one of them is left out. Along an axis of even length n, n / 2 and -n / 2 are the same.
    """
    ranges = [range(-min((n - 1) // 2, most), min(n // 2, most) + 1) for n in size]
    found = []
    for frequency in product(*ranges):
        mirror = tuple(f if 2 * f == n else -f for f, n in zip(frequency, size, strict=True))
        if any(frequency) and frequency >= mirror:
            found.append((frequency, frequency == mirror))
    return tuple(sorted(found, key=lambda item: (sum(f * f for f in item[0]), [-f for f in item[0]])))


def fitting_waves(size: Sequence[int], wanted: int | None = None) -> int:
    """How many waves a map of ``size`` takes: at most ``wanted``, each cosine with its sine. Default: the lowest of each axis."""
    if wanted is None:
        return sum(min(n - 1, 2) for n in size)
    count = 0
    for _, alone in frequencies(tuple(size), wanted):
        if count + 2 - alone > wanted:
            break
        count += 2 - alone
    return count


def check_waves(size: Sequence[int], count: int) -> None:
    """Refuse more waves than a map has, none, and a cosine without its sine: shifts would map it out of the path."""
    size = tuple(size)
    most = math.prod(size) - 1
    if not 1 <= count <= most:
        how = f"take at most {most}" if most > 0 else "leave out the path that depends on position"
        raise ValueError(f"a map of {'x'.join(map(str, size))} has {most} waves, not {count}: {how}")
    if (fits := fitting_waves(size, count)) != count:
        raise ValueError(
            f"{count} waves on a map of {'x'.join(map(str, size))} would have a cosine without its sine: take {fits or fits + 2}"
        )
