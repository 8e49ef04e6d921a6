"""Do fewer copies in steps, or steps on a part of the data, change what ``symmetrise`` learns? Rotated digits, three ranges, several seeds.

    python benchmarks/draws.py [--quick]        writes benchmarks/results/draws.json

Runs as of ``autosym run rotated-digits`` (700 digits turned by up to 180, 90 and 0 degrees, one hidden layer, 60 epochs). They differ in
the copies of a step (``in_steps``) and in the samples that an evidence step takes its curvature from (``subset``). The evidence at the
end is that of all samples and 31 copies in every run. CPU seconds are of one thread, divided by those with 31 copies and all samples.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

import autosym
from autosym.papers.rotated_digits import VARIANTS, Run, build, tensors
from autosym.runtime.provenance import provenance
from autosym.runtime.tables import table

OUT = Path(__file__).parent / "results" / "draws.json"
SAMPLES, EPOCHS, TEST = 31, 60, 1097  # digits that are left for training: 700
WAYS = ((31, 1), (15, 1), (8, 1), (4, 1), (8, 4))  # copies in steps, and by what the samples of an evidence step are divided


def cell(run: Run, in_steps: int, part: int) -> dict:
    """What one run learns."""
    (x, y), (x_test, y_test) = tensors(run)
    torch.manual_seed(run.seed)
    model = autosym.symmetrise(build(run).model, {"rotation": run.start}, SAMPLES, in_steps=in_steps)
    subset = None if part == 1 else len(x) // part
    begun = time.process_time()
    fit = autosym.fit(model, (x, y), epochs=run.epochs, lr=run.lr, every=1, hyper_lr=run.hyper_lr, seed=run.seed, subset=subset)
    seconds = time.process_time() - begun
    with torch.no_grad():
        accuracy = float((model(x_test).argmax(1) == y_test).double().mean())
    return {
        "variant": run.task,
        "seed": run.seed,
        "in_steps": in_steps,
        "part": part,
        "degrees": model.ranges()["rotation"].value,
        "evidence": float(fit.evidence.log_evidence) / len(x),
        "accuracy": 100 * accuracy,
        "seconds": seconds,
    }


def summary(cells: list[dict]) -> str:
    """Means over seeds, and how far a run is from the same run with all copies and samples, at most."""
    rows = [("variant", "copies", "samples", "degrees", "away by", "evidence / N", "away by", "accuracy", "time")]
    for task in dict.fromkeys(c["variant"] for c in cells):
        for way in dict.fromkeys((c["in_steps"], c["part"]) for c in cells):
            own = {c["seed"]: c for c in cells if (c["variant"], c["in_steps"], c["part"]) == (task, *way)}
            full = {c["seed"]: c for c in cells if (c["variant"], c["in_steps"], c["part"]) == (task, *WAYS[0])}
            away = {key: max(abs(own[s][key] - full[s][key]) for s in own) for key in ("degrees", "evidence")}
            means = {key: mean(c[key] for c in own.values()) for key in ("degrees", "evidence", "accuracy")}
            ratio = sum(c["seconds"] for c in own.values()) / sum(c["seconds"] for c in full.values())
            rows.append(
                (
                    task,
                    str(way[0]),
                    "all" if way[1] == 1 else f"1/{way[1]}",
                    f"{means['degrees']:.1f}",
                    f"{away['degrees']:.1f}",
                    f"{means['evidence']:.4f}",
                    f"{away['evidence']:.4f}",
                    f"{means['accuracy']:.1f} %",
                    f"{ratio:.2f}",
                )
            )
    return table(rows, "<>>>>>>>>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two epochs and one seed, printed only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = []
    for seed in (1,) if options.quick else (1, 2, 3):
        for task in VARIANTS:
            run = replace(Run(task), seed=seed, epochs=2 if options.quick else EPOCHS, test=TEST)
            cells += [cell(run, *way) for way in (WAYS[:2] if options.quick else WAYS)]
            print(f"{task}, seed {seed}", flush=True)
    print(summary(cells))
    if not options.quick:
        OUT.write_text(json.dumps({"cells": cells, "provenance": provenance("cpu")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
