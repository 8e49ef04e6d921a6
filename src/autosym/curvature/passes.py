"""The pass over data that every evidence estimator makes: which samples, how many at a time, which noise, which data."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.curvature.verification import Verified
from autosym.runtime import processes
from autosym.runtime.batching import Data, Numbered, check_loader, check_seen, size_of, to_model


class Pass:
    """All samples of ``data`` once, as ``model`` takes them: in parts that fit into memory, checked, counted and fingerprinted.

        for x, y, record, places in shown:      record: take curvature from this part?  places: its indices among all samples
            shown.add(model(x), y)
        shown.finish()                          then samples, used, outputs, statistic, fingerprint and classes_seen are known

    ``verify`` finds out, from two samples, how many bytes one needs. A part holds as many samples as fit into ``memory`` (GiB),
    and at most ``batch_size``. Curvature is taken from ``subset`` samples (default: all). ``sampled`` draws noise by ``seed``, in place
    of all columns of the output Hessian's root but the ``largest`` of each sample, as many as that says.
    Each process takes its part of the samples, unless ``alone``.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        likelihood: Likelihood,
        batch_size: int | None = None,
        verify: Callable[[Tensor], Verified] | None = None,
        *,
        memory: float | None = None,
        subset: int | None = None,
        sampled: bool = False,
        largest: int = 0,
        seed: int = 0,
        alone: bool = False,
        allow_partial: bool = False,
    ):
        check_loader(data, allow_partial)
        self.model, self.data, self.likelihood, self.allow_partial = model, data, likelihood, allow_partial
        self.device = next(model.parameters()).device
        self.chosen, self.signs = choose(subset, size_of(data), seed), Signs(seed) if sampled else None
        self.largest = largest
        self.verify, self.memory, self.parts = verify, memory, 1 if alone else shares(data)
        batch_size = (8192 if self.device.type == "cuda" else 256) if batch_size is None else batch_size
        self.stream = Numbered(data, batch_size, processes.rank() % self.parts, self.parts)
        self.samples = self.used = self.outputs = self.classes_seen = 0
        self.exchangeable = False
        self.labels: Tensor | None = None  # which classes were seen (K,), if permuting outputs permutes classes
        self.statistic = torch.zeros((), dtype=torch.float64, device=self.device)
        self.fingerprint = torch.zeros(5, dtype=torch.float64, device=self.device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, bool, Tensor]]:
        limit = 2**31
        for x, y, places in self.stream:
            x, y = to_model(x, y, self.model, f"samples {places[0]} to {places[-1]}")
            if not self.samples and self.verify is not None:
                found = self.verify(x[:2])
                limit = max(1, int(min(budget(self.memory, self.device) / found.bytes_per_sample, limit)))
                self.exchangeable = found.exchangeable
            self.samples += len(x)
            self.fingerprint += fingerprint(x, y)
            mask = None if self.chosen is None else self.chosen[places % len(self.chosen)]
            for x_part, y_part, record, rows in split(x, y, mask, limit):
                self.used += len(rows) if record else 0
                yield x_part, y_part, record, places[rows]
        if not self.used and self.parts > 1:
            raise ValueError(
                f"no sample is left for process {processes.rank()} of {self.parts}: use fewer processes, or a larger subset"
            )

    def check(self, f: Tensor, y: Tensor) -> None:
        """Refuse targets and outputs that the likelihood does not accept."""
        self.likelihood.check(f.shape[1], y)
        if not self.outputs:
            self.likelihood.check_outputs(f, self.model)
            relabels = likelihoods.relabels(self.likelihood, f.shape[1])
            self.labels = self.statistic.new_zeros(max(f.shape[1], 2)) if relabels else None
        self.outputs = f.shape[1]

    def add(self, f: Tensor, y: Tensor) -> None:
        """Add the likelihood's statistic of one part with outputs f (B, outputs) and targets y."""
        self.check(f, y)
        self.statistic = self.statistic + self.likelihood.statistic(f, y).double()
        if self.labels is not None and y.numel() == len(y):
            self.labels += torch.isin(torch.arange(len(self.labels), device=y.device), y.detach().flatten().long())

    def columns(self, f: Tensor, places: Tensor) -> Sequence[Tensor]:
        """The columns (B, outputs) of the root of the output Hessian at f; if ``sampled``, one random combination of most of them.

        The order of a sample's columns does not matter, as curvature is the sum over all.
        """
        roots = self.likelihood.root(f)
        if self.signs is None:
            return roots.unbind(2)
        if self.largest:
            order = roots.square().sum(1).argsort(dim=1, descending=True, stable=True)
            roots = roots.gather(2, order[:, None, :].expand_as(roots))
        rest = roots[:, :, self.largest :]
        if not rest.shape[2]:
            return roots.unbind(2)
        return [
            *roots[:, :, : self.largest].unbind(2),
            (rest @ self.signs(places, rest.shape[2]).to(roots)[:, :, None])[:, :, 0],
        ]

    def finish(self, *others: Tensor) -> None:
        """Add up the sums of all processes in place, ``others`` included. Refuse data unless each sample was shown once."""
        if self.parts > 1:
            seen = self.stream.seen
            own = [self.samples, self.used, seen, not self.exchangeable]
            counts = torch.tensor(own, dtype=torch.float64, device=self.device)
            labels = [] if self.labels is None else [self.labels]
            processes.add(counts, self.statistic, self.fingerprint, *labels, *others)
            self.samples, self.used, total, unlike = (int(n) for n in counts)
            self.exchangeable = not unlike
            if total != processes.count() * seen:
                raise ValueError(
                    f"process {processes.rank()} was shown {seen} samples, all {processes.count()} together {total}: "
                    "the counts differ (an extra batch in one?); give every process the same data, each takes its own part"
                )
        check_seen(self.samples, self.data, self.allow_partial)
        self.statistic, self.fingerprint = self.statistic.cpu(), self.fingerprint.cpu()
        if self.labels is not None and self.exchangeable:
            self.classes_seen = int((self.labels > 0).sum())


def columns_within(model: nn.Module, data: Data, likelihood: Likelihood, rest: float, **options: Any) -> int | None:
    """The least number of largest columns, of each sample, beyond which all others have at most the part ``rest`` of the trace.

    None if these are most of them: then all may as well be taken. It takes one forward pass over the data. ``options`` are those of
    ``Pass``.
    """
    shown, sizes = Pass(model, data, likelihood, **options), None
    with processes.agreeing(), torch.no_grad():
        for x, y, _, _ in shown:
            f = model(x)
            shown.check(f, y)
            own = likelihood.root(f).square().sum(1).sort(1, descending=True).values.double().sum(0)
            sizes = own if sizes is None else sizes + own
    assert sizes is not None, "a pass without a sample is refused"
    shown.finish(sizes)
    beyond = sizes.sum() - sizes.cumsum(0)
    needed = int((beyond > rest * sizes.sum()).sum()) + 1
    return needed if 2 * needed <= len(sizes) else None


TARGETS = slice(0, 2)  # the sums of a fingerprint over targets only


def fingerprint(x: Tensor, y: Tensor) -> Tensor:
    """Sums over samples that tell data sets apart: targets y and y^2, inputs x and x^2, and x y.

    Here x is a sample's mean, weighted by position, so that a flip of the image changes it too.
    """
    flat = x.detach().flatten(1)
    weights = (1 + torch.arange(flat.shape[1], dtype=torch.float64, device=x.device).cos()) / flat.shape[1]
    mean = torch.cat([part.double() @ weights for part in flat.split(max(1, 2**22 // flat.shape[1]))])
    target = y.detach().double().reshape(len(y), -1)
    parts = (target.sum(), target.square().sum(), mean.sum(), mean.square().sum(), (mean * target.sum(1)).sum())
    return torch.stack(parts)


def alike(one: Tensor | None, other: Tensor | None, part: slice = slice(None), rtol: float = 1e-5, atol: float = 1e-5) -> bool:
    """Whether two fingerprints may come from the same data. A missing one (None) matches anything.

    They are equal up to rounding, also between float32 and float64. ``part`` compares some sums only, e.g. TARGETS.
    """
    return one is None or other is None or torch.allclose(one[part], other[part], rtol=rtol, atol=atol)


def shares(data: Data) -> int:
    """The number of parts that the samples are divided into: one per process, or 1 (each takes all) if samples are too few."""
    return processes.count() if (size_of(data) or math.inf) >= processes.count() else 1


def split(x: Tensor, y: Tensor, mask: Tensor | None, limit: int) -> Iterator[tuple[Tensor, Tensor, bool, Tensor]]:
    """Parts (x, y, record, rows) of at most ``limit`` samples: first those to take curvature from (True), then the rest."""
    chosen = mask if mask is not None else torch.ones(len(x), dtype=torch.bool, device="cpu")
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
    """Independent signs, one row per place in the stream. They do not depend on batches or processes.

    Places must be asked for in ascending order.
    """

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
