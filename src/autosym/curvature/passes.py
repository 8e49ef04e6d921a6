"""What every pass over data shares: which samples, how many at a time, whose noise, and a fingerprint of the data."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from autosym.runtime import processes
from autosym.runtime.batching import Data, size_of


def fingerprint(x: Tensor, y: Tensor) -> Tensor:
    """Sums over samples that tell data sets apart: of targets y and y^2, of inputs x and x^2, and of x y.

    x is a sample's mean, weighted by place: a flip of the image changes it too.
    """
    flat = x.detach().flatten(1)
    weights = (1 + torch.arange(flat.shape[1], dtype=torch.float64, device=x.device).cos()) / flat.shape[1]
    mean = torch.cat([part.double() @ weights for part in flat.split(max(1, 2**22 // flat.shape[1]))])
    target = y.detach().double().reshape(len(y), -1)
    parts = (target.sum(), target.square().sum(), mean.sum(), mean.square().sum(), (mean * target.sum(1)).sum())
    return torch.stack(parts)


def shares(data: Data) -> int:
    """Among how many processes the samples are shared out: all, or, if there are fewer samples, none (each takes all)."""
    return processes.count() if (size_of(data) or math.inf) >= processes.count() else 1


def split(x: Tensor, y: Tensor, mask: Tensor | None, limit: int) -> Iterator[tuple[Tensor, Tensor, bool, Tensor]]:
    """The samples of a batch to take curvature from (True), then the rest (False), at most ``limit`` at a time, and their rows."""
    chosen = mask if mask is not None else torch.ones(len(x), dtype=torch.bool)
    for part, record in ((chosen, True), (~chosen, False)):
        for rows in part.nonzero().flatten().split(limit) if part.any() else ():
            whole = len(rows) == len(x)
            yield (x, y, record, rows) if whole else (x[rows.to(x.device)], y[rows.to(y.device)], record, rows)


def budget(memory: float | None, device: torch.device) -> float:
    """Bytes for the activations of one batch."""
    if memory is not None:
        if not memory > 0:
            raise ValueError(f"memory is in GiB and must be positive, got {memory}")
        return memory * 2**30
    return min(torch.cuda.mem_get_info(device)[0] / 2, 16 * 2**30) if device.type == "cuda" else 2 * 2**30


def choose(subset: int | None, size: int | None, seed: int) -> Tensor | None:
    """Which samples of the stream to use: None for all, else a mask of ``subset`` of ``size``."""
    if subset is None:
        return None
    if size is None:
        raise ValueError("subset needs data whose length is known: pass tensors, a dataset, or a loader of one")
    if not 0 < subset <= size:
        raise ValueError(f"subset must be between 1 and the {size} samples of the data, got {subset}")
    mask = torch.zeros(size, dtype=torch.bool)
    mask[torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:subset]] = True
    return mask


class Signs:
    """Independent signs, one row for each place in the stream, whatever the batches and processes; asked for in ascending order."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.block, self.end = torch.empty(0), 0  # the last rows drawn, and the place after them

    def __call__(self, places: Tensor, width: int) -> Tensor:
        kept = []
        while len(places):
            here = int((places < self.end).sum())
            if here:
                kept.append(self.block[places[:here] - self.end])
            places = places[here:]
            if len(places):
                self.block, self.end = 2 * torch.randint(2, (1024, width), generator=self.generator) - 1, self.end + 1024
        return torch.cat(kept)


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether fingerprints are equal up to rounding, of a model in float32 beside one in float64 too."""
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)
