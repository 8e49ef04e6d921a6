"""Where does a fit spend its time, and what do fewer evidence steps cost? Digits in quadrants, the network of ``autosym demo``.

    python benchmarks/rhythm.py [--jobs 2] [--seeds 1 2 3] [--double]       writes benchmarks/results/rhythm.json

Contenders, in one run: the default, steps less often while they gain little (``longest=4``), and the floor: the same weights without
evidence steps (MAP; its evidence at the end is taken all the same). Times are of one thread of a CPU. With ``--double`` data and network
are float64, as in the demo.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

import autosym
import pool
from autosym.evidence.predictive import scores
from autosym.nn import nets
from autosym.papers import quadrant_digits
from autosym.runtime.provenance import provenance
from autosym.training import fitting

OUT = Path(__file__).parent / "results" / "rhythm.json"
RHYTHMS = {"default": {}, "sparing": {"longest": 4}, "floor": {"step": "none"}}


@dataclass(frozen=True)
class Case:
    """One fit."""

    task: str
    rhythm: str
    seed: int


def fitted(case: Case, epochs: int, double: bool) -> dict:
    """Evidence and accuracy at the end, evidence steps, CPU seconds in all and of weight steps alone."""
    run = quadrant_digits.Run(case.task, seed=case.seed, epochs=epochs)
    dtype = torch.float64 if double else torch.float32
    (x, y), (x_test, y_test) = quadrant_digits.tensors(run)
    torch.manual_seed(case.seed)
    net = nets.build(run.model, (1, 16, 16), quadrant_digits.TASKS[case.task], run.width, (1, 2, 4, 8), (2, 2, 2, 2), hidden=8)
    of_weights, real = [], fitting._train_weights

    def timed(*arguments):
        begun = time.process_time()
        found = real(*arguments)
        of_weights.append(time.process_time() - begun)
        return found

    begun, clock = time.process_time(), time.perf_counter()
    with patch.object(fitting, "_train_weights", timed):
        fit = autosym.fit(net.to(dtype), (x.to(dtype), y), epochs=epochs, lr=run.lr, seed=case.seed, **RHYTHMS[case.rhythm])
    taken, waited = time.process_time() - begun, time.perf_counter() - clock
    with torch.no_grad():
        accuracy = 100 * scores(net(x_test.to(dtype)), y_test).accuracy
    return {
        "log_evidence": float(fit.evidence.log_evidence),
        "accuracy": accuracy,
        "steps": sum("log_evidence" in line for line in fit.history),
        "epochs": len(fit.history),
        "cpu_seconds": taken,
        "wall_seconds": waited,
        "evidence_part": 1 - sum(of_weights) / taken,
        "forecast_seconds": fit.forecast.seconds,
        "factors_kept": fit.laplace.nbytes / fit.forecast.factors,  # of those of all paths: paths that compute zero have none
        "free_share": list(fit.symmetry().free_share().values()),
    }


def table(found: list[dict]) -> list[dict]:
    """Means over seeds for each task and rhythm; ratios of time are to the floor."""
    lines = []
    for task in quadrant_digits.TASKS:
        own = {r: [f for f in found if (f["task"], f["rhythm"]) == (task, r)] for r in RHYTHMS}
        floor = statistics.mean(f["cpu_seconds"] for f in own["floor"])
        for rhythm, fits in own.items():
            keys = ("log_evidence", "accuracy", "steps", "cpu_seconds", "evidence_part", "factors_kept")
            means = {key: statistics.mean(f[key] for f in fits) for key in keys}
            means["forecast"] = statistics.mean(f["forecast_seconds"] / f["wall_seconds"] for f in fits)
            lines.append({"task": task, "rhythm": rhythm, **means, "of_floor": means["cpu_seconds"] / floor})
    return lines


def show(line: dict) -> str:
    return (
        f"{line['task']:15s} {line['rhythm']:8s} log evidence {line['log_evidence']:8.1f}, {line['accuracy']:5.1f} %, "
        f"{line['steps']:4.1f} steps, {line['cpu_seconds']:6.1f} s of CPU, {line['evidence_part']:4.0%} not weights"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    settings = {"epochs": options.epochs, "double": options.double}
    cases = [Case(task, rhythm, seed) for seed in options.seeds for task in quadrant_digits.TASKS for rhythm in RHYTHMS]
    found = pool.answers(fitted, cases, options.jobs, options.out.with_suffix(".jsonl"), settings, show=show)
    lines = table(found)
    for line in lines:
        print(f"{show(line)}, {line['of_floor']:.2f}x the floor; forecast {line['forecast']:.2f}x the time it took, ", end="")
        print(f"{line['factors_kept']:.0%} of all factors held")
    result = {"table": lines, "settings": settings, "provenance": provenance(), "cases": found}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
