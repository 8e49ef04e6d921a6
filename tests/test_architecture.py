"""The arrows of the design: a module imports only from the rooms before it, and nothing heavy at module level."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "autosym"

# What each room may import of autosym (its own room aside).
LAYER_ROOMS = {"capture", "convolutions", "groups", "paths", "products", "sparse", "layers"}
EVIDENCE_ROOMS = {
    "averaging",
    "convolutions",
    "groups",
    "paths",
    "products",
    "sparse",
    "sites",
    "likelihoods",
    "priors",
    "batching",
    "processes",
    "curvature",
    "evidence",
}
FITTED_ROOMS = EVIDENCE_ROOMS | LAYER_ROOMS | {"predictive", "schedules", "symmetry", "tables"}
ALLOWED = {
    "groups": set(),
    "likelihoods": set(),
    "priors": set(),
    "batching": set(),
    "data": set(),
    "convolutions": set(),
    "products": set(),
    "tables": set(),
    "paths": {"convolutions", "groups", "products"},
    "sparse": {"convolutions", "coordinates", "groups", "paths"},
    "layers": {"capture", "groups", "paths", "sparse"},
    "nets": LAYER_ROOMS,
    "equivariance": {"batching", "groups", "layers", "paths", "tables"},
    "observation": set(),
    "conversion": LAYER_ROOMS | {"batching", "observation", "sites", "tables"},
    "plain": LAYER_ROOMS,
    "hardening": FITTED_ROOMS | {"plain", "training"},
    "averaging": set(),
    "noether": EVIDENCE_ROOMS | {"wording"},
    "sites": {"averaging", "batching", "coordinates", "groups", "paths", "sparse"},
    "processes": set(),
    "curvature": {"averaging", "groups", "paths", "products", "sites", "likelihoods", "priors", "batching", "processes"},
    "evidence": EVIDENCE_ROOMS | {"capture"},
    "symmetry": EVIDENCE_ROOMS | LAYER_ROOMS | {"tables", "wording"},
    "predictive": EVIDENCE_ROOMS,
    "capture": set(),
    "coordinates": set(),
    "proximal": {"coordinates", "likelihoods", "priors", "processes"},
    "checkpoint": {"batching", "likelihoods", "priors", "proximal", "processes"},
    "logs": set(),
    "schedules": set(),
    "ranges": EVIDENCE_ROOMS,
    "training": FITTED_ROOMS | {"capture", "proximal", "checkpoint", "logs", "ranges", "wording"},
    "__init__": FITTED_ROOMS
    | {
        "nets",
        "conversion",
        "hardening",
        "averaging",
        "noether",
        "equivariance",
        "training",
        "comparison",
        "loop",
        "simplifying",
    },
    "comparison": FITTED_ROOMS | {"training", "wording"},
    "simplifying": FITTED_ROOMS | {"training", "comparison"},
    "loop": FITTED_ROOMS | {"training"},
    "lightning": {"batching", "loop"},
    "provenance": {"__init__"},
    "findings": FITTED_ROOMS | {"training", "comparison", "equivariance", "provenance"},
    "runs": FITTED_ROOMS | {"comparison", "findings"},
    "wording": {"groups"},
    "charts": {"wording"},
    "page": {"sites", "findings", "wording", "charts"},
    "report": FITTED_ROOMS | {"training", "findings", "runs", "page"},
    "pictures": set(),
    "programs": set(),
    "applications": FITTED_ROOMS
    | {
        "checkpoint",
        "training",
        "provenance",
        "wording",
        "findings",
        "runs",
        "nets",
        "equivariance",
        "pictures",
        "programs",
        "experiments",
    },
    "conserved_page": {"charts", "findings", "page", "wording"},
    "physics": {"noether", "conserved_page", "provenance", "report", "experiments", "processes"},
    "cli": FITTED_ROOMS
    | {"physics", "training", "findings", "runs", "report", "nets", "data", "experiments", "applications", "__init__"},
    "experiments": FITTED_ROOMS
    | {
        "training",
        "provenance",
        "findings",
        "runs",
        "report",
        "nets",
        "conversion",
        "averaging",
        "capture",
        "noether",
        "data",
        "__init__",
    },
    "__main__": {"cli", "processes"},
}
INSIDE_FUNCTIONS = {("training", "report")}  # Fit.report
OUTER = {
    "lightning",
    "cli",
    "physics",
    "__main__",
    "experiments",
    "report",
    "data",
}  # may import their own tools at module level
LIBRARIES = {"torch", "numpy", "safetensors", "autosym", *sys.stdlib_module_names}
FILES = sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


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
            deeper = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports(node, package, deeper)


def violations(room: str, source: str, package: tuple[str, ...] = ("autosym",)) -> list[str]:
    found = []
    for name, inside in imports(ast.parse(source), package):
        top, *rest = name.split(".")
        if top == "autosym":
            target = rest[0] if rest and rest[0] in ALLOWED else "__init__"
            lazily = inside and (room, target) in INSIDE_FUNCTIONS
            if target != room and target not in ALLOWED[room] and not lazily:
                found.append(f"{room} imports {name}")
        elif top == "pickle" or (top not in LIBRARIES and not inside and room not in OUTER):
            found.append(f"{room} imports {name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    room = room_of(path)
    assert room in ALLOWED, f"{room} has no place in the design: add it to ALLOWED, with what it may import"
    assert violations(room, path.read_text(), ("autosym", *path.relative_to(ROOT).parts[:-1])) == []


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("layers", "from autosym.curvature import kfac"),
        ("layers", "from autosym import curvature"),
        ("layers", "import autosym.curvature"),
        ("layers", "from . import curvature"),
        ("layers", "from .curvature import kfac"),
        ("layers", "from autosym import log_evidence"),
        ("paths", "def f():\n    from autosym import layers"),
        ("curvature", "from autosym.evidence.laplace import at"),
        ("evidence", "from autosym import training"),
        ("training", "from autosym import report"),
        ("training", "def f():\n    from autosym import page"),
        ("findings", "from autosym.page import html"),
        ("page", "import jinja2"),
        ("page", "from autosym.report import plot"),
        ("charts", "import matplotlib"),
        ("logs", "from torch.utils.tensorboard import SummaryWriter\nimport tensorboard"),
        ("training", "import rich"),
        ("evidence", "import matplotlib.pyplot as plt"),
        ("evidence", "from scipy import linalg"),
        ("report", "import pickle"),
        ("priors", "def f():\n    import pickle"),
        ("training", "from autosym.data import digits"),
        ("equivariance", "from autosym.training import fit"),
        ("layers", "from autosym.equivariance import assert_equivariant"),
    ],
)
def test_imports_against_the_arrows_are_seen(room, source):
    assert violations(room, source)


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("layers", "from autosym.paths import Conv"),
        ("evidence", "from autosym.evidence.record import Evidence"),
        ("evidence", "from .record import Evidence"),
        ("training", "def f():\n    from autosym import report"),
        ("training", "def f():\n    import rich"),
        ("page", "def f():\n    import jinja2"),
        ("report", "from autosym import findings"),
        ("report", "import matplotlib"),
        ("cli", "from autosym.experiments import quadrants"),
    ],
)
def test_imports_along_the_arrows_are_not(room, source):
    package = ("autosym", "evidence") if room == "evidence" else ("autosym",)
    assert violations(room, source, package) == []


def test_the_arrows_have_no_circle():
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {room for room, needs in ALLOWED.items() if room not in done and needs - {room} <= done}
        assert ready, f"a circle among {set(ALLOWED) - done}"
        done |= ready


def test_there_is_no_utils():
    assert len(FILES) > 8
    assert not [path for path in FILES if path.stem in ("utils", "util", "helpers", "common")]
