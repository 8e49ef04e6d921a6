"""Chains of paths beside a group convolution: one for each smaller group, each holding only what the one before it does not.

    1/n (n gconv(x) + turn(x) + ... + free(x) + ...)      all but gconv are zero at the start: the function is the same

The first step breaks the whole group and keeps the next smaller one, the last keeps shifts alone. Free paths break these too.
"""

import math
from typing import Any

import torch
from torch import nn

from autosym.linear.contrasts import BiasContrast, GroupContrast
from autosym.linear.conv import Conv
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import GROUPS, Group
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
    """The group convolution of a lifted model with a chain of paths beside it that start at zero, or None; and a note."""
    assert isinstance(layer, Relaxed)
    (symmetric,) = layer.values()
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
    for parameter in symmetric.parameters():
        parameter.data *= 1 + len(steps) + len(made)
    note = approximate(conv, seen.in_shape[1:]).replace("symmetry", "shifts")
    return Relaxed({**layer, **steps}, made, lifted=layer.lifted), note


def _step(own: GroupConv, biased: bool, form: dict, breaks: Group, keeps: Group | None) -> Branch | GroupContrast:
    """What breaks one group and keeps the next, of the form of a group convolution, and with a bias if that has one."""
    fields = own.groups * own.weight.shape[1]
    linear = GroupContrast(
        own.group, own.in_channels, fields, own.kernel_size, own.lift, breaks, keeps, padding=own.padding, **form
    )
    return Affine(linear, BiasContrast(own.group, fields, breaks, keeps)) if biased else linear
