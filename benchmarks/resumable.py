"""Runs that are made one after the other, each once, by several copies of a script, in as many calls as it takes."""

import fcntl
import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autosym.papers import measuring


def run_each(
    cases: Sequence[Any],
    run: Callable[[Any, Path], dict[str, Any]],
    show: Callable[[dict[str, Any]], str],
    results: Path,
    work: Path,
    seconds: float,
) -> int:
    """``run(case, its folder in work)`` for every case, by its ``name``, that has no result and no other copy is at.

    Returns how many failed.
    """
    begun, failed = time.monotonic(), 0
    for case in cases:
        if time.monotonic() - begun > seconds:
            print(f"{case.name} and later ones are left: {seconds:.0f} seconds are over", file=sys.stderr)
            break
        file, own = results / f"{case.name}.json", work / case.name
        with held(work / f"{case.name}.lock") as mine:
            if not mine or file.exists():
                continue
            try:
                result = run(case, own)
            except Exception:
                traceback.print_exc()
                print(f"FAILED {case.name}", file=sys.stderr, flush=True)
                failed += 1
                continue
            measuring.write(result, file)
            shutil.rmtree(own, ignore_errors=True)
        print(show(result), flush=True)
    return failed


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Whether this process got the lock. The system lets go of it when a process dies, so that a killed run is free again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def stored(results: Path) -> list[dict[str, Any]]:
    """All results of a folder, by name."""
    found = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    if not found:
        raise FileNotFoundError(f"{results} holds no result: run the script without --table first")
    return found
