"""What the tensors of a forward pass are made of: the image, fields over a group, or numbers that no symmetry moves.

A mode follows every function that ``forward`` calls, so that residuals, concatenation and flattening need no modules of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

IMAGE, FIELDS, INVARIANT, MIXED = "the image", "fields", "invariant", "fields beside something that is not"
JOINING = ("cat", "concat", "concatenate", "hstack")
RESIZING = ("max_pool2d", "avg_pool2d", "lp_pool2d", "interpolate", "adaptive_avg_pool2d", "adaptive_max_pool2d")


@dataclass(frozen=True)
class Trace:
    """What one tensor is, and how many ``channels`` the maps have, or had before they were flattened.

    ``convs`` are the last convolutions before it; ``denses`` the dense layers since the last map.
    """

    kind: str
    channels: int
    convs: frozenset[nn.Module] = frozenset()
    denses: frozenset[nn.Module] = frozenset()


class Flow(TorchFunctionMode):
    """Follows tensors from the image on. Layers that change what a tensor is ``mark`` their output."""

    def __init__(self, image: Tensor):
        super().__init__()
        self.known: dict[int, tuple[Tensor, Trace]] = {}  # tensors are kept, so that no other takes their id
        self.gates: set[nn.Module] = set()  # dense layers whose outputs become maps again, e.g. of squeeze-and-excitation
        self.functions: list[str] = []  # what resizes maps in forward() itself, where no module can be replaced
        self.inside = 0  # calls of modules that may resize
        self.mark(image, Trace(IMAGE, image.shape[1]))

    def mark(self, x: Tensor, trace: Trace) -> None:
        self.known[id(x)] = (x, trace)

    def of(self, x: Tensor) -> Trace | None:
        """None for a tensor that does not depend on the image."""
        found = self.known.get(id(x))
        return None if found is None else found[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in RESIZING and not self.inside and name not in self.functions:
            self.functions.append(name)
        inputs = [(x, trace) for x in _tensors((args, kwargs)) if (trace := self.of(x)) is not None]
        joined = _joined(inputs) if name in JOINING else None
        for y in _tensors(result) if inputs else ():
            merged = self._merged([trace for _, trace in inputs], y)
            self.mark(y, merged if joined is None or y.dim() == 4 else replace(merged, channels=joined))
        return result

    def _merged(self, traces: list[Trace], y: Tensor) -> Trace:
        kinds = {trace.kind for trace in traces}
        convs, denses = (frozenset().union(*sets) for sets in zip(*((t.convs, t.denses) for t in traces), strict=True))
        kind = kinds.pop() if len(kinds) == 1 else INVARIANT if kinds == {IMAGE, INVARIANT} else MIXED
        merged = Trace(kind, max(trace.channels for trace in traces), convs, denses)
        if y.dim() != 4:
            return merged
        self.gates |= denses
        return replace(merged, channels=y.shape[1], denses=frozenset())


def _joined(inputs: list[tuple[Tensor, Trace]]) -> int | None:
    """How many channels flattened maps have that are joined along them; None if their numbers of positions differ."""
    positions = {x[0].numel() / trace.channels for x, trace in inputs}
    return sum(trace.channels for _, trace in inputs) if len(positions) == 1 else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
