"""Kronecker-factored generalised Gauss-Newton (KFAC) of a model, by the path law alone (Sec. 5).

For a path with columns a: (S, K, in) and cotangents g: (S, K, out) of every sample,

    A_k = 1/N sum_n sum_s a a^T        G_k = sum_n 1/S sum_s g Lambda g^T        GGN block k ~ kron(G_k, A_k)

for row-major weights (out, in). It is exact where S = 1 at one sample and for linear networks with squared loss; over shared
positions it is KFAC-expand. Exact curvature takes one backward pass per output, sampled curvature one in all; both
differentiate with respect to the outputs of paths only. Sums and counts are accumulated, so batch size and order do not matter.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autosym.batching import Data, batches, check_seen, size_of
from autosym.likelihoods import Likelihood
from autosym.paths import Bias, Conv, Dense, Path


@dataclass(frozen=True)
class Site:
    """A parameter of the model that a path owns, and the module whose inputs and outputs that path sees."""

    name: str
    module: nn.Module
    parameter: nn.Parameter
    path: Callable[[Tensor], Path]  # the path, given an output of the module: torch's layers do not know their map's size


@dataclass(frozen=True)
class Factors:
    """sum A: (K, in, in), sum G: (K, out, out) of one path over the samples used."""

    A: Tensor
    G: Tensor


@dataclass(frozen=True)
class Curvature:
    """Factors of every path, the data's part of the log-likelihood, and the true counts of samples and outputs."""

    factors: dict[str, Factors]
    statistic: Tensor
    samples: int
    outputs: int

    def eigenvalues(self) -> dict[str, tuple[Tensor, Tensor]]:
        """lambda: (K, out) of G and mu: (K, in) of A for every path, in float64."""
        return {name: (_eigvalsh(f.G, f"G of {name}"), _eigvalsh(f.A, f"A of {name}")) for name, f in self.factors.items()}


def sites(model: nn.Module, expand_bias: bool = False) -> list[Site]:
    """Every trainable parameter with the path that owns it; frozen ones are point estimates, outside the evidence.

    Paths own their weight; ``nn.Linear`` and ``nn.Conv2d`` are read as Dense or Conv and Bias. Anything else is refused.
    """
    found: dict[int, Site] = {}
    owners: dict[int, str] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}".lstrip(".")
            if not parameter.requires_grad:
                continue
            if id(parameter) in owners:
                raise ValueError(
                    f"{full} and {owners[id(parameter)]} are the same parameter: the curvature of tied weights is not the sum "
                    "of its parts; untie them, or freeze them by requires_grad_(False)"
                )
            if parameter.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"{full} is {parameter.dtype}: curvature needs float32 or float64; use model.float()")
            if not torch.isfinite(parameter).all():
                raise ValueError(f"{full} holds values that are not finite (NaN or Inf)")
            owners[id(parameter)] = full
            path = _path_of(module, name, expand_bias)
            if path is None:
                raise ValueError(
                    f"no path owns the parameter {full} of {type(module).__name__}: the evidence covers autosym's paths, "
                    "nn.Linear and nn.Conv2d; freeze it by requires_grad_(False) to keep it as a point estimate outside of it"
                )
            found[id(parameter)] = Site(module_name if isinstance(module, Path) else full, module, parameter, path)
    if not found:
        raise ValueError("the model has no trainable parameter, so there is nothing to integrate over")
    return list(found.values())


def kfac(
    model: nn.Module,
    data: Data,
    likelihood: Likelihood,
    *,
    sampled: bool = False,
    subset: int | None = None,
    share_blocks: bool = False,
    expand_bias: bool = False,
    dtype: torch.dtype | None = None,
    batch_size: int = 256,
    seed: int = 0,
    allow_partial: bool = False,
) -> Curvature:
    """The Kronecker factors of ``model`` on ``data``, at unit likelihood scale (see ``likelihoods``), in one pass.

    ``sampled`` replaces one backward per output by one in all, with noise drawn per sample from ``seed``. ``subset`` takes
    the curvature from that many randomly chosen samples, scaled to all; the log-likelihood is always that of all.
    ``share_blocks`` replaces the G of every block by their mean, as the paper does. Factors are in ``dtype``, by default that
    of the model. The model's mode, gradients, buffers and hooks are left as they were.
    """
    _refuse_batch_dependence(model)
    used = _choose(subset, size_of(data), seed)
    signs = _Signs(seed)
    tape = _Tape(sites(model, expand_bias), dtype)
    statistic = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    samples = outputs = 0
    with tape, torch.enable_grad():
        for x, y in batches(data, batch_size):
            x, y = _to_model(x, y, model, f"samples {samples} to {samples + len(x) - 1}")
            mask = None if used is None else used[samples : samples + len(x)]
            samples += len(x)
            for x_part, y_part, record in _split(x, y, mask):
                f = tape.record(model, x_part) if record else tape.forward(model, x_part)
                likelihood.check(f, y_part)
                statistic = statistic + likelihood.statistic(f.detach(), y_part).double()
                outputs = f.shape[1]
                if record:
                    roots = likelihood.root(f.detach())
                    if sampled:
                        roots = roots @ signs(len(f), outputs).to(roots)[:, :, None]
                    tape.backward(f, roots)
    check_seen(samples, data, allow_partial)
    return Curvature(tape.factors(samples, share_blocks), statistic, samples, outputs)


class _Tape:
    """Hooks on the modules of all sites: columns are summed as they come forward, rows as they come backward."""

    def __init__(self, sites: Sequence[Site], dtype: torch.dtype | None):
        self.sites, self.dtype = sites, dtype
        self.by_module: dict[nn.Module, list[Site]] = {}
        for site in sites:
            self.by_module.setdefault(site.module, []).append(site)
        self.sum_A: dict[str, Tensor] = {}
        self.sum_G: dict[str, Tensor] = {}
        self.edges: dict[nn.Module, GradientEdge] = {}
        self.paths: dict[str, Path] = {}
        self.positions: dict[str, int] = {}
        self.recording = self.blaming = False
        self.batch = self.used = 0

    def __enter__(self) -> "_Tape":
        self.handles = [module.register_forward_hook(self._hook) for module in self.by_module]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.edges.clear()

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        """The outputs of the model alone, without a graph."""
        with torch.no_grad():
            return self._check_outputs(model, model(x), x)

    def record(self, model: nn.Module, x: Tensor) -> Tensor:
        """The outputs of the model, with the columns of every path summed and a graph to go back through."""
        self.edges.clear()
        self.recording, self.batch = True, len(x)
        self.used += len(x)
        f = model(x)
        self.recording = False
        f = self._check_outputs(model, f, x)
        missing = [site.name for site in self.sites if site.module not in self.edges]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} took no part in the forward pass, so the data say nothing about it: remove it, or "
                "freeze it by requires_grad_(False)"
            )
        return f

    def backward(self, f: Tensor, roots: Tensor) -> None:
        """Sum rows of the cotangents ``roots``: (B, outputs, columns), one backward pass for each column."""
        modules = list(self.edges)
        for column in range(roots.shape[2]):
            last = column == roots.shape[2] - 1
            edges = [self.edges[module] for module in modules]
            grads = torch.autograd.grad(f, edges, roots[:, :, column], retain_graph=not last, allow_unused=True)
            for module, grad in zip(modules, grads, strict=True):
                for site in self.by_module[module]:
                    if grad is None:
                        raise ValueError(f"{site.name} has no influence on the output: remove it, or freeze it")
                    rows = self.paths[site.name].rows(grad)
                    self._add(self.sum_G, site.name, _gram(rows, self.dtype) / self.positions[site.name])

    def factors(self, samples: int, share_blocks: bool) -> dict[str, Factors]:
        """Means of A and sums of G, the latter scaled from the samples used to all."""
        factors = {}
        for site in self.sites:
            A = self.sum_A[site.name] / self.used
            G = self.sum_G[site.name] * (samples / self.used)
            if share_blocks:
                G = G.mean(0, keepdim=True).expand_as(G)
            for letter, factor in (("A", A), ("G", G)):
                if not torch.isfinite(factor).all():
                    raise ValueError(
                        f"the factor {letter} of {site.name} overflowed {factor.dtype}: rescale the inputs or the targets, or "
                        "pass dtype=torch.float64"
                    )
            factors[site.name] = Factors(A, G)
        return factors

    def _hook(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        names = ", ".join(site.name for site in self.by_module[module])
        if self.blaming and not torch.isfinite(output).all():
            raise ValueError(
                f"the output of {names} is not finite though its inputs and weights were: the values overflow {output.dtype}; "
                "rescale the inputs, or use the model in float64"
            )
        if not self.recording:
            return output
        if module in self.edges:
            raise ValueError(
                f"{names} is used more than once in a forward pass: the curvature of a shared layer is not the sum of its "
                "uses; make one layer for each use"
            )
        if len(inputs) != 1 or inputs[0].shape[0] != self.batch:
            raise ValueError(
                f"{names} must see one positional tensor whose first axis is the batch of {self.batch} samples; got "
                f"{[tuple(x.shape) for x in inputs]}: keep positions in an axis of their own"
            )
        if not output.requires_grad:  # everything before this layer is frozen
            output = output.clone().requires_grad_().clone()
        for site in self.by_module[module]:
            path = self.paths.setdefault(site.name, site.path(output))
            columns = path.columns(inputs[0].detach())
            self.positions[site.name] = columns.shape[1]
            self._add(self.sum_A, site.name, _gram(columns, self.dtype))
        # The edge, not the tensor: an in-place activation that follows would move the tensor's place in the graph.
        self.edges[module] = get_gradient_edge(output)
        return output

    def _check_outputs(self, model: nn.Module, f: Tensor, x: Tensor) -> Tensor:
        if not isinstance(f, Tensor) or f.dim() != 2 or len(f) != len(x):
            shape = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
            raise ValueError(f"the model must return (B, outputs) for a batch of {len(x)}, got {shape}")
        if not torch.isfinite(f).all():
            self.blaming = True
            model(x)  # once more, to name the first layer that overflows
            raise ValueError("the outputs of the model are not finite, though those of its layers are")
        return f

    @staticmethod
    def _add(sums: dict[str, Tensor], name: str, term: Tensor) -> None:
        sums[name] = sums[name] + term if name in sums else term


def _gram(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """sum over samples and positions of outer products: (B, S, K, d) -> (K, d, d)."""
    t = t.detach().to(dtype or t.dtype).permute(2, 0, 1, 3).flatten(1, 2)
    return t.mT @ t


def _eigvalsh(factors: Tensor, name: str) -> Tensor:
    """Eigenvalues of (K, d, d) positive semi-definite matrices, in float64, of matrices scaled to unit trace first.

    Solvers fail on nearly zero and on badly scaled matrices in float32: those are solved in float64.
    """
    trace = factors.diagonal(dim1=-2, dim2=-1).sum(-1).double()
    scaled = factors / trace.clamp_min(torch.finfo(torch.float64).tiny).to(factors)[:, None, None]
    scaled = torch.where((trace > 0)[:, None, None], scaled, torch.zeros_like(scaled))
    try:
        values = torch.linalg.eigvalsh(scaled)
    except torch.linalg.LinAlgError:
        values = torch.full_like(trace, torch.nan)
    if not torch.isfinite(values).all():
        try:
            values = torch.linalg.eigvalsh(scaled.double())
        except torch.linalg.LinAlgError as error:
            raise ValueError(f"the eigenvalues of the factor {name} did not converge, even in float64") from error
    return values.double().clamp_min(0) * trace[:, None]


def _path_of(module: nn.Module, name: str, expand_bias: bool) -> Callable[[Tensor], Path] | None:
    """How to read a parameter of a module as a path: ours are paths, torch's are adopted."""
    if isinstance(module, Bias) and expand_bias:
        return lambda _: _definition(Bias, module.shape, module.out_shape, True)
    if isinstance(module, Path):
        return lambda _: module
    if type(module) is nn.Linear:
        if name == "weight":
            return lambda _: _definition(Dense, (module.in_features,), (module.out_features,))
        return lambda y: _definition(Bias, (1,) * (y.dim() - 2) + (y.shape[-1],), y.shape[1:], expand_bias)
    if type(module) is nn.Conv2d:
        if name == "weight":
            return lambda _: _adopted_conv(module)
        return lambda y: _definition(Bias, (y.shape[1], 1, 1), y.shape[1:], expand_bias)
    return None


def _adopted_conv(conv: nn.Conv2d) -> Path:
    padding = tuple(conv._reversed_padding_repeated_twice)  # torch's own reading of "same", "valid" and numbers
    shape = (conv.in_channels, conv.out_channels, conv.kernel_size)
    return _definition(Conv, *shape, conv.stride, padding, conv.dilation, conv.groups, conv.padding_mode)


def _definition(kind: Callable[..., Path], *arguments: object) -> Path:
    """A path without weights: its columns and rows are all that curvature asks for."""
    with torch.device("meta"):
        return kind(*arguments)


def _refuse_batch_dependence(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"{name} ({kind}) uses the statistics of the batch, so a sample's output depends on its batchmates and the "
                "evidence on the batch size: call model.eval(), with running statistics"
            )
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise ValueError(f"{name} ({kind}) is in train mode, so every pass gives other outputs: call model.eval()")


def _to_model(x: Tensor, y: Tensor, model: nn.Module, which: str) -> tuple[Tensor, Tensor]:
    if not x.is_floating_point():
        raise ValueError(f"inputs are {x.dtype}: convert them to floating point")
    if not torch.isfinite(x).all():
        rows = (~torch.isfinite(x).flatten(1).all(1)).nonzero().flatten().tolist()
        raise ValueError(
            f"the inputs of {which} are not finite (NaN or Inf) in rows {rows[:5]} of that batch: drop or mend them"
        )
    if y.is_floating_point() and not torch.isfinite(y).all():
        raise ValueError(f"the targets of {which} are not finite (NaN or Inf): drop or mend them")
    parameter = next(model.parameters())
    y = y.to(parameter) if y.is_floating_point() else y.to(parameter.device)
    return x.to(parameter), y


def _split(x: Tensor, y: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """The samples of a batch to take curvature from (True), then the rest (False)."""
    if mask is None:
        yield x, y, True
        return
    for part, record in ((mask.to(x.device), True), (~mask.to(x.device), False)):
        if part.any():
            yield x[part], y[part], record


def _choose(subset: int | None, size: int | None, seed: int) -> Tensor | None:
    """Which samples of the stream to use: None for all, else a mask of ``subset`` of ``size``."""
    if subset is None:
        return None
    if size is None:
        raise ValueError("subset needs data whose length is known: pass tensors, a dataset, or a loader of one")
    if not 0 < subset <= size:
        raise ValueError(f"subset must be between 1 and the {size} samples of the data, got {subset}")
    mask = torch.zeros(size, dtype=torch.bool)
    mask[torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:subset]] = True
    return mask


class _Signs:
    """Independent signs, one row per sample in the order of the stream, whatever the batch size."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.left: list[Tensor] = []

    def __call__(self, count: int, width: int) -> Tensor:
        while len(self.left) < count:
            self.left += (2 * torch.randint(2, (1024, width), generator=self.generator) - 1).unbind()
        taken, self.left = self.left[:count], self.left[count:]
        return torch.stack(taken)
