"""Documented modules that have moved: their old names still import, with a warning that says the new one."""

import importlib
import sys
import warnings
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {  # what was documented by these names; they go with 0.2
    "averaging": "nn.symmetrised",
    "data": "papers.datasets",
    "evidence.differentiable": "evidence.gradient",
    "evidence.last_layer": "papers.last_layer",
    "groups": "linear.groups",
    "layers": "nn.layers",
    "likelihoods": "bayes.likelihoods",
    "lightning": "training.lightning",
    "nets": "nn.nets",
    "paths": "linear",
    "priors": "bayes.priors",
}


class _Redirected(MetaPathFinder, Loader):
    """Finds ``package.old`` and loads ``package.new`` for it."""

    def __init__(self, package: str):
        self.names = {f"{package}.{old}": f"{package}.{new}" for old, new in MOVED.items()}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = self.names[spec.name]
        warnings.warn(
            f"{spec.name} is now {new}, and goes with version 0.2: import it from there", DeprecationWarning, stacklevel=2
        )
        module = importlib.import_module(new)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # its own, which the import of another name has replaced


def redirect(package: str) -> Callable[[str], ModuleType]:
    """Let the old names of ``package`` be imported; returns its ``__getattr__``, for those that are only read."""
    sys.meta_path.append(_Redirected(package))

    def attribute(name: str) -> ModuleType:
        if name in MOVED:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute
