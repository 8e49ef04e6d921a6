"""Which free path, and how deep? FC, F-FC and S-FC beside the convolution in the first k blocks of four, on embedded data.

    python benchmarks/ablation.py [--jobs 14] [--seeds 1]       writes benchmarks/results/ablation.json

Digits in one of four quadrants; the digit (symmetric to translations), or digit and quadrant (not). k = 0 is a convolutional network,
k = 4 has the free path in every block. What the layers cost by themselves is measured by costs.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

import autosym
import pool
from autosym.evidence.predictive import scores
from autosym.nn import nets
from autosym.papers import quadrant_digits
from autosym.runtime.provenance import provenance
from priors import arguments, show, table

OUT = Path(__file__).parent / "results" / "ablation.json"
FREE, DEPTHS = ("fc", "f-fc", "s-fc"), (1, 2, 4)


@dataclass(frozen=True)
class Case:
    """One fit: the free path and in how many of the first blocks it is."""

    task: str
    free: str
    depth: int
    seed: int


def cases(seeds: int) -> list[Case]:
    forms = [("none", 0), *((free, depth) for free in FREE for depth in DEPTHS)]
    return [Case(task, *form, seed) for seed in range(1, seeds + 1) for task in quadrant_digits.TASKS for form in forms]


def build(case: Case, width: int) -> nets.Net:
    """The first blocks with the free path, the others convolutional."""

    def whole(name: str) -> nets.Net:
        classes = quadrant_digits.TASKS[case.task]
        return nets.build(name, (1, 16, 16), classes, width, (1, 2, 4, 8), (2, 2, 2, 2), hidden=8)

    net = whole("conv")
    if case.depth:
        relaxed = whole(f"{case.free}+conv")
        for block in range(case.depth):
            net.blocks[block] = relaxed.blocks[block]
    return net


def fitted(case: Case, epochs: int, width: int) -> dict:
    """Accuracy on held-out digits, log evidence, parameters, and the free shares."""
    run = quadrant_digits.Run(case.task, seed=case.seed, epochs=epochs, width=width)
    train, (x, y) = quadrant_digits.tensors(run)
    torch.manual_seed(case.seed)
    net = build(case, width)
    fit = autosym.fit(net.to(x), train, epochs=epochs, lr=run.lr, seed=case.seed)
    with torch.no_grad():
        found = scores(net(x), y)
    return {
        "free_share": list(fit.symmetry().free_share().values()),
        "log_evidence": float(fit.evidence.log_evidence),
        "accuracy": 100 * found.accuracy,
        "standard_error": 100 * found.standard_error,
        "parameters": sum(p.numel() for p in net.parameters()),
    }


def main() -> None:
    options = arguments(__doc__, OUT)
    settings = {"epochs": options.epochs, "width": options.width}
    chosen = cases(options.seeds)
    found = pool.answers(
        fitted, chosen, options.jobs, options.out.with_suffix(".jsonl"), settings, cost=lambda case: case.depth, show=show
    )
    lines = table(found, ("task", "free", "depth"))
    for line in lines:
        print(f"{line['depth']} blocks, {line['parameters']:.0f} parameters, {show(line)}")
    result = {"table": lines, "settings": settings, "provenance": provenance(), "cases": found}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
