"""The free paths that ``relax`` puts beside a convolution: made for its maps, starting at zero, and what they cost."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from autosym.linear.conv import Conv
from autosym.linear.path import Path
from autosym.linear.where import Where, WhereBias, fitting_waves
from autosym.nn import layers
from autosym.nn.layers import Affine, Branch
from autosym.surgery.observation import Seen

FREE = ("f-fc", "fc", "s-fc", "where")
LARGE = 20_000_000  # weights of all factored paths of a model: with more, "auto" is waves of position
LARGEST_FACTORS = 4 * 2**30  # bytes for the curvature of one layer's free paths; a layer that needs more is not relaxed


def is_free(path: str) -> bool:
    """Whether ``relax`` takes a free path of this name."""
    return path in FREE or layers.waves_of(path) is not None


def fitting(convolutions: Iterable[Seen]) -> str:
    """What "auto" is in a model with these convolutions: f-fc, or waves of position if f-fc would be too large.

    F-FC has C C' (P + P') weights, for maps of P and P' positions. Waves have a few times those of the convolution, on maps of any size.
    """
    shapes = [(seen.in_shape, seen.out_shape) for seen in convolutions if seen.calls == 1 and len(seen.in_shape) > 1]
    size = sum(a[0] * b[0] * (math.prod(a[1:]) + math.prod(b[1:])) for a, b in shapes)
    return "f-fc" if size <= LARGE else "where"


def free_names(name: str, layer: nn.Module, wanted: str) -> list[str]:
    """The free paths that are joined by '+'."""
    free = wanted.split("+")
    kinds = [path.partition(":")[0] for path in free]  # where and where:8 have waves in common
    if any(not is_free(path) for path in free) or len(set(kinds)) < len(free):
        raise ValueError(
            f"{name} ({type(layer).__name__}) cannot have the paths {wanted!r}: join different ones of {', '.join(FREE)} by '+' "
            "(where:8 is where with 8 waves), or leave the choice for all layers to paths='auto'"
        )
    return free


def free_path(path: str, conv: Conv, seen: Seen) -> Branch:
    """The free path of this name beside a convolution that saw maps of these shapes."""
    in_shape, out_shape = seen.in_shape, seen.out_shape
    if path not in FREE or path == "where":
        wanted = layers.waves_of(path)
        waves = fitting_waves(out_shape[1:], wanted) or wanted or 0  # none fit: the path says why
        return Affine(Where.beside(conv, out_shape, waves), WhereBias(out_shape, waves))
    if path == "fc":
        return layers.fc(in_shape, out_shape)
    if path == "f-fc":
        return layers.Factored(in_shape, out_shape)
    in_anchors, out_anchors = (max(1, math.prod(shape[1:]) // 2) for shape in (in_shape, out_shape))
    return layers.SparseFactored(in_shape, out_shape, in_anchors, out_anchors)


@torch.no_grad()
def start_at_zero(path: Branch | Path, symmetric: Path, x: Tensor | None) -> None:
    """Set the output factor to zero, and store the weight size that makes the path's outputs as large as the symmetric path's.

    Steps are relative to that size. So neither path learns much faster than the other, however large the pretrained weights are.
    """
    factor = path.get_submodule(path.parts()["weights"][-1])
    assert isinstance(factor, Path)
    assert x is not None
    factor.weight.normal_()
    wanted, found = (float(t.square().mean().sqrt()) for t in (symmetric(x), path(x)))
    factor.start_size = wanted / found if found > 0 else 0.0
    factor.weight.zero_()


def fewer_waves(made: Mapping[str, nn.Module]) -> Iterator[str]:
    """Which paths have fewer waves than asked for, as the map has no more."""
    for name, path in made.items():
        wanted, linear = layers.waves_of(name), getattr(path, "linear", None)
        if wanted is not None and isinstance(linear, Where) and linear.waves < wanted:
            yield f"{linear.waves} waves for {name}: a cosine goes with its sine, and the map has no more"


def factor_bytes(path: nn.Module) -> int:
    """Bytes of the Kronecker factors of all parts of a path, in float32."""
    shapes = [part.weight.shape for part in path.modules() if isinstance(part, Path)]
    return sum(4 * blocks * (rows**2 + columns**2) for blocks, rows, columns in shapes)


def too_large(wanted: str, seen: Seen, size: int) -> str:
    """Why a layer is not relaxed whose free paths would need more than ``LARGEST_FACTORS``."""
    return (
        f"the curvature of {wanted} on {seen.in_shape} would take {size / 2**30:.0f} GiB: name it in paths with where or s-fc"
    )


def approximate(conv: Conv, size: Sequence[int]) -> str:
    """Whether a convolution of this form, on maps of this size, is exactly equivariant, and where it is not."""
    uneven = any(n % stride for n, stride in zip(size, conv.stride, strict=True))
    notes = ["at the borders"] if conv.has_borders or uneven else []
    if set(conv.stride) != {1}:
        notes.append(f"between shifts of the stride {max(conv.stride)}")
    return f"symmetry approximate {' and '.join(notes)}" if notes else "symmetry exact"
