"""What is an augmented image worth to the evidence? CIFAR-10, flipped and cropped, by MAP and by evidence.

    python benchmarks/augmented.py --data DIR              every run without a result, in benchmarks/results/augmented
    python benchmarks/augmented.py --data DIR --small      1,000 images of 16x16 and a narrow network: minutes on a CPU
    python benchmarks/augmented.py --table [--small]       means over seeds

The evidence counts each image once. Augmented images teach more than one image does, but less than as many images as were drawn. So it is
tried with

    none             the images as they are
    drawn            an image is flipped and cropped anew whenever it is seen; evidence on the images as they are (``fit(augment=...)``)
    T copies         T draws of each image, made once, and no others: the evidence counts N T images
    drawn, count T   drawn anew whenever it is seen; evidence on T draws of each image: a likelihood that is tempered by T

All have as many steps of the weights; epochs are T times fewer, so there are fewer evidence steps (18 of the images as they are, 7 of 16
draws). The prior of MAP is T times weaker too. DIR holds CIFAR-10 in its binary version. Several copies of the script share the runs.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autosym.evidence.predictive import scores
from autosym.nn import nets
from autosym.papers import datasets, measuring
from autosym.papers.images import DATASETS
from autosym.runtime.arithmetic import one_thread
from autosym.runtime.provenance import provenance
from autosym.runtime.tables import table
from autosym.training.fitting import fit
from autosym.training.schedule import Schedule
from resumable import run_each, stored

OUT = Path(__file__).parent / "results" / "augmented"
WAYS = {  # how often an image counts, and whether it is drawn anew
    "none": (1, False),
    "drawn": (1, True),
    **{f"{n} copies": (n, False) for n in (2, 4, 8)},
    **{f"drawn, count {n}": (n, True) for n in (2, 4, 8, 16)},
}
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size:
    """How large everything is; ``epochs`` are those of the images as they are."""

    name: str
    images: int
    side: int
    width: int
    epochs: int
    batch: int
    blocks: tuple[tuple[int, ...], tuple[int, ...]]


LARGE = Size("large", 10_000, 32, 10, 160, 128, ((1, 2, 2, 4, 4, 8, 8, 16), (1, 2, 1, 2, 1, 2, 2, 2)))
SMALL = Size("small", 1_000, 16, 6, 160, 64, ((1, 2, 4), (2, 2, 2)))


@dataclass(frozen=True)
class Case(measuring.Run):
    """One run: ``task`` is how images are augmented."""

    size: Size = LARGE

    @property
    def name(self) -> str:
        return f"{self.size.name}-{self.task.replace(',', '').replace(' ', '-')}-{self.method}-{self.seed}"


def cases(size: Size, seeds: int = 3) -> list[Case]:
    """All runs, seed after seed."""
    return [
        Case(task, "conv", method, seed=seed, epochs=size.epochs // count, size=size)
        for seed in range(seeds)
        for task, (count, _) in WAYS.items()
        for method in ("map", "evidence")
    ]


def images(case: Case, folder: Path) -> tuple[Pair, Pair, Pair]:
    """Training images, those of the evidence, and test images."""
    (x, y), (x_test, y_test), _ = DATASETS["cifar-10"](folder, 2 * case.seed)
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(case.seed))[: case.size.images]
    shrink = partial(F.adaptive_avg_pool2d, output_size=case.size.side)
    x, y, (count, anew) = shrink(x[chosen]), y[chosen], WAYS[case.task]
    draw, labels = torch.Generator().manual_seed(100 + case.seed), y.repeat(count)
    counted = torch.cat([drawn(x, draw) for _ in range(count)]) if count > 1 else x
    train = (x.repeat(count, 1, 1, 1), labels) if anew else (counted, labels)
    return train, (counted, labels), (shrink(x_test), y_test)


def drawn(x: Tensor, generator: torch.Generator) -> Tensor:
    """Flipped and cropped, by an eighth of the image."""
    return datasets.flip_and_crop(x, generator, pad=x.shape[-1] // 8)


def run(case: Case, data: Path) -> dict[str, Any]:
    size, device = case.size, "cuda" if torch.cuda.is_available() else "cpu"
    train, counted, (x_test, y_test) = ([part.to(device) for part in pair] for pair in images(case, data))
    begun = time.perf_counter()
    with one_thread(device == "cpu"):
        torch.manual_seed(case.seed)
        net = nets.build("conv", train[0].shape[1:], 10, size.width, *size.blocks).to(device)
        schedule = Schedule(epochs=case.epochs, batch_size=size.batch, step=measuring.METHODS[case.method])
        augment = drawn if WAYS[case.task][1] else None
        fitted = fit(net, train, schedule=schedule, seed=case.seed, augment=augment, evidence_data=counted)
        scored = measuring.in_percent(scores(measuring.outputs_of(net, x_test), y_test.cpu()))
    evidence = float(fitted.evidence.log_evidence) / len(train[0])
    row = {**measuring.cell_of(case), **scored, "evidence": evidence, "seconds": time.perf_counter() - begun}
    return {"row": row, "config": asdict(case), "provenance": provenance(device)}


def lines(results: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each way and method: means over seeds."""
    found = []
    for task in WAYS:
        for method in ("map", "evidence"):
            own = [r["row"] for r in results if r["row"]["task"] == task and r["row"]["method"] == method]
            if own:
                means = [
                    statistics.fmean(row[key] for row in own) for key in ("accuracy", "nll", "calibration_error", "evidence")
                ]
                spread = f" ± {statistics.stdev(row['accuracy'] for row in own):.1f}" if len(own) > 1 else ""
                found.append((task, method, f"{means[0]:.1f}{spread}", *(f"{value:.3f}" for value in means[1:]), str(len(own))))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of CIFAR-10")
    parser.add_argument("--small", action="store_true", help="1,000 images of 16x16")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no new run after so many")
    parser.add_argument("--results", type=Path, default=OUT)
    parser.add_argument("--work", type=Path, default=Path("runs/augmented"))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    size = SMALL if options.small else LARGE
    if options.table:
        results = [r for r in stored(options.results) if r["config"]["size"]["name"] == size.name]
        head = ("augmented", "by", "accuracy (%)", "NLL", "calibration error", "evidence / N", "seeds")
        print(table([head, *lines(results)], "<<>>>>>"))
        return 0
    if options.data is None:
        parser.error("--data DIR is missing")

    def shown(result: dict[str, Any]) -> str:
        return "{task:10s} {method:9s} {accuracy:6.2f} {nll:.3f} {evidence:.3f} {seconds:.0f} s".format(**result["row"])

    every = cases(size, options.seeds)
    return int(
        run_each(every, lambda case, _: run(case, options.data), shown, options.results, options.work, options.seconds) > 0
    )


if __name__ == "__main__":
    sys.exit(main())
