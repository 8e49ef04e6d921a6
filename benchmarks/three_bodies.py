"""Where the quantities of three bodies start: at directions of least drift (as in the table), at noise, momenta first.

    python benchmarks/three_bodies.py noise                           # full size: for a GPU; the same command goes on if it was stopped
    python benchmarks/three_bodies.py hnn noise momenta least-drift disturbed oracle --small       # minutes each, on one core

Prints one line of JSON for each: the bound, errors, singular values, and how much of each true quantity lies in the seven largest
directions. ``disturbed`` starts at least drift with noise added: training must bring the directions back by itself.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autosym.noether import candidates
from autosym.noether.conserved import Quadratic
from autosym.papers import noether

NOISE: dict[str, Any] = {key: noether.BODIES[key] for key in ("start", "quantities_lr", "warmup", "epochs")} | {
    "begin": "noise"
}
STARTS: dict[str, dict[str, Any]] = {
    "hnn": {"model": "hnn"},
    "oracle": {"model": "oracle"},
    "noise": NOISE,
    "noise-at-once": NOISE | {"warmup": 0},
    "momenta": NOISE | {"warmup": 0, "momenta": 400, "start": 0.02},
    "least-drift": {},
    "least-drift-small": {"start": 0.3, "quantities_lr": 1e-3},
    "least-drift-slow": {"start": 0.3, "quantities_lr": 5e-5},
    "disturbed": {"quantities_lr": 2e-3},
}
SMALL = {
    "trajectories": 60,
    "steps": 20,
    "batch": 6,
    "width": 48,
    "layers": 3,
    "taus": 16,
    "lr": 3e-3,
    "size": 2.5,
    "epochs": 200,
}


def disturbed(conserved: Quadratic, trajectories: torch.Tensor, start: float, noise: float = 0.06) -> None:
    """Least drift, with noise on A and b."""
    candidates.begin(conserved, trajectories, start)
    with torch.no_grad():
        for part in conserved.parameters():
            part[:7] += noise * start * torch.randn(part[:7].shape).to(part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("starts", nargs="+", choices=STARTS)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/three-bodies"))
    asked = parser.parse_args()
    if asked.small:  # measured on a fifth of the training data, and on a twentieth of the test data
        measure = noether.measure
        noether.measure = lambda learner, held: measure(
            learner, {key: t[:: 5 if key in ("inputs", "targets") else 20] for key, t in held.items()}
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in asked.starts:
        run = replace(noether.RUNS["noether/three-bodies/learned"], **STARTS[name], seed=asked.seed)
        if asked.small:
            run = replace(run, **SMALL, warmup=50 if run.warmup else 0, momenta=50 if run.momenta else 0)
        run = replace(run, epochs=run.epochs if asked.epochs is None else asked.epochs)
        noether.begin = disturbed if name == "disturbed" else candidates.begin
        held = noether.data(run, device)
        folder = asked.out / f"{name}{'-small' if asked.small else ''}-seed{run.seed}"
        row = noether._one_start(run, 0, held, device, not asked.small, folder, True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "row.json").write_text(json.dumps({"start": name, "row": row, "config": vars(run)}, indent=1))
        print(json.dumps({"start": name, **row}), flush=True)


if __name__ == "__main__":
    main()
