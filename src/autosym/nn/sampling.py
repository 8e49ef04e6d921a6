"""Downsampling that keeps equivariance in networks with branches: maps of one size share one choice of a polyphase grid.

A shift of the input by one pixel moves some grids by one position, and others not at all. Branches that are added up again must
therefore keep the same grid of every sample, or their sum follows no shift. Turns need no common choice: they map grids onto grids.
"""

import threading

from torch import Tensor, nn

from autosym.linear.grids import largest_grid, on_grid

Key = tuple[int, int, int]  # height, width and stride


class Grids(threading.local):
    """The grids that were chosen in this forward pass, by size of the map and stride, and who has read them; apart for every thread."""

    def __init__(self) -> None:
        self.chosen: dict[Key, Tensor] = {}
        self.read: dict[Key, set[int]] = {}

    def __deepcopy__(self, memo: dict) -> "Grids":
        memo[id(self)] = copied = Grids()  # one for all layers of the copy, without the last pass
        return copied

    def __reduce__(self) -> tuple:
        return Grids, ()


class Downsample(nn.Module):
    """The polyphase grid of (B, C, H, W) with the largest norm, chosen for each sample by the first layer that meets such maps.

    This layer chooses for the keys in ``leads`` and follows the choice of another layer for those in ``follows``. ``place`` tells
    apart the layers that share ``grids``.
    """

    def __init__(self, stride: int, grids: Grids, place: int):
        super().__init__()
        self.stride, self.grids, self.place = stride, grids, place
        self.leads: set[Key] = set()
        self.follows: set[Key] = set()

    def forward(self, y: Tensor) -> Tensor:
        key = (int(y.shape[-2]), int(y.shape[-1]), self.stride)
        if key in self.leads:
            self.grids.chosen[key], self.grids.read[key] = largest_grid(y, self.stride), set()
        elif key not in self.follows:
            sizes = ", ".join(f"{height}x{width}" for height, width, _ in sorted(self.leads | self.follows))
            raise ValueError(f"this network downsamples maps of {sizes} here, got {key[0]}x{key[1]}: lift it for such images")
        elif key not in self.grids.chosen or self.place in self.grids.read[key]:
            raise RuntimeError(
                "a layer that downsamples ran without the one whose grid it shares: run the whole network, not a part of it"
            )
        self.grids.read[key].add(self.place)
        return on_grid(y, self.stride, self.grids.chosen[key])

    def extra_repr(self) -> str:
        return f"stride={self.stride}"


def circular(module: nn.Module, before: int, after: int) -> nn.Module:
    """The module on maps that are padded circularly, by ``before`` at the left and top and by ``after`` at the right and bottom."""
    if not before and not after:
        return module
    return nn.Sequential(nn.CircularPad2d((before, after, before, after)), module)
