"""CNNs of torchvision and timm: what relax, one evidence step, harden and torch.export make of each family.

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

from autosym.runtime.provenance import provenance

ROOT = Path(__file__).parent.parent
OUT, PAGE = ROOT / "benchmarks" / "results" / "zoo.json", ROOT / "docs" / "zoo.md"
COLUMNS = (
    "family",
    "model",
    "image",
    "relaxed",
    "kept",
    "frozen",
    "same function",
    "evidence step",
    "harden",
    "export",
    "why not",
)


def table(families: dict[str, dict]) -> str:
    """The results as a table in markdown, one row for each family."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *(_row(name, entry) for name, entry in families.items())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str, entry: dict) -> tuple[str, ...]:
    from visiting import SAME

    said = {stage: entry[f"{stage}_moved"] for stage in ("relax", "harden", "export")}
    same = {stage: "-" if value is None else "yes" if value <= SAME else "**no**" for stage, value in said.items()}
    counts = (str(entry[outcome]) for outcome in ("relaxed", "kept", "frozen"))
    evidence = "-" if entry["evidence"] is None else "yes"
    image, why = f"{entry['size']}x{entry['size']}", entry["why"].replace("|", "\\|")
    return (name, f"`{entry['model']}`", image, *counts, same["relax"], evidence, same["harden"], same["export"], why)


def main() -> None:
    sys.path.append(str(ROOT / "tests"))
    from families import FAMILIES
    from visiting import PATHS, visit

    torch.set_num_threads(1)
    names = [name for name in sys.argv[1:] if name != "--table"]
    for name in () if "--table" in sys.argv else names or FAMILIES:
        start = time.process_time()
        found = asdict(visit(FAMILIES[name]))
        seconds = round(time.process_time() - start, 1)
        families = {**_written(), name: {**found, "seconds": seconds}}  # as it is now: several processes may share the work
        families = {family: families[family] for family in FAMILIES if family in families}
        OUT.write_text(json.dumps({"paths": PATHS, **provenance(), "families": families}, indent=1) + "\n")
        print(f"{name}: {seconds} s, {found['why'] or 'all done'}", flush=True)
    page = PAGE.read_text()
    PAGE.write_text(re.sub(r"\| family .*?\n(?!\|)", lambda _: table(_written()) + "\n", page, count=1, flags=re.DOTALL))


def _written() -> dict[str, dict]:
    return json.loads(OUT.read_text())["families"] if OUT.exists() else {}


if __name__ == "__main__":
    main()
