"""CNNs of torchvision and timm: what relax, one evidence step, harden, torch.export and lift make of each family.

python benchmarks/zoo.py [NAME ...]      writes benchmarks/results/zoo.json (the families named, or all) and the table of docs/zoo.md
python benchmarks/zoo.py --table         the table alone, of the results that are there
"""

import json
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from autosym.runtime.files import write
from autosym.runtime.provenance import provenance

ROOT = Path(__file__).parent.parent
OUT, PAGE = ROOT / "benchmarks" / "results" / "zoo.json", ROOT / "docs" / "zoo.md"
COLUMNS = (
    "family",
    "model",
    "image",
    "free paths",
    "growth",
    "relaxed",
    "kept",
    "frozen",
    "same function",
    "evidence step",
    "harden",
    "export",
    "`where`",
    "lift c4",
    "c4, shifts",
    "strict in shifts",
    "why not",
)
STAGES = ("relax", "harden", "export")
REASONS = (  # the beginning of what lift says, and in short
    (r"\S+ \((\w+)\) has parameters of its own", r"\1 has parameters of its own"),
    (r"\S+ \((\w+)\) cannot be lifted: ([^:;]*)", r"\1: \2"),
    (r"what reaches (\S+|the output) does not follow", r"code between layers, before \1"),
    (r"forward\(\) of the lifted model cannot run after (\S+)", r"code between layers, after \1"),
)


def table(families: dict[str, dict]) -> str:
    """The results as a table in markdown, one row for each family."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *(_row(name, entry) for name, entry in families.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str, entry: dict) -> tuple[str, ...]:
    same = [_same(entry[f"{stage}_moved"]) for stage in STAGES]
    counts = [str(entry[outcome]) for outcome in ("relaxed", "kept", "frozen")]
    evidence = "-" if entry["evidence"] is None else "yes"
    where, lifts = entry["where"], entry["lift"]
    return (
        name,
        f"`{entry['model']}`",
        _image(entry["size"]),
        entry["paths"],
        _growth(entry),
        *counts,
        same[0],
        evidence,
        *same[1:],
        "" if where is None else _growth(where) if _done(where) else f"**no**: {where['why']}",
        _lifted(lifts["c4"], entry["size"]),
        "" if lifts["c4"]["shifted"] is None else _exact(lifts["c4"], "shifted"),
        _lifted(lifts["translations"], entry["size"]),
        entry["why"].replace("|", "\\|"),
    )


def _same(moved: float | None) -> str:
    from visiting import SAME

    return "-" if moved is None else "yes" if moved <= SAME else "**no**"


def _exact(entry: dict, key: str) -> str:
    from visiting_lifts import exact

    return "yes" if exact(entry[key], entry["rounding"]) else f"{entry[key]:.2g}"


def _done(entry: dict) -> bool:
    return not entry["why"] and all(_same(entry[f"{stage}_moved"]) == "yes" for stage in STAGES)


def _growth(entry: dict) -> str:
    return f"{entry['relaxed_parameters'] / entry['parameters']:.1f}x"


def _image(size: int) -> str:
    return f"{size}x{size}"


def _lifted(entry: dict, size: int) -> str:
    """Whether it was lifted, at which size if that is another one, or the reason in short."""
    if entry["size"] is not None:
        return _exact(entry, "moved") + (f", {_image(entry['size'])}" if entry["size"] != size else "")
    for pattern, words in REASONS:
        if found := re.match(pattern, entry["why"]):
            return f"no: {found.expand(words)}"
    return f"no: {entry['why']}"


def visited(name: str) -> dict:
    """All that is tried with one family."""
    from families import FAMILIES, WHERE
    from visiting import visit
    from visiting_lifts import visit_lifted

    start, family = time.process_time(), FAMILIES[name]
    found = asdict(visit(family))
    found["where"] = asdict(visit(family, "where")) if name in WHERE else None
    found["lift"] = {group: asdict(visit_lifted(family, group)) for group in ("c4", "translations")}
    return {**found, "seconds": round(time.process_time() - start, 1), "commit": provenance()["commit"]}


def main() -> None:
    from families import FAMILIES
    from visiting import PATHS

    torch.set_num_threads(1)
    names = [name for name in sys.argv[1:] if name != "--table"]
    for name in () if "--table" in sys.argv else names or FAMILIES:
        found = visited(name)
        families = {**_written(), name: found}  # as it is now: several processes may share the work
        families = {family: families[family] for family in FAMILIES if family in families}
        write(OUT, json.dumps({"paths": PATHS, **provenance(), "families": families}, indent=1) + "\n")
        print(f"{name}: {found['seconds']} s, {found['why'] or 'all done'}", flush=True)
    page = PAGE.read_text()
    PAGE.write_text(re.sub(r"\| family .*?\n(?!\|)", lambda _: table(_written()) + "\n", page, count=1, flags=re.DOTALL))


def _written() -> dict[str, dict]:
    return json.loads(OUT.read_text())["families"] if OUT.exists() else {}


if __name__ == "__main__":
    sys.path.append(str(ROOT / "tests"))
    main()
