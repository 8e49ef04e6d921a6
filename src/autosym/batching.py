"""Tensors, datasets and loaders as one stream of batches that counts what it shows."""

from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeGuard

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

Data = tuple[Tensor, Tensor] | Dataset | Iterable[Any]


def size_of(data: Data) -> int | None:
    """How many samples the data say they have; None where they do not say."""
    if _is_pair(data):
        return len(data[0])
    source = data if isinstance(data, Dataset) else getattr(data, "dataset", None)
    return len(source) if isinstance(source, Sized) else None


def batches(data: Data, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets) in order. A loader keeps its own batches; ``batch_size`` is for tensors and datasets."""
    if _is_pair(data):
        inputs, targets = data
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs but {len(targets)} targets")
        data = TensorDataset(inputs, targets)
    if isinstance(data, TensorDataset):  # whole slices, not one sample at a time
        for start in range(0, len(data), batch_size):
            yield data[start : start + batch_size]
        return
    for batch in DataLoader(data, batch_size) if isinstance(data, Dataset) else data:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
            raise TypeError(f"each batch must be a pair (inputs, targets) of tensors, got {type(batch).__name__}")
        yield batch[0], batch[1]


def check_seen(seen: int, data: Data, allow_partial: bool) -> None:
    """Refuse a stream that showed nothing, or not what the dataset has (``drop_last``, a sampler that skips)."""
    if seen == 0:
        raise ValueError("the data are empty: no batch held a sample")
    size = size_of(data)
    if size is not None and seen != size and not allow_partial:
        raise ValueError(
            f"the loader showed {seen} of the {size} samples of its dataset (drop_last, or a sampler?): the evidence would be "
            "that of other data; set drop_last=False, or allow_partial=True for the evidence of the samples seen"
        )


def _is_pair(data: Data) -> TypeGuard[tuple[Tensor, Tensor]]:
    return isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)
