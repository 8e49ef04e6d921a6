"""The recorded pass: hooks show every path its inputs in the forward pass, and hand out its rows in the backward pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autosym.curvature.owners import Site
from autosym.linear.grids import Grid
from autosym.linear.path import Definition
from autosym.nn.symmetrised import Symmetrised
from autosym.runtime.arithmetic import NotFinite
from autosym.runtime.batching import all_finite


def _knows_grids(hook: Callable) -> Callable:
    """Marks hooks that are right where a layer computes only what it keeps of a map (``nn.layers``)."""
    hook.knows_grids = True  # type: ignore[attr-defined]
    return hook


class Tape:
    """Hooks on the modules of all sites: show paths their inputs in the forward pass, hand out rows in the backward pass.

    Weights are not part of the graph, unless ``weights`` is True. A backward pass then stops at the outputs of paths, at half
    the cost. If a model averages copies of every sample (``averaging``), a path sees its mean input and the sum of its
    cotangents, because columns and rows are linear. This reduced form is exact if the model is linear. With ``reduce`` False
    copies count as samples. With ``graph`` inputs and rows stay in the graph, to be differentiated again. With ``few`` positions of which
    samples keep nothing (``linear.grids``) have no rows.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        see: Callable[[str, Definition, Tensor], None],
        weights: bool = False,
        reduce: bool = True,
        graph: bool = False,
        few: bool = False,
    ):
        self.sites, self.see, self.weights, self.reduce, self.graph, self.few = sites, see, weights, reduce, graph, few
        self.copies: dict[nn.Module, int] = {}
        self.by_module: dict[nn.Module, list[Site]] = {}
        for site in sites:
            self.by_module.setdefault(site.module, []).append(site)
        self.edges: dict[nn.Module, GradientEdge] = {}
        self.grids: dict[nn.Module, Grid] = {}
        self.paths: dict[str, Definition] = {}
        self.recording = self.blaming = False
        self.batch = 0
        self.current = sites[0].name  # the layer that a pass has reached, for messages

    def __enter__(self) -> "Tape":
        self.handles = [module.register_forward_hook(self._hook, with_kwargs=True) for module in self.by_module]
        self.handles += [module.register_forward_pre_hook(self._enter, prepend=True) for module in self.by_module]
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.edges.clear()
        self.grids.clear()
        if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error)):
            raise MemoryError(
                f"out of memory in the curvature pass at {self.current}: pass a smaller memory= (GiB) or batch_size=; if its "
                "factors are too large, replace it by a factored layer (f-fc), or freeze it by requires_grad_(False)"
            ) from error

    @_knows_grids
    def _enter(self, module: nn.Module, _: object) -> None:
        self.current = self.by_module[module][0].name

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        """The outputs of the model, without a graph and without showing paths their inputs."""
        with torch.no_grad():
            return self._check_outputs(model, model(x), x)

    def record(self, model: nn.Module, x: Tensor) -> Tensor:
        """The outputs of the model, with a graph for ``backward``. Every path is shown its input."""
        self.edges.clear()
        self.grids.clear()
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
        """The rows of every path for one cotangent (B, outputs) of the outputs. The graph is kept until the next ``record``.

        Paths that share the same rows in memory (e.g. a dense map and its bias) come as one item.
        """
        self.current = "a backward pass"
        edges = list(self.edges.values())
        grads = torch.autograd.grad(f, edges, cotangent, retain_graph=True, allow_unused=True, create_graph=self.graph)
        same: dict[tuple, tuple[tuple[str, ...], Tensor]] = {}
        for module, grad in zip(self.edges, grads, strict=True):
            grid, averaged = self.grids.get(module), self.reduce and module in self.copies
            few = grid is not None and self.few and not averaged  # copies of a sample keep different grids
            if grad is not None and grid is not None and not few:
                grad = grid.spread(grad)
            if grad is not None and averaged:
                grad = grad.unflatten(0, (self.batch, -1)).sum(1)
            for site in self.by_module[module]:
                if grad is None:
                    raise ValueError(f"{site.name} has no influence on the output: remove it, or freeze it")
                self.current = site.name
                rows = self.paths[site.name].rows(grad)
                if few or rows.untyped_storage().data_ptr() != grad.untyped_storage().data_ptr():
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

    @_knows_grids
    def _hook(self, module: nn.Module, inputs: tuple[Tensor, ...], options: Mapping[str, Any], output: Tensor) -> Tensor:
        names = ", ".join(site.name for site in self.by_module[module])
        if self.blaming and not torch.isfinite(output).all():
            raise NotFinite(
                f"the output of {names} is not finite, but its inputs and weights are: the values overflow {output.dtype}; "
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
        spread = 0 in output.stride()  # an expanded tensor, which nothing can change in place
        if not output.requires_grad:  # the first layer, or all layers before it are frozen
            output = output.detach().requires_grad_()
            output = output if spread else output.clone()
        elif output._is_view() and not spread:  # a later in-place activation would take a view out of the graph
            output = output.clone()
        x = inputs[0] if self.graph else inputs[0].detach()
        if self.reduce and copies > 1:
            x = x.unflatten(0, (self.batch, copies)).mean(1)
        for site in self.by_module[module]:
            path = self.paths[site.name] = site.path(x, output)
            self.see(site.name, path, x)
        if "grid" in options:
            self.grids[module] = options["grid"].without_map()
        # Keep the edge, not the tensor: a later in-place activation would move the tensor's place in the graph.
        self.edges[module] = get_gradient_edge(output)
        return output

    def _check_outputs(self, model: nn.Module, f: Tensor, x: Tensor) -> Tensor:
        if not isinstance(f, Tensor) or f.dim() != 2 or len(f) != len(x):
            shape = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
            raise ValueError(f"the model must return (B, outputs) for a batch of {len(x)}, got {shape}")
        if not all_finite(f):
            bad = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
            if bad:  # they are frozen: trainable ones were refused before
                raise ValueError(
                    f"the outputs of the model are not finite, because the frozen {', '.join(bad)} is not: "
                    "load or initialise it anew"
                )
            self.blaming = True
            model(x)  # once more, to name the first layer that overflows
            raise NotFinite(
                "the outputs of the model are not finite, but its layers' outputs are: check what forward() does with them"
            )
        return f
