"""Does the evidence of the whole network choose another end of a fit than Kronecker factors do, and what does that cost?

    python benchmarks/ends.py [NAME ...]       writes benchmarks/results/ends.json
    python benchmarks/ends.py --quick          one network and a few epochs, printed only

Networks of ``predictive.py`` (trained plainly, then relaxed) and of ``whole.py`` (from scratch) are fitted by the defaults. At every end
that a run may have: the evidence by Kronecker factors and of the whole network, and Kronecker's effective parameters. Of either choice: the
epoch, the test loss of digits that were not trained on, and seconds of one core, as part of the fit's.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import predictive
import whole
from autosym.evidence import costs
from autosym.runtime.provenance import provenance
from autosym.training import fitting, guarding
from autosym.training.callbacks import opened
from autosym.training.checkpoint import Keeper
from autosym.training.guarding import End
from autosym.training.running import Run
from autosym.training.schedule import Schedule
from autosym.training.starting import begin

OUT = Path(__file__).parent / "results" / "ends.json"
SCRATCH = {f"{c.name}, {c.head}": c for c in whole.CASES if c.question == "digit"}
NAMES = ("resnet", "flat", "dense", "shape", "conv, flat", "f-fc+conv, pooled", "gconv:c4, pooled", "fc, pooled")


def trained(name: str, seed: int, epochs: int) -> tuple[Run, list[Tensor], float]:
    """A run after its last epoch, test data, and the seconds that it took."""
    if name in SCRATCH:
        x, y, *test = predictive.digits(seed, size=8)
        torch.manual_seed(seed)
        model = whole.network(SCRATCH[name], 10, x)
    else:
        model, (x, y, *test) = predictive.relaxed(name, seed, epochs)
    begun = time.process_time()
    run = fitting.prepare(model, (x, y), "categorical", Schedule(epochs=epochs), seed=seed)
    begin(run)
    with opened(False, None, None, [], epochs, [], run.count) as tell:
        fitting.train(run, tell, Keeper(run.state, None, 60.0))
    return run, test, time.process_time() - begun


def cell(name: str, seed: int, epochs: int) -> dict:
    """What both kinds of evidence say of the ends of one run."""
    run, (x, y), seconds = trained(name, seed, epochs)
    last, ends, choices = run.state.snapshot(len(run.progress.lines), None), [], {}
    for snapshot in {s.epoch: s for s in (last, run.progress.snapshots[run.progress.best], run.progress.snapshots[0])}.values():
        if snapshot is last or snapshot.log_evidence is not None:
            run.state.put_back(snapshot)
            end = End.here(run, snapshot.epoch)
            found = {"epoch": snapshot.epoch, "kronecker": end.value, "effective_parameters": end.effective}
            ends.append(found | {"whole": run.whole_value(end.at)})
    for curvature in ("kronecker", "whole", None):
        run.state.put_back(last)
        begun = time.process_time()
        at, epoch, by = guarding.choose(run, curvature)
        spent = time.process_time() - begun
        with torch.no_grad():
            loss = float(F.cross_entropy(run.model(x), y))
        choices[str(curvature)] = {"epoch": epoch, "by": by, "of_the_fit": spent / seconds, "test_nll": loss}
    counted = costs.of(run.model, run.evidence_data, at)
    part = counted.least / counted.fit(len(run.progress.lines), run.stream.together)
    return {"name": name, "seed": seed, "fit_seconds": seconds, "counted_each": part, "ends": ends, "choices": choices}


def table(cells: list[dict]) -> list[str]:
    lines = []
    for c in cells:
        parts = [f"{(e['whole'] - e['kronecker']) / e['effective_parameters']:.2f}" for e in c["ends"]]
        lines.append(f"{c['name']} {c['seed']}: whole above Kronecker by {', '.join(parts)} of the effective parameters")
        for how, made in c["choices"].items():
            lines[-1] += (
                f"; {how}: epoch {made['epoch']} by {made['by']}, {made['of_the_fit']:.3f} of the fit, nll {made['test_nll']:.4f}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names, epochs = (["dense"], 3) if options.quick else (options.names or NAMES, options.epochs)
    known = json.loads(OUT.read_text())["cells"] if OUT.exists() and not options.quick else []
    for name in names:
        found = cell(name, options.seed, epochs)
        print(table([found])[0], flush=True)
        known = [c for c in known if (c["name"], c["seed"]) != (name, options.seed)] + [found]
        if not options.quick:
            written = {"epochs": epochs, "cells": known, "provenance": provenance("cpu")}
            OUT.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
