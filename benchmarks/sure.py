"""May the Laplace evidence of a network that is sure of its training data be trusted? It and its bound, by MAP and by evidence.

    python benchmarks/sure.py [--jobs 14] [--seeds 2]           writes benchmarks/results/sure.json

The digit, in one of four quadrants, by F-FC+CONV of four blocks. Precisions are learned, or fixed at 1, 0.1 or 0.01; the smaller, and the
longer the run, the surer the network. ``fit.bound`` looks at all training digits.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

import autosym
import pool
from autosym import nets
from autosym.experiments import quadrant_digits
from autosym.predictive import scores
from autosym.provenance import provenance
from priors import arguments

OUT = Path(__file__).parent / "results" / "sure.json"
PRECISIONS, LENGTHS = (None, 1.0, 0.1, 0.01), (1, 2)


@dataclass(frozen=True)
class Case:
    """One fit: its precision (learned where None) and by how much it is longer."""

    precision: float | None
    length: int
    seed: int


def fitted(case: Case, epochs: int, width: int) -> dict:
    """In nats a sample: training loss, what Laplace expects of its Gaussian beyond it, the evidence and its bound, held-out loss."""
    run = quadrant_digits.Run("digit", seed=case.seed, epochs=case.length * epochs, width=width)
    train, (x, y) = quadrant_digits.tensors(run)
    torch.manual_seed(case.seed)
    net = nets.build("f-fc+conv", (1, 16, 16), 10, width, (1, 2, 4, 8), (2, 2, 2, 2), hidden=8).to(x)
    prior = {} if case.precision is None else {"step": "none", "prior_precision": case.precision}
    fit = autosym.fit(net, train, epochs=run.epochs, lr=run.lr, seed=case.seed, **prior)
    found, samples = fit.bound(train, look_at=len(train[0])), len(train[0])
    with torch.no_grad():
        held_out, effective = scores(net(x), y), float(fit.laplace.effective_parameters(fit.prior).sum())
    return {
        "loss": -float(fit.evidence.log_likelihood) / samples,
        "expected": effective / 2 / samples,
        "evidence": found.log_evidence / samples,
        "bound": found.bound / samples,
        "held_out": held_out.nll,
        "accuracy": 100 * held_out.accuracy,
    }


def show(entry: dict) -> str:
    by = "learned" if entry["precision"] is None else f"precision {entry['precision']:g}"
    return (
        f"{by:14s} x{entry['length']}, seed {entry['seed']}: loss {entry['loss']:.4f}, expected {entry['expected']:.3f}, "
        f"evidence {entry['evidence']:.3f}, bound {entry['bound']:.3f}, held out {entry['held_out']:.3f}, {entry['accuracy']:.1f} %"
    )


def main() -> None:
    options = arguments(__doc__, OUT)
    settings = {"epochs": options.epochs, "width": options.width}
    cases = [Case(p, length, s) for s in range(1, options.seeds + 1) for length in LENGTHS for p in PRECISIONS]
    lines = options.out.with_suffix(".jsonl")
    found = pool.answers(fitted, cases, options.jobs, lines, settings, cost=lambda case: case.length, show=show)
    options.out.write_text(json.dumps({"settings": settings, "provenance": provenance(), "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
