"""The order of the packages: each imports only from those before it, lazily too, and nothing heavy at module level."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autosym
from autosym.runtime import moved

ROOT = Path(autosym.__file__).parent
ORDER = (
    "runtime", "linear", "nn", "bayes", "curvature", "evidence", "training", "surgery", "answer", "report", "noether", "papers", "cli",
)  # fmt: skip
ABOVE_ALL = {"__init__", "__main__"}  # they see every package, and none sees them
OUTER = {"report", "papers", "cli"}  # may import their own tools at module level
ADAPTERS = {"training/lightning.py"}  # of another library, which whoever imports them has; nothing here does
LIBRARIES = {"torch", "numpy", "safetensors", "autosym", *sys.stdlib_module_names}
FILES = sorted(ROOT.rglob("*.py"))


def imports(tree: ast.AST, package: tuple[str, ...], inside: bool = False):
    """(dotted name, whether it is inside a function) of everything a module imports; relative ones made absolute."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*package[: len(package) + 1 - node.level], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            yield from ((f"{base}.{alias.name}", inside) for alias in node.names)
        else:
            yield from imports(node, package, inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))


def violations(file: str, source: str) -> list[str]:
    """What a file, named as it is below src/autosym, imports against the order."""
    *folders, name = file.split("/")
    room = folders[0] if folders else name.removesuffix(".py")
    before = ORDER if room in ABOVE_ALL else ORDER[: ORDER.index(room) + 1]
    found = []
    for imported, inside in imports(ast.parse(source), ("autosym", *folders)):
        top, *rest = imported.split(".")
        if top == "autosym":
            wrong = not rest or rest[0] not in before
        else:
            wrong = top == "pickle" or not (top in LIBRARIES or inside or room in OUTER or file in ADAPTERS)
        found += [f"{file} imports {imported}"] if wrong else []
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_order(path):
    assert violations(str(path.relative_to(ROOT)), path.read_text()) == []


def test_every_package_has_its_place_in_the_order():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == set(ORDER)
    assert {path.stem for path in ROOT.glob("*.py")} == ABOVE_ALL


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("nn/layers.py", "from autosym.curvature.kronecker import kfac"),
        ("nn/layers.py", "from autosym import curvature"),
        ("nn/layers.py", "import autosym.curvature"),
        ("nn/layers.py", "from .. import curvature"),
        ("nn/layers.py", "from ..curvature import kfac"),
        ("nn/layers.py", "from autosym import log_evidence"),
        ("nn/layers.py", "import autosym"),
        ("linear/path.py", "def f():\n    from autosym.nn import layers"),
        ("curvature/kronecker.py", "from autosym.evidence.laplace import at"),
        ("evidence/laplace.py", "from autosym import training"),
        ("training/fitted.py", "from autosym.report import writing"),
        ("training/fitted.py", "def f():\n    from autosym.report import writing"),
        ("report/page.py", "from autosym.cli import commands"),
        ("training/callbacks.py", "import rich"),
        ("evidence/laplace.py", "import matplotlib.pyplot as plt"),
        ("evidence/laplace.py", "from scipy import linalg"),
        ("report/page.py", "import pickle"),
        ("bayes/priors.py", "def f():\n    import pickle"),
        ("training/fitting.py", "from autosym.papers.datasets import digits"),
        ("answer/equivariance.py", "from autosym.noether import discover"),
    ],
)
def test_imports_against_the_order_are_seen(file, source):
    assert violations(file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("nn/layers.py", "from autosym.linear.conv import Conv"),
        ("evidence/laplace.py", "from autosym.evidence.record import Evidence"),
        ("evidence/laplace.py", "from .record import Evidence"),
        ("training/callbacks.py", "def f():\n    import rich"),
        ("report/page.py", "def f():\n    import jinja2"),
        ("report/drawing.py", "import matplotlib"),
        ("cli/commands.py", "from autosym.papers import images"),
        ("__init__.py", "from autosym.report import writing"),
    ],
)
def test_imports_along_the_order_are_not(file, source):
    assert violations(file, source) == []


def modules_of(file: Path) -> str:
    return ".".join(("autosym", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def test_modules_have_no_circle():
    """Inside a package too: what a module imports, lazily or not, never leads back to it."""
    names = {modules_of(file): file for file in FILES}
    needs = {}
    for name, file in names.items():
        package = ("autosym", *file.relative_to(ROOT).parts[:-1])
        found = {imported for imported, _ in imports(ast.parse(file.read_text()), package)}
        needs[name] = {one if one in names else one.rpartition(".")[0] for one in found} & set(names) - {name}
    done: set[str] = set()
    while len(done) < len(needs):
        ready = {name for name, others in needs.items() if name not in done and others <= done}
        assert ready, f"a circle among {sorted(set(needs) - done)}"
        done |= ready


def test_there_is_no_utils():
    assert len(FILES) > 8
    assert not [path for path in FILES if path.stem in ("utils", "util", "helpers", "common")]


def test_no_test_imports_another():
    """What tests share is in the modules beside them: a file of tests can be run alone."""
    tests = Path(__file__).parent
    found = [path.name for path in tests.rglob("*.py") if re.search(r"^\s*(from|import) test_", path.read_text(), re.M)]
    assert not found, found


def test_the_library_needs_torch_numpy_and_safetensors_only():
    """In a process of its own, in which nothing else can be imported."""
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("rich", "matplotlib", "jinja2", "tyro", "sklearn", "pooch", "PIL", "tensorboard", "lightning", "scipy"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import autosym
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("old", "new"), moved.MOVED.items())
@pytest.mark.parametrize("imported", [True, False])
def test_documented_modules_that_moved_go_by_their_old_names(imported, old, new, monkeypatch):
    if old == "lightning":
        pytest.importorskip("lightning")
    parent, _, name = f"autosym.{old}".rpartition(".")
    monkeypatch.delitem(sys.modules, f"autosym.{old}", raising=False)
    monkeypatch.delitem(vars(sys.modules[parent]), name, raising=False)
    expected = importlib.import_module(f"autosym.{new}")
    spec = expected.__spec__
    with pytest.warns(DeprecationWarning, match=f"autosym.{old} is now autosym.{new}") as told:
        found = importlib.import_module(f"autosym.{old}") if imported else getattr(sys.modules[parent], name)
    assert found is expected
    assert expected.__spec__ is spec
    assert imported or told[0].filename == __file__, "the warning is of the line that uses the old name"


def test_other_attributes_are_not_found():
    with pytest.raises(AttributeError, match="no attribute 'spam'"):
        autosym.spam  # noqa: B018
