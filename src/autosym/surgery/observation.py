"""What one forward pass shows about a user's model: the inputs and outputs of every layer, and which flat inputs were maps."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autosym.linear.conv import CONVOLUTIONS
from autosym.nn.layers import Relaxed

LAYERS = (nn.Linear, *CONVOLUTIONS)
FLATTENING = ("flatten", "reshape", "view")


@dataclass
class Seen:
    """The calls of one module; shapes leave out the batch axis."""

    calls: int = 0
    by_sample: bool = True  # one positional tensor whose first axis is the batch
    in_shape: tuple[int, ...] = ()
    out_shape: tuple[int, ...] = ()
    x: Tensor | None = None  # the input of a convolution, of a dense layer on maps with channels last, and of subclasses
    flat: tuple[int, ...] = ()  # the shape of the input before it was flattened, if seen
    maps: tuple[int, ...] = ()  # the same (C, ...), if C is known to count the channels of a convolution
    last: bool = False  # whether the input is maps (..., C) with the channels last, as far as the convolution before it shows
    convolved: bool = False  # whether a convolution came before
    after: nn.Module | None = None  # the layer whose output is the input, unchanged


class _Flattened(TorchFunctionMode):
    """Remembers tensors (B, C, ...) that a module or a function flattened, and whether axes were ever permuted."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
        self.permuted = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.permuted |= any(_is_permuted(x, result) for x in args)
        if getattr(func, "__name__", "") in FLATTENING and isinstance(result, Tensor) and result.dim() == 2:
            x = args[0] if args and isinstance(args[0], Tensor) else result
            if x.dim() > 2 and len(x) == len(result):
                self.maps[result.data_ptr()] = (result, tuple(x.shape[1:]))  # kept, so that its memory is not reused
        return result


def is_subclass(module: nn.Module) -> bool:
    """Whether the module is a Linear or a convolution that may compute something else than torch's."""
    return isinstance(module, LAYERS) and type(module) not in LAYERS


def _is_permuted(x: Any, y: Any) -> bool:
    """Whether y is a view of x with its axes in another order, whatever function made it."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x is y or x.data_ptr() != y.data_ptr():
        return False
    a, b = ([axis for axis in zip(t.shape, t.stride(), strict=True) if axis[0] > 1] for t in (x, y))
    return a != b and sorted(a) == sorted(b)


@dataclass
class Observation:
    """What was seen of each module; ``outputs`` are the model's outputs."""

    outputs: Any = None
    modules: dict[nn.Module, Seen] = field(default_factory=dict)

    def of(self, module: nn.Module) -> Seen:
        return self.modules.get(module, Seen())


@torch.no_grad()
def observe(model: nn.Module, example: Tensor) -> Observation:
    """Run ``model`` once on ``example``, without gradients."""
    seen = Observation()
    kept: list[Tensor] = []  # while tensors live, their addresses tell them apart
    producers: dict[int, nn.Module] = {}
    flattened = _Flattened()
    convolution: tuple[int, ...] = ()

    def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        nonlocal convolution
        record = seen.modules.setdefault(module, Seen())
        record.calls += 1
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or not isinstance(output, Tensor) or x.dim() == 0 or len(x) != len(example):
            record.by_sample = False
            return
        record.in_shape, record.out_shape = tuple(x.shape[1:]), tuple(output.shape[1:])
        record.after, record.convolved = producers.get(id(x)), bool(convolution)
        if x.dim() == 2 and x.data_ptr() in flattened.maps:
            maps = record.flat = flattened.maps[x.data_ptr()][1]
            # Maps need the channels of a convolution: tokens (T, D) have none. If axes were permuted and another axis is as long
            # as the channels, it is unknown which one the channels are.
            known = len(maps) == len(convolution) and maps[0] == convolution[0]
            record.maps = maps if known and not (flattened.permuted and maps.count(maps[0]) > 1) else ()
        maps_out = isinstance(module, (*CONVOLUTIONS, Relaxed))
        if maps_out and len(record.out_shape) > 1:
            convolution = record.out_shape
        if isinstance(module, nn.Linear):
            record.last = flattened.permuted and _is_last(record.in_shape, convolution)
        if maps_out or is_subclass(module) or record.last:
            record.x = x.clone()  # later layers may change it in place
        kept.extend((x, output))
        if not list(module.children()) or isinstance(module, Relaxed):
            producers[id(output)] = module

    with _hooks(model, hook), flattened:
        seen.outputs = model(example)
    return seen


def _is_last(shape: tuple[int, ...], convolution: tuple[int, ...]) -> bool:
    """Whether maps (C, ...) of the last convolution are now (..., C'). It is unknown if a position axis is as long as the channels."""
    return len(convolution) > 1 and shape[:-1] == convolution[1:] and convolution[0] not in convolution[1:]


@contextmanager
def _hooks(model: nn.Module, hook: Any) -> Iterator[None]:
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
