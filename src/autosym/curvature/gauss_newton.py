"""Products with the Gauss-Newton matrix of a whole network, without forming it.

    H v = sum_n J_n^T Lambda_n J_n v,        Lambda = R R^T the output Hessian

J v is the derivative of J^T u with respect to u, along v. So any model that can be differentiated twice will do, and all vectors share
one graph. A product takes about four passes over the data, whatever the number of outputs.

The network linearised at its weights w has the outputs f + J d at w + d. With an ``offset`` d, Lambda and slopes are taken there. With
``roots``, R is theirs, whatever the outputs.
"""

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


class GaussNewton:
    """H of ``model`` on ``data`` at unit likelihood scale, as a linear map of flat vectors: all weights of the sites in a row.

    A ``subset`` of samples, chosen by ``seed``, may stand for all in products. Slopes and outputs always cover all samples.
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
    ):
        self.model, self.data, self.likelihood = processes.unwrapped(model), data, likelihood
        self.subset, self.seed = subset, seed
        refuse_batch_dependence(self.model)
        self.sites = sites(self.model)
        self.parameters = [site.parameter for site in self.sites]
        self.sizes = [p.numel() for p in self.parameters]
        self.device = self.parameters[0].device
        self.batch_size, self.memory = batch_size, budget(memory, self.device) / 2**30 / GRAPHS
        self.verified: Verified | None = None
        self.offset: Tensor | None = None
        self.roots: Tensor | None = None  # R of each sample (N, D, rank), in the order of the data
        self.products = 0  # how many there were
        self.samples = 0  # of a pass over all data

    def __call__(self, vectors: Tensor) -> Tensor:
        """H v for each row v of ``vectors`` (k, weights), in float64."""
        totals, parts = torch.zeros_like(vectors, dtype=torch.float64), [self._parts(v) for v in vectors]
        shown = self._pass(self.subset)
        with processes.agreeing():
            for f, along, back, _, places in self._linearised(shown):
                root = self.likelihood.root(f).detach() if self.roots is None else self.roots[places.to(self.device)].to(f)
                for total, part in zip(totals, parts, strict=True):
                    jv = along(part)
                    total += back((root @ (root.mT @ jv[:, :, None]))[:, :, 0])
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
                total[1:] += back(g)
        total = self._summed(shown, total)
        return total[0].cpu(), total[1:]

    def along(self, vectors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The outputs (N, D) of all samples at the offset, and J v (k, N, D) for each row v of ``vectors``, in the order of the data."""
        parts = [self._parts(v) for v in (() if vectors is None else vectors)]
        found: list[Tensor] = []
        seen: list[Tensor] = []
        shown = self._pass()
        with processes.agreeing():
            for f, along, _, _, places in self._linearised(shown):
                found.append(torch.stack([f, *(along(part) for part in parts)]).double())
                seen.append(places)
        own = torch.cat(found, 1)
        total = own.new_zeros(len(own), size_of(self.data) or shown.samples, own.shape[2])
        total[:, torch.cat(seen).to(self.device)] = own
        total = self._summed(shown, total)
        return total[0], total[1:]

    def back(self, cotangents: Tensor) -> Tensor:
        """sum_n J_n^T u_n (k, weights) for ``cotangents`` u (k, N, D), in the order of the data."""
        totals = torch.zeros(len(cotangents), sum(self.sizes), dtype=torch.float64, device=self.device)
        shown = self._pass()
        with processes.agreeing():
            for f, _, back, _, places in self._linearised(shown):
                for total, u in zip(totals, cotangents[:, places.to(cotangents.device)].to(f), strict=True):
                    total += back(u)
        return self._summed(shown, totals)

    def _linearised(self, shown: Pass) -> Iterator[tuple[Tensor, Callable, Callable, Tensor, Tensor]]:
        """For each batch: outputs at the offset, v -> J v for the parts of v, u -> J^T u as a flat vector, targets and places."""
        offset = None if self.offset is None else self._parts(self.offset)
        for x, y, record, places in shown:
            if record:
                f, along, back = linear(self.model, self.parameters, x)
                yield f if offset is None else f + along(offset), along, back, y, places

    def _parts(self, vector: Tensor) -> list[Tensor]:
        return parts_of(vector, self.parameters)

    def _pass(self, subset: int | None = None) -> Pass:
        seen = (self.model, self.data, self.likelihood, self.batch_size, self._verified)
        return Pass(*seen, memory=self.memory, subset=subset, seed=self.seed)

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


@arithmetic.true_float32()
def linear(model: nn.Module, parameters: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Callable, Callable]:
    """The outputs at x, v -> J v for v in parts, one for each parameter, and u -> J^T u as a flat vector."""
    with torch.enable_grad():
        f = model(x)
        u = torch.zeros_like(f, requires_grad=True)
        slopes = torch.autograd.grad(f, parameters, u, create_graph=True, materialize_grads=True)
    used = [i for i, g in enumerate(slopes) if g.requires_grad]

    @arithmetic.true_float32()
    def along(parts: Sequence[Tensor]) -> Tensor:
        return torch.autograd.grad([slopes[i] for i in used], u, [parts[i] for i in used], retain_graph=True)[0].detach()

    @arithmetic.true_float32()
    def back(cotangent: Tensor) -> Tensor:
        return flat(torch.autograd.grad(f, parameters, cotangent, retain_graph=True, materialize_grads=True))

    return f.detach(), along, back


def parts_of(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """A flat vector as one tensor for each parameter, in its shape and type."""
    pieces = vector.split([p.numel() for p in parameters])
    return [piece.to(p).view_as(p) for piece, p in zip(pieces, parameters, strict=True)]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All entries in a row, in float64."""
    return torch.cat([t.detach().flatten().double() for t in tensors])
