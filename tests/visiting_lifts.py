"""What becomes of one network of the zoo when it is lifted: how far its outputs move with the image, in units of their spread."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import autosym
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import GROUPS
from families import Family
from visiting import SAME, lived_in

ROUNDING = 1e-15  # of images, whose numbers are about 1
SHIFTS = ((1, 0), (0, 1), (3, -5), (-7, 2))


@dataclass
class LiftVisit:
    """The size of images it was lifted for; how far the outputs move by the group, and over c4 with circular padding by shifts.

    ``promised`` says whether such a network follows shifts by docs/lift.md. ``why`` is the reason of a refusal, at the last size.
    """

    size: int | None = None
    spread: float | None = None
    rounding: float | None = None  # how far outputs move if images are rounded: deep networks magnify it
    moved: float | None = None
    shifted: float | None = None
    promised: bool = False
    why: str = ""


def visit_lifted(family: Family, group: str) -> LiftVisit:
    """Lift at the first size that works; then measure."""
    torch.manual_seed(0)
    model = lived_in(family.build().double(), (3, family.size, family.size))
    found = LiftVisit()
    n = family.size
    for size in sorted({n, n + 1, n + 3, *(32 * -(-least // 32) for least in (n + 1, 2 * n, 4 * n))}):  # for most total strides
        try:
            lifted = autosym.lift(model, images(size), group)
        except ValueError as error:
            found.why = str(error)
            continue
        found.size, found.why = size, ""
        found.spread, found.rounding, found.moved = _measured(lifted, size, group == "c4")
        break
    if found.size is not None and group == "c4":
        try:
            wrapped = autosym.lift(model, images(found.size), group, padding="circular")
        except ValueError:  # circular padding reaches around a small map more than once
            return found
        for turned in (True, False):
            _, rounding, moved = _measured(wrapped, found.size, turned)
            found.rounding = max(found.rounding or 0.0, rounding)
            found.moved, found.shifted = (max(found.moved or 0.0, moved), None) if turned else (found.moved, moved)
        found.promised = _follows_shifts(wrapped)
    return found


def exact(moved: float, rounding: float) -> bool:
    """Whether outputs moved no more than rounding may move them: that of layers too, which differs between machines."""
    return moved <= max(SAME, 100 * rounding)


def images(size: int) -> Tensor:
    return torch.randn(3, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def _measured(lifted: nn.Module, size: int, turned: bool) -> tuple[float, float, float]:
    """|f - mean f| / |f|; |f(x') - f(x)| / |f - mean f| for rounded x', and the largest of it for x' = g x.

    No parameter or statistic has its first value.
    """
    model, x = lived_in(lifted, (3, size, size)), images(size)
    f = model(x)
    spread = (f - f.mean(0)).norm()
    rounded = x + ROUNDING * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    rounding, *moved = (float((model(y) - f).norm() / spread) for y in (rounded, *_moved(x, turned)))
    return float(spread / f.norm()), rounding, max(moved)


def _moved(x: Tensor, turned: bool) -> Iterable[Tensor]:
    if turned:
        return (GROUPS["c4"].act(g, x) for g in range(1, 4))
    return (x.roll(shift, (-2, -1)) for shift in SHIFTS)


def _follows_shifts(lifted: nn.Module) -> bool:
    """Whether a network over a group follows shifts by one pixel: circular padding keeps every size, and no pool has a stride."""
    modules = list(lifted.modules())
    pools = [module for module in modules if isinstance(module, (nn.MaxPool2d, nn.AvgPool2d))]
    borders = [module for module in modules if isinstance(module, GroupConv) and module.has_borders]
    return not borders and all(pool.stride == 1 for pool in pools)
