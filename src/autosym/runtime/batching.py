"""Tensors, datasets and loaders as one stream of batches that counts what it shows."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeGuard

import torch
from torch import Generator, Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset, WeightedRandomSampler

Data = tuple[Tensor, Tensor] | Dataset | Iterable[Any]


def is_pair(data: Data) -> TypeGuard[tuple[Tensor, Tensor]]:
    """Whether the data are two tensors, inputs and targets."""
    return isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)


def tensors_of(data: Data) -> tuple[Tensor, Tensor] | None:
    """Inputs and targets of all samples, where the data hold them as two tensors; else None."""
    if is_pair(data):
        return data
    return (data.tensors[0], data.tensors[1]) if type(data) is TensorDataset and len(data.tensors) == 2 else None


def targets_of(data: Data) -> Tensor:
    """The targets of all samples."""
    tensors = tensors_of(data)
    return torch.cat([y for _, y in batches(data, 256)]) if tensors is None else tensors[1]


def size_of(data: Data) -> int | None:
    """How many samples the data say they have; None if they do not say."""
    if is_pair(data):
        return len(data[0])
    source = data if isinstance(data, Dataset) else getattr(data, "dataset", None)
    return len(source) if isinstance(source, Sized) else None


def batches(data: Data, batch_size: int, shuffle: Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets), in order or shuffled. A loader keeps its own batches and order, whatever the arguments."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    if isinstance(data, Tensor):
        raise TypeError("the data are one tensor, without targets: give a pair (inputs, targets)")
    if is_pair(data):
        inputs, targets = data
        _check_lengths(inputs, targets)
        data = TensorDataset(inputs, targets)
    if type(data) is TensorDataset and len(data.tensors) == 2:  # whole batches, not one sample at a time
        inputs, targets = data.tensors
        if shuffle is None:
            for start in range(0, len(data), batch_size):  # copies, which a model may change in place
                yield inputs[start : start + batch_size].clone(), targets[start : start + batch_size].clone()
            return
        order = torch.randperm(len(data), generator=shuffle)
        for rows in order.split(batch_size) if len(data) else ():
            yield inputs[rows.to(inputs.device)], targets[rows.to(targets.device)]
        return
    if isinstance(data, Dataset):
        shuffled = shuffle is not None and not isinstance(data, IterableDataset)
        data = DataLoader(data, batch_size, shuffle=shuffled, generator=shuffle or Generator())
    if isinstance(data, (tuple, list)) and len(data) == 2 and any(isinstance(part, Tensor) for part in data):
        kinds = ", ".join(type(part).__name__ for part in data)
        raise TypeError(f"data must be a pair of tensors, inputs and targets, got ({kinds}): use torch.as_tensor for the other")
    for batch in data:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
            raise TypeError(
                f"each batch must be a pair (inputs, targets) of tensors, got {type(batch).__name__}: use torch.as_tensor for arrays"
            )
        inputs, targets = batch
        _check_lengths(inputs, targets, "a batch holds ")
        if len(inputs):
            yield inputs, targets


class Numbered:
    """(inputs, targets, their places among all samples), in order, of every ``parts``-th sample from ``part`` on.

    A loader that shows every process another part, padded by repeating samples, is read as its dataset: each sample counts once.
    ``seen`` counts all samples read, those of other parts included.
    """

    def __init__(self, data: Data, batch_size: int, part: int = 0, parts: int = 1):
        self.data = data.dataset if parts > 1 and is_sharded(data) else data  # type: ignore[union-attr]
        self.batch_size, self.part, self.parts, self.seen = batch_size, part, parts, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for x, y in batches(self.data, self.parts * self.batch_size):
            own = slice((self.part - self.seen) % self.parts, None, self.parts)
            places = torch.arange(self.seen, self.seen + len(x))[own]
            self.seen += len(x)
            if len(places):
                yield x[own], y[own], places


def is_sharded(data: Data) -> bool:
    """Whether a loader shows each process a part of its own (a DistributedSampler, or what accelerate makes of a loader)."""
    shards = type(getattr(data, "batch_sampler", None)).__name__ == "BatchSamplerShard"
    return shards or isinstance(getattr(data, "sampler", None), DistributedSampler)


def all_finite(t: Tensor) -> bool:
    """Whether no value is NaN or Inf. A finite sum is proof enough."""
    return bool(torch.isfinite(t.sum())) or bool(torch.isfinite(t).all())


def rows_not_finite(t: Tensor) -> list[int]:
    """The rows of a tensor (N, ...) that hold a NaN or an Inf."""
    finite = not t.is_floating_point() or all_finite(t)
    return [] if finite else (~torch.isfinite(t).reshape(len(t), -1).all(1)).nonzero().flatten().tolist()


def check_finite(t: Tensor, what: str, where: str = "") -> None:
    """Refuse rows that hold a NaN or an Inf, by their numbers."""
    if rows := rows_not_finite(t):
        raise ValueError(f"{what} are not finite (NaN or Inf) in rows {rows[:5]}{where}: drop or mend them")


def to_model(x: Tensor, y: Tensor, model: nn.Module, which: str) -> tuple[Tensor, Tensor]:
    """A batch on the device and in the precision of the model, if its values can be used."""
    if not x.is_floating_point():
        raise ValueError(
            f"inputs are {x.dtype}: convert them to floating point{' (bytes: x / 255)' if x.dtype == torch.uint8 else ''}"
        )
    check_finite(x, f"the inputs of {which}", " of that batch")
    check_finite(y, f"the targets of {which}", " of that batch")
    parameter = next(model.parameters())
    y = y.to(parameter) if y.is_floating_point() else y.to(parameter.device)
    return x.to(parameter), y


def check_module(model: object) -> None:
    """Refuse anything but a model (a Fit, say), and say what to give."""
    if isinstance(model, nn.Module):
        return
    if isinstance(model, type):
        raise TypeError(f"the model is the class {model.__name__}: make one of it, {model.__name__}(...)")
    how = "give its model, by .model" if hasattr(model, "model") else "give a torch module"
    raise TypeError(f"the model is a {type(model).__name__}, not a torch module: {how}")


def _check_lengths(inputs: Tensor, targets: Tensor, where: str = "") -> None:
    if not inputs.dim() or not targets.dim():
        raise ValueError(
            f"inputs are {tuple(inputs.shape)} and targets {tuple(targets.shape)}, without an axis of samples: give all samples, x and y "
            "in place of x[0] and y[0]; one alone is x[None] and y[None]"
        )
    if len(inputs) != len(targets):
        raise ValueError(f"{where}{len(inputs)} inputs but {len(targets)} targets")


def check_repeatable(*data: Data | None) -> None:
    """Refuse data that can be read only once."""
    if any(hasattr(one, "__next__") for one in data):
        raise ValueError("the data are an iterator, which can be read only once: pass a list of batches, a dataset or a loader")


def check_loader(data: Data, allow_partial: bool = False) -> None:
    """Refuse, before any work, a loader that will not show each sample of its dataset once."""
    if allow_partial:
        return
    sampler, size = getattr(data, "sampler", None), size_of(data)
    if isinstance(sampler, WeightedRandomSampler) or getattr(sampler, "replacement", False):
        raise ValueError(
            f"the loader's sampler ({type(sampler).__name__}) draws with replacement, so it repeats some samples and skips "
            "others: use one that shows each once; to train with it, give fit the same samples without it as evidence_data"
        )
    left = 1 if size is None else size % (getattr(data, "batch_size", None) or 1)
    if getattr(data, "drop_last", False) and left:
        raise ValueError(
            "the loader has drop_last=True, so samples will be missing from the evidence: set drop_last=False; to train with it, give "
            "fit the same samples without it as evidence_data; log_evidence takes allow_partial=True for those seen"
        )


def check_seen(seen: int, data: Data, allow_partial: bool = False) -> None:
    """Refuse a stream that showed nothing, or not as many samples as its dataset has."""
    if seen == 0:
        raise ValueError("the data are empty: no batch held a sample")
    size = size_of(data)
    if size is not None and seen != size and not allow_partial:
        raise ValueError(
            f"the loader showed {seen} of the {size} samples of its dataset (drop_last, or a sampler?): the evidence would be "
            "that of other data; set drop_last=False and show each once, or (log_evidence) allow_partial=True for those seen"
        )


def checksum(data: Data) -> int | None:
    """A checksum of tensors, in their order: a resumed run needs the same. None if the data are not tensors."""
    tensors = data if is_pair(data) else data.tensors if type(data) is TensorDataset else ()
    found = 0
    for tensor in tensors:
        found = zlib.crc32(raw(tensor), found)
    return found if tensors else None


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in order. Its strides may be any: ``contiguous`` alone leaves those of axes of length 1."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


Augment = Callable[[Tensor, Generator], Tensor]


class Stream:
    """Training batches on the device and in the precision of a model, epoch after epoch: shuffled, checked, augmented.

    Tensors are moved there once, if they fit, and checked once; other data batch by batch. ``check`` refuses wrong targets. ``augment``
    gets inputs on the device and a generator there. With ``parts`` processes each takes every ``parts``-th sample of a batch, from ``part``
    on, unless its loader already shows it a part of its own. ``shown`` counts the samples of all processes before the present batch.
    """

    def __init__(
        self,
        data: Data,
        batch_size: int,
        model: nn.Module,
        check: Callable[[Tensor], None],
        seed: int,
        augment: Augment | None = None,
        part: int = 0,
        parts: int = 1,
    ):
        self.data, self.batch_size, self.model, self.check, self.augment = data, batch_size, model, check, augment
        self.own, self.parts, self.shown = slice(part, None, parts), parts, 0
        self.shuffle = Generator().manual_seed(seed)
        self.noise = Generator(next(model.parameters()).device).manual_seed(seed + 1)  # not the draws of the shuffle
        self.resident: tuple[Tensor, Tensor] | None = None
        tensors = tensors_of(data)
        if tensors is not None and _fits(tensors, self.noise.device):
            _check_lengths(*tensors)
            check(tensors[1])
            x, y = to_model(*tensors, model, "the data")
            self.resident = (x, y)
            self.data = self.resident

    @property
    def together(self) -> int:
        """How many samples all processes together take at a step: the loader's batch size, if it has one."""
        own = getattr(self.data, "batch_size", None) or self.batch_size
        return own * self.parts if self.parts > 1 and is_sharded(self.data) else own

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of one epoch."""
        self.shown = 0
        sharded = self.parts > 1 and is_sharded(self.data)
        if sharded and isinstance(sampler := getattr(self.data, "sampler", None), DistributedSampler):
            sampler.set_epoch(number)
        own, times = (slice(None), self.parts) if sharded else (self.own, 1)
        for x, y in self._read(number) if self.resident is None else self._gather(*self.resident):
            yield x[own], y[own]
            self.shown += times * len(x)

    def _read(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in batches(self.data, self.batch_size, self.shuffle):
            self.check(y)
            x, y = to_model(x, y, self.model, f"a batch of epoch {number}")
            yield x if self.augment is None else self.augment(x.clone(), self.noise), y

    def _gather(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(x), generator=self.shuffle).to(x.device)
        for rows in order.split(32 * self.batch_size):  # gathered and augmented many batches at a time
            inputs, targets = x[rows], y[rows]
            if self.augment is not None:
                inputs = self.augment(inputs, self.noise)
            yield from zip(inputs.split(self.batch_size), targets.split(self.batch_size), strict=True)


def _fits(tensors: tuple[Tensor, ...], device: torch.device) -> bool:
    """Whether tensors may stay on a device: they are there already, or take less than a quarter of its free memory."""
    if device.type != "cuda" or all(t.device == device for t in tensors):
        return True
    return 4 * sum(t.numel() * max(t.element_size(), 4) for t in tensors) < torch.cuda.mem_get_info(device)[0]
