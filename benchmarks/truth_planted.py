"""How often is the answer of discover right on planted cases? The 104 of truth.py, in an order that was drawn by lot.

    python benchmarks/truth_planted.py                                every case without a result, in benchmarks/results/truth_planted
    python benchmarks/truth_planted.py --cases 52 --seconds 500       the first 52 of the lot; starts no new one after 500 seconds
    python benchmarks/truth_planted.py --only 'turned-*'              some of them
    python benchmarks/truth_planted.py --list                         the cases in their order, the right answers, and which are done
    python benchmarks/truth_planted.py --table                        verdicts, errors with intervals, agreement of seeds, calibration
    python benchmarks/truth_planted.py --try 8 --results DIR          eight cases of seeds that are not reported, to choose settings by

A case is one ``autosym.discover`` by its defaults, about the one symmetry that it asks for: quarter turns, flips, or translations. Its
network is "f-fc+conv"; for a relaxed case it is the trained CNN of plain torch. Cases that truth.py counts apart (``compared``) have the
same data as others, and are left out.

The order is random, so any number of first cases is a fair sample. A case runs on the CPU, in one thread: start a copy for each core, and
each takes cases that no other is at. A killed case goes on from what it left in --work. Only torch, numpy and safetensors are needed,
and the digits of scikit-learn: without it, name an .npz of them by AUTOSYM_DIGITS (``papers.datasets.digits``). Without a checkout, set
AUTOSYM_COMMIT to the commit.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autosym
from autosym.answer.hypotheses import SHIFTS
from autosym.runtime.provenance import provenance
from resumable import run_each, stored
from truth import GROUPS, REGRESSIONS, Case, digit_data, planted, regression_data, teacher_data, trained
from truth_table import broken_layers, print_table, rows

OUT = Path(__file__).parent / "results" / "truth_planted"
LOT = 104  # the seed of the order: written down before any run
REPORTED = 10_000  # the first seed of cases that are reported: none of them was looked at before the rules were written
TRIED = 9000  # the first seed of cases that settings are chosen by


class Named(Case):
    """A planted case with a name."""

    @property
    def task(self) -> str:
        """The question, and whether the symmetry is there; "half": something breaks a half of the label."""
        return f"{self.question}-{'yes' if self.symmetric else 'no' if self.strength == 1 else 'half'}"

    @property
    def name(self) -> str:
        """As the file of its result is called."""
        return f"{self.task}-{self.samples}-{self.seed}"

    @property
    def symmetry(self) -> str:
        """What ``discover`` is asked about."""
        return GROUPS[self.question][0] if self.question in GROUPS else SHIFTS


def drawn(first_seed: int) -> list[Named]:
    """All cases with seeds from ``first_seed`` on, in random order."""
    asked = [case for case in planted(first_seed) if not case.compared]
    cases = [Named(case.question, case.symmetric, case.samples, case.seed, case.strength) for case in asked]
    random.Random(LOT).shuffle(cases)
    return cases


def data_of(case: Named) -> tuple[Tensor, Tensor]:
    """Images and labels, or numbers, on the CPU."""
    make = regression_data if case.question in REGRESSIONS else teacher_data if case.question == "teacher" else digit_data
    return make(case)


def model_of(case: Named, pair: tuple[Tensor, Tensor]) -> str | nn.Module:
    """What ``discover`` is given: a name, or a trained CNN."""
    torch.manual_seed(case.seed + 1)
    return trained(*pair) if case.question == "relaxed" else "f-fc+conv"


def run(case: Named, work: Path, **options: Any) -> dict[str, Any]:
    """Ask ``discover``; its answer and the right one."""
    pair = data_of(case)
    model = model_of(case, pair)
    likelihood = "gaussian" if case.question in REGRESSIONS else "categorical"
    begun = time.perf_counter()
    answer = autosym.discover(model, pair, case.symmetry, likelihood, resume=work, progress=False, **options)
    return {
        "config": {"task": case.task, "images": case.samples, "seed": case.seed, **options},
        "right": {case.symmetry: case.symmetric},
        "answer": answer.as_dict(),
        "layers": broken_layers(answer),
        "seconds": time.perf_counter() - begun,
        "provenance": provenance(),
    }


def run_all(cases: Sequence[Named], results: Path, work: Path, seconds: float, **options: Any) -> int:
    """Run what has no result and no other copy is at; returns how many failed."""
    torch.set_num_threads(1)

    def shown(result: dict[str, Any]) -> str:
        return "\n".join("  ".join(row) for row in rows([result]))

    return run_each(cases, lambda case, own: run(case, own, **options), shown, results, work, seconds)


def missing(cases: Sequence[Named], results: Path) -> list[str]:
    """The cases without a result that are in the lot before one that has one: their absence may be no chance."""
    done = [(results / f"{case.name}.json").exists() for case in cases]
    last = max((place for place, is_done in enumerate(done) if is_done), default=0)
    return [case.name for case, is_done in zip(cases[:last], done[:last], strict=True) if not is_done]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, help="the first so many of the lot")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases whose names match, as in 'turned-*'")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no new case after so many")
    parser.add_argument("--epochs", type=int, help="of a full fit, other than by default")
    parser.add_argument("--samples", type=int, help="no more samples than these: to try it out")
    parser.add_argument("--try", type=int, dest="tried", metavar="N", help="so many cases of other seeds; name --results too")
    parser.add_argument("--results", type=Path, default=OUT, help="the folder of results")
    parser.add_argument("--work", type=Path, default=Path("runs/truth_planted"), help="the folder of cases that are not done")
    for name, what in (("list", "name the cases"), ("table", "print the table")):
        parser.add_argument(f"--{name}", action="store_true", help=what)
    options = parser.parse_args()
    lot = drawn(REPORTED) if options.tried is None else drawn(TRIED)[: options.tried]
    most = options.samples or max(case.samples for case in lot)
    cases = dict.fromkeys(replace(case, samples=min(case.samples, most)) for case in lot[: options.cases])
    cases = [case for case in cases if fnmatch(case.name, options.only)]
    if options.table:
        print_table(stored(options.results), sorted({case.task for case in lot}))
        if left := missing(cases, options.results):
            print(f"{len(left)} cases that come before others in the lot have no result: {', '.join(left)}.")
    elif options.list:
        for case in cases:
            done = "done" if (options.results / f"{case.name}.json").exists() else ""
            print(f"{case.name:28s} {case.symmetry}: {'yes' if case.symmetric else 'no':4s} {done}".rstrip())
    elif not cases:
        parser.error(f"no case is called {options.only}")
    elif options.tried is not None and options.results == OUT:
        parser.error("--try is for settings: name another folder by --results")
    else:
        more = {} if options.epochs is None else {"epochs": options.epochs}
        return int(run_all(cases, options.results, options.work, options.seconds, **more) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
