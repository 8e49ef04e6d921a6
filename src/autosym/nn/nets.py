"""The architectures of the experiments (App. F): relaxed blocks with ReLU, global pooling, a two-layer head.

Eight blocks of width a, 2a, 2a, 4a, 4a, 8a, 8a, 16a and strides 1, 2, 1, 2, 1, 2, 2, 2, then Linear(16a, 64a), ReLU,
Linear(64a, K). For a 32x32 image the last map is 1x1. For larger images it is averaged, which keeps translation invariance.

With a group convolution every map is lifted. ``width`` then counts fields of |G| channels, and other paths see the group as
channels. The head sees the mean over the group, which keeps invariance to it. The network of Table 3, "f-fc+conv+gconv:c4" of
width 2, then has 1,083,907 parameters on MNIST and 1,116,855 on CIFAR-10. The paper says 1.2 M, with too few details to explain
the difference.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from autosym.linear.dense import Bias, Dense
from autosym.linear.groups import GROUPS, Group
from autosym.linear.where import fitting_waves
from autosym.nn import layers
from autosym.nn.layers import Affine, Branch, Relaxed

SYMMETRIC = ("conv", "s-conv")
FREE = ("fc", "f-fc", "s-fc", "where")
NAMES = (
    "fc",
    "conv",
    "fc+conv",
    "f-fc",
    "f-fc+conv",
    "s-fc",
    "s-conv",
    "s-fc+s-conv",
    "gconv:c4",
    "f-fc+conv+gconv:c4",
    "where+conv",
    "gconv:c4+turn:c4",
)


class Net(nn.Module):
    """Relaxed layers with ReLU, the mean over positions and group, and a head of two dense layers. Returns logits."""

    def __init__(
        self, blocks: Sequence[Relaxed], in_shape: tuple[int, ...], fields: int, order: int, hidden: int, classes: int
    ):
        super().__init__()
        self.in_shape, self.order = in_shape, order
        self.blocks = nn.ModuleList(blocks)
        self.hidden = Affine(Dense((fields,), (hidden,)), Bias((hidden,)))
        self.output = Affine(Dense((hidden,), (classes,)), Bias((classes,)))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:] != self.in_shape:
            raise ValueError(f"this network was built for inputs {('B', *self.in_shape)}, got {tuple(x.shape)}")
        for block in self.blocks:
            x = torch.relu(block(x))
        pooled = x.mean((-2, -1)).unflatten(1, (-1, self.order)).mean(-1)
        return self.output(torch.relu(self.hidden(pooled)))


def build(
    name: str,
    in_shape: Sequence[int],
    classes: int,
    width: int = 10,
    channels: Sequence[int] = (1, 2, 2, 4, 4, 8, 8, 16),
    strides: Sequence[int] = (1, 2, 1, 2, 1, 2, 2, 2),
    hidden: int = 64,
    prior: Literal["u", "omega"] = "u",
    filter_anchors: int = 7,
    grid_anchors: float = 0.5,
    start: float = 0.3,
) -> Net:
    """A network with the paths of ``name`` in every block, e.g. ``"f-fc+conv"``, ``"where+conv"`` or ``"f-fc+conv+gconv:c4"``.

    ``"gconv:d4+turn:d4+turn:c4"`` is a chain: ``turn:GROUP`` breaks its group and keeps the next smaller one that has a ``turn``,
    the last of them translations only. No two paths of a chain have a map in common (``layers.turn``).

    ``channels`` and ``hidden`` are multiples of ``width``; ``in_shape`` is (channels, height, width). A sparse filter has
    ``filter_anchors`` anchors. A sparse map has ``grid_anchors`` times as many anchors as positions. With ``prior="omega"`` the
    inverse lengthscales of sparse paths are also parameters with a prior (Sec. 3.2).

    If the paths of a layer keep different symmetries, ``start`` multiplies the initial weights of all paths except those that
    keep the most (a group, then translations). Adam's rates in ``fit`` are relative to initial sizes, so the weights of these
    paths also move slower; their biases do not. docs/schedule.md says why.
    """
    paths = name.split("+")
    groups = _groups(name, paths)
    turns = _turns(name, paths, groups)
    fields = max(groups.values(), key=len, default=None)
    order = 1 if fields is None else len(fields)
    own = {**groups, **{path: keeps for path, (_, keeps) in turns.items() if keeps is not None}}
    symmetries = {path: 0 if is_free(path) else len(own[path]) if path in own else 1 for path in paths}
    starts = {path: 1.0 if kept == max(symmetries.values()) else start for path, kept in symmetries.items()}
    _check_sizes(in_shape, channels, strides, groups)
    if not 0 < start < math.inf:
        raise ValueError(f"start must be positive and finite, got {start}")
    blocks = []
    shape = tuple(in_shape)
    for index, (multiple, stride) in enumerate(zip(channels, strides, strict=True)):
        out_shape = (width * multiple * order, shape[1] // stride, shape[2] // stride)
        made: dict[str, nn.Module] = {}
        for path in _possible(paths, out_shape):
            if path in groups:
                made[path] = layers.gconv(shape, out_shape, groups[path], lift=index == 0)
            elif path in turns and fields is not None:
                made[path] = layers.turn(shape, out_shape, fields, index == 0, *turns[path])
            else:
                made[path] = _path(path, shape, out_shape, prior == "omega", filter_anchors, grid_anchors)
        symmetric = {path: module for path, module in made.items() if not is_free(path)}
        free = {path: module for path, module in made.items() if is_free(path)}
        layer = Relaxed(symmetric, free, stride, lifted=fields)
        # with this gain, the weighted mean of outputs of equal variance has the variance of one output
        gain = len(made) / math.hypot(*(starts[path] for path in made))
        blocks.append(scaled(layer, {path: gain * starts[path] for path in made}))
        shape = out_shape
    return Net(blocks, tuple(in_shape), shape[0] // order, order, width * hidden, classes)


def is_free(path: str) -> bool:
    """Whether a path of this name is free; "where:8" is "where" with 8 waves."""
    return path in FREE or layers.waves_of(path) is not None


def _possible(paths: Sequence[str], out_shape: Sequence[int]) -> list[str]:
    """The paths without those that depend on position, if there is only one."""
    only_one = math.prod(out_shape[1:]) == 1
    found = [path for path in paths if not (only_one and path.partition(":")[0] == "where")]
    if not found:
        raise ValueError(
            f"a block has maps of one position, where {'+'.join(paths)!r} has no path: add conv, or pass other strides"
        )
    return found


def _path(
    name: str, shape: Sequence[int], out_shape: Sequence[int], learn_omega: bool, filter_anchors: int, grid_anchors: float
) -> nn.Module:
    if name == "fc":
        return layers.fc(shape, out_shape)
    if name == "conv":
        return layers.conv(shape, out_shape)
    if name == "f-fc":
        return layers.Factored(shape, out_shape)
    if name.partition(":")[0] == "where":
        wanted = layers.waves_of(name)
        return layers.where(shape, out_shape, fitting_waves(out_shape[1:], wanted) or wanted)
    if name == "s-conv":
        return layers.s_conv(shape, out_shape, filter_anchors, learn_omega)
    in_anchors, out_anchors = (max(1, int(grid_anchors * math.prod(s[1:]))) for s in (shape, out_shape))
    return layers.SparseFactored(shape, out_shape, in_anchors, out_anchors, learn_omega)


def _groups(name: str, paths: Sequence[str]) -> dict[str, Group]:
    """The group of every group convolution among the paths. Unknown paths are refused."""
    groups = {path: GROUPS[path.removeprefix("gconv:")] for path in paths if path.removeprefix("gconv:") in GROUPS}
    known = {*SYMMETRIC, *(f"{kind}:{group}" for kind in ("gconv", "turn") for group in GROUPS)}
    if any(path not in known and not is_free(path) for path in paths) or len(set(paths)) != len(paths):
        raise ValueError(
            f"unknown network {name!r}: join different paths of {', '.join((*FREE, *SYMMETRIC))}, turn:GROUP and gconv:GROUP by "
            f"'+', with GROUP one of {', '.join(GROUPS)}; where:8 is where with 8 waves"
        )
    largest = max(groups.values(), key=len, default=None)
    apart = [path for path, group in groups.items() if largest is not None and not largest.nests(group)]
    if apart:
        raise ValueError(
            f"{', '.join(apart)} does not act on the lifted maps of {name!r} as on its own, so the network would have neither "
            "symmetry: use one group, or nested ones such as c4 and d4"
        )
    return groups


def _turns(name: str, paths: Sequence[str], groups: Mapping[str, Group]) -> dict[str, tuple[Group, Group | None]]:
    """The group that every ``turn:GROUP`` breaks, and the one that it keeps: the next smaller with a ``turn``, or None."""
    found = sorted((GROUPS[path.removeprefix("turn:")] for path in paths if path.startswith("turn:")), key=len, reverse=True)
    for group in found:
        if not group.exact:
            raise ValueError(
                f"turn:{group.name} of {name!r}: {group.name} does not map the grid onto itself, so nothing is orthogonal to its "
                f"interpolated filters; use conv+gconv:{group.name}, or an exact group such as c4 or d4"
            )
    if found and f"gconv:{found[0].name}" not in groups:
        raise ValueError(
            f"turn:{found[0].name} of {name!r} breaks {found[0].name}, but no path keeps just that: add gconv:{found[0].name}, or, "
            "beside a larger gconv:GROUP, also turn:GROUP"
        )
    steps = list(zip(found, [*found[1:], None], strict=True)) if found else []
    for large, small in steps:
        if small is not None and large.elements(small) is None:
            raise ValueError(
                f"turn:{large.name} and turn:{small.name} of {name!r} do not nest: {small.name} is not within {large.name}; use a "
                "chain such as gconv:d4+turn:d4+turn:c4+turn:c2, or one of them alone"
            )
    return {f"turn:{large.name}": (large, small) for large, small in steps}


def _check_sizes(in_shape: Sequence[int], channels: Sequence[int], strides: Sequence[int], groups: dict[str, Group]) -> None:
    if len(in_shape) != 3:
        raise ValueError(f"in_shape must be (channels, height, width), got {tuple(in_shape)}")
    if len(channels) != len(strides):
        raise ValueError(f"{len(channels)} channels and {len(strides)} strides: give one of each per block")
    total = math.prod(strides)
    for side, size in zip(("height", "width"), in_shape[1:], strict=True):
        if size % total:
            raise ValueError(
                f"{side} {size} is not divisible by the product of strides {total}: an odd map has no polyphase grids "
                f"of equal size; pad or resize the images to a multiple of {total}, or pass other strides"
            )
    for group in groups.values():
        group.check_size(in_shape[1:])


@torch.no_grad()
def scaled(layer: Relaxed, factors: Mapping[str, float]) -> Relaxed:
    """The layer, with the output of each path, without its biases, multiplied by its factor."""
    for name, path in layer.items():
        assert isinstance(path, Branch)
        last = path.get_submodule(path.parts()["weights"][-1])
        last.get_parameter("weight").mul_(factors[name])
    return layer
