"""Layers that follow every circular shift of the image: how each kind of torch layer becomes one, with its trained weights.

    conv of stride s  ->  conv of stride 1 with circular padding, then one polyphase grid of stride s

Pools likewise. A dense layer on flattened maps becomes its invariant part: W[c] = sum over positions of W[c, p], times the mean.
"""

import copy

from torch import Tensor, nn

from autosym.linear.dense import Pool
from autosym.nn.sampling import circular
from autosym.surgery.flow import FIELDS, IMAGE, INVARIANT, Trace
from autosym.surgery.over_group import KEPT, PADS, POOLS, Made, Sampler, head, window


class OverShifts:
    """Layers that follow shifts: circular padding, polyphase downsampling, pooled heads."""

    padding = "circular"

    def __init__(self) -> None:
        self.sampler = Sampler()

    def make(self, module: nn.Module, x: Tensor, trace: Trace) -> Made:
        """The layer in place of ``module`` for inputs like x. Raises a ValueError that says why there is none."""
        if isinstance(module, nn.Conv2d) and type(module) is nn.Conv2d:
            return self._conv(module, x)
        if isinstance(module, nn.Linear) and trace.kind != INVARIANT and x.dim() == 2:
            return self._dense(module, x, trace)
        if isinstance(module, POOLS):
            return self._pool(module, x, trace)
        if isinstance(module, KEPT):
            return self._adaptive(module, x, trace)
        if isinstance(module, PADS):
            return Made(nn.Identity(), "left out", "the layer after it pads circularly", trace.kind)
        return Made(module, "kept", "", trace.kind)

    def _conv(self, conv: nn.Conv2d, x: Tensor) -> Made:
        left, right, top, bottom = conv._reversed_padding_repeated_twice
        reach = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        before = [
            first if first + last == r else r // 2 for r, first, last in zip(reach, (top, left), (bottom, right), strict=True)
        ]
        after = [r - b for r, b in zip(reach, before, strict=True)]
        if any(side > n for n, a, b in zip(x.shape[-2:], before, after, strict=True) for side in (a, b)):
            raise ValueError(f"its filter reaches around a map of {tuple(x.shape[-2:])} more than once; use larger images")
        stride = self._stride(conv.stride)
        same = before == after
        made = nn.Conv2d(
            conv.in_channels,
            conv.out_channels,
            conv.kernel_size,  # type: ignore[arg-type]
            padding=tuple(before) if same else 0,  # type: ignore[arg-type]
            dilation=conv.dilation,  # type: ignore[arg-type]
            groups=conv.groups,
            bias=conv.bias is not None,
            padding_mode="circular" if any(reach) else "zeros",
            device="meta",
        )
        made.weight, made.bias = conv.weight, conv.bias
        whole: nn.Module = made
        if not same:
            whole = nn.Sequential(nn.CircularPad2d((before[1], after[1], before[0], after[0])), made)
        notes = ["circular padding"] if any(reach) and (conv.padding_mode != "circular" or [top, left] != before) else []
        if stride > 1:
            whole = nn.Sequential(whole, self._down(conv, x, stride))
            notes.append(f"polyphase {stride}")
        return Made(whole if notes else conv, "circular conv" if notes else "kept", ", ".join(notes), FIELDS)

    def _dense(self, dense: nn.Linear, x: Tensor, trace: Trace) -> Made:
        if trace.kind == IMAGE:
            raise ValueError(
                "it is a dense map of the image, which no shift leaves as it is; lift networks that begin with Conv2d"
            )
        channels = trace.channels
        before, now = dense.in_features // channels, x.shape[1] // channels
        if before <= 1 and x.shape[1] == dense.in_features:
            return Made(dense, "kept", "", INVARIANT)
        if x.shape[1] % channels or dense.in_features % channels:
            raise ValueError(f"its {dense.in_features} inputs are not flattened maps of {channels} channels")
        path = Pool(channels, now, dense.out_features).to(dense.weight)
        path.weight.data = dense.weight.detach().unflatten(1, (channels, before)).sum(2)[None]
        made = head(path, dense.bias, keep=True)
        for parameter, given in zip(made.parameters(), dense.parameters(), strict=True):
            parameter.requires_grad_(given.requires_grad)
        return Made(made, "invariant dense", f"weights summed over {before} positions, of the mean", INVARIANT)

    def _pool(self, pool: nn.MaxPool2d | nn.AvgPool2d, x: Tensor, trace: Trace) -> Made:
        kernel, stride, dilation, padding = window(pool)
        if padding == 0 and all(n == kernel for n in x.shape[-2:]):
            return Made(pool, "kept", "covers the whole map", trace.kind)
        reach = dilation * (kernel - 1)
        before = padding if padding <= reach else reach // 2
        full = copy.copy(pool)  # it may be called again, on maps of another size
        full.stride, full.padding, full.ceil_mode = 1, 0, False
        parts = [circular(full, before, reach - before)]
        if stride > 1:
            parts.append(self._down(pool, x, stride))
        return Made(
            nn.Sequential(*parts), f"circular {type(pool).__name__}", f"polyphase {stride}" if stride > 1 else "", trace.kind
        )

    def _adaptive(self, pool: nn.Module, x: Tensor, trace: Trace) -> Made:
        size = pool.output_size if isinstance(pool.output_size, tuple) else (pool.output_size,) * 2
        if all(want in (1, None, n) for want, n in zip(size, x.shape[-2:], strict=True)):
            return Made(pool, "kept", "", trace.kind)
        return Made(type(pool)(1), f"{type(pool).__name__} of one position", "no larger one follows shifts", trace.kind)

    def _stride(self, stride: tuple[int, ...]) -> int:
        if len(set(stride)) > 1:
            raise ValueError(f"its stride {stride} differs by side: give it one number")
        return stride[0]

    def _down(self, owner: nn.Module, x: Tensor, stride: int) -> nn.Module:
        height, width = x.shape[-2:]
        if height % stride or width % stride:
            raise ValueError(
                f"its map of {height}x{width} has no polyphase grids of stride {stride}: use images whose sides are multiples of the "
                "total stride"
            )
        return self.sampler.polyphase(owner, (height, width), stride)
