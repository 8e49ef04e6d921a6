"""Measured equivariance: does a layer, or a whole model, commute with a group?

    error = |f(g x) - g f(x)| / |f(x)|,       averaged over inputs and elements of the group

The group acts on outputs by their kind. Vectors have no positions and stay as they are (invariance). Maps are moved. Lifted maps
of group convolutions are also permuted. It works on any torch model, however it was trained.

"translations" are the circular shifts, a group. On a network with zero padding they measure the border most of all: what leaves the
image at one side comes back at the other. "shifts" leave the border alone. A window of the image lies on a frame of zeros, at two places
that are both inside, and maps are compared within the window.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from autosym.linear.groups import GROUPS, Group, translations
from autosym.linear.path import Path
from autosym.nn.layers import Branch, Relaxed
from autosym.runtime.batching import Data, batches, check_finite, check_module
from autosym.runtime.tables import table

SHIFTS = "shifts"  # the name of shifts that leave the border alone


@dataclass(frozen=True)
class LayerError:
    """Relative error of one layer (``""`` is the model itself) under one group."""

    layer: str
    kind: str
    group: str
    compared: str
    error: float


@dataclass(frozen=True)
class EquivarianceError:
    """Errors of the output, and of every layer that returns maps or vectors; prints as a table."""

    rows: tuple[LayerError, ...]

    def __iter__(self) -> Iterator[LayerError]:
        return iter(self.rows)

    def output(self) -> dict[str, float]:
        """By group, the error of the model's output."""
        return {row.group: row.error for row in self.rows if row.layer == ""}

    def __str__(self) -> str:
        groups = list(dict.fromkeys(row.group for row in self.rows))
        layers = list(dict.fromkeys((row.layer, row.kind) for row in self.rows))
        errors = {(row.layer, row.group): row.error for row in self.rows}
        rows = [("layer", "", *groups)]
        for layer, kind in layers:
            cells = (f"{errors[layer, group]:.2g}" if (layer, group) in errors else "" for group in groups)
            rows.append((layer or "(output)", kind, *cells))
        return table(rows, "<" * len(rows[0]))


def equivariance_error(
    model: nn.Module,
    group: str | Group | Sequence[str | Group],
    data: Data | Tensor,
    elements: int = 8,
    samples: int = 64,
    seed: int = 0,
) -> EquivarianceError:
    """The measured error of every layer of ``model``, on ``samples`` inputs of ``data`` and at most ``elements`` of each group.

    A group is an object, or a name: "shifts" (the border stays as it is), "translations" (circular shifts) or a key of ``groups.GROUPS``.
    Rotations and flips of the input are exact on the pixel grid, except for groups that interpolate (C8). ``data`` may be a tensor of
    inputs alone: labels are not used.
    """
    check_module(model)
    x = data[:samples] if isinstance(data, Tensor) else next(batches(data, samples), (torch.empty(0),))[0][:samples]
    if not len(x):
        raise ValueError(
            "the data are empty, no batch held a sample to measure on: pass some (an iterator can be read only once)"
        )
    check_finite(x, "the inputs")
    x = x.to(next(model.parameters(), x))
    was = {module: module.training for module in model.modules()}
    model.eval()
    try:
        rows = [row for name, pairs in _motions(group, x, elements, seed) for row in _errors(model, name, pairs)]
    finally:
        for module, mode in was.items():
            module.training = mode
    return EquivarianceError(tuple(rows))


def assert_equivariant(
    layer: Callable[[Tensor], Tensor], group: str | Group, example: Tensor, tolerance: float | None = None
) -> None:
    """Raise an AssertionError unless ``layer`` commutes with every element of ``group`` on the batch ``example``.

    The default tolerance is 1e-5 in float32 and 1e-10 in float64. The input is lifted if the layer holds a path that
    ``takes`` lifted features; the output is lifted if the layer says so (``lifted``), as group convolutions do.
    """
    if isinstance(layer, type) or not callable(layer):
        check_module(layer)
    tolerance = tolerance or {torch.float64: 1e-10}.get(example.dtype, 1e-5)
    (found,) = _as_groups(group, example)
    lifted_in = _lifted_input(layer)
    with torch.no_grad():
        y = layer(example)
        for g in range(len(found)):
            moved = _permuted(found.act(g, example), lifted_in, found.matrices[g])
            error = _error(layer(moved), y, layer, found, g, example.shape[-2:])[1]
            if not error <= tolerance:
                name = layer if isinstance(layer, str) else type(layer).__name__
                raise AssertionError(f"{name} is not equivariant to element {g} of {found.name}: relative error {error:.3g}")


def _as_groups(group: str | Group | Sequence[str | Group], x: Tensor) -> list[Group]:
    if isinstance(group, (str, Group)):
        group = [group]
    if x.dim() != 4:
        raise ValueError(f"groups act on images (B, C, H, W), but the inputs have shape {tuple(x.shape)}: pass images")
    unknown = [g for g in group if isinstance(g, str) and g not in ("translations", *GROUPS)]
    if unknown:
        known = ", ".join(("translations", *GROUPS))
        raise ValueError(f"unknown group {unknown[0]!r}: use {known}, or a Group; equivariance_error also takes {SHIFTS!r}")
    named = {**GROUPS, "translations": translations(*x.shape[-2:])}
    found = [named[g] if isinstance(g, str) else g for g in group]
    for g in found:
        g.check_size(x.shape[-2:])
    return found


# ---- inputs before and after


Judge = Callable[[Tensor, Tensor, object], tuple[str, float]]  # (after, before, layer): how they were compared, and the error
Pair = tuple[Tensor, Tensor, Judge]  # an input, the same input moved, and how to compare what a layer makes of them


def _motions(
    group: str | Group | Sequence[str | Group], x: Tensor, elements: int, seed: int
) -> Iterator[tuple[str, Iterator[Pair]]]:
    """By name, the pairs of inputs of each group."""
    asked = [group] if isinstance(group, (str, Group)) else list(group)
    found = iter(_as_groups([g for g in asked if g != SHIFTS], x))
    for one in asked:
        draw = torch.Generator("cpu").manual_seed(seed)
        if one == SHIFTS:
            yield SHIFTS, _inside(x, elements, draw)
        else:
            known = next(found)
            yield known.name, _moved(known, x, elements, draw)


def _moved(group: Group, x: Tensor, elements: int, draw: torch.Generator) -> Iterator[Pair]:
    if len(group) < 2:
        raise ValueError(f"{group.name} has only the identity, and everything commutes with it: choose a larger group")
    chosen = 1 + torch.randperm(len(group) - 1, generator=draw, device="cpu")[:elements]
    for g in chosen.tolist():
        yield x, group.act(g, x), partial(_error, group=group, g=g, size=x.shape[-2:])


def _inside(x: Tensor, elements: int, draw: torch.Generator) -> Iterator[Pair]:
    """A window of half a side, from anywhere in the images, at two places that are an eighth of a side away from the border.

    Around it are zeros, as zero padding has them: the border is the same before and after.
    """
    size = x.shape[-2:]
    if max(size) < 2:
        raise ValueError(f"images of {size[0]} x {size[1]} pixels cannot be shifted: pass larger ones")
    window = [max(1, side // 2) for side in size]
    edge = [side // 8 for side in size]

    def place(lowest: Sequence[int]) -> list[int]:
        rooms = [side - low - w - low + 1 for side, low, w in zip(size, lowest, window, strict=True)]
        return [
            low + int(torch.randint(room, (), generator=draw, device="cpu")) for low, room in zip(lowest, rooms, strict=True)
        ]

    def laid(content: Tensor, at: Sequence[int]) -> Tensor:
        canvas = torch.zeros_like(x)
        canvas[..., at[0] : at[0] + window[0], at[1] : at[1] + window[1]] = content
        return canvas

    for _ in range(elements):
        (top, left), before, after = place((0, 0)), place(edge), place(edge)
        while before == after:
            after = place(edge)
        content = x[..., top : top + window[0], left : left + window[1]]
        by = [there - here for here, there in zip(before, after, strict=True)]
        judge = partial(_error_inside, by=by, at=after, window=window, size=size)
        yield laid(content, before), laid(content, after), judge


def _error_inside(
    after: Tensor, y: Tensor, layer: object, by: Sequence[int], at: Sequence[int], window: Sequence[int], size: Sequence[int]
) -> tuple[str, float]:
    """The error where the content is. A map without a pixel that lies in the window is compared as a whole."""
    if y.dim() == 2 or y.shape[-2:] == (1, 1):
        return "invariant", _relative(after, [y])
    scales = [have / side for have, side in zip(y.shape[-2:], size, strict=True)]
    ends = [(math.ceil(a * s), math.floor((a + w) * s)) for a, w, s in zip(at, window, scales, strict=True)]
    rows, columns = (slice(*end) if end[0] < end[1] else slice(None) for end in ends)
    moved = _rolled(y, *(shift * scale for shift, scale in zip(by, scales, strict=True)))
    return "map", _relative(after[..., rows, columns], [m[..., rows, columns] for m in moved])


# ---- outputs before and after


def _errors(model: nn.Module, name: str, pairs: Iterator[Pair]) -> Iterator[LayerError]:
    names = {module: layer for layer, module in model.named_modules() if _is_shown(module)}
    errors: dict[nn.Module, list[float]] = {}
    compared: dict[nn.Module, str] = {}
    seen, before = None, {}
    for x, moved, judge in pairs:
        if x is not seen:
            seen, before = x, _outputs(model, names, x)
        after = _outputs(model, names, moved)
        for module, y in before.items():
            compared[module], error = judge(after[module], y, module)
            errors.setdefault(module, []).append(error)
    for module, found in errors.items():
        yield LayerError(names.get(module, ""), type(module).__name__, name, compared[module], sum(found) / len(found))


def _is_shown(module: nn.Module) -> bool:
    """Whether the table has a row for it: relaxed layers as a whole, and torch layers without children."""
    return isinstance(module, Relaxed) or (type(module).__module__.startswith("torch.nn") and not list(module.children()))


def _outputs(model: nn.Module, names: dict[nn.Module, str], x: Tensor) -> dict[nn.Module, Tensor]:
    outputs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, _: object, y: object) -> None:
        if isinstance(y, Tensor) and y.dim() in (2, 4) and len(y) == len(x):
            outputs[module] = y.detach()

    handles = [module.register_forward_hook(keep) for module in names]
    try:
        with torch.no_grad():
            y = model(x)
    finally:
        for handle in handles:
            handle.remove()
    outputs.pop(model, None)
    return {**outputs, model: y}


def _error(after: Tensor, y: Tensor, layer: object, group: Group, g: int, size: Sequence[int]) -> tuple[str, float]:
    """How the outputs were compared, and |f(g x) - g f(x)| / |f(x)|."""
    lifted = _lifted_output(layer)
    if y.dim() == 2 and lifted is not None and y.shape[1] % len(lifted) == 0:  # fields of one position, or numbers behind them
        return "lifted or invariant", _relative(after, [y, _permuted(y, lifted, group.matrices[g])])
    kind = "lifted map" if lifted is not None and _element(lifted, group.matrices[g]) is not None else "map"
    if y.dim() == 2 or (y.shape[-2:] == (1, 1) and kind == "map"):
        return "invariant", _relative(after, [y])
    if group.size is None:
        if y.shape[-1] != y.shape[-2] and size[0] == size[1]:
            return "map", float("nan")
        moved = [group.act(g, y)]
    else:
        moved = list(_shifted(y, group, g, size))
    return kind, _relative(after, [_permuted(m, lifted, group.matrices[g]) for m in moved])


def _lifted_input(layer: object) -> Group | None:
    """The group whose fields are the channels of the input, if any."""
    modules = layer.modules() if isinstance(layer, (Path, Branch, Relaxed)) else ()
    return next((m.takes for m in modules if isinstance(m, Path) and m.takes is not None), None)


def _lifted_output(layer: object) -> Group | None:
    """The group whose fields are the channels of the output, if any."""
    return getattr(layer, "lifted", None)


def _element(group: Group, matrix: Tensor) -> int | None:
    """The index of the group element with that matrix, or None."""
    near = (group.matrices - matrix).abs().amax((1, 2))
    return int(near.argmin()) if near.min() < 1e-6 else None


def _permuted(y: Tensor, lifted: Group | None, matrix: Tensor) -> Tensor:
    """Lifted features, permuted by the group element with that matrix; y itself if there is no such element."""
    g = None if lifted is None else _element(lifted, matrix)
    if lifted is None or g is None:
        return y
    return y.unflatten(1, (-1, len(lifted)))[:, :, lifted.table[lifted.inverse[g]]].flatten(1, 2)


def _shifted(y: Tensor, group: Group, g: int, size: Sequence[int]) -> Iterator[Tensor]:
    """f(x) moved by a shift of the input. On a smaller map the shift is a fraction, so both neighbouring whole shifts are tried."""
    point = Group(group.name, group.matrices[g : g + 1], torch.zeros(1, 2, dtype=torch.float64))
    turned = point.act(0, y)
    right, up = group.shifts[g].tolist()
    yield from _rolled(turned, -up * y.shape[-2] / size[0], right * y.shape[-1] / size[1])


def _rolled(y: Tensor, down: float, across: float) -> Iterator[Tensor]:
    """y moved by the whole shifts around a fractional one."""
    for rows in {math.floor(down), math.ceil(down)}:
        for columns in {math.floor(across), math.ceil(across)}:
            yield y.roll((rows, columns), (-2, -1))


def _relative(after: Tensor, candidates: Sequence[Tensor]) -> float:
    """The relative error, averaged over samples; each sample is compared with its nearest candidate."""
    scale = candidates[0].flatten(1).norm(dim=1).clamp_min(torch.finfo(after.dtype).tiny)
    errors = torch.stack([(after - y).flatten(1).norm(dim=1) / scale for y in candidates]).amin(0)
    return float(errors.mean())
