"""A relaxed model computes what the given one did: checked on the example, and before anybody fits it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autosym.curvature.owners import sites
from autosym.curvature.verification import verify
from autosym.linear.path import Path
from autosym.nn.layers import Relaxed
from autosym.surgery.observation import observe

ROUNDING = (
    1000  # in units of the precision of outputs: models, or layers, whose outputs differ by more compute different functions
)


@dataclass(frozen=True)
class OfSize:
    """A hook before a model's forward(): it takes inputs of one size only, as layers were made for that."""

    size: tuple[int, ...]
    made: str

    def __call__(self, module: nn.Module, args: tuple) -> None:
        found = tuple(args[0].shape[2:]) if args and isinstance(args[0], Tensor) else self.size
        if found != self.size:
            sizes = ["x".join(map(str, size)) for size in (self.size, found)]
            raise ValueError(
                f"this model was {self.made} for inputs of {sizes[0]}, got {sizes[1]}: resize them, or make it for that size"
            )


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace the layer under every name it has: a model may hold it both by itself and in a Sequential."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new


def same(after: Tensor, before: Tensor) -> bool:
    """Whether two outputs are equal up to rounding."""
    tolerance = ROUNDING * torch.finfo(before.dtype).eps * before.abs().max() + 1e-12
    return after.shape == before.shape and bool((after - before).abs().max() <= tolerance)


def check(relaxed: nn.Module, example: Tensor, before: Tensor) -> None:
    """Check that the function is the same, that every relaxed layer is used, and that the evidence covers it."""
    if not any(parameter.requires_grad for parameter in relaxed.parameters()):
        raise ValueError(f"no layer is left to fit:\n{relaxed.relaxation}")
    try:
        seen = observe(relaxed, example)
    except Exception as error:
        raise ValueError(
            f"the relaxed model cannot run ({type(error).__name__}: {error}): if forward() reads attributes of a layer, name that "
            "layer in keep"
        ) from error
    for name, module in relaxed.named_modules():
        if isinstance(module, Relaxed) and not all(seen.of(leaf).calls for leaf in module.modules() if isinstance(leaf, Path)):
            raise ValueError(f"{name} was relaxed, but forward() does not call it by that name: name it in keep")
    if not same(seen.outputs, before):
        raise ValueError(
            "the relaxed model computes another function: with fold=True, a layer's output is used by more than its "
            "normalisation; otherwise forward() uses a layer in a way that relax cannot see: name that layer in keep"
        )
    verify(relaxed, example[:2], owned=sites(relaxed))
