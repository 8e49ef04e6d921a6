"""Subclasses of torch's layers as the torch layers that they compute: what ``lift`` sees of them.

    conv(x)  =  W * pad(x) + b                    weight-standardised convolutions, and those that pad by themselves (``reading``)
    norm(x)  =  children(norm of torch (x))       normalisation with an activation inside, each checked in both modes

A subclass that computes anything else stays as it is.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from autosym.surgery.checking import replace, same
from autosym.surgery.reading import read

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)
KINDS = (nn.Linear, nn.Conv2d, *NORMS)
SAMPLES = 4  # random ones: more than one, as batch normalisation needs for training


def plain_layers(model: nn.Module, example: Tensor) -> nn.Module:
    """A copy of the model with torch's own layers in place of their subclasses; the model itself if it has none."""
    if not any(is_subclass(module) for module in model.modules()):
        return model
    copied = copy.deepcopy(model)
    training = {module: module.training for module in copied.modules()}
    copied.eval()
    for module, x in _inputs(copied, example).items():
        made = _plain_norm(module, x) if isinstance(module, NORMS) else _plain_linear(module, x)
        if made is not None:
            training.update(dict.fromkeys(made.modules(), training[module]))
            replace(copied, module, made)
    for module in copied.modules():
        module.training = training[module]
    return copied


def is_subclass(module: nn.Module) -> bool:
    """Whether the module is a layer that lift knows, but may compute something else than torch's."""
    return isinstance(module, KINDS) and type(module) not in KINDS


@torch.no_grad()
def _inputs(model: nn.Module, example: Tensor) -> dict[nn.Module, Tensor]:
    """What every subclass is called with, if that is one tensor. A model that does not take the example is refused elsewhere."""
    found: dict[nn.Module, Tensor] = {}

    def see(module: nn.Module, args: tuple) -> None:
        if len(args) == 1 and isinstance(args[0], Tensor):
            found[module] = args[0].clone()  # later layers may change it in place

    handles = [module.register_forward_pre_hook(see) for module in model.modules() if is_subclass(module)]
    try:
        model(example)
    except RuntimeError:
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return found


def _plain_linear(layer: nn.Module, x: Tensor) -> nn.Module | None:
    """A dense layer or convolution; padding that differs by side is a layer of its own, as torch's convolutions have none."""
    found = read(layer, x)
    conv: Any = found.layer
    if conv is None or found.runs:
        return conv
    if conv.padding_mode != "zeros":
        return None
    pad = nn.ZeroPad2d(tuple(conv._reversed_padding_repeated_twice))
    conv.padding, conv._reversed_padding_repeated_twice = (0, 0), [0, 0, 0, 0]
    return nn.Sequential(pad, conv)


@torch.no_grad()
def _plain_norm(norm: Any, x: Tensor) -> nn.Module | None:
    """torch's normalisation, then the children of the subclass in their order, if that is what it computes, in both modes."""
    made: Any
    if isinstance(norm, nn.GroupNorm):
        made = nn.GroupNorm(norm.num_groups, norm.num_channels, norm.eps, norm.affine)
    else:
        kind = nn.BatchNorm2d if isinstance(norm, nn.BatchNorm2d) else nn.BatchNorm1d
        made = kind(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    made.to(x)
    own = {**dict(norm.named_parameters(recurse=False)), **dict(norm.named_buffers(recurse=False))}
    if own.keys() != made.state_dict().keys():
        return None
    made.load_state_dict(own)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(own[name].requires_grad)
    children = [child for child in norm.children() if not isinstance(child, nn.Identity)]
    whole = nn.Sequential(made, *children) if children else made
    return whole if all(_same_layer(norm, whole, x, training) for training in (False, True)) else None


def _same_layer(norm: nn.Module, whole: nn.Module, x: Tensor, training: bool) -> bool:
    """Whether both give the same outputs for random numbers, and keep the same statistics."""
    drawn = torch.randn(SAMPLES, *x.shape[1:], generator=torch.Generator().manual_seed(0)).to(x)
    outputs, statistics = [], []
    for layer in map(copy.deepcopy, (norm, whole)):
        with torch.random.fork_rng():
            torch.manual_seed(0)  # of dropout
            outputs.append(layer.train(training)(drawn.clone()))
        statistics.append([buffer for buffer in layer.buffers() if buffer.is_floating_point()])
    return same(*outputs) and all(same(a, b) for a, b in zip(*statistics, strict=True))
