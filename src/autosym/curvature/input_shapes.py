"""Inputs whose axes are not those that a network takes: an error that says what is there, what is expected, and the code that mends it."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autosym.linear.conv import CONVOLUTIONS, Conv
from autosym.nn.layers import Relaxed

AXES = {1: "L", 2: "H, W", 3: "D, H, W"}  # of maps, by their number


@contextmanager
def explained(model: Any, x: Any) -> Iterator[None]:
    """What fails inside because the axes of ``x`` are wrong for ``model`` fails with ``misshapen``; other errors stay as they are."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        if why := misshapen(model, x, failing=True):
            raise ValueError(why) from error
        raise


def misshapen(model: Any, x: Any, failing: bool = False) -> str:
    """What is wrong with the axes of inputs ``x``, if the first convolution of ``model`` sees them as they are, or nothing.

    If ``failing``, nothing as well where the model takes them. It is a copy that is run: a forward pass may change a model.
    """
    if not isinstance(model, nn.Module) or not isinstance(x, Tensor):
        return ""
    seen, failed = _first_seen(model, x)
    if seen is None or seen[2] != x.shape or (failing and not failed):  # a model may add axes itself
        return ""
    name, conv, shape = seen
    mend = mended(shape, len(conv.kernel_size), conv.in_channels)
    expected = f"(B, {conv.in_channels}, {AXES[len(conv.kernel_size)]})"
    return mend and f"inputs are {tuple(shape)}, but {name}, which sees them first, expects {expected}: {mend}"


def mended(shape: Sequence[int], dims: int = 2, channels: int | None = None) -> str:
    """How inputs ``x`` of this ``shape`` become a batch of maps (B, ``channels``, ...) with ``dims`` axes; nothing if they are one."""
    missing = dims + 2 - len(shape)
    if missing == 0 and channels in (None, shape[1]):
        return ""
    if missing == 0 and shape[-1] == channels:
        return "their channels are last; use x.movedim(-1, 1)"
    if missing == 0:
        return f"give inputs with {channels} channels, or a model that takes {shape[1]}"
    if missing == 1 and channels == shape[0]:
        return "this is one sample; give a batch, x[:2] in place of x[0], or x[None]"
    if missing == 1 and channels in (None, 1):
        return "they have no channel axis; use x[:, None]"
    if missing == 1:
        return "an axis is missing; use x[None] if that of the batch, x[:, None] if that of the channels"
    if len(shape) == 2:
        return f"use x[None, None] for one map, x.reshape(-1, {channels or 'C'}, {AXES[dims]}) for flattened ones"
    return "give them these axes"


@torch.no_grad()
def _first_seen(model: nn.Module, x: Tensor) -> tuple[tuple[str, Any, torch.Size] | None, bool]:
    """The first convolution that a forward pass of a copy reaches, with the shape it sees; and whether the pass failed."""
    seen: list[tuple[str, Any, torch.Size]] = []

    def note(name: str, conv: nn.Module) -> Any:
        return lambda module, args: seen.append((f"{name or 'the model'} ({type(module).__name__})", conv, args[0].shape))

    try:
        tried = copy.deepcopy(model).eval()
        for name, module in tried.named_modules():
            convs = [part for part in module.modules() if type(part) in CONVOLUTIONS or isinstance(part, Conv)]
            if convs and (module is convs[0] or isinstance(module, Relaxed)):
                module.register_forward_pre_hook(note(name, convs[0]))
        x = x.to(next(tried.parameters()))
    except Exception:  # not every model can be copied
        return None, False
    failed = False
    with torch.random.fork_rng(devices=[]):
        try:
            tried(x)
        except Exception:
            failed = True
    return (seen[0] if seen else None), failed
