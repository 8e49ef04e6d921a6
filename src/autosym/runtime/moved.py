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
        self.package, self.names = package, {f"{package}.{old}": old for old in MOVED}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        old = self.names[spec.name]
        warnings.warn(_told(self.package, old), DeprecationWarning, stacklevel=2)
        module = importlib.import_module(f"{self.package}.{MOVED[old]}")
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # its own, which the import of another name has replaced


def redirect(package: str) -> None:
    """Let the old names of ``package`` be imported."""
    sys.meta_path.append(_Redirected(package))


def attribute(package: str, inside: str = "") -> Callable[[str], ModuleType]:
    """The ``__getattr__`` of ``package``, or of its part ``inside``, for old names that are read without being imported."""

    def found(name: str) -> ModuleType:
        old = f"{inside}.{name}".lstrip(".")
        if old not in MOVED:
            raise AttributeError(f"module {f'{package}.{inside}'.rstrip('.')!r} has no attribute {name!r}")
        warnings.warn(_told(package, old), DeprecationWarning, stacklevel=2)
        return importlib.import_module(f"{package}.{MOVED[old]}")

    return found


def _told(package: str, old: str) -> str:
    return f"{package}.{old} is now {package}.{MOVED[old]}, and goes with version 0.2: import it from there"
