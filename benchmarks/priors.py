"""Does the prior's family matter? Gaussian and Student-t priors on the same tasks: learned symmetry, evidence and accuracy.

    python benchmarks/priors.py [--jobs 14] [--seeds 3]         writes benchmarks/results/priors.json

Digits in one of four quadrants; the digit (symmetric to translations), or digit and quadrant (not). The student is F-FC+CONV of four
blocks, the rate and length of training those of the demo. A Student-t of nu degrees of freedom gives every row of a path's matrix a
scale of its own; its evidence is a lower bound. MAP at precision 1, without evidence, is the control.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

import autosym
import pool
from autosym.evidence.predictive import scores
from autosym.nn import nets
from autosym.papers import quadrant_digits
from autosym.runtime.provenance import provenance

OUT = Path(__file__).parent / "results" / "priors.json"
PRIORS = {"Gaussian": {}, "Student-t, nu = 10": {"nu": 10.0}, "Student-t, nu = 2": {"nu": 2.0}, "MAP": {"step": "none"}}


@dataclass(frozen=True)
class Case:
    """One fit."""

    task: str
    prior: str
    seed: int


def fitted(case: Case, epochs: int, width: int) -> dict:
    """Shares of the free path by layer, the log evidence (or its bound), and what is right on held-out digits."""
    run = quadrant_digits.Run(case.task, seed=case.seed, epochs=epochs, width=width)
    train, (x, y) = quadrant_digits.tensors(run)
    torch.manual_seed(case.seed)
    net = nets.build(
        "f-fc+conv", (1, 16, 16), quadrant_digits.TASKS[case.task], width, (1, 2, 4, 8), (2, 2, 2, 2), hidden=8
    ).to(x)
    fit = autosym.fit(net, train, epochs=epochs, lr=run.lr, seed=case.seed, **PRIORS[case.prior])
    with torch.no_grad():
        found = scores(net(x), y)
    return {
        "free_share": list(fit.symmetry().free_share().values()),
        "log_evidence": float(fit.evidence.log_evidence),
        "bound_of": fit.evidence.bound_of,
        "accuracy": 100 * found.accuracy,
        "standard_error": 100 * found.standard_error,
        "samples": len(train[0]),
    }


def table(entries: list[dict], keys: tuple[str, ...]) -> list[dict]:
    """Means over seeds of what has the same ``keys``, with the spread over seeds (the standard deviation; none of one seed)."""
    groups: dict[tuple, list[dict]] = {}
    for entry in entries:
        groups.setdefault(tuple(entry[key] for key in keys), []).append(entry)
    lines = []
    for names, members in groups.items():
        line = dict(zip(keys, names, strict=True)) | {"seeds": len(members)}
        for name in ("accuracy", "log_evidence", "seconds", "parameters"):
            if name in members[0]:
                values = torch.tensor([float(m[name]) for m in members], dtype=torch.float64)
                spread = None if len(values) == 1 else float(values.std())
                line |= {name: float(values.mean()), f"{name}_spread": spread}
        shares = torch.tensor([m["free_share"] for m in members], dtype=torch.float64)
        lines.append(line | {"free_share": shares.mean(0).tolist()})
    return lines


def show(line: dict) -> str:
    shares = " ".join(f"{100 * share:3.0f}" for share in line["free_share"])
    names = ", ".join(str(value) for value in line.values() if isinstance(value, str) and len(value) < 30)
    evidence = line["log_evidence"]
    return (
        f"{names}: accuracy {line['accuracy']:.1f}, log evidence {evidence:.0f}, free share {shares} %, {line['seconds']:.0f} s"
    )


def arguments(doc: str | None, out: Path) -> argparse.Namespace:
    """What the studies of fits take from the command line."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--out", type=Path, default=out)
    return parser.parse_args()


def main() -> None:
    options = arguments(__doc__, OUT)
    cases = [Case(t, p, s) for s in range(1, options.seeds + 1) for t in quadrant_digits.TASKS for p in PRIORS]
    settings = {"epochs": options.epochs, "width": options.width}
    found = pool.answers(fitted, cases, options.jobs, options.out.with_suffix(".jsonl"), settings, show=show)
    lines = table(found, ("task", "prior"))
    for line in lines:
        print(show(line))
    assert all(math.isfinite(line["log_evidence"]) for line in lines)
    result = {"table": lines, "settings": settings, "provenance": provenance(), "cases": found}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
