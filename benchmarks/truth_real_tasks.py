"""The tasks of truth_real.py: real images, moved, turned and mirrored so that the right answer is known from how they were made.

``Task.answers`` was written down before any run. It says of each symmetry in question whether images and labels have it: the images that
the symmetry makes are as likely as those they are made of, and have the same label. None: nobody knows, so it is reported and not scored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from autosym.papers import datasets

Pair = tuple[Tensor, Tensor]
FEW_DIGITS = 4  # in pairs of digits: 16 classes in order, 10 without


@dataclass(frozen=True)
class Task:
    """``make(images in [0, 1], labels, generator)`` gives the images and targets; ``classes`` is 0 for a regression of one number."""

    source: str
    classes: int
    answers: Mapping[str, bool | None]
    make: Callable[[Tensor, Tensor, torch.Generator], Pair]


# ---- how images are made: (N, C, H, W) and labels (N,)


def quadrants(x: Tensor, y: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Each digit in one of four quadrants of 32x32, moved by a few pixels around the torus: shifts by any number of pixels are alike."""
    small = datasets.resized(x, 16)
    canvas = torch.zeros(len(x), x.shape[1], 32, 32)
    canvas[..., :16, :16] = small
    quadrant = _randint(4, len(x), draw)
    jitter = _randint(5, 2 * len(x), draw).reshape(2, -1) - 2
    return _rolled(canvas, 16 * (quadrant // 2) + jitter[0], 16 * (quadrant % 2) + jitter[1]), y, quadrant


def digit(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    return quadrants(x, y, draw)[:2]


def digit_and_quadrant(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    x, y, quadrant = quadrants(x, y, draw)
    return x, y + 10 * quadrant


def ink(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    """How much ink there is, wherever it is."""
    x, _, _ = quadrants(x, y, draw)
    return x, x.sum((1, 2, 3))[:, None]


def height(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    """How high the ink is in the picture."""
    x, _, _ = quadrants(x, y, draw)
    rows = torch.linspace(-1, 1, x.shape[2])
    return x, ((x.sum((1, 3)) * rows).sum(1) / x.sum((1, 2, 3)))[:, None]


def regular(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    return datasets.resized(x, 32), y


def shifted(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    """Anywhere on the torus."""
    move = _randint(32, 2 * len(x), draw).reshape(2, -1)
    return _rolled(datasets.resized(x, 32), *move), y


def turned(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    """By quarter turns."""
    return _turned(datasets.resized(x, 32), _randint(4, len(x), draw)), y


def upright_or_turned(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    """By quarter turns; which digit, and is it upright or upside down rather than on its side?"""
    turns = _randint(4, len(x), draw)
    return _turned(datasets.resized(x, 32), turns), y + 10 * (turns % 2)


def mirrored(x: Tensor, y: Tensor, draw: torch.Generator, dim: int = 3) -> Pair:
    """Half of the images, left to right (3) or upside down (2)."""
    return _mirrored(datasets.resized(x, 32), _randint(2, len(x), draw), dim), y


def mirrored_vertically(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    return mirrored(x, y, draw, 2)


def digit_and_mirrored(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    """Which digit, and is it mirrored?"""
    flip = _randint(2, len(x), draw)
    return _mirrored(datasets.resized(x, 32), flip, 3), y + 10 * flip


def class_and_upside_down(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    """Which class, and is it mirrored upside down?"""
    flip = _randint(2, len(x), draw)
    return _mirrored(datasets.resized(x, 32), flip, 2), y + 10 * flip


def sixes_and_nines_apart(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    """All digits by half turns but sixes and nines, which stay upright: a half turn makes a nine of a six."""
    turns = 2 * _randint(2, len(x), draw) * ((y != 6) & (y != 9))
    return _turned(datasets.resized(x, 32), turns), y


def sixes_and_nines_merged(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    """All digits by half turns, and sixes and nines are one class."""
    return _turned(datasets.resized(x, 32), 2 * _randint(2, len(x), draw)), torch.where(y == 9, 6, y)


def pairs_by_themselves(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    """Two digits in opposite corners, each turned by itself; which one is above, which below? A half turn swaps them."""
    first, second, canvas = _pairs(x, y, draw, by_themselves=True)
    return canvas, FEW_DIGITS * first + second


def pairs_together(x: Tensor, y: Tensor, draw: torch.Generator) -> Pair:
    """Two digits in opposite corners, the whole picture turned; which two?"""
    first, second, canvas = _pairs(x, y, draw, by_themselves=False)
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    kinds = torch.zeros(FEW_DIGITS, FEW_DIGITS, dtype=torch.long)
    kinds[tuple(torch.triu_indices(FEW_DIGITS, FEW_DIGITS))] = torch.arange(FEW_DIGITS * (FEW_DIGITS + 1) // 2)
    return canvas, kinds[low, high]


def _pairs(x: Tensor, y: Tensor, draw: torch.Generator, by_themselves: bool) -> tuple[Tensor, Tensor, Tensor]:
    few = (y < FEW_DIGITS).nonzero()[:, 0]
    first, second = (few[_randint(len(few), len(x), draw)] for _ in range(2))
    turns = _randint(4, 3 * len(x), draw).reshape(3, -1)
    canvas = torch.zeros(len(x), x.shape[1], 32, 32)
    for chosen, turn, place in ((first, turns[0], slice(0, 16)), (second, turns[1], slice(16, 32))):
        small = datasets.resized(x[chosen], 16)
        canvas[..., place, place] = _turned(small, turn) if by_themselves else small
    return y[first], y[second], canvas if by_themselves else _turned(canvas, turns[2])


def _randint(most: int, count: int, draw: torch.Generator) -> Tensor:
    return torch.randint(most, (count,), generator=draw)


def _rolled(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Around the torus, each image by its own numbers of rows and columns."""
    rows = (torch.arange(x.shape[2]) - down[:, None]) % x.shape[2]
    columns = (torch.arange(x.shape[3]) - right[:, None]) % x.shape[3]
    return x[torch.arange(len(x))[:, None, None], :, rows[:, :, None], columns[:, None]].movedim(3, 1)


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Each square image by its own number of quarter turns."""
    every = torch.stack([torch.rot90(x, k, (2, 3)) for k in range(4)])
    return every[turns % 4, torch.arange(len(x))]


def _mirrored(x: Tensor, flip: Tensor, dim: int) -> Tensor:
    return torch.where(flip[:, None, None, None] == 1, x.flip(dim), x)


TASKS = {
    "digit": Task("mnist", 10, {"translations": True}, digit),
    "digit-quadrant": Task("mnist", 40, {"translations": False}, digit_and_quadrant),
    "shifted": Task("mnist", 10, {"translations": True}, shifted),
    "ink": Task("mnist", 0, {"translations": True}, ink),
    "height": Task("mnist", 0, {"translations": False}, height),
    "turned": Task("mnist", 10, {"c4": True}, turned),
    "turned-side": Task("mnist", 20, {"c4": False}, upright_or_turned),
    "mirrored": Task("mnist", 10, {"flip-horizontal": True}, mirrored),
    "mirrored-which": Task("mnist", 20, {"flip-horizontal": False}, digit_and_mirrored),
    "six-nine-apart": Task("mnist", 10, {"c2": False}, sixes_and_nines_apart),
    "six-nine-merged": Task("mnist", 10, {"c2": True}, sixes_and_nines_merged),
    "pairs-by-themselves": Task("mnist", FEW_DIGITS**2, {"c4": False}, pairs_by_themselves),
    "pairs-together": Task("mnist", FEW_DIGITS * (FEW_DIGITS + 1) // 2, {"c4": True}, pairs_together),
    "cifar-mirrored": Task("cifar10", 10, {"flip-horizontal": True}, mirrored),
    "cifar-upside-down": Task("cifar10", 10, {"flip-vertical": True}, mirrored_vertically),
    "cifar-which-side-up": Task("cifar10", 20, {"flip-vertical": False}, class_and_upside_down),
    "cifar-turned": Task("cifar10", 10, {"c4": True}, turned),
    "mnist": Task("mnist", 10, {"translations": None, "c4": None}, regular),
    "cifar": Task("cifar10", 10, {"flip-horizontal": None, "c4": None}, regular),
}


def tensors(name: str, images: int, seed: int, folder: Path | None) -> tuple[Pair, Pair]:
    """Training and test pairs of a task, standardised by the training part, numbers too; other images and draws for each seed."""
    task = TASKS[name]
    (x, y), (x_test, y_test) = (datasets.cifar10 if task.source == "cifar10" else datasets.mnist)(folder, download=False)
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(x), generator=draw)[:images]
    train = task.make(datasets.as_floats(x[chosen]), y[chosen], draw)
    test = task.make(datasets.as_floats(x_test), y_test, draw)
    statistics = train[0].mean((0, 2, 3)).tolist(), train[0].std((0, 2, 3)).tolist()
    if not task.classes:
        middle, size = train[1].mean(), train[1].std()
        train, test = ((x, (y - middle) / size) for x, y in (train, test))
    return (datasets.normalised(train[0], *statistics), train[1]), (datasets.normalised(test[0], *statistics), test[1])
