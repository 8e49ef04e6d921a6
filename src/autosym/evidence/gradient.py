"""d log p(D) / d eta of Laplace evidence, for hyperparameters eta that enter the forward pass, in two phases.

    log p(D) ~ log p(D | w) + log p(w) - 1/2 log det(kron(G, A) / sigma^2 + delta) + const,       A and G depend on eta

Phase one takes the factors, without a graph (``laplace.at``). With G = U diag(lambda) U^T, A = V diag(mu) V^T and
c = 1 / sigma^2 the cotangents of 1/2 log det have a closed form, which also holds if eigenvalues coincide:

    d/dG = U diag_i(1/2 sum_j c mu_j / (c lambda_i mu_j + delta)) U^T       d/dA = V diag_j(1/2 sum_i c lambda_i / (...)) V^T

Phase two shows micro-batches to the model again, with a graph, and differentiates log-likelihood - <d/dA, A> - <d/dG, G> at
fixed cotangents. Rows g depend on eta through the network and through the root of the output Hessian; both stay in the graph.
The sum is exact at fixed weights and draws, and needs the memory of one micro-batch. No gradient passes through an
eigendecomposition.

Where a network has kinks (ReLU, max pooling), rows g jump as eta moves a sample across one; where it chooses a polyphase grid, so do its
outputs. No derivative sees that, so over many samples it is not the slope of the evidence. ``differences`` is, over their width, and
``kinked`` says where to use it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autosym.bayes.priors import Prior
from autosym.curvature.owners import sites
from autosym.curvature.passes import Pass, alike, budget
from autosym.curvature.tape import Tape
from autosym.curvature.verification import verify
from autosym.evidence import laplace
from autosym.evidence.laplace import Laplace
from autosym.linear.path import Definition, Path
from autosym.runtime import arithmetic, processes
from autosym.runtime.batching import Data

GRAPH = 4  # times the memory of a pass without a second derivative
STEP = 0.02  # of differences in eta: wide enough for many samples to cross a kink, and far above rounding
_UNITS = ("Relu", "LeakyRelu", "Prelu", "Rrelu", "Elu", "Hard", "Softshrink", "Threshold", "Abs", "Clamp", "Where")
_LARGEST = ("Max", "Min", "Amax", "Amin", "AdaptiveMax", "FractionalMax", "Topk", "Cummax", "Cummin")
KINKS = (*_UNITS, *_LARGEST, "Gather", "_ConvOnGrid")  # how nodes of autograd begin; the last two choose polyphase grids


def gradient(
    model: nn.Module,
    data: Data,
    prior: Prior,
    at: Laplace,
    hyperparameters: Mapping[str, Tensor],
    *,
    sampled: bool = False,
    subset: int | None = None,
    batch_size: int | None = None,
    memory: float | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """d log evidence / d eta for each of ``hyperparameters`` (leaves of the model's forward pass), at the weights of ``at``.

    ``at`` is ``laplace.at(model, data, ...)``. Give the same ``sampled``, ``subset`` and ``seed`` as to it, so that both phases
    see the same samples and the same noise. With ``sampled`` or ``subset`` the data must come in the same order: no shuffled
    loader. Leaves need not require gradients; their ``requires_grad`` is left as it was.
    """
    _check(model, at, hyperparameters)
    leaves = list(hyperparameters.values())
    total = [torch.zeros_like(leaf, dtype=torch.float64) for leaf in leaves]
    device = next(model.parameters()).device
    count = at.samples if subset is None else subset
    against = _Against(at, prior, device, 1 / count, at.samples / count)
    batch_size = 1024 if batch_size is None and device.type == "cuda" else batch_size
    options: dict[str, Any] = {"subset": subset, "sampled": sampled, "seed": seed, "allow_partial": True}
    within = budget(memory, device) / GRAPH / 2**30
    shown = Pass(model, data, at.likelihood, batch_size, partial(verify, model), memory=within, **options)
    with (
        processes.agreeing(),
        arithmetic.true_float32(),
        torch.enable_grad(),
        Tape(sites(model), against.see, graph=True) as tape,
    ):
        for x, y, record, places in shown:
            with asking(leaves):
                f = tape.record(model, x) if record else model(x)
                fit = at.likelihood.log_likelihood(at.likelihood.statistic(f, y).double(), 0)
                _add(total, fit - against.take(), leaves)
                for column in shown.columns(f, places) if record else ():
                    _add(total, -against.rows(tape.backward(f, column)), leaves)
    shown.finish(*total)
    _refuse_other_data(at, shown.samples, shown.fingerprint)
    return {name: grad.to(leaf.dtype) for (name, leaf), grad in zip(hyperparameters.items(), total, strict=True)}


@torch.no_grad()
def differences(
    model: nn.Module,
    data: Data,
    prior: Prior,
    at: Laplace,
    hyperparameters: Mapping[str, Tensor],
    *,
    step: float = STEP,
    **options: Any,
) -> dict[str, Tensor]:
    """(log p(D; eta + h) - log p(D; eta - h)) / 2h: the same slopes from two evidences each, h = ``step``, kinks included.

    ``options`` are those of ``laplace.at``: give the same as to ``at``.
    """
    _check(model, at, hyperparameters)
    bound = prior.mixture_bound

    def evidence() -> float:
        found = laplace.at(model, data, at.likelihood, **options)
        _refuse_other_data(at, found.samples, found.fingerprint)
        return float((found.with_scales(prior, 0) if prior.scales else found)(prior).log_evidence)

    slopes = {name: torch.zeros_like(leaf) for name, leaf in hyperparameters.items()}
    for name, leaf in hyperparameters.items():
        before = leaf.clone()
        for place in range(leaf.numel()):
            values = []
            for sign in (1, -1):
                leaf.view(-1)[place] += sign * step
                try:
                    values.append(evidence())
                finally:
                    leaf.copy_(before)
            slopes[name].view(-1)[place] = (values[0] - values[1]) / (2 * step)
    prior.mixture_bound = bound
    return slopes


def kinked(model: nn.Module, x: Tensor) -> bool:
    """Whether the outputs for ``x`` have a derivative that jumps: the graph of autograd has ReLU, max pooling or the like in it."""
    with torch.enable_grad():
        todo, seen = [model(x).grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            if node.name().startswith(KINKS):
                return True
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    return False


class _Against:
    """Sums of quadratic forms a^T (d/dA) a of columns and g^T (d/dG) g of rows, with fixed cotangents."""

    def __init__(self, at: Laplace, prior: Prior, device: torch.device, weight_a: float, weight_g: float):
        found = {name: [t.to(device) for t in pair] for name, pair in cotangents(at, prior).items()}
        self.A = {name: weight_a * pair[0] for name, pair in found.items()}
        self.G = {name: weight_g * pair[1] for name, pair in found.items()}
        self.zero = torch.zeros((), dtype=torch.float64, device=device)
        self.sum = self.zero

    def see(self, name: str, path: Definition, x: Tensor) -> None:
        """Add the quadratic form of a path's columns, if they depend on a hyperparameter. Paths without factors have none."""
        if name not in self.A:
            return
        columns = path.columns(x)
        if columns.requires_grad:
            self.sum = self.sum + _quadratic(columns, self.A[name])

    def take(self) -> Tensor:
        """Return the sum of ``see`` so far, and reset it."""
        taken, self.sum = self.sum, self.zero
        return taken

    def rows(self, parts: Iterator[tuple[tuple[str, ...], Tensor]]) -> Tensor:
        """The quadratic forms of the rows of one backward pass, summed over all paths."""
        return sum((_quadratic(g, self.G[n]) / g.shape[1] for names, g in parts for n in names if n in self.G), start=self.zero)


def cotangents(at: Laplace, prior: Prior) -> dict[str, tuple[Tensor, Tensor]]:
    """d (1/2 log det) / dA (K, in, in) and / dG (K, out, out) of every path, in closed form."""
    delta, c = prior.precision(), float(at.likelihood.scale().detach())
    found = {}
    for name, (lam, U, mu, V) in at.curvature.decompositions(prior.scales).items():
        weight = 0.5 * c / (c * lam[:, :, None] * mu[:, None, :] + delta[name])
        of_g, of_a = (weight @ mu[:, :, None])[..., 0], (weight.mT @ lam[:, :, None])[..., 0]
        found[name] = ((V * of_a[:, None, :]) @ V.mT, (U * of_g[:, None, :]) @ U.mT)
    return found


def _quadratic(t: Tensor, matrix: Tensor) -> Tensor:
    """sum over samples and positions of t^T M t, for (B, S, K, d) and (K, d, d)."""
    flat = t.permute(2, 0, 1, 3).flatten(1, 2)
    return ((flat @ matrix.to(flat)) * flat).sum(dtype=torch.float64)


def _add(total: Sequence[Tensor], value: Tensor, leaves: Sequence[Tensor]) -> None:
    if not value.requires_grad:  # e.g. a linear model, whose rows depend on nothing
        return
    for sum_, grad in zip(total, torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True), strict=True):
        if grad is not None:
            sum_ += grad


@contextmanager
def asking(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Make leaves require gradients inside the block."""
    before = [leaf.requires_grad for leaf in leaves]
    for leaf in leaves:
        leaf.requires_grad_(True)
    try:
        yield
    finally:
        for leaf, asked in zip(leaves, before, strict=True):
            leaf.requires_grad_(asked)


def _check(model: nn.Module, at: Laplace, hyperparameters: Mapping[str, Tensor]) -> None:
    owned = {id(site.parameter): site.name for site in sites(model)}
    paths = [module for module in model.modules() if isinstance(module, Path)]
    inside = {id(t) for path in paths for t in (*path.parameters(), *path.buffers())}
    for name, leaf in hyperparameters.items():
        if not leaf.is_leaf or not leaf.is_floating_point():
            raise ValueError(f"the hyperparameter {name} must be a leaf tensor of floats: a frozen parameter of the model")
        if id(leaf) in owned:
            raise ValueError(
                f"the hyperparameter {name} is the weight {owned[id(leaf)]}, which the evidence integrates over: it cannot be "
                "both; freeze it by requires_grad_(False)"
            )
        if id(leaf) in inside:
            raise ValueError(
                f"the hyperparameter {name} is part of a path, which stores values computed from it: learn it as a parameter "
                "with its own prior (learn_omega)"
            )
    moved = [site.name for site in sites(model) if not torch.equal(site.parameter, at.parameters[site.name])]
    if moved:
        raise ValueError(f"{', '.join(moved[:3])} changed since the evidence was taken: take it again at the present weights")


def _refuse_other_data(at: Laplace, samples: int, fingerprint: Tensor | None) -> None:
    """Refuse data that are not those of ``at``."""
    if samples != at.samples:
        raise ValueError(f"the evidence was taken on {at.samples} samples, but the data now show {samples}: not the same")
    if not alike(fingerprint, at.fingerprint, rtol=1e-6, atol=1e-9 * at.samples):
        raise ValueError(
            "the data differ from the data that the evidence was taken on (random augmentation that changes between passes?): "
            "give data that do not change; to train on augmented data, use fit's augment, or give it evidence_data"
        )
