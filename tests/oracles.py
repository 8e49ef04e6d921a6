"""Slow, dense and obviously right, in float64: what the fast code is compared with."""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev, vmap

from autosym.curvature.kronecker import Curvature
from autosym.linear.conv import Conv
from autosym.linear.group_conv import GroupConv
from autosym.linear.groups import Group


def negative_log_likelihood(likelihood: str, sigma_noise: float = 1.0):
    """-log p(y | f) of one sample, as a function of (f, y), up to a constant in f."""
    if likelihood == "categorical":
        return lambda f, y: f.logsumexp(-1) - f.gather(-1, y[None])[0]
    if likelihood == "poisson":
        return lambda f, y: (f.exp() - y * f).sum()
    return lambda f, y: (f - y).square().sum() / (2 * sigma_noise**2)


def block_ggn(model: nn.Module, name: str, x: Tensor, y: Tensor, likelihood: str) -> Tensor:
    """sum_n J_n^T Lambda_n J_n of one parameter: (P, P), with every cross term."""
    parameter = dict(model.named_parameters())[name].detach()
    f = model(x).detach()
    jacobian = jacrev(lambda p: functional_call(model, {name: p}, (x,)))(parameter).reshape(*f.shape, -1)
    output_hessian = vmap(hessian(negative_log_likelihood(likelihood)))(f, y)
    return torch.einsum("ncp,ncd,ndq->pq", jacobian, output_hessian, jacobian).detach()


def whole_ggn(
    model: nn.Module, names: Sequence[str], x: Tensor, y: Tensor, log_prob: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """sum_n J_n^T Lambda_n J_n of all named parameters in a row: (P, P). ``log_prob`` is of outputs (1, D) and targets (1, ...)."""
    parameters = {name: dict(model.named_parameters())[name].detach() for name in names}
    f = model(x).detach()
    found = jacrev(lambda p: functional_call(model, p, (x,)))(parameters)
    jacobian = torch.cat([found[name].reshape(*f.shape, -1) for name in names], -1)
    output_hessian = vmap(hessian(lambda f, y: -log_prob(f[None], y[None])))(f, y)
    return torch.einsum("ncp,ncd,ndq->pq", jacobian, output_hessian, jacobian).detach()


def blocks(matrix: Tensor, count: int) -> Tensor:
    """The ``count`` diagonal blocks of a (P, P) matrix: (count, P / count, P / count)."""
    size = len(matrix) // count
    return torch.stack([matrix[k * size : (k + 1) * size, k * size : (k + 1) * size] for k in range(count)])


def kron_blocks(curvature: Curvature, name: str) -> Tensor:
    """kron(G_k, A_k) of every block of a path: (K, out * in, out * in)."""
    factors = curvature.factors[name]
    return torch.stack([torch.kron(G, A) for A, G in zip(factors.A, factors.G, strict=True)])


def patch(path: Conv, image: Tensor, position: tuple[int, ...]) -> Tensor:
    """What the filters see at one output position: (C, height, width), pixel by pixel, with its own idea of padding."""
    size, before = image.shape[1:], path.padding[-2::-2]  # the first axis first
    seen = torch.zeros(len(image), *path.kernel_size, dtype=image.dtype)
    for offset in itertools.product(*map(range, path.kernel_size)):
        axes = zip(position, path.stride, offset, path.dilation, before, strict=True)
        place = [p * s + u * d - b for p, s, u, d, b in axes]
        if path.padding_mode == "circular":
            place = [p % n for p, n in zip(place, size, strict=True)]
        if all(0 <= p < n for p, n in zip(place, size, strict=True)):
            seen[(slice(None), *offset)] = image[(slice(None), *place)]
    return seen


def expand_factors(path: Conv, inputs: Tensor, cotangents: Tensor) -> tuple[Tensor, Tensor]:
    """KFAC-expand of a convolution by loops. ``cotangents``: (N, columns of the output Hessian's root, C', H', W')."""
    groups, out, size = path.weight.shape
    samples, positions = len(inputs), list(itertools.product(*map(range, cotangents.shape[3:])))
    A, G = (torch.zeros(groups, d, d, dtype=inputs.dtype) for d in (size, out))
    for n, position in itertools.product(range(samples), positions):
        a = patch(path, inputs[n], position).reshape(groups, size)
        for k in range(groups):
            A[k] += torch.outer(a[k], a[k]) / samples
        for cotangent in cotangents[n]:
            g = cotangent[(slice(None), *position)].reshape(groups, out)
            for k in range(groups):
                G[k] += torch.outer(g[k], g[k]) / len(positions)
    return A, G


def regression_log_evidence(features: Tensor, targets: Tensor, precision: float, sigma_noise: float) -> float:
    """log N(y | 0, Phi Phi^T / delta + sigma^2 I), summed over the columns of ``targets``: (N, D)."""
    samples = len(features)
    covariance = features @ features.T / precision + sigma_noise**2 * torch.eye(samples, dtype=features.dtype)
    total = 0.0
    for y in targets.T:
        quadratic = y @ torch.linalg.solve(covariance, y)
        total -= 0.5 * float(quadratic + torch.linalg.slogdet(covariance)[1] + samples * math.log(2 * math.pi))
    return total


def laplace_log_evidence(model: nn.Module, x: Tensor, log_prob: Callable[[Tensor], Tensor], precision: float) -> float:
    """log p(D, w) + P/2 log 2 pi - 1/2 log det of the Hessian of -log p(D, w), all weights in one vector; log_prob is of the outputs."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    w = torch.cat([p.detach().flatten() for p in model.parameters()])

    def log_joint(w: Tensor) -> Tensor:
        parts = w.split([shape.numel() for shape in shapes.values()])
        weights = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        log_prior = 0.5 * (len(w) * math.log(precision / (2 * math.pi)) - precision * w.square().sum())
        return log_prob(functional_call(model, weights, (x,))) + log_prior

    log_det = torch.linalg.slogdet(-hessian(log_joint)(w))[1]
    return float(log_joint(w) + 0.5 * (len(w) * math.log(2 * math.pi) - log_det))


def group_patch(path: GroupConv, image: Tensor, g: int, moved: Tensor, row: int, column: int) -> Tensor:
    """What the weights (C, |G|, k, k) see through element g at one position of (C, |G|, H, W), pixel by pixel.

    ``moved[i, j]`` is the filter (k, k) that holds one at (i, j) only, moved by g.
    """
    k = path.kernel_size
    channels, order, height, width = image.shape
    window = torch.stack([image[..., (row + i) % height, :] for i in range(-(k // 2), k // 2 + 1)], -2)
    window = torch.stack([window[..., (column + j) % width] for j in range(-(k // 2), k // 2 + 1)], -1)
    seen = torch.zeros(channels, order, k, k, dtype=image.dtype)
    for h in range(order):
        source = window[:, 0 if path.lift else int(path.group.table[g, h])]
        for i in range(k):
            for j in range(k):
                seen[:, h, i, j] = (moved[i, j] * source).sum((-2, -1))
    return seen


def group_expand_factors(path: GroupConv, inputs: Tensor, cotangents: Tensor) -> tuple[Tensor, Tensor]:
    """KFAC-expand of a group convolution by loops, over positions and the group. ``cotangents``: (N, columns, C' |G|, H, W)."""
    _, out, size = path.weight.shape
    order, k = len(path.group), path.kernel_size
    samples, _, _, height, width = cotangents.shape
    fields = inputs.unflatten(1, (path.in_channels, -1))
    units = torch.eye(k * k, dtype=inputs.dtype).reshape(k, k, k, k)
    A, G = (torch.zeros(1, d, d, dtype=inputs.dtype) for d in (size, out))
    for g in range(order):
        moved = path.group.act(g, units)
        for n in range(samples):
            for r in range(height):
                for c in range(width):
                    a = group_patch(path, fields[n], g, moved, r, c).flatten()
                    A[0] += torch.outer(a, a) / samples
                    for cotangent in cotangents[n].unflatten(1, (out, order))[:, :, g, r, c]:
                        G[0] += torch.outer(cotangent, cotangent) / (order * height * width)
    return A, G


def group_error(layer: nn.Module, group: Group, within: Group, x: Tensor, lift: bool = False) -> float:
    """The largest relative difference between moving input and output by the elements of ``within``, on fields of ``group``.

    With ``lift`` the input is an image. Infinite if ``within`` is not within the group.
    """
    elements, y = group.elements(within), layer(x).detach()
    if elements is None:
        return math.inf
    errors = []
    for g in elements.tolist():
        moved = layer(group.act(g, x) if lift else group.act_on_features(g, x)).detach()
        errors.append((moved - group.act_on_features(g, y)).norm() / y.norm())
    return float(max(errors))


def projected(filters: Tensor, group: Group, subgroup: Group | None, order: int) -> Tensor:
    """P K, the mean of K[c', h g', c, h g, h s] over h, for filters (C' |G|, C order, k, k) of fields; order 1 in a lifting layer."""
    kernel = filters.unflatten(1, (-1, order)).unflatten(0, (-1, len(group)))
    elements = [0] if subgroup is None else [int(near) for near in subgroup_elements(group, subgroup)]
    total = torch.zeros_like(kernel)
    for h in elements:
        turned = torch.zeros_like(kernel)
        for out in range(len(group)):
            for source in range(order):
                read = kernel[:, group.table[h, out], :, group.table[h, source] if order > 1 else 0]
                turned[:, out, :, source] = group.act(int(group.inverse[h]), read)  # (h^-1 K)(s) = K(h s)
        total += turned
    return (total / len(elements)).flatten(2, 3).flatten(0, 1)


def subgroup_elements(group: Group, subgroup: Group) -> list[int]:
    """The elements of a group that have a matrix of the subgroup, one by one."""
    return [next(g for g, own in enumerate(group.matrices) if torch.allclose(own, matrix)) for matrix in subgroup.matrices]
