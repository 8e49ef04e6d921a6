"""Faults put in on purpose, one line each: does a test that concerns the line notice?

    python tests/mutations.py [--only NAME ...] [--jobs 1]

A fault is put into a copy of the tree, never into the tree itself, and is noticed if a test fails that passed without it. Add a fault for
a mistake that is easily made, before you look whether a test sees it. Pytest does not collect this file.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from mutants import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 1200  # for the tests of one fault


class Copy:
    """A copy of the tree (what git knows, or does not ignore), in which tests are run one selection at a time."""

    def __init__(self, folder: Path):
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        for name in filter(None, os.fsdecode(listed).split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def test(self, tests: str) -> str:
        """What became of a selection: "passed", "failed" (a test did), or what kept it from running."""
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
        asked = [f"tests/{word}" if word.endswith(".py") else word for word in shlex.split(tests)]
        command = [sys.executable, "-m", "pytest", *options, *asked]
        paths = os.pathsep.join([str(self.folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Without bytecode: a fault as long as its line, put in within the same second, would not be compiled anew.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"not done after {SECONDS} s"
        outcome = {0: "passed", 1: "failed"}.get(done.returncode)
        return outcome or f"pytest ended with {done.returncode}: {(done.stdout.strip() or done.stderr).splitlines()[-1:]}"

    def with_fault(self, fault: Fault) -> str:
        """What became of its tests."""
        file = self.folder / "src" / "autosym" / fault.file
        before = file.read_text()
        file.write_text(before.replace(fault.line, fault.broken))
        try:
            return self.test(fault.tests)
        finally:
            file.write_text(before)


def stale(fault: Fault) -> str:
    """Why a fault cannot be put in, if so: its line must be there, once."""
    file = ROOT / "src" / "autosym" / fault.file
    times = file.read_text().count(fault.line) if file.is_file() else 0
    return "" if times == 1 else f"stale: the line is there {times} times"


def each(work, todo, copies: SimpleQueue, jobs: int):
    """``work(copy, one)`` of all to do, as many at a time as there are copies, in order."""

    def with_copy(one):
        copy = copies.get()
        try:
            return work(copy, one)
        finally:
            copies.put(copy)

    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(todo, pool.map(with_copy, todo), strict=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="faults whose name holds one of these")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    asked = parser.parse_args()
    chosen = {name: fault for name, fault in FAULTS.items() if any(part in name for part in asked.only)}
    if not chosen:
        parser.error(f"no fault has {' or '.join(asked.only)} in its name")
    noticed, fresh = 0, [name for name, fault in chosen.items() if not stale(fault)]
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue = SimpleQueue()
        for job in range(asked.jobs):
            copies.put(Copy(Path(folder) / str(job)))
        run = partial(each, copies=copies, jobs=asked.jobs)
        sound = {}
        for tests, outcome in run(Copy.test, dict.fromkeys(chosen[name].tests for name in fresh)):
            sound[tests] = outcome == "passed"
            if outcome != "passed":
                print(f"without any fault: {tests}: {outcome}", flush=True)
        for name, outcome in run(lambda copy, name: stale(chosen[name]) or copy.with_fault(chosen[name]), chosen):
            seen = outcome == "failed" and sound[chosen[name].tests]
            noticed += seen
            print(f"{'noticed ' if seen else 'SURVIVED'}  {name}" + ("" if seen else f" ({outcome})"), flush=True)
    print(f"{noticed} of {len(chosen)} noticed")
    return 0 if noticed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
