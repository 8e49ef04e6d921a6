"""Measured tables of README.md and docs/ come from files: this puts them there.

    python benchmarks/tables_of_docs.py            fills the marked places of all pages from results/ and benchmarks/results/
    python benchmarks/tables_of_docs.py --check    changes nothing; names the pages that differ from the files, and ends with 1
    python benchmarks/tables_of_docs.py NAME       prints one table

A marked place is a line ``<!-- table: NAME -->``, and all up to the next line ``<!-- end -->``.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import answers_table
import augmented as augmented_runs
import findings
import speed_table
from autosym.papers import images, invariance, noether, table1, table2, table3
from findings import made, markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
PLACE = re.compile(r"^<!-- table: (\S+) -->\n.*?^<!-- end -->$", re.S | re.M)
NAMES = {"digit": "the digit", "digit+quadrant": "digit and quadrant"}


def beside(own: float | None, paper: float | None, digits: int, spread: float | None = None) -> str:
    """ "ours ± spread (theirs)"; a dash is not run, or not published."""
    shown = "-" if own is None else f"{own:.{digits}f}"
    if spread is not None:
        shown += f" ± {spread:.{digits}f}"
    return shown if paper is None else f"{shown} ({paper:.{digits}f})"


def _rows(table: str, module: Any) -> dict[tuple[str, ...], dict[str, Any]]:
    found = images.rows(table, module.RUNS, module.PAPER, RESULTS)
    return {(row["task"], row["model"], row["prior"], row["method"]): row for row in found}


def _made(table: str, kind: Callable[..., Any] = images.Run) -> str:
    """The line under a table of a paper."""
    results = [result for several in images.stored(table, RESULTS, kind).values() for result in several]
    return made(results, f"autosym table {table.removeprefix('table')}")


def _accuracy(row: Mapping[str, Any]) -> str:
    return beside(row["accuracy"], row["paper_accuracy"], 2, row["spread"])


def first() -> str:
    found = _rows("table1", table1)
    rows = []
    for model, words in (("fc", "FC"), ("conv", "CONV"), ("f-fc+conv", "learned (F-FC+CONV)")):
        for method, by in (("map", "MAP"), ("evidence", "evidence")):
            cells = [found[task, model, "theta", method] for task in table1.TASKS]
            rows.append((words, by, *map(_accuracy, cells), cells[0]["epochs"]))
    return markdown(("network", "by", *(NAMES[task] for task in table1.TASKS), "epochs"), rows) + _made("table1")


def second() -> str:
    found = _rows("table2", table2)
    rows = []
    for model, prior in table2.SETTINGS:
        map_, evidence = (found["cifar-10", model, prior, method] for method in ("map", "evidence"))
        name = model.upper() + {"theta": "", "u": ", prior on u", "omega": ", prior on omega"}[prior]
        nll = [beside(row["nll"], row["paper_nll"], 3) for row in (map_, evidence)]
        per_sample = beside(evidence["evidence"], evidence["paper_evidence"], 3)
        epochs = f"{map_['epochs']}, {evidence['epochs']}"
        rows.append((name, _accuracy(map_), nll[0], _accuracy(evidence), nll[1], per_sample, epochs))
    header = ("CIFAR-10", "MAP: accuracy (%)", "NLL", "evidence: accuracy (%)", "NLL", "log evidence / N", "epochs")
    return markdown(header, rows) + _made("table2")


def third() -> str:
    found = _rows("table3", table3)
    rows = []
    for task in table3._NUMBERS:
        map_, evidence = (found[task, table3.MODEL, "theta", method] for method in ("map", "evidence"))
        nll = [beside(row["nll"], row["paper_nll"], 3) for row in (map_, evidence)]
        rows.append((task, _accuracy(map_), nll[0], _accuracy(evidence), nll[1], evidence["epochs"]))
    header = ("data", "MAP: accuracy (%)", "NLL", "evidence: accuracy (%)", "NLL", "epochs")
    return markdown(header, rows) + _made("table3")


def third_shares() -> str:
    found = _rows("table3", table3)
    rows = []
    for task in table3._NUMBERS:
        row = found[task, table3.MODEL, "theta", "evidence"]
        shares = [beside(100 * row["shares"][path], 100 * paper, 0) for path, paper in row["paper_shares"].items()]
        rows.append((task, beside(row["evidence"], row["paper_evidence"], 3), *shares))
    return markdown(("by evidence", "log evidence / N", "F-FC (%)", "CONV (%)", "rotation path (%)"), rows)


def published() -> str:
    """The networks that learned their symmetry, in a few rows."""
    chosen = (
        ("MNIST in quadrants: the digit", "table1", table1, ("digit", "f-fc+conv", "theta")),
        ("MNIST in quadrants: digit and quadrant", "table1", table1, ("digit+quadrant", "f-fc+conv", "theta")),
        ("CIFAR-10", "table2", table2, ("cifar-10", "f-fc+conv", "theta")),
        ("CIFAR-10, sparse paths", "table2", table2, ("cifar-10", "s-fc+s-conv", "u")),
        ("rotated MNIST, small network", "table3", table3, ("rotated-mnist", table3.MODEL, "theta")),
        ("rotated CIFAR-10, small network", "table3", table3, ("rotated-cifar-10", table3.MODEL, "theta")),
        ("CIFAR-10, small network", "table3", table3, ("cifar-10", table3.MODEL, "theta")),
    )
    rows = []
    for words, table, module, key in chosen:
        row = _rows(table, module)[*key, "evidence"]
        free = sum(share for path, share in row["shares"].items() if path.endswith("fc"))
        rows.append((words, row["model"], _accuracy(row), row["epochs"], f"{100 * free:.0f}"))
    return markdown(("data", "paths", "test accuracy (%)", "epochs", "free, mean over layers (%)"), rows)


def ranges() -> str:
    """Table 1 of *Learning Invariant Weights*."""
    found = {(row["model"], row["task"]): row for row in invariance.rows("invariance-1", RESULTS)}
    models = list(dict.fromkeys(model for model, _ in found))

    def learned(row: Mapping[str, Any]) -> str:
        turned = (row["ranges"] or {}).get("rotation")
        return "" if turned is None else f"±{turned['value']:.0f}°; "

    rows = []
    for model in models:
        cells = [found[model, task] for task in invariance.TURNED]
        bounds = [beside(row["evidence"], row["paper_evidence"], 2) for row in cells]
        shown = [
            learned(row) + beside(row["accuracy"], row["paper_accuracy"], 2) + (f"; {bound}" if bound != "-" else "")
            for row, bound in zip(cells, bounds, strict=True)
        ]
        rows.append((model, *shown))
    header = ("range; accuracy (%); log evidence / N", "turned by up to 180°", "by up to 90°", "upright")
    return markdown(header, rows) + _made("invariance-1", invariance.Run)


def affine(table: str) -> str:
    """Tables 2 and 3 of *Learning Invariant Weights*."""
    found = {(row["model"], row["task"]): row for row in invariance.rows(table, RESULTS)}
    models = sorted(dict.fromkeys(model for model, _ in found), key=lambda name: (name.startswith("laplace"), len(name)))
    rows = [
        (
            model,
            *(beside(found[model, t]["accuracy"], found[model, t]["paper_accuracy"], 2) for t in invariance.CHANGED),
        )
        for model in models
    ]
    return markdown(("accuracy (%)", *invariance.CHANGED), rows) + _made(table, invariance.Run)


def affine_ranges() -> str:
    """What the networks with all six transformations learned."""
    rows = []
    for table, data in (("invariance-2", "MNIST"), ("invariance-3", "CIFAR-10")):
        found = {(row["model"], row["task"]): row for row in invariance.rows(table, RESULTS)}
        for model in ("mlp+affine", "laplace+affine"):
            for kind in ("rotation", "translation", "scale"):
                cells = []
                for task in invariance.CHANGED:
                    held = found[model, task]["ranges"] or {}
                    some = [one["value"] for name, one in held.items() if name.endswith(kind)]
                    cells.append(
                        ", ".join(f"{value:.{0 if kind == 'rotation' else 2 if kind == 'scale' else 1}f}" for value in some)
                    )
                unit = {"rotation": "degrees", "translation": "pixels", "scale": "factor"}[kind]
                rows.append((data, model, f"{kind} ({unit})", *cells))
    return markdown(("data", "network", "range", *invariance.CHANGED), rows)


def razor() -> str:
    """The table of *Noether's razor*."""
    rows = []
    for row in noether.rows(RESULTS):
        pairs = [(row[key], row[f"paper_{key}"]) for key in ("negative_elbo", "test_mse", "moved_mse")]
        forms = (".2f", ".2g", ".2g")
        shown = [
            ("-" if own is None else f"{own:{form}}") + ("" if paper is None else f" ({paper:{form}})")
            for (own, paper), form in zip(pairs, forms, strict=True)
        ]
        rows.append((row["system"], row["model"], *shown, row["epochs"]))
    results = [findings.json.loads(path.read_text()) for path in sorted((RESULTS / "noether").glob("*.json"))]
    header = ("system", "model", "-ELBO / N", "test MSE", "moved: MSE", "epochs")
    return markdown(header, rows) + made(results, "autosym table noether")


def peers() -> str:
    """One curvature pass by libraries for curvature."""
    result = findings.read("cpu")
    contenders = {
        "autosym": "ours",
        "laplace-torch, by curvlinops": "laplace-torch-curvlinops",
        "laplace-torch, by ASDL": "laplace-torch-asdl",
        "curvlinops": "curvlinops",
    }

    def shown(network: str, kind: str, name: str) -> str:
        seconds, ours = (result["seconds"][network].get(f"{by}/{kind}") for by in (name, "ours"))
        return "-" if seconds is None else f"{seconds:.2f}" if name == "ours" else f"{seconds:.2f} ({seconds / ours:.1f}x)"

    columns = [(network, kind) for network in ("conv", "mlp") for kind in ("exact", "sampled")]
    rows = [(words, *(shown(*column, name) for column in columns)) for words, name in contenders.items()]
    header = ("seconds (multiples of ours)", "CNN, exact", "CNN, sampled", "MLP, exact", "MLP, sampled")
    return markdown(header, rows) + made([result], "make bench")


def augmented() -> str:
    """1,000 images of CIFAR-10: how each image is augmented and counted."""
    results = [result for result in findings.folder("augmented") if result["config"]["size"]["name"] == "small"]
    header = ("augmented", "by", "accuracy (%)", "NLL", "calibration error", "log evidence / N", "seeds")
    return markdown(header, augmented_runs.lines(results)) + made(results, "python benchmarks/augmented.py --data DIR --small")


TABLES: dict[str, Callable[[], str]] = (
    findings.TABLES
    | speed_table.TABLES
    | answers_table.TABLES
    | {
        "augmented": augmented,
        "peers": peers,
        "published": published,
        "table1": first,
        "table2": second,
        "table3": third,
        "table3-shares": third_shares,
        "invariance-1": ranges,
        "invariance-2": lambda: affine("invariance-2"),
        "invariance-3": lambda: affine("invariance-3"),
        "invariance-ranges": affine_ranges,
        "noether": razor,
    }
)


def pages(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def filled(text: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """A page with every marked place as the files have it; a name that is unknown, or a place without an end, is refused."""
    opened = re.findall(r"^<!-- table: (\S+) -->$", text, re.M)
    if len(opened) != len(PLACE.findall(text)):
        raise ValueError("a marked place has no <!-- end --> of its own")
    if unknown := set(opened) - set(tables):
        raise ValueError(f"no table is called {', '.join(sorted(unknown))}: there are {', '.join(tables)}")
    return PLACE.sub(lambda place: f"<!-- table: {place[1]} -->\n\n{tables[place[1]]()}\n\n<!-- end -->", text)


def main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] != "--check":
        print("\n\n".join(TABLES[name]() for name in arguments))
        return 0
    stale = []
    for page in pages():
        if (new := filled(page.read_text())) != page.read_text():
            stale.append(str(page.relative_to(ROOT)))
            if not arguments:
                page.write_text(new)
    if stale:
        print("differ from the files of results:" if arguments else "filled:", ", ".join(stale))
        print("run python benchmarks/tables_of_docs.py" if arguments else "", end="\n" if arguments else "")
    return int(bool(stale and arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
