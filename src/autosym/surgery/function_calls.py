"""Pools that forward() calls as functions, as modules: only a module can be replaced."""

import copy
from typing import Any

from torch import fx, nn

MODULES = {
    "max_pool2d": nn.MaxPool2d,
    "avg_pool2d": nn.AvgPool2d,
    "adaptive_avg_pool2d": nn.AdaptiveAvgPool2d,
    "adaptive_max_pool2d": nn.AdaptiveMaxPool2d,
}
ARGUMENTS = {  # of the functions, in their order, after the map
    "max_pool2d": ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    "avg_pool2d": ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
    "adaptive_avg_pool2d": ("output_size",),
    "adaptive_max_pool2d": ("output_size", "return_indices"),
}


def pools_as_modules(model: nn.Module) -> nn.Module | None:
    """A copy of the model, traced by ``torch.fx``, with a module for each pool that forward() calls; None if that is not possible.

    A trace holds what forward() does in one mode. A model that says ``training=`` in a call, e.g. of F.dropout, is not traced.
    """
    copied = copy.deepcopy(model)
    try:
        traced = fx.symbolic_trace(copied)
    except Exception:  # fx raises many kinds of errors, for code that depends on numbers
        return None
    calls = [node for node in traced.graph.nodes if node.op in ("call_function", "call_method")]
    if any("training" in node.kwargs for node in calls):
        return None
    for number, node in enumerate(node for node in calls if _name(node) in MODULES):
        name = f"{_name(node)}_{number}"
        arguments = dict(zip(ARGUMENTS[_name(node)], node.args[1:], strict=False)) | dict(node.kwargs)
        x = arguments.pop("input", node.args[0] if node.args else None)
        if any(
            isinstance(part, fx.Node)
            for value in arguments.values()
            for part in (value if isinstance(value, tuple) else [value])
        ):
            return None  # e.g. a window of the size of the map
        traced.add_submodule(name, MODULES[_name(node)](**arguments))
        with traced.graph.inserting_before(node):
            made = traced.graph.call_module(name, (x,))
        node.replace_all_uses_with(made)
        traced.graph.erase_node(node)
    traced.recompile()
    return traced


def _name(node: Any) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
