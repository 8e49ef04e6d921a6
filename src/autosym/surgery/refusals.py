"""What ``relax`` refuses before any work: models, examples and options that cannot become a relaxed model."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from autosym.curvature.input_shapes import explained, misshapen
from autosym.curvature.owners import check_parameter
from autosym.linear.path import Path
from autosym.nn.layers import Relaxed
from autosym.runtime.batching import check_module
from autosym.surgery.free_paths import FREE
from autosym.surgery.observation import LAYERS, Observation, observe


def refuse(model: nn.Module, example: Tensor, paths: str | Mapping[str, str], keep: Sequence[str]) -> None:
    """Refuse, before any work, what cannot become a relaxed model."""
    check_module(model)
    if not isinstance(example, Tensor) or not example.is_floating_point() or example.dim() < 2:
        raise ValueError("example must be one tensor of floating point numbers: a small batch (B, ...) of the model's inputs")
    if not isinstance(paths, (str, Mapping)):
        raise TypeError(
            f"paths is {paths!r}: name the free path of all convolutions ({', '.join(FREE)}), or give a dict from layers to paths"
        )
    if not len(example) or not torch.isfinite(example).all():
        raise ValueError("example is empty, or not finite (NaN or Inf): take a few valid samples of the inputs, (B, ...)")
    lifted = hasattr(model, "lifting")  # its layers are autosym's paths
    if hasattr(model, "relaxation") or (not lifted and any(isinstance(module, Path) for module in model.modules())):
        raise ValueError(
            "the model already has an attribute relaxation, or autosym paths: relax the plain model, or a lifted one"
        )
    names = dict(model.named_modules())
    named = tuple(paths) if isinstance(paths, Mapping) else ()
    able = (*LAYERS, Relaxed)
    unknown = [n for n in keep if n not in names] + [n for n in named if not isinstance(names.get(n), able)]
    if unknown:
        layers = ", ".join(name for name, module in names.items() if isinstance(module, able))
        raise ValueError(f"the model has no such module, or not one to relax: {', '.join(unknown)}; its layers are {layers}")
    for name, module in names.items():
        kind = f"{name} ({type(module).__name__})"
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise ValueError(f"{kind} has no weights yet: run the model once on an example before relaxing it")
        if type(module).__module__.startswith(("torch.ao.nn", "torch.nn.quantized")):
            raise ValueError(f"{kind} is quantised: relax the model as it was before quantisation")
        if parametrize.is_parametrized(module) or (type(module) in LAYERS and "weight" not in module._parameters):
            raise ValueError(
                f"{kind} is parametrised (weight_norm, spectral_norm, ...), so its weight is not a parameter of its own: first call "
                "torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm or remove_spectral_norm"
            )
    owners: dict[int, str] = {}
    for name, module in names.items():
        for part, parameter in module.named_parameters(recurse=False):
            check_parameter(f"{name}.{part}".lstrip("."), parameter, owners)
    if not owners:
        raise ValueError("the model has no parameters, so there is nothing to fit")


def observed(model: nn.Module, example: Tensor) -> Observation:
    """What one forward pass shows. Refuses models that do not take the example, or do not return finite (B, outputs)."""
    try:
        with explained(model, example):
            seen = observe(model, example)
    except RuntimeError as error:
        raise ValueError(
            f"the model does not take the example, {tuple(example.shape)}: give a small batch (B, ...) of its inputs, or one sample as "
            f"sample[None]; torch says: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(seen.outputs, Tensor) or seen.outputs.dim() != 2 or len(seen.outputs) != len(example):
        shape = tuple(seen.outputs.shape) if isinstance(seen.outputs, Tensor) else type(seen.outputs).__name__
        raise ValueError(
            misshapen(model, example)
            or f"the model must return (B, outputs) for a batch of {len(example)}, got {shape}: relax the part of it that does (or is "
            "example one sample instead of a batch?)"
        )
    if not torch.isfinite(seen.outputs).all():
        raise ValueError(
            f"the outputs of the model on the example are not finite (NaN or Inf): they overflow {seen.outputs.dtype}; rescale the "
            "inputs, or use the model in float64"
        )
    return seen
