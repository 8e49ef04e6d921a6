"""Records as files: frozen dataclasses of tensors and plain values, taken apart into tensors by name and JSON, and put together again.

Only classes that the reader names are ever made, from what their fields are called: nothing in a file can run.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def pack(value: Any, name: str, tensors: dict[str, Tensor], leave_out: Sequence[str] = ()) -> Any:
    """``value`` as JSON takes it; its tensors are added to ``tensors``, by names that begin with ``name``. Fields may be left out."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if is_dataclass(value) and not isinstance(value, type):
        kept = [field.name for field in fields(value) if field.name not in leave_out]
        return {
            "record": type(value).__name__,
            "fields": {key: pack(getattr(value, key), f"{name}/{key}", tensors) for key in kept},
        }
    if isinstance(value, Mapping):
        return {"dict": {str(key): pack(item, f"{name}/{key}", tensors) for key, item in value.items()}}
    if isinstance(value, (tuple, list)):
        return {type(value).__name__: [pack(item, f"{name}/{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def unpack(packed: Any, tensors: Mapping[str, Tensor], kinds: Mapping[str, type], **others: Any) -> Any:
    """What ``pack`` was given. ``kinds`` are the classes of records by name; ``others`` are fields of the outermost that were left out."""
    if not isinstance(packed, dict):
        return packed
    if "record" in packed:
        made = {key: unpack(item, tensors, kinds) for key, item in packed["fields"].items()}
        return kinds[packed["record"]](**made, **others)
    (kind, inside), *_ = packed.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "dict":
        return {key: unpack(item, tensors, kinds) for key, item in inside.items()}
    if kind == "float":
        return float(inside)
    items = (unpack(item, tensors, kinds) for item in inside)
    return {"tuple": tuple, "list": list}[kind](items)
