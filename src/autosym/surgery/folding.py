"""Batch normalisation merged into the layer before it: for eval-mode statistics both are one affine map.

    s (W x + b - mean) / sqrt(var + eps) + t  =  (s' W) x + s' (b - mean) + t          s' = s / sqrt(var + eps)

In a model of ``lift`` the normalisation is by field, and so are the rows of the weights and the biases that it scales.
"""

from collections.abc import Collection

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from autosym.linear.dense import Bias
from autosym.linear.normalisation import BATCH
from autosym.linear.path import Path
from autosym.nn.layers import Affine, Relaxed
from autosym.nn.sampling import Downsample
from autosym.surgery.checking import replace
from autosym.surgery.observation import LAYERS, Observation


def fold(model: nn.Module, norm: _BatchNorm, seen: Observation, held: Collection[nn.Module]) -> str:
    """Merge the normalisation into the layer directly before it; or why it was not merged."""
    if norm in held or type(norm) not in BATCH:
        return "it is named in keep" if norm in held else f"it is a {type(norm).__name__}"
    before = seen.of(norm).after
    by_field = before if isinstance(before, nn.Unflatten) else None
    before = before if by_field is None else seen.of(by_field).after
    if isinstance(before, Downsample):
        return "which grid was kept before it depends on the scale of each channel"
    known = (*LAYERS, Relaxed) if by_field is None else (Relaxed,)  # an Unflatten of the user's own makes other channels
    if not isinstance(before, known) or type(before) not in known:
        return "no dense layer or convolution comes directly before it"
    if before in held:
        return "the layer before it is named in keep"
    if seen.of(norm).calls != 1 or seen.of(before).calls != 1:
        return "it, or the layer before it, is used more than once"
    if isinstance(before, Relaxed):
        if (why := _into_path(before, norm, by_field, seen)) != "":
            return why
    else:
        fuse = fuse_linear_bn_weights if isinstance(before, nn.Linear) else fuse_conv_bn_weights
        statistics = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
        before.weight, before.bias = fuse(before.weight, before.bias, *statistics)  # type: ignore
        before.bias.requires_grad_(before.weight.requires_grad)  # also a new bias
    replace(model, norm, nn.Identity())
    return ""


@torch.no_grad()
def _into_path(layer: Relaxed, norm: _BatchNorm, by_field: nn.Unflatten | None, seen: Observation) -> str:
    """Merge into a layer of a lifted model, which is one path; or why not."""
    ((name, branch),) = layer.items()
    own = branch.linear if isinstance(branch, Affine) else branch
    assert isinstance(own, Path)
    fields, order = own.weight.shape[0] * own.weight.shape[1], len(layer.lifted) if layer.lifted else 1
    found = (fields, order) if by_field is None else tuple(by_field.unflattened_size)
    if found != (fields, order) or norm.num_features != fields:
        return "it does not normalise by field"
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps) * (1 if norm.weight is None else norm.weight)
    shift = (0 if norm.bias is None else norm.bias) - norm.running_mean * scale
    own.weight.mul_(scale.view(*own.weight.shape[:2], 1))
    if isinstance(branch, Affine):
        bias = branch.bias
        bias.weight.mul_(scale.view_as(bias.weight))
    else:
        shape = (fields,) if layer.lifted is None else (fields, order, *seen.of(layer).out_shape[1:])
        bias = Bias((fields, *(1 for _ in shape[1:])), shape).to(own.weight)
        bias.weight.requires_grad_(own.weight.requires_grad)
        layer[name] = Affine(own, bias).train(branch.training)
    bias.weight.add_(shift.view_as(bias.weight))
    return ""
