"""Likelihoods: log-probability and the closed-form square root of the output Hessian.

    Lambda(f) = -d^2 log p(y | f) / df^2 = scale * R R^T          one column of R: (B, D, rank) per backward pass

``root`` is R and ``scale`` a hyperparameter's part (1 / noise variance), kept apart so that one curvature pass serves every
noise. ``statistic`` is all of the data that the log-likelihood needs once the hyperparameter is free.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Categorical(nn.Module):
    """p(y | f) = softmax(f)_y; Lambda = diag(p) - p p^T, which has rank D - 1.

    Its root is the Cholesky factor in closed form (Tanabe & Sagae 1992), with one column, so one backward pass, less than outputs:
    R_jj = sqrt(p_j q_j / r_j) and R_ij = - p_i sqrt(p_j / (q_j r_j)) for i > j, with r_j = p_j + p_{j+1} + ... and q_j = r_j - p_j.
    """

    name = "categorical"

    def check(self, outputs: int, targets: Tensor) -> None:
        """Refuse targets that do not suit a model with so many outputs."""
        if outputs < 2:
            raise ValueError(
                "the model has one output, but a categorical likelihood needs one for each class: two for two classes"
            )
        if targets.is_floating_point() or targets.dim() != 1:
            kind = "one-hot or probabilities" if targets.shape[1:] == (outputs,) else "not class indices"
            shape = ", ".join(map(str, ("N", *targets.shape[1:])))  # fit looks at a few of them first
            raise ValueError(
                f"targets of shape ({shape}) and type {targets.dtype} are {kind}: the categorical "
                f"likelihood takes integer class indices of shape (N,); use {_as_indices(targets)}"
            )
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < outputs:
            raise ValueError(
                f"labels run from {int(targets.min())} to {int(targets.max())}, but the model has {outputs} outputs, "
                f"so they must lie in 0..{outputs - 1}: number them from 0, or give the model more outputs"
            )

    def check_outputs(self, outputs: Tensor, model: nn.Module) -> None:
        """Refuse a model that ends in a softmax: softmax(softmax(f)) is another likelihood. softmax(log_softmax(f)) is the same one."""
        rounding = max(1e-5, 2 * torch.finfo(outputs.dtype).eps)
        f = outputs.detach().double()
        if not bool((f >= 0).all() & ((f.sum(1) - 1).abs() <= rounding).all()):
            return
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Softmax)]
        raise ValueError(
            f"the outputs of the model are probabilities, by {f'{names[-1]} (Softmax)' if names else 'a softmax in its forward()'}: "
            "the categorical likelihood takes the softmax itself; leave it out of the model (a log-softmax may stay)"
        )

    def statistic(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """sum_n log p(y_n | f_n)."""
        return -F.cross_entropy(outputs, targets.long(), reduction="sum")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The negative log-likelihood at unit scale, without constants."""
        return -self.statistic(outputs, targets)

    def log_likelihood(self, statistic: Tensor, count: int) -> Tensor:
        return statistic

    def scale(self) -> Tensor:
        return torch.ones((), dtype=torch.float64)

    def root(self, outputs: Tensor) -> Tensor:
        # By logarithms: where a probability is 0 in floating point its root would have an infinite slope.
        p = outputs.log_softmax(-1)
        tail = p.flip(-1).logcumsumexp(-1).flip(-1)  # log r_j; q_j is r_{j+1}
        here, rest, part = tail[:, None, :-1], tail[:, None, 1:], p[:, None, :-1]
        classes = torch.arange(p.shape[1], device=p.device)
        row, column = classes[:, None], classes[:-1]
        below = p[:, :, None] + (part - here - rest) / 2
        diagonal = ((part - here + rest) / 2).expand_as(below)
        size = torch.where(row > column, below, torch.where(row == column, diagonal, -torch.inf)).exp()
        return torch.where(row > column, -size, size)

    def diagonal(self, outputs: Tensor) -> Tensor:
        """That of R R^T, (B, D)."""
        p = outputs.softmax(-1)
        return p * (1 - p)

    def column(self, outputs: Tensor, index: Tensor) -> Tensor:
        """One column (B, D) for each sample of the symmetric root sqrt(p_c) (e_c - p), c = ``index`` (B,); it has D."""
        p = outputs.softmax(-1)
        index = index.to(p.device)[:, None]
        return p.gather(1, index).sqrt() * (torch.zeros_like(p).scatter_(1, index, 1.0) - p)


class Gaussian(nn.Module):
    """p(y | f) = N(y | f, sigma^2 I); Lambda = I / sigma^2, root I, scale 1 / sigma^2. The noise is learned."""

    name = "gaussian"

    def __init__(self, sigma_noise: float = 1.0):
        super().__init__()
        if not 0 < sigma_noise < math.inf:
            raise ValueError(f"sigma_noise must be positive and finite, got {sigma_noise}")
        self.log_variance = nn.Parameter(torch.tensor(2 * math.log(sigma_noise), dtype=torch.float64))

    def check(self, outputs: int, targets: Tensor) -> None:
        """Refuse targets that do not suit a model with so many outputs."""
        if targets.shape[1:] != (outputs,) or not targets.is_floating_point():
            hint = ""
            if targets.dim() == 1 and outputs == 1:
                hint = ": use targets[:, None] (broadcasting would compare every target with every output)"
            elif not targets.is_floating_point():
                hint = ": use targets.float(), or likelihood='categorical' for class labels"
            raise ValueError(
                f"targets {tuple(targets.shape)} of type {targets.dtype} do not match outputs {(len(targets), outputs)}{hint}"
            )

    def check_outputs(self, outputs: Tensor, model: nn.Module) -> None:
        """Any outputs will do."""

    def statistic(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of squared errors."""
        return (outputs - targets).square().sum()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The negative log-likelihood at unit scale, without constants."""
        return self.statistic(outputs, targets) / 2

    def log_likelihood(self, statistic: Tensor, count: int) -> Tensor:
        """log N of ``count`` numbers (samples times outputs) with the given sum of squared errors."""
        return -0.5 * (statistic * self.scale() + count * (self.log_variance + math.log(2 * math.pi)))

    def scale(self) -> Tensor:
        return (-self.log_variance).exp()

    def root(self, outputs: Tensor) -> Tensor:
        return torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device).expand(len(outputs), -1, -1)

    def diagonal(self, outputs: Tensor) -> Tensor:
        """That of R R^T, (B, D)."""
        return torch.ones_like(outputs)

    def column(self, outputs: Tensor, index: Tensor) -> Tensor:
        """One column (B, D) of the root for each sample, that of ``index`` (B,)."""
        return torch.zeros_like(outputs).scatter_(1, index.to(outputs.device)[:, None], 1.0)


def _as_indices(targets: Tensor) -> str:
    """The call that makes class indices of targets that are none."""
    if math.prod(targets.shape[1:]) != 1:
        return "targets.argmax(1) if they are one-hot, or likelihood='gaussian'"
    flat = "targets.squeeze(1)" if targets.dim() == 2 else "targets.flatten()" if targets.dim() > 2 else "targets"
    if not targets.is_floating_point():
        return flat
    return f"{flat}.long() if they are whole numbers, else likelihood='gaussian', with targets (N, 1) and a model of one output"


LIKELIHOODS = {"categorical": Categorical, "gaussian": Gaussian}
Likelihood = Categorical | Gaussian


def of(kind: str | Likelihood) -> Likelihood:
    """The likelihood of a name, or the one given."""
    if isinstance(kind, (Categorical, Gaussian)):
        return kind
    if not isinstance(kind, str):
        raise TypeError(f"the likelihood is a {type(kind).__name__}: inputs and targets are one pair, as in (model, (x, y))")
    if kind not in LIKELIHOODS:
        raise ValueError(f"unknown likelihood {kind!r}: use {' or '.join(map(repr, LIKELIHOODS))}")
    return LIKELIHOODS[kind]()
