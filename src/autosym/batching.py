"""Tensors, datasets and loaders as one stream of batches that counts what it shows."""

from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeGuard

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

Data = tuple[Tensor, Tensor] | Dataset | Iterable[Any]


def is_pair(data: Data) -> TypeGuard[tuple[Tensor, Tensor]]:
    """Whether the data are two tensors, inputs and targets."""
    return isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)


def size_of(data: Data) -> int | None:
    """How many samples the data say they have; None where they do not say."""
    if is_pair(data):
        return len(data[0])
    source = data if isinstance(data, Dataset) else getattr(data, "dataset", None)
    return len(source) if isinstance(source, Sized) else None


def batches(data: Data, batch_size: int, shuffle: Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets), in order or shuffled. A loader keeps its own batches and order: both arguments are for the others."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    if is_pair(data):
        inputs, targets = data
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs but {len(targets)} targets")
        data = TensorDataset(inputs, targets)
    if type(data) is TensorDataset and len(data.tensors) == 2:  # whole batches, not one sample at a time
        inputs, targets = data.tensors
        order = torch.arange(len(data)) if shuffle is None else torch.randperm(len(data), generator=shuffle)
        for rows in order.split(batch_size) if len(data) else ():
            yield inputs[rows.to(inputs.device)], targets[rows.to(targets.device)]
        return
    if isinstance(data, Dataset):
        shuffled = shuffle is not None and not isinstance(data, IterableDataset)
        data = DataLoader(data, batch_size, shuffle=shuffled, generator=shuffle or Generator())
    for batch in data:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
            raise TypeError(f"each batch must be a pair (inputs, targets) of tensors, got {type(batch).__name__}")
        inputs, targets = batch
        if len(inputs) != len(targets):
            raise ValueError(f"a batch holds {len(inputs)} inputs but {len(targets)} targets")
        if len(inputs):
            yield inputs, targets


def check_loader(data: Data, allow_partial: bool = False) -> None:
    """Refuse, before any work, a loader that will not show each sample of its dataset once."""
    if allow_partial:
        return
    sampler, size = getattr(data, "sampler", None), size_of(data)
    if isinstance(sampler, WeightedRandomSampler) or getattr(sampler, "replacement", False):
        raise ValueError(
            f"the loader's sampler ({type(sampler).__name__}) draws with replacement, so it repeats some samples and skips "
            "others: use one that shows each once, or allow_partial=True for the evidence of the samples drawn"
        )
    left = 1 if size is None else size % (getattr(data, "batch_size", None) or 1)
    if getattr(data, "drop_last", False) and left:
        raise ValueError(
            "the loader has drop_last=True, so samples will be missing from the evidence: set drop_last=False (in fit, give such "
            "a loader as evidence_data), or allow_partial=True for the evidence of the samples seen"
        )


def check_seen(seen: int, data: Data, allow_partial: bool = False) -> None:
    """Refuse a stream that showed nothing, or not as many samples as its dataset has."""
    if seen == 0:
        raise ValueError("the data are empty: no batch held a sample")
    size = size_of(data)
    if size is not None and seen != size and not allow_partial:
        raise ValueError(
            f"the loader showed {seen} of the {size} samples of its dataset (drop_last, or a sampler?): the evidence would be "
            "that of other data; set drop_last=False, or allow_partial=True for the evidence of the samples seen"
        )
