"""Products with the Gauss-Newton matrix of a whole network, without forming it.

    H v = sum_n J_n^T Lambda_n J_n v,        Lambda = R R^T the output Hessian

J v is the derivative of J^T u with respect to u, along v. So any model that can be differentiated twice will do. A product takes about
four passes over the data, whatever the number of outputs. All vectors share one graph, and go through it in blocks.

The network linearised at its weights w has the outputs f + J d at w + d. With an ``offset`` d, Lambda and slopes are taken there. With
``roots``, R is theirs, whatever the outputs.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from autosym.bayes.likelihoods import Likelihood
from autosym.curvature.owners import sites
from autosym.curvature.passes import Pass, budget
from autosym.curvature.verification import Verified, refuse_batch_dependence, verify
from autosym.runtime import arithmetic, processes
from autosym.runtime.arithmetic import NotFinite
from autosym.runtime.batching import Data, size_of

GRAPHS = 6  # a product keeps so many graphs: forward, backward and its derivative, of one batch and of the one before
BLOCK = 8  # vectors that go through a graph together, at most; each adds two graphs


class GaussNewton:
    """H of ``model`` on ``data`` at unit likelihood scale, as a linear map of flat vectors: all weights of the sites in a row.

    A ``subset`` of samples, chosen by ``seed``, may stand for all in products. Slopes and outputs always cover all samples. With
    ``tf32`` arithmetic is as torch is set, else float32 has all its bits (see ``curvature.kfac``).
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        likelihood: Likelihood,
        *,
        subset: int | None = None,
        seed: int = 0,
        batch_size: int | None = None,
        memory: float | None = None,
        tf32: bool = False,
    ):
        self.model, self.data, self.likelihood = processes.unwrapped(model), data, likelihood
        self.subset, self.seed, self.tf32 = subset, seed, tf32
        refuse_batch_dependence(self.model)
        self.sites = sites(self.model)
        self.parameters = [site.parameter for site in self.sites]
        self.sizes = [p.numel() for p in self.parameters]
        self.device = self.parameters[0].device
        self.batch_size, self.memory = batch_size, budget(memory, self.device) / 2**30
        self.verified: Verified | None = None
        self.offset: Tensor | None = None
        self.roots: Tensor | None = None  # R of each sample (N, D, rank), in the order of the data
        self.products = 0  # how many there were
        self.samples = 0  # of a pass over all data

    def __call__(self, vectors: Tensor) -> Tensor:
        """H v for each row v of ``vectors`` (k, weights), in float64."""
        totals, parts = torch.zeros_like(vectors, dtype=torch.float64), self._parts(vectors)
        shown = self._pass(self.subset, len(vectors))
        with processes.agreeing():
            for f, along, back, _, places in self._linearised(shown):
                root = self.likelihood.root(f).detach() if self.roots is None else self.roots[places.to(self.device)].to(f)
                jv = along(parts)
                totals += back((root @ (root.mT @ jv[..., None]))[..., 0])
        self.products += len(vectors)
        totals = self._summed(shown, totals)
        return totals * (shown.samples / shown.used) if self.subset is not None else totals

    def slope(self) -> tuple[Tensor, Tensor]:
        """The statistic of the log-likelihood and the gradient of the loss, at unit scale, of the linearised network at the offset."""
        total = torch.zeros(1 + sum(self.sizes), dtype=torch.float64, device=self.device)
        shown = self._pass()
        with processes.agreeing():
            for f, _, back, y, _ in self._linearised(shown):
                with torch.enable_grad():
                    f.requires_grad_()
                    (g,) = torch.autograd.grad(self.likelihood.loss(f, y), f)
                total[0] += self.likelihood.statistic(f.detach(), y).double().detach()
                total[1:] += back(g[None])[0]
        total = self._summed(shown, total)
        return total[0].cpu(), total[1:]

    def along(self, vectors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The outputs (N, D) of all samples at the offset, and J v (k, N, D) for each row v of ``vectors``, in the order of the data."""
        parts = None if vectors is None else self._parts(vectors)
        found: list[Tensor] = []
        seen: list[Tensor] = []
        shown = self._pass(vectors=1 if vectors is None else len(vectors))
        with processes.agreeing():
            for f, along, _, _, places in self._linearised(shown):
                found.append((f[None] if parts is None else torch.cat([f[None], along(parts)])).double())
                seen.append(places)
        own = torch.cat(found, 1)
        total = own.new_zeros(len(own), size_of(self.data) or shown.samples, own.shape[2])
        total[:, torch.cat(seen).to(self.device)] = own
        total = self._summed(shown, total)
        return total[0], total[1:]

    def back(self, cotangents: Tensor) -> Tensor:
        """sum_n J_n^T u_n (k, weights) for ``cotangents`` u (k, N, D), in the order of the data."""
        totals = torch.zeros(len(cotangents), sum(self.sizes), dtype=torch.float64, device=self.device)
        shown = self._pass(vectors=len(cotangents))
        with processes.agreeing():
            for f, _, back, _, places in self._linearised(shown):
                totals += back(cotangents[:, places.to(cotangents.device)].to(f))
        return self._summed(shown, totals)

    def _linearised(self, shown: Pass) -> Iterator[tuple[Tensor, Callable, Callable, Tensor, Tensor]]:
        """For each batch: outputs at the offset, v -> J v and u -> J^T u as in ``linear``, targets and places."""
        offset = None if self.offset is None else self._parts(self.offset[None])
        for x, y, record, places in shown:
            if record:
                f, along, back = linear(self.model, self.parameters, x, self.tf32)
                yield f if offset is None else f + along(offset)[0], along, back, y, places

    def _parts(self, vectors: Tensor) -> list[Tensor]:
        return parts_of(vectors, self.parameters)

    def _pass(self, subset: int | None = None, vectors: int = 1) -> Pass:
        seen = (self.model, self.data, self.likelihood, self.batch_size, self._verified)
        memory = self.memory / (GRAPHS + 2 * (min(vectors, BLOCK) - 1))
        return Pass(*seen, memory=memory, subset=subset, seed=self.seed)

    def _verified(self, x: Tensor) -> Verified:
        self.verified = self.verified or verify(self.model, x, owned=self.sites)
        return self.verified

    def _summed(self, shown: Pass, totals: Tensor) -> Tensor:
        """The sum over all processes. Every pass has to show as many samples as the first."""
        shown.finish(totals)
        if shown.samples != (self.samples or shown.samples):
            raise ValueError(
                f"the data showed {self.samples} samples, and then {shown.samples}: pass data that can be read again and again"
            )
        self.samples = shown.samples
        if not torch.isfinite(totals).all():
            raise NotFinite("a product with the Gauss-Newton matrix is not finite: rescale the inputs, or use model.double()")
        return totals


def linear(
    model: nn.Module, parameters: Sequence[Tensor], x: Tensor, tf32: bool = False
) -> tuple[Tensor, Callable[[Sequence[Tensor]], Tensor], Callable[[Tensor], Tensor]]:
    """The outputs (B, D) at x, v -> J v (k, B, D) for k vectors in parts (k, ...), and u -> J^T u (k, weights) for u (k, B, D).

    ``parts`` are one tensor for each parameter (``parts_of``). With ``tf32`` arithmetic is as torch is set.
    """
    with arithmetic.true_float32(not tf32), torch.enable_grad():
        f = model(x)
        u = torch.zeros_like(f, requires_grad=True)
        slopes = torch.autograd.grad(f, parameters, u, create_graph=True, materialize_grads=True)
    used = [i for i, g in enumerate(slopes) if g.requires_grad]

    def along(parts: Sequence[Tensor]) -> Tensor:
        with arithmetic.true_float32(not tf32):
            return _derivatives([slopes[i] for i in used], [u], [parts[i] for i in used])[0]

    def back(cotangents: Tensor) -> Tensor:
        with arithmetic.true_float32(not tf32):
            found = _derivatives([f], parameters, [cotangents])
        return torch.cat([g.reshape(len(cotangents), -1).double() for g in found], 1)

    return f.detach(), along, back


def _derivatives(outputs: Sequence[Tensor], inputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    """Those of ``outputs`` along each of ``cotangents`` (k, ...), by inputs: in blocks, or one by one if an operation has no blocks."""

    def derivatives(cotangents: Sequence[Tensor], batched: bool) -> list[Tensor]:
        found = torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=batched)
        shape = [len(cotangents[0])] * batched
        return [i.new_zeros([*shape, *i.shape]) if g is None else g for i, g in zip(inputs, found, strict=True)]

    found = []
    for block in zip(*(c.split(BLOCK) for c in cotangents), strict=True):
        if len(block[0]) > 1:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns where an operation of a block is done one by one
                    found.append(derivatives(block, True))
                continue
            except RuntimeError:  # an operation that cannot be done in blocks, or no memory for them
                pass
        ones = [derivatives(one, False) for one in zip(*block, strict=True)]
        found.append([torch.stack(parts) for parts in zip(*ones, strict=True)])
    return [torch.cat(parts).detach() for parts in zip(*found, strict=True)]


def parts_of(vectors: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Flat vectors (k, weights) as one tensor (k, ...) for each parameter, in its shape and type."""
    pieces = vectors.split([p.numel() for p in parameters], 1)
    return [piece.to(p).view(-1, *p.shape) for piece, p in zip(pieces, parameters, strict=True)]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All entries in a row, in float64."""
    return torch.cat([t.detach().flatten().double() for t in tensors])
