"""Sites: which path owns which parameter of a model, and the hooks that show each path its inputs and cotangents.

autosym's paths own their weight; torch's Linear, Conv1d and Conv2d are read as paths without being changed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autosym.averaging import Symmetrised
from autosym.batching import all_finite
from autosym.coordinates import Frame
from autosym.paths import Bias, Conv, Dense, Path, form_of
from autosym.sparse import Sparse, SparseConv, SparseIn, SparseOut, Tangents


class Definition(Protocol):
    """The part of a path that curvature asks for."""

    def columns(self, x: Tensor) -> Tensor: ...

    def gram(self, x: Tensor) -> Tensor: ...

    def rows(self, g: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Site:
    """A parameter of the model that a path owns, and the module whose inputs and outputs that path sees."""

    name: str
    module: nn.Module
    parameter: nn.Parameter
    path: Callable[[Tensor, Tensor], Definition]  # given an input and its output: torch's layers do not know their map's size


def sites(model: nn.Module, expand_bias: bool = False) -> list[Site]:
    """Every trainable parameter with the path that owns it; frozen ones are point estimates, outside the evidence.

    Paths own their weight; torch's Linear, Conv1d and Conv2d are read as Dense or Conv and Bias. Anything else is refused.
    """
    found: dict[int, Site] = {}
    owners: dict[int, str] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=isinstance(module, Path)):
            full = f"{module_name}.{name}".lstrip(".")
            if owners.get(id(parameter)) == full:  # of a part of a path, which the path owns
                continue
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
                raise ValueError(f"{full} holds values that are not finite (NaN or Inf): load or initialise it anew")
            owners[id(parameter)] = full
            path = _path_of(module, name, expand_bias)
            if path is None:
                raise ValueError(
                    f"no path owns the parameter {full} of {type(module).__name__}: the evidence covers autosym's paths, "
                    "nn.Linear, nn.Conv1d and nn.Conv2d; freeze it by requires_grad_(False) to keep it as a point estimate outside of it"
                )
            own_weight = isinstance(module, Path) and name == "weight"
            found[id(parameter)] = Site(module_name if own_weight else full, module, parameter, path)
    if not found:
        raise ValueError(
            "the model has no trainable parameter, so there is nothing to integrate over: unfreeze some by requires_grad_(True)"
        )
    return list(found.values())


def is_under(name: str, stem: str) -> bool:
    """Whether a dotted name is ``stem``, or of something that it holds; the model itself, "", holds all."""
    return not stem or name == stem or name.startswith(f"{stem}.")


def sizes(sites: Sequence[Site]) -> dict[str, float]:
    """The size of every parameter, in units of which relative steps are: its root mean square, but for what a path says of its own."""
    return {
        site.name: site.module.size()
        if isinstance(site.module, Path) and site.parameter is site.module.weight
        else float(site.parameter.detach().square().mean().sqrt())
        for site in sites
    }


def frames(sites: Sequence[Site], scaled_rows: bool = False) -> dict[str, Frame]:
    """The coordinates that steps are even in, of anchor values: those of all else are the weights themselves.

    Where rows have scales of their own (a Student-t prior) anchors that are rows have none: the prior would not be diagonal there.
    """
    found = {s.name: s.module for s in sites if isinstance(s.module, Sparse) and s.parameter is s.module.weight}
    return {name: path.frame() for name, path in found.items() if path.across or not scaled_rows}


def verify(model: nn.Module, x: Tensor, expand_bias: bool = False) -> float:
    """Compare every parameter's gradient with the one that its path's rows and columns give, on a few samples.

    They differ where a parameter acts outside of its path (used in a function, reparametrised), or a path is ill defined.
    Returns the bytes that a pass takes for each sample: what autograd keeps, and three times the largest columns or rows.
    """
    x = x.clone()  # of which the storage is its own
    columns: dict[str, Tensor] = {}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t.detach()  # an output that kept itself would never be freed

    owned = sites(model, expand_bias)
    see = lambda name, path, x: columns.__setitem__(name, path.columns(x))  # noqa: E731
    with Tape(owned, see, weights=True, reduce=False) as tape, torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            f = tape.record(model, x)
        cotangent = torch.ones_like(f) / torch.arange(1, f.shape[1] + 1, device=f.device)
        rows = {name: rows for names, rows in tape.backward(f, cotangent) for name in names}
        gradients = torch.autograd.grad(f, [site.parameter for site in owned], cotangent, allow_unused=True)
    for site, gradient in zip(owned, gradients, strict=True):
        expected = torch.einsum("bsko,bski->koi", rows[site.name], columns[site.name]).flatten()
        actual = torch.zeros_like(expected) if gradient is None else gradient.flatten()
        if (expected - actual).abs().max() > 1e-2 * expected.abs().max() + 1e-6 * max(1.0, float(actual.abs().max())):
            raise ValueError(
                f"the gradient of {site.name} is not what its layer's inputs and outputs give: it is also used outside of "
                f"{type(site.module).__name__}, or reparametrised; use it once, as the layer's own weight, or freeze it"
            )
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    activations = sum(size for where, size in kept.items() if where not in weights)
    largest = max(t.numel() * t.element_size() for t in (*columns.values(), *rows.values()))
    return (activations + 3 * largest) / len(x)


def linearised(
    model: nn.Module, x: Tensor, root: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The outputs f (B, D), and for every path columns (B, S, K, in) and rows (B, C, S, K, out) for the C columns of root(f): (B, D, C).

    The sum over positions of their products is the Jacobian of root(f)^T f. Copies of a sample (``averaging``) are as good as positions.
    """
    columns: dict[str, Tensor] = {}

    def together(t: Tensor) -> Tensor:
        return t.unflatten(0, (len(x), -1)).flatten(1, 2)

    see = lambda name, path, x: columns.__setitem__(name, together(path.columns(x)))  # noqa: E731
    with Tape(sites(model), see, reduce=False) as tape, torch.enable_grad():
        f = tape.record(model, x)
        rows: dict[str, list[Tensor]] = {name: [] for name in columns}
        for cotangent in root(f.detach()).unbind(2):
            for names, row in tape.backward(f, cotangent):
                for name in names:
                    rows[name].append(together(row.detach()))
    return f.detach(), {name: (columns[name], torch.stack(rows[name], 1)) for name in columns}


def refuse_batch_dependence(model: nn.Module) -> None:
    """Refuse models whose output for a sample depends on its batchmates, or on chance."""
    if torch.is_inference_mode_enabled():
        raise ValueError("curvature needs a graph: call it outside of torch.inference_mode() (torch.no_grad() is fine)")
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"{name} ({kind}) uses the statistics of the batch, so a sample's output depends on its batchmates and the "
                "evidence on the batch size: call model.eval(), with running statistics"
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.training and module.running_mean is not None:
            raise ValueError(f"{name} ({kind}) is in train mode and would change its running statistics: call model.eval()")
        random = isinstance(module, nn.RReLU) or (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0)
        if random and module.training:
            raise ValueError(f"{name} ({kind}) is in train mode, so every pass gives other outputs: call model.eval()")


class Tape:
    """Hooks on the modules of all sites: shows paths their inputs as they come forward, and hands out rows as they come backward.

    Weights take no part in its graph (but with ``weights``): a backward pass goes to the outputs of paths only, at half the cost.
    Of a model that averages copies of every sample (``averaging``) a path sees its mean input and the sum of its cotangents, as columns
    and rows are linear: the reduced form, exact where the model is linear. With ``reduce`` False copies count as samples. With ``graph``
    inputs and rows stay in the graph, to be differentiated again.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        see: Callable[[str, Definition, Tensor], None],
        weights: bool = False,
        reduce: bool = True,
        graph: bool = False,
    ):
        self.sites, self.see, self.weights, self.reduce, self.graph = sites, see, weights, reduce, graph
        self.copies: dict[nn.Module, int] = {}
        self.by_module: dict[nn.Module, list[Site]] = {}
        for site in sites:
            self.by_module.setdefault(site.module, []).append(site)
        self.edges: dict[nn.Module, GradientEdge] = {}
        self.paths: dict[str, Definition] = {}
        self.recording = self.blaming = False
        self.batch = 0
        self.current = sites[0].name  # where a pass is

    def __enter__(self) -> "Tape":
        self.handles = [module.register_forward_hook(self._hook) for module in self.by_module]
        self.handles += [module.register_forward_pre_hook(self._enter, prepend=True) for module in self.by_module]
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.edges.clear()
        if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error)):
            raise MemoryError(
                f"out of memory in the curvature pass at {self.current}: pass a smaller memory= (GiB) or batch_size=, or, if its factors "
                "are too large, use a factored layer (f-fc) in its place, or freeze it by requires_grad_(False)"
            ) from error

    def _enter(self, module: nn.Module, _: object) -> None:
        self.current = self.by_module[module][0].name

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        """The outputs of the model alone, without a graph."""
        with torch.no_grad():
            return self._check_outputs(model, model(x), x)

    def record(self, model: nn.Module, x: Tensor) -> Tensor:
        """The outputs of the model, with every path shown its input and a graph to go back through."""
        self.edges.clear()
        self.recording, self.batch = True, len(x)
        averaged = [module for module in model.modules() if isinstance(module, Symmetrised)]
        self.copies = {part: module.copies for module in averaged for part in module.model.modules()}
        with nullcontext() if self.weights else self._weights_aside():
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

    def backward(self, f: Tensor, cotangent: Tensor) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """The rows of every path for one cotangent (B, outputs) of the outputs; the graph is kept until the next record.

        Paths whose rows are the same numbers at the same place in memory (a dense map and its bias) come together.
        """
        self.current = "a backward pass"
        edges = list(self.edges.values())
        grads = torch.autograd.grad(f, edges, cotangent, retain_graph=True, allow_unused=True, create_graph=self.graph)
        same: dict[tuple, tuple[tuple[str, ...], Tensor]] = {}
        for module, grad in zip(self.edges, grads, strict=True):
            if grad is not None and self.reduce and module in self.copies:
                grad = grad.unflatten(0, (self.batch, -1)).sum(1)
            for site in self.by_module[module]:
                if grad is None:
                    raise ValueError(f"{site.name} has no influence on the output: remove it, or freeze it")
                self.current = site.name
                rows = self.paths[site.name].rows(grad)
                if rows.untyped_storage().data_ptr() != grad.untyped_storage().data_ptr():
                    yield (site.name,), rows
                    continue
                place = (rows.data_ptr(), rows.shape, rows.stride())
                names, _ = same.get(place, ((), rows))
                same[place] = ((*names, site.name), rows)
        for names, rows in same.values():
            self.current = names[0]
            yield names, rows

    @contextmanager
    def _weights_aside(self) -> Iterator[None]:
        for site in self.sites:
            site.parameter.requires_grad_(False)
        try:
            yield
        finally:
            for site in self.sites:
                site.parameter.requires_grad_(True)

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
        copies = self.copies.get(module, 1)
        if len(inputs) != 1 or inputs[0].shape[0] != self.batch * copies:
            raise ValueError(
                f"{names} must see one positional tensor whose first axis is the batch of {self.batch} samples; got "
                f"{[tuple(x.shape) for x in inputs]}: keep positions in an axis of their own"
            )
        spread = 0 in output.stride()  # of an expanded tensor, which nothing can change in place
        if not output.requires_grad:  # the first layer, or all before it are frozen
            output = output.detach().requires_grad_()
            output = output if spread else output.clone()
        elif output._is_view() and not spread:  # an in-place activation that follows would take a view out of the graph
            output = output.clone()
        x = inputs[0] if self.graph else inputs[0].detach()
        if self.reduce and copies > 1:
            x = x.unflatten(0, (self.batch, copies)).mean(1)
        for site in self.by_module[module]:
            path = self.paths[site.name] = site.path(x, output)
            self.see(site.name, path, x)
        # The edge, not the tensor: an in-place activation that follows would move the tensor's place in the graph.
        self.edges[module] = get_gradient_edge(output)
        return output

    def _check_outputs(self, model: nn.Module, f: Tensor, x: Tensor) -> Tensor:
        if not isinstance(f, Tensor) or f.dim() != 2 or len(f) != len(x):
            shape = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
            raise ValueError(f"the model must return (B, outputs) for a batch of {len(x)}, got {shape}")
        if not all_finite(f):
            bad = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
            if bad:  # trainable ones were refused before
                raise ValueError(
                    f"the outputs of the model are not finite, as the frozen {', '.join(bad)} is not: load or initialise it anew"
                )
            self.blaming = True
            model(x)  # once more, to name the first layer that overflows
            raise ValueError(
                "the outputs of the model are not finite, though those of its layers are: look at what forward() does with them"
            )
        return f


def _path_of(module: nn.Module, name: str, expand_bias: bool) -> Callable[[Tensor, Tensor], Definition] | None:
    """How to read a parameter of a module as a path: ours are paths, torch's are adopted."""
    if isinstance(module, (SparseConv, SparseIn, SparseOut)) and name in ("basis.omega", "basis.shift"):
        return lambda x, _: Tangents(module, name.removeprefix("basis."), x)
    if isinstance(module, Bias) and name == "weight" and expand_bias:
        return lambda *_: _definition(Bias, module.shape, module.out_shape, True)
    if isinstance(module, Path) and name == "weight":
        return lambda *_: module
    if type(module) is nn.Linear and name == "weight":
        return lambda *_: _definition(Dense, (module.in_features,), (module.out_features,))
    if type(module) is nn.Linear and name == "bias":
        return lambda _, y: _definition(Bias, (1,) * (y.dim() - 2) + (y.shape[-1],), tuple(y.shape[1:]), expand_bias)
    if isinstance(module, (nn.Conv1d, nn.Conv2d)) and type(module) in (nn.Conv1d, nn.Conv2d):  # not a subclass
        if name == "weight":
            return lambda *_: _definition(Conv, *form_of(module))
        return lambda _, y: _definition(Bias, (y.shape[1],) + (1,) * (y.dim() - 2), tuple(y.shape[1:]), expand_bias)
    return None


@cache
def _definition(kind: Callable[..., Path], *arguments: object) -> Path:
    """A path without weights: its columns and rows are all that curvature asks for."""
    with torch.device("meta"):
        return kind(*arguments)
