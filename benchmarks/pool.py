"""Cases in processes of one thread each; every answer is a line of a file as soon as it is there, so that a stop loses nothing."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from autosym.runtime.provenance import commit

Case = TypeVar("Case")  # a frozen dataclass of numbers and strings


def answers(
    function: Callable[..., dict],
    cases: Sequence[Case],
    jobs: int,
    lines: Path | None,
    settings: dict[str, Any],
    cost: Callable[[Case], float] = lambda case: 1.0,
    show: Callable[[dict], str] = json.dumps,
) -> list[dict]:
    """``function(case, **settings)`` of every case, as case | answer | seconds, in the order of the cases; the costliest begin.

    With a file of ``lines`` those that it holds, of the same commit and settings, are not made again. One that fails is named and leaves
    the others alone; the script then ends with an error. (A process that is killed ends them all: start again.)
    """
    origin = {"commit": commit(), **settings}
    found = {case: entry for case in cases if (entry := done_before(lines, origin).get(json.dumps(asdict(case)))) is not None}
    left = sorted((case for case in cases if case not in found), key=lambda case: -cost(case))
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes: before they start
    with ProcessPoolExecutor(min(jobs, max(len(left), 1)), mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_timed, function, case, settings): case for case in left}
        for done in as_completed(waiting):
            case = waiting[done]
            if error := done.exception():
                print(f"FAILED {case}: {error!r}", file=sys.stderr, flush=True)
                continue
            found[case] = asdict(case) | done.result()
            if lines:
                lines.parent.mkdir(parents=True, exist_ok=True)
                with lines.open("a") as file:  # on a line of its own, also after one that was cut off
                    file.write("\n" + json.dumps(found[case] | {"case": asdict(case), "origin": origin}) + "\n")
            print(f"{len(found)}/{len(cases)}  {show(found[case])}", file=sys.stderr, flush=True)
    if len(found) < len(cases):
        sys.exit(f"{len(cases) - len(found)} of {len(cases)} cases failed: start again to try them once more")
    return [found[case] for case in cases]


def _timed(function: Callable[..., dict], case: Any, settings: dict[str, Any]) -> dict:
    torch.set_num_threads(1)
    begun = time.perf_counter()
    answer = function(case, **settings)
    return answer | {"seconds": time.perf_counter() - begun}


def done_before(lines: Path | None, origin: dict[str, Any]) -> dict[str, dict]:
    """The answers of a file that were made alike, by their case as JSON; a line that was cut off by a stop is none."""
    found = {}
    for line in lines.read_text().splitlines() if lines and lines.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        case = json.dumps(entry.pop("case"))
        if entry.pop("origin") == origin:
            found[case] = entry
    return found
