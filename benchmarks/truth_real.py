"""How often is the answer of discover right on real images? MNIST and CIFAR-10, made so that the right answer is known before.

    python benchmarks/truth_real.py --data DIR                           every run without a result, in benchmarks/results/truth_real
    python benchmarks/truth_real.py --data DIR --only 'turned-2000-*' --seconds 500    some of them; starts no new run after 500 seconds
    python benchmarks/truth_real.py --list                               the runs, the right answers, and which are done
    python benchmarks/truth_real.py --table                              verdicts, errors with intervals, agreement of seeds, calibration
    python benchmarks/truth_real.py --data DIR --try 3                   seeds that are not reported, to choose settings by

DIR holds MNIST and CIFAR-10 in their official layouts (``papers.datasets``). Only torch, numpy and safetensors are needed. Without a
checkout, set AUTOSYM_COMMIT to the commit. A run is one ``autosym.discover`` by its defaults, about the symmetries that its task asks for.
A killed run goes on from what it left in --work. Several copies may share a GPU: each takes runs that no other is at.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import autosym
from autosym.answer.answers import Answer, network_of
from autosym.evidence.predictive import scores
from autosym.papers import measuring
from autosym.runtime.provenance import provenance
from resumable import run_each, stored
from truth_real_tasks import TASKS, tensors
from truth_table import broken_layers, print_table, rows

OUT = Path(__file__).parent / "results" / "truth_real"
TELL_MOST = ("digit-quadrant", "turned", "cifar-turned")  # with all images
REPORTED = 6  # the first seed of runs that are reported: none was looked at before the rules were written
TRIED = 1000  # the first seed of runs that settings are chosen by


@dataclass(frozen=True)
class Case:
    """One run: a task with so many training images. The seed draws images, labels and networks."""

    task: str
    images: int
    seed: int = REPORTED

    @property
    def name(self) -> str:
        """As the file of its result is called."""
        return f"{self.task}-{self.images}-{self.seed}"


CASES = [
    *(Case(task, 2_000, seed) for seed in range(REPORTED, REPORTED + 3) for task in TASKS),
    *(Case(task, 10_000) for task in TASKS),
    *(Case(task, 50_000 if TASKS[task].source == "cifar10" else 60_000) for task in TELL_MOST),
]


def run(case: Case, data: Path, work: Path, **options: Any) -> dict[str, Any]:
    """Ask ``discover``; its answer, the right ones, and how good the network that it returns, and each candidate, is on test data."""
    device, task = "cuda" if torch.cuda.is_available() else "cpu", TASKS[case.task]
    (x, y), (x_test, y_test) = tensors(case.task, case.images, case.seed, data)
    begun, likelihood = time.perf_counter(), "categorical" if task.classes else "gaussian"
    given = {"network": {"classes": task.classes}} if task.classes else {}
    answer = autosym.discover(
        "f-fc+conv",
        (x.to(device), y.to(device)),
        tuple(task.answers),
        likelihood,
        resume=work,
        progress=False,
        **given,
        **options,
    )
    seconds = time.perf_counter() - begun
    return {
        "config": {"task": case.task, "images": case.images, "seed": case.seed, **options},
        "right": dict(task.answers),
        "answer": answer.as_dict(),
        "layers": broken_layers(answer),
        "test": tested(answer.fit.model, x_test, y_test),
        "candidates": {name: tested(model.to(device), x_test, y_test) for name, model in candidates_of(answer, work).items()},
        "seconds": seconds,
        "provenance": provenance(device),
    }


def tested(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy and others of classes in percent; of numbers the squared error."""
    outputs = measuring.outputs_of(model, x)
    if y.is_floating_point():
        return {"squared error": float((outputs - y).square().mean())}
    return measuring.in_percent(scores(outputs, y))


def candidates_of(answer: Answer, work: Path) -> dict[str, nn.Module]:
    """The network of each hypothesis at the end with its most evidence, from the folder of a run."""
    models = {}
    for candidate in answer.candidates:
        recipe = {"network": candidate.network, "width": candidate.width, "seed": candidate.seed, "left": []}
        model = network_of({**answer.recipe, **recipe})
        assert model is not None  # made by its name
        model.load_state_dict(load_file(work / candidate.key / "end.safetensors"))
        models[candidate.network] = model
    return models


def run_all(cases: Sequence[Case], data: Path, results: Path, work: Path, seconds: float, **options: Any) -> int:
    """Run what has no result and no other copy is at; returns how many failed."""

    def shown(result: dict[str, Any]) -> str:
        return "\n".join("  ".join(row) for row in rows([result]))

    return run_each(cases, lambda case, own: run(case, data, own, **options), shown, results, work, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of MNIST and CIFAR-10")
    parser.add_argument(
        "--only", default="*", metavar="PATTERNS", help="runs whose names match, in this order: 'turned-2000-*,mnist-*'"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no new run after so many")
    parser.add_argument("--epochs", type=int, help="of a full fit, other than by default")
    parser.add_argument("--memory", type=float, metavar="GIB", help="for the activations of a pass, where several share a GPU")
    parser.add_argument("--images", type=int, help="no more training images than these: to try it out")
    parser.add_argument("--try", type=int, dest="tried", metavar="N", help="other seeds, so many; name --results too")
    parser.add_argument("--results", type=Path, default=OUT, help="the folder of results")
    parser.add_argument("--work", type=Path, default=Path("runs/truth_real"), help="the folder of runs that are not done")
    for name, what in (("list", "name the runs"), ("table", "print the table")):
        parser.add_argument(f"--{name}", action="store_true", help=what)
    options = parser.parse_args()
    cases = CASES if options.tried is None else [Case(t, 2_000, TRIED + s) for s in range(options.tried) for t in TASKS]
    most = options.images or max(case.images for case in cases)
    cases = list(dict.fromkeys(Case(c.task, min(c.images, most), c.seed) for c in cases))
    cases = list(dict.fromkeys(c for only in options.only.split(",") for c in cases if fnmatch(c.name, only)))
    if options.table:
        print_table(stored(options.results), list(TASKS))
    elif options.list:
        for case in cases:
            done = "done" if (options.results / f"{case.name}.json").exists() else ""
            right = ", ".join(
                f"{name}: {'?' if a is None else 'yes' if a else 'no'}" for name, a in TASKS[case.task].answers.items()
            )
            print(f"{case.name:36s} {right:44s} {done}".rstrip())
    elif not cases or options.data is None:
        parser.error("--data DIR is missing" if cases else f"no run is called {options.only}")
    elif options.tried is not None and options.results == OUT:
        parser.error("--try is for settings: name another folder by --results")
    else:
        more = {name: value for name in ("epochs", "memory") if (value := getattr(options, name)) is not None}
        return int(run_all(cases, options.data, options.results, options.work, options.seconds, **more) > 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
