"""Some of the samples, where all of them take longer than ``minutes``.

    place of a sample = its rank in its class / size of the class          ranks: by a hash of the sample, as good as a lot

The first ``count`` by place are drawn. So every class has its part, and one sample at least; larger draws contain smaller ones, and the
draw depends on the samples alone: not on their order, which a loader may shuffle, nor on the process.
"""

import hashlib
import math
from collections import Counter
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from autosym.runtime.batching import Data, batches, is_sharded, raw
from autosym.training.schedule import Schedule

LEAST = (200, 10)  # samples to draw at least: of all, and for each class there is
MEASURED = 600  # samples by which times are measured, at most
STEPS = 8  # of the weights in an epoch at least, by smaller batches if need be
BATCH = 256


def shortened(schedule: Schedule, samples: int, count: int) -> Schedule:
    """The schedule for ``count`` of ``samples``, with as many steps of the weights."""
    batch = min(schedule.batch_size, max(STEPS, count // STEPS))
    steps = schedule.epochs * math.ceil(samples / schedule.batch_size)
    return replace(schedule, batch_size=batch, epochs=math.ceil(steps / math.ceil(count / batch)))


def said(count: int, samples: int, seconds: float) -> str:
    """That not all samples were used, and why; nothing if all were."""
    limit = "1 minute" if seconds == 60 else f"{seconds / 60:g} minutes"
    return (
        f"{count:,} of {samples:,} samples were used, to stay within {limit}: more minutes use more" if count < samples else ""
    )


class Draw:
    """Draws from ``data``, by class if targets are of so many ``classes``. The largest one so far is held in memory."""

    def __init__(self, data: Data, classes: int | None):
        self.data, self.classes = data.dataset if is_sharded(data) else data, classes  # type: ignore[union-attr]
        self.held: tuple[Tensor, Tensor] | None = None

    @cached_property
    def order(self) -> list[bytes]:
        """The hashes of all samples, the first to be drawn first."""
        known = [one for x, y in batches(self.data, BATCH) for one in zip(_hashes(x, y), _labels(y, self.classes), strict=True)]
        sizes, ranks, places = Counter(label for _, label in known), Counter[float](), []
        for name, label in sorted(known):
            places.append((ranks[label] / sizes[label], name))
            ranks[label] += 1
        return [name for _, name in sorted(places)]

    def least(self, samples: int) -> int:
        """The fewest of ``samples`` to draw."""
        return min(samples, max(LEAST[0], LEAST[1] * (self.classes or 0)))

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """The first ``count`` samples, as tensors."""
        if self.held is None or len(self.held[0]) < count:
            self.held = self._read(count)
        x, y = self.held
        return x[:count].clone(), y[:count].clone()

    def _read(self, count: int) -> tuple[Tensor, Tensor]:
        places: dict[bytes, list[int]] = {}
        for place, name in enumerate(self.order[:count]):
            places.setdefault(name, []).append(place)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for x, y in batches(self.data, BATCH):
            for row, name in enumerate(_hashes(x, y)):
                if places.get(name):  # samples that are equal have several
                    found[places[name].pop(0)] = x[row], y[row]
        if len(found) < count:
            raise ValueError(
                "the data are not the same when they are read again, so some of them cannot be drawn: leave random changes to augment="
            )
        chosen = [found[place] for place in range(count)]
        return torch.stack([x for x, _ in chosen]), torch.stack([y for _, y in chosen])


def _hashes(x: Tensor, y: Tensor) -> list[bytes]:
    return [hashlib.blake2b(bytes(raw(a)) + bytes(raw(b)), digest_size=16).digest() for a, b in zip(x, y, strict=True)]


def _labels(y: Tensor, classes: int | None) -> list[float]:
    return [0.0] * len(y) if classes is None else y.reshape(len(y), -1)[:, 0].tolist()
