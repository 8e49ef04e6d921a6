"""Parts of Noether's razor that the runs here do not use: local sampling, equal modes, and the update of the noise variance."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from autosym.bayes.likelihoods import Gaussian
from autosym.evidence.record import Evidence
from autosym.evidence.variational import MatrixNormal, Posterior
from autosym.linear.path import Path


@contextmanager
def local(posterior: Posterior, model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """y = M x + |L_A x| L_S e: local sampling, where paths add separate noise to the output of every sample.

    Yields the means: call the model with them. Each sample by itself has the same distribution as with sampled weights, and gradients
    have less noise. Paths must have one position (S = 1), because positions that share a weight also share its noise.
    """
    modules = dict(model.named_modules())
    hooks = []
    for name, part in zip(posterior.names, posterior.parts, strict=True):
        module = modules[name.rpartition(".")[0]]
        if not isinstance(module, Path):
            raise ValueError(
                f"{name}: local sampling works only for autosym's paths; for {type(module).__name__}, sample weights instead"
            )
        assert isinstance(part, MatrixNormal)
        hooks.append(module.register_forward_hook(_noise(name, part)))
    try:
        yield posterior.means()
    finally:
        for hook in hooks:
            hook.remove()


def _noise(name: str, part: MatrixNormal) -> Callable:
    def add(path: Path, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        columns = path.columns(inputs[0])  # (B, S, K, in)
        if columns.shape[1] != 1:
            raise ValueError(
                f"{name} has {columns.shape[1]} shared positions: local sampling needs one; sample weights instead"
            )
        S, A = part.factors()
        size = torch.einsum("kij,bskj->bski", A, columns).norm(dim=-1, keepdim=True)
        noise = torch.randn(*size.shape[:-1], S.shape[1], dtype=output.dtype, device=output.device)
        return output + path.place(size * torch.einsum("koj,bskj->bsko", S, noise), inputs[0])

    return add


def with_permutations(evidence: Evidence, hidden: Sequence[int]) -> Evidence:
    """The bound plus log n! for each n in ``hidden``: numbers of units that can be permuted without changing the network.

    For each n, q covers one of n! equal modes. The result assumes that the modes do not overlap.
    """
    copies = sum(math.lgamma(n + 1) for n in hidden)
    bound = f"{evidence.bound_of}, if modes that differ by permutations do not overlap"
    return replace(evidence, complexity=evidence.complexity - copies, bound_of=bound)


@torch.no_grad()
def update_variance(likelihood: Gaussian, mean_square_error: float | Tensor, rate: float = 1.0) -> None:
    """sigma^2 <- (1 - rate) sigma^2 + rate E_q[mean squared error]: a moving average towards the best value for this q."""
    error = torch.as_tensor(mean_square_error).to(likelihood.log_variance)
    likelihood.log_variance.copy_(((1 - rate) * likelihood.log_variance.exp() + rate * error).log())
