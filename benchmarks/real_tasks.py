"""The tasks of real.py: images and sequences, and whether shifts keep their labels, as an expert says before any run."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from autosym.papers import datasets
from autosym.runtime.batching import Augment

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """``symmetric`` is the answer an expert gives, before any run: does the label stay the same when the input is shifted?

    Below the accuracy before by more than ``allowance`` points, a cell counts as worse.
    """

    symmetric: bool
    classes: int = 10
    channels: int = 1
    allowance: float = 0.3


TASKS = {
    "digit": Task(True),  # MNIST in one of four quadrants; which digit?
    "place": Task(False, 40),  # the same images; which digit, in which quadrant?
    "mnist": Task(True),  # here and in rotated all digits are centred: shifts keep the label, but the data do not show them
    "rotated": Task(True),
    "translated": Task(True),
    "cifar10": Task(True, channels=3),
    "cifar10-augmented": Task(True, channels=3, allowance=1.0),  # flipped and shifted in training and in fit
    "shape": Task(True, 3),  # a bump of one of three shapes in noise; which shape?
    "shape-place": Task(False, 6),  # which shape, in which half?
    "embedded-digit": Task(True),  # the small version: scikit-learn's digits in quadrants
}


@dataclass(frozen=True)
class Cell:
    """One run: a network on so many training samples of a task, the seed of everything, and the free paths that relax adds."""

    network: str
    task: str
    images: int
    seed: int = 0
    width: int | None = None
    paths: str = "f-fc"

    @property
    def name(self) -> str:
        """As the file of its result is called."""
        paths = "" if self.paths == "f-fc" else f"-{self.paths.replace(':', '')}"
        return f"{self.network}-{self.task}-{self.images}-{self.seed}{paths}"

    @property
    def augment(self) -> Augment | None:
        return datasets.flip_and_crop if "augmented" in self.task else None

    @property
    def batch_size(self) -> int:
        return min(128, max(8, self.images // 20))

    @property
    def plain_epochs(self) -> int:
        """About as many steps for every number of images, and three times as many on CIFAR-10, which is harder."""
        return max(4, min(40, 120_000 // self.images)) * (3 if "cifar10" in self.task else 1)


def tensors(cell: Cell, folder: Path | None) -> tuple[Pair, Pair]:
    """Training and test pairs, standardised by the training part, channel by channel."""
    if cell.network == "sequence":
        parts = [sequences(cell.task, count, 2 * cell.seed + part) for part, count in enumerate((cell.images, 2000))]
    else:
        parts = [images(cell.task, *pair, 2 * cell.seed + part) for part, pair in enumerate(_raw(cell, folder))]
    pixels = parts[0][0].numpy()  # NumPy's sums do not depend on the number of threads, so that another machine can go on
    axes = (0, *range(2, pixels.ndim))
    statistics = pixels.mean(axes).tolist(), pixels.std(axes).tolist()
    (x, y), (x_test, y_test) = parts
    return (datasets.normalised(x, *statistics), y), (datasets.normalised(x_test, *statistics), y_test)


def _raw(cell: Cell, folder: Path | None) -> list[Pair]:
    """Training and test images as they come, as many for training as the cell has."""
    if "embedded" in cell.task:
        x, y = datasets.digits()
        train, test = datasets.split(len(x), len(x) - cell.images, cell.seed)
        return [(x[train], y[train]), (x[test], y[test])]
    (x, y), test_pair = (datasets.cifar10 if "cifar10" in cell.task else datasets.mnist)(folder, download=False)
    return [(x[: cell.images], y[: cell.images]), test_pair]


def images(task: str, x: Tensor, y: Tensor, seed: int) -> Pair:
    """Images as the task shows them, and its labels."""
    if "embedded" in task:
        x, quadrant = datasets.in_quadrants(x, 1, seed)
    elif task in ("digit", "place"):
        x, quadrant = datasets.quadrants(datasets.as_floats(x), seed)
    elif "cifar10" in task:
        x = datasets.as_floats(x)
    else:
        x = datasets.CHANGES.get(task, datasets.CHANGES["regular"])(datasets.resized(datasets.as_floats(x)), seed)
    return x, y + 10 * quadrant if "place" in task else y


def sequences(task: str, count: int, seed: int, length: int = 64) -> Pair:
    """A bump, its slope or its curvature, at a random place in noise: (count, 1, length)."""
    draw = torch.Generator().manual_seed(seed)
    kind, centre = torch.randint(3, (count,), generator=draw), torch.randint(12, length - 12, (count,), generator=draw)
    u = (torch.arange(length) - centre[:, None]) / 4
    shapes = torch.stack([torch.ones_like(u), 1.6 * u, 1 - 2 * u**2]) * torch.exp(-(u**2))
    size = 0.7 + 0.6 * torch.rand(count, 1, generator=draw)
    x = size * shapes[kind, torch.arange(count)] + 0.25 * torch.randn(count, length, generator=draw)
    return x[:, None], kind + 3 * (centre >= length / 2) if "place" in task else kind
