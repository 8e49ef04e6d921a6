"""``discover`` on digits in quadrants: are shifts a symmetry of "which digit?", and of "which digit, in which quadrant?"?

The answers are known from how the data are made: yes, and no. Five digits and 500 images of them keep it to minutes.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosym.answer.discovering import discover
from autosym.papers import datasets
from autosym.papers.measuring import outputs_of
from autosym.report import answered
from autosym.runtime.arithmetic import one_thread
from autosym.runtime.provenance import provenance
from autosym.runtime.workers import workers

TRUTH = {"digit": "yes", "digit+quadrant": "no"}
FORM = {"width": 6, "channels": (1, 2, 3), "strides": (2, 2, 2), "hidden": 4}


@dataclass(frozen=True)
class Run:
    """One question. The settings were tried with data of seeds 100 and above."""

    task: str = "digit"
    seed: int = 1
    samples: int = 500
    digits: int = 5
    jitter: int = 2
    epochs: int = 60


def tensors(run: Run) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test pairs, normalised by the training images."""
    images, labels = datasets.digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(run.seed))
    order = order[labels[order] < run.digits]
    canvas, quadrant = datasets.in_quadrants(images[order], run.jitter, run.seed)
    y = labels[order] + (run.digits * quadrant if run.task == "digit+quadrant" else 0)
    x = (canvas - canvas[: run.samples].mean()) / canvas[: run.samples].std()
    return (x[: run.samples], y[: run.samples]), (x[run.samples :], y[run.samples :])


def execute(run: Run, out: Path) -> dict[str, Any]:
    """The answer to one question, with its report in ``out``."""
    train, test = tensors(run)
    begun = time.perf_counter()
    with one_thread():
        network = FORM | {"classes": run.digits * (4 if run.task == "digit+quadrant" else 1)}
        answer = discover("f-fc+conv", train, "translations", network=network, epochs=run.epochs)
    answer.save(out / run.task)
    with contextlib.suppress(ImportError):  # there is no page without jinja2
        answered.write(answer, out / run.task / "report.html", f"Digits in quadrants: {run.task.replace('+', ' and ')}")
    correct = outputs_of(answer.fit.model, test[0]).argmax(1) == test[1]
    found = {"task": run.task, "truth": TRUTH[run.task], "text": str(answer), "accuracy": 100 * float(correct.float().mean())}
    return found | {"answer": answer.as_dict(), "seconds": time.perf_counter() - begun}


def execute_all(runs: Sequence[Run], out: Path, jobs: int) -> dict[str, Any]:
    """All questions, ``jobs`` at a time."""
    with workers(jobs) as pool:
        found = [done.result() for done in as_completed([pool.submit(execute, run, out) for run in runs])]
    by_task = {result["task"]: result for result in found}
    return {"answers": [by_task[run.task] for run in runs], "provenance": provenance()}


def show(summary: Mapping[str, Any]) -> None:
    """Question, answer, and the verdict that the data were made for."""
    for result in summary["answers"]:
        print(f"\n{result['task'].replace('+', ' and ').capitalize()} (shifts are a symmetry: {result['truth']})")
        print(result["text"])
        print(answered.headline(result["answer"]["verdicts"]))
        print(f"Test accuracy of the best network {result['accuracy']:.1f} %; {result['seconds']:.0f} s.")
