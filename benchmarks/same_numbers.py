"""Did a change of the source change a number? Prints one line for each quantity: its name, a number of it, how many, and a hash of all.

    python benchmarks/same_numbers.py                     this source: about a minute of one core
    python benchmarks/same_numbers.py --against main      this source beside another revision; exit 1 if anything differs
    python benchmarks/same_numbers.py --only fits loop    some groups of quantities

Compared, by the exact bytes, on small data with fixed seeds, in one process with one thread of the CPU:

- evidence: all parts of the record for networks with every kind of layer and for plain torch networks; curvature exact, sampled and
  from a subset; both likelihoods; slopes in precisions and noise; slopes in learned ranges; kernel, variational and exact evidence;
- fits: evidence, weights, precisions, history and shares for each kind of schedule, prior, data and model;
- checkpoints: a run that is interrupted and resumed ends like one that is not. With ``--against``, this source also resumes checkpoints
  that the other revision wrote;
- after a fit: simplify, harden, relax, compare, predictions, equivariance errors, the contents of a report;
- a loop of one's own with ``Learner``; conserved quantities by ``noether.discover``; variants of data; the demo and a
  network of Noether's razor, made small;
- the command line: fit, audit, demo, table. With ``--against`` both sides make tables of the results of the other revision.

Only numbers count. Words may change: strings are left out, and so are times and where a result comes from. Of a printed table only the
numbers in its rows count. HTML pages are not compared.

This script and ``quantities.py`` run unchanged on another layout of the source: they use public names and the command line, and
``find`` for all else.
"""

import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import autosym
import quantities
from quantities import Quantities, exact_bytes, find, images, leaves, shares

ROOT = Path(__file__).resolve().parents[1]
ERROR = "ERROR"  # in place of a hash: it is never the same as another
Found = dict[str, dict[str, Any]]  # by name of a quantity: value, numbers, hash


def summary(value: Any) -> dict[str, Any]:
    """The first number, how many there are, and the hash of all."""
    found = list(leaves(value))
    first = next((float(part.flat[0]) for part in found if part.size), math.nan)
    digest = hashlib.sha256(exact_bytes(value)).hexdigest()[:16]
    return {"value": f"{first:.9g}", "numbers": sum(part.size for part in found), "hash": digest}


# ---- the papers and the command line


def of_papers() -> Quantities:
    pictures = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(2))
    for name in ("rotated", "translated", "scaled", "quadrants"):
        yield f"data {name}", find(name, "data", "datasets", "variants")(pictures, 3)
    run, execute, demo, summarise = (find(name, "quadrant_digits") for name in ("Run", "execute", "DEMO", "summarise"))
    cells = [execute(run(*cell, width=2, test=1600, epochs=2)) for cell in demo]
    found = summarise(cells)
    yield "demo", [found["rows"], found["comparison"], [shares(rows) for rows in found["symmetry"].values()]]
    yield "demo, predicted", [cell["predicted"] for cell in cells]
    run, execute = (find(name, "noether", "conserved", "razor") for name in ("Run", "execute"))
    with tempfile.TemporaryDirectory() as folder:
        small = run("oscillator", "learned", trajectories=3, taus=4, weights=2, width=8, epochs=3)
        yield "noether, by a network", execute(small, results=Path(folder))["row"]


def printed(text: str) -> list[float]:
    """The numbers in the rows of a table as it is printed."""
    rows = "\n".join(line for line in text.splitlines() if "│" in line)
    found = re.findall(r"(?<![\w.+-])[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.-])", rows)
    return [float(number.replace(",", "")) for number in found]


def command(*arguments: Any) -> str:
    """What ``autosym`` prints, run in this process."""
    out, before = io.StringIO(), sys.argv
    sys.argv = ["autosym", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_module("autosym", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"autosym {arguments} ended with {end.code}") from end
    finally:
        sys.argv = before
    return out.getvalue()


def of_commands(results: Path) -> Quantities:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        x, y = images()
        np.savez(folder / "x.npz", images=x[:, 0].mul(40).add(128).clamp(0, 255).byte().numpy(), labels=y.numpy())
        ran = json.loads(command("fit", folder / "x.npz", "--epochs", 1, "--test", 0.2, "--out", folder / "run", "--json"))
        yield "autosym fit", [ran["row"], shares(ran["symmetry"]), ran["preprocessing"], ran["network"]]
        yield "autosym audit", json.loads(command("audit", folder / "run", folder / "x.npz", "--samples", 8, "--json"))
        yield "autosym demo --basis", json.loads(command("demo", "--basis", "--out", folder / "basis", "--json"))["rows"]
    for name in ("1", "2", "3", "invariance-1", "invariance-2", "invariance-3", "noether"):
        yield f"autosym table {name}", printed(command("table", name, "--results", results))
        yield f"autosym table {name} --json", json.loads(command("table", name, "--results", results, "--json"))["rows"]


# ---- all of them, and two sources side by side

QUANTITIES: dict[str, Callable[..., Quantities]] = {
    "evidence": quantities.of_networks,
    "estimators": quantities.of_other_estimators,
    "ranges": quantities.of_ranges,
    "fits": quantities.of_fits,
    "checkpoints": quantities.of_checkpoints,
    "answers": quantities.of_answers,
    "reports": quantities.of_reports,
    "loop": quantities.of_own_loop,
    "dynamics": quantities.of_dynamics,
    "papers": of_papers,
    "commands": of_commands,
}


def measure(groups: Iterable[str], handed: Path, results: Path) -> Found:
    """Every quantity of these groups by name. An error ends its group and stands in the place of what is left of it."""
    torch.set_num_threads(1)
    os.environ["COLUMNS"] = "120"
    folders = {"checkpoints": (handed,), "commands": (results,)}
    found: Found = {}
    for group in groups:
        torch.manual_seed(0)
        try:
            for name, value in QUANTITIES[group](*folders.get(group, ())):
                if name in found:
                    raise ValueError(f"two quantities are called {name!r}")
                found[name] = summary(value)
        except Exception as error:
            traceback.print_exc()
            found[f"the rest of {group}"] = {"value": f"{type(error).__name__}: {error}"[:60], "numbers": 0, "hash": ERROR}
    return found


def measure_in(tree: Path, groups: Iterable[str], handed: Path, results: Path) -> Found:
    """What this script finds in the source of ``tree``, in a process of its own."""
    call = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--json",
        "--only",
        *groups,
        "--handed",
        str(handed),
        "--results",
        str(results),
    ]
    setting = {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(call, cwd=tree, env=os.environ | setting, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        raise RuntimeError(f"the script ended with {done.returncode} in {tree}, without a result")
    found = json.loads(done.stdout.splitlines()[-1])
    if not Path(found["source"]).is_relative_to(tree.resolve()):
        raise RuntimeError(f"{found['source']} was measured in place of {tree}: an installed autosym comes before PYTHONPATH")
    return found["quantities"]


def measure_both(revision: str, groups: Iterable[str]) -> tuple[Found, Found]:
    """Then and now: ``revision`` in a worktree of its own, then the source around this script, with checkpoints and results of then."""
    with tempfile.TemporaryDirectory() as temporary:
        tree, handed = Path(temporary).resolve() / "then", Path(temporary) / "handed"
        handed.mkdir()
        git = partial(subprocess.run, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        git(["git", "worktree", "add", "--quiet", "--detach", str(tree), revision])
        try:
            then = measure_in(tree, groups, handed, tree / "results")
            return then, measure_in(ROOT, groups, handed, tree / "results")
        finally:
            git(["git", "worktree", "remove", "--force", str(tree)])


def side_by_side(then: Mapping[str, Mapping], now: Mapping[str, Mapping]) -> list[tuple[str, str, str, str]]:
    """Name, value then, value now, and whether they are the same to the last bit; what one side lacks differs."""
    rows = []
    for name in dict.fromkeys((*then, *now)):
        both = [side.get(name, {"value": "-", "hash": ERROR}) for side in (then, now)]
        same = both[0]["hash"] == both[1]["hash"] != ERROR
        rows.append((name, both[0]["value"], both[1]["value"], "same" if same else "DIFFERS"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", metavar="REV", help="compare with this revision of the repository")
    parser.add_argument(
        "--only", nargs="+", choices=QUANTITIES, default=list(QUANTITIES), metavar="GROUP", help=", ".join(QUANTITIES)
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--handed", type=Path, help="a folder of checkpoints to resume; those it lacks are written to it")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="the folder of results that tables are made of")
    asked = parser.parse_args()
    if asked.against:
        rows = side_by_side(*measure_both(asked.against, asked.only))
        differ = [row for row in rows if row[3] != "same"]
        if asked.json:
            print(json.dumps([dict(zip(("name", "then", "now", "verdict"), row, strict=True)) for row in rows]))
        else:
            for row in [("quantity", "its first number then", "now", "all of it"), *rows]:
                print("{:36s} {:>21s} {:>21s}  {}".format(*row))
            print(f"{len(rows) - len(differ)} of {len(rows)} quantities are the same")
        return int(bool(differ))
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(asked.only, asked.handed or Path(temporary), asked.results.resolve())
    if asked.json:
        print(json.dumps({"source": str(Path(autosym.__file__).resolve()), "quantities": found}))
    else:
        for name, one in found.items():
            print(f"{name:36s} {one['value']:>18s} {one['numbers']:>7d}  {one['hash']}")
    return int(any(one["hash"] == ERROR for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
