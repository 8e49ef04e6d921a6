"""Chains of paths beside a group convolution: one for each smaller group, each holding only what the one before it does not.

    1/n (n gconv(x) + turn(x) + ... + free(x) + ...)      all but gconv are zero at the start: the function is the same

The first step breaks the whole group and keeps the next smaller one, the last keeps shifts alone. Free paths break these too.
The head of a lifted model, a dense map of the mean over the group and positions, has such a chain too:

    1/n (n pool(x) + turn(x) + ... + rest(x))             rest sees x - mean x over positions, if there is more than one
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autosym.linear.contrasts import BiasContrast, GroupContrast, PoolContrast
from autosym.linear.conv import Conv
from autosym.linear.dense import Centred, Pool
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import GROUPS, Group
from autosym.linear.path import Path
from autosym.nn.layers import Affine, Branch, Relaxed
from autosym.surgery.free_paths import (
    LARGEST_FACTORS,
    approximate,
    factor_bytes,
    free_names,
    free_path,
    start_at_zero,
    too_large,
)
from autosym.surgery.observation import Seen


def chain(group: Group) -> list[tuple[Group, Group | None]]:
    """(what a step breaks, what it keeps), from the whole group down to shifts alone: each keeps the largest group that is left."""
    steps: list[tuple[Group, Group | None]] = []
    left: Group | None = group
    while left is not None:
        within = [other for other in GROUPS.values() if len(other) < len(left) and left.elements(other) is not None]
        smaller = max(within, key=len, default=None)
        steps.append((left, smaller))
        left = smaller
    return steps


def relaxed_lifted(name: str, layer: nn.Module, seen: Seen, wanted: str) -> tuple[Relaxed | None, str]:
    """The group convolution, or the head, of a lifted model with a chain of paths beside it that start at zero, or None; and a note."""
    assert isinstance(layer, Relaxed)
    (symmetric,) = layer.values()
    if (pool := pool_of(layer)) is not None:
        return _relaxed_head(name, layer, pool, seen, wanted)
    (own,) = (part for part in symmetric.modules() if isinstance(part, GroupConv))
    padding = (own.padding,) * 4
    form: dict[str, Any] = {"dilation": own.dilation, "groups": own.groups, "padding_mode": own.padding_mode}
    with torch.device("meta"):
        conv = Conv(seen.in_shape[0], seen.out_shape[0], own.kernel_size, 1, padding, **form)
        alone = math.prod(seen.out_shape[1:]) == 1  # of one position: only the group to break
        free = [] if alone else free_names(name, layer, wanted)
        size = sum(factor_bytes(free_path(path, conv, seen)) for path in free)
        size += sum(factor_bytes(_step(own, isinstance(symmetric, Affine), form, *step)) for step in chain(own.group))
    if size > LARGEST_FACTORS:
        return None, too_large(wanted, seen, size)
    made = {path: free_path(path, conv, seen) for path in free}
    steps = {
        f"turn:{breaks.name}": _step(own, isinstance(symmetric, Affine), form, breaks, keeps)
        for breaks, keeps in chain(own.group)
    }
    for path in (*steps.values(), *made.values()):
        start_at_zero(path.to(own.weight), own, seen.x)
    note = approximate(conv, seen.in_shape[1:]).replace("symmetry", "shifts")
    return _beside(layer, steps, made), note


def _beside(layer: Relaxed, steps: Mapping[str, nn.Module], free: Mapping[str, nn.Module]) -> Relaxed:
    """The layer with more paths, which compute zero."""
    for parameter in layer.parameters():
        parameter.data *= 1 + len(steps) + len(free)
    return Relaxed({**layer, **steps}, free, lifted=layer.lifted)


def pool_of(layer: nn.Module) -> Pool | None:
    """The path of a lifted model's head, which sees the mean over the group and positions; None for other layers."""
    return next((part for part in layer.modules() if isinstance(part, Pool)), None) if isinstance(layer, Relaxed) else None


def _relaxed_head(name: str, layer: Relaxed, own: Pool, seen: Seen, wanted: str) -> tuple[Relaxed | None, str]:
    """The head with what breaks each group, and with the rest of all dense maps, which breaks shifts."""
    if wanted != "pool":
        raise ValueError(f"{name} (the head) cannot have the paths {wanted!r}: a dense layer of a lifted model takes 'pool'")
    _, outputs, fields = own.weight.shape
    order = len(own.group) if own.group else 1
    positions = own.positions // order
    steps: dict[str, Path] = {}
    if own.group is not None:
        for breaks, keeps in chain(own.group):
            steps[f"turn:{breaks.name}"] = PoolContrast(own.group, fields, positions, outputs, breaks, keeps)
    with torch.device("meta"):
        size = factor_bytes(Centred(fields * order, positions, outputs))
    fits = size <= LARGEST_FACTORS
    free = {"rest": Centred(fields * order, positions, outputs)} if positions > 1 and fits else {}
    notes = [] if fits else [f"no path breaks shifts: {too_large('rest', seen, size).partition(':')[0]}"]
    if not steps and not free:
        return None, notes[0] if notes else "a dense map of one position has no symmetry to relax"
    for path in (*steps.values(), *free.values()):
        start_at_zero(path.to(own.weight), own, seen.x)
    said = ["invariant part", *(["what breaks the group"] if steps else []), *(["the rest"] if free else [])]
    return _beside(layer, steps, free), "; ".join([f"{', '.join(said[:-1])} and {said[-1]}", *notes])


def _step(own: GroupConv, biased: bool, form: dict, breaks: Group, keeps: Group | None) -> Branch | GroupContrast:
    """What breaks one group and keeps the next, of the form of a group convolution, and with a bias if that has one."""
    fields = own.groups * own.weight.shape[1]
    linear = GroupContrast(
        own.group, own.in_channels, fields, own.kernel_size, own.lift, breaks, keeps, padding=own.padding, **form
    )
    return Affine(linear, BiasContrast(own.group, fields, breaks, keeps)) if biased else linear
