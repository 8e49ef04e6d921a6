"""A wider copy of a user's CNN: every layer between the image and the outputs has ``factor`` times the channels, with new weights.

    conv: C -> C'   becomes   factor C -> factor C'          (the first keeps its inputs, the last its outputs)

Whether it still runs is tried on an example; a network that reads its own numbers of channels may not.
"""

import copy

import torch
from torch import Tensor, nn

from autosym.surgery.observation import is_subclass

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def widened(model: nn.Module, example: Tensor, factor: int) -> nn.Module:
    """The wider network, initialised anew by torch's random numbers. A ValueError says why there is none."""
    made = copy.deepcopy(model)
    kinds = (nn.Conv2d, nn.Linear)
    layers = [m for m in _in_order(made, example[:2]) if isinstance(m, kinds)]
    if not layers or any(is_subclass(m) for m in layers):
        raise ValueError("it has no plain Conv2d or Linear layers to widen: give a factory, width -> module, in place of the model")
    for module in made.modules():
        if type(module) in kinds:
            _widen(module, factor, module is layers[0], module is layers[-1])
        elif isinstance(module, NORMS):
            module.__init__(factor * module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)  # type: ignore[misc]
        elif type(module) is nn.GroupNorm:
            module.__init__(module.num_groups, factor * module.num_channels, module.eps, module.affine)  # type: ignore[misc]
    made.to(example).train(model.training)
    try:
        with torch.no_grad():
            wide, given = made(example[:2]), model(example[:2])
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"it does not run with {factor} times the channels ({str(error).splitlines()[0]}): give a factory, width -> module, in "
            "place of the model"
        ) from error
    if wide.shape != given.shape:
        raise ValueError(f"with {factor} times the channels its outputs are {tuple(wide.shape)}: give a factory, width -> module")
    return made


def anew(model: nn.Module) -> nn.Module:
    """A copy with new weights, by torch's random numbers."""
    made = copy.deepcopy(model)
    for module in made.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return made


def _in_order(model: nn.Module, example: Tensor) -> list[nn.Module]:
    """The layers without children in the order of the forward pass."""
    seen: list[nn.Module] = []
    handles = [m.register_forward_pre_hook(lambda m, _: seen.append(m)) for m in model.modules() if not list(m.children())]
    try:
        with torch.no_grad():
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _widen(module: nn.Module, factor: int, first: bool, last: bool) -> None:
    inside, outside = 1 if first else factor, 1 if last else factor
    if isinstance(module, nn.Linear):
        module.__init__(inside * module.in_features, outside * module.out_features, module.bias is not None)  # type: ignore[misc]
        return
    assert isinstance(module, nn.Conv2d)
    groups = module.groups * factor if module.groups == module.in_channels > 1 and not first else module.groups
    form = (module.kernel_size, module.stride, module.padding, module.dilation, groups, module.bias is not None, module.padding_mode)
    module.__init__(inside * module.in_channels, outside * module.out_channels, *form)  # type: ignore[misc]
