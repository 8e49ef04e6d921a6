"""Scales and shifts of torch's normalisation layers, as paths: y = scale * xhat + shift.

xhat is the normalised input. BatchNorm (in eval mode) normalises by its running statistics, LayerNorm and GroupNorm by those of the
sample itself, so no sample depends on its batchmates. The shift is a ``Bias``. The scale has one column and S = K = 1, like a bias,
so both blocks are exact.

The prior of a scale is centred at zero, as all priors here are, though scales start at one. A prior centred at one would fit most
trained scales better, but one has no meaning: where an activation such as ReLU and a linear layer follow, a scale and shift of any
other size, with the next weights rescaled, compute the same function. Zero is the only fixed centre at which the evidence, with learned
precisions, does not see that.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from autosym.linear.path import Tangents

BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NORMALISATIONS = (*BATCH, nn.LayerNorm, nn.GroupNorm)  # these, and not their subclasses, which may compute something else
WIDEST = 4096  # numbers in a scale or a shift: its exact block has the square of that


class Scale(Tangents):
    """The scale of a normalisation layer, whose derivative is xhat. ``shape`` broadcasts to one sample of it."""

    def __init__(self, normalised: Tensor, shape: tuple[int, ...]):
        super().__init__(normalised)
        self.shape = shape

    def rows(self, g: Tensor) -> Tensor:
        return (g * self.tangents).sum_to_size(len(g), *self.shape).reshape(len(g), 1, 1, -1)


def normalised(module: nn.Module, x: Tensor) -> Tensor:
    """xhat: the output of the layer with a scale of one and a shift of zero."""
    if isinstance(module, BATCH):
        return F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)
    assert isinstance(module, nn.GroupNorm)
    return F.group_norm(x, module.num_groups, eps=module.eps)


def affine_shape(module: nn.Module, x: Tensor) -> tuple[int, ...]:
    """The shape of scale and shift beside one sample of x: by channel, or for LayerNorm of its last axes."""
    if isinstance(module, nn.LayerNorm):
        own = tuple(module.normalized_shape)
        return (1,) * (x.dim() - 1 - len(own)) + own
    return (x.shape[1],) + (1,) * (x.dim() - 2)


def too_wide(module: nn.Module) -> bool:
    """Whether the exact blocks of scale and shift would be too large."""
    return any(parameter.numel() > WIDEST for parameter in module.parameters(recurse=False))
