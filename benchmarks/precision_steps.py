"""Which effective parameters should learn precisions: those of Kronecker factors, or those of the whole network?

    python benchmarks/precision_steps.py --seeds 2        writes benchmarks/results/precision_steps.json

Fits of small networks on 400 embedded digits (those of ``whole.py``) go on in rounds: a closed-form step of all precisions, then 10 epochs
of weights at them. One copy takes its steps by Kronecker factors, one by the exact matrix of the whole network, all else alike. Both
are judged by the evidence of the whole network and on 1,397 digits that were not shown.
"""

import argparse
import copy
import json
from pathlib import Path

import torch

import autosym
from autosym.evidence import laplace, whole
from autosym.evidence.laplace import closed_form_step
from autosym.evidence.predictive import scores
from autosym.papers import datasets
from autosym.runtime.provenance import provenance
from autosym.runtime.tables import table
from whole import SAMPLES, Case, network

OUT = Path(__file__).parent / "results" / "precision_steps.json"
CASES = [Case("conv", "pooled", "digit", 4), Case("conv", "flat", "digit", 6), Case("gconv:c4", "flat", "digit", 3),
         Case("f-fc+conv", "pooled", "digit", 4), Case("cnn", "flat", "digit", 8)]  # fmt: skip
ROUNDS, EPOCHS, LR = 5, 10, 0.01


def digits():
    images, labels = datasets.digits()
    own = images[:SAMPLES]
    x = ((images - own.mean()) / own.std())[:, None]
    return (x[:SAMPLES], labels[:SAMPLES]), (x[SAMPLES:], labels[SAMPLES:])


def went_on(fit: autosym.Fit, by: str, data, test) -> dict[str, float]:
    """Rounds of a step of precisions by these effective parameters, and of weights; what came of it."""
    model, prior = copy.deepcopy(fit.model), copy.deepcopy(fit.prior)
    for number in range(ROUNDS + 1):
        at = laplace.at(model, data, fit.likelihood)
        found = whole.at(model, data, at, prior, how="weights" if int(at.sizes.sum()) < at.samples * at.outputs else "rows")
        if number == ROUNDS:
            break
        gamma = found.gamma if by == "whole" else at.effective_parameters(prior).detach()
        with torch.no_grad():
            closed_form_step(prior, fit.likelihood, gamma, at.square_norms, at.curvature.statistic, SAMPLES * 10, 1.0, 2.0)
        autosym.fit(model, data, epochs=EPOCHS, step="none", prior_precision=prior.precision(), lr=LR, seed=number)
    with torch.no_grad():
        score = scores(model(test[0]), test[1])
    return {"log_evidence": float(found.evidence.log_evidence), "accuracy": 100 * score.accuracy, "nll": score.nll,
            "effective_parameters": float(found.gamma.sum())}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, test = digits()
    cells, rows = [], [("network", "seed", "steps by", "log evidence", "accuracy (%)", "NLL", "effective parameters")]
    for case in CASES:
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            fit = autosym.fit(network(case, 10, data[0]), data, epochs=60, seed=seed)
            for by in ("kronecker", "whole"):
                found = went_on(fit, by, data, test)
                cells.append({"network": case.name, "head": case.head, "seed": seed, "by": by} | found)
                numbers = (f"{found['log_evidence']:.0f}", f"{found['accuracy']:.1f}", f"{found['nll']:.3f}")
                rows.append((f"{case.name} {case.head}", str(seed), by, *numbers, f"{found['effective_parameters']:.0f}"))
                print(*rows[-1], flush=True)
    print(table(rows, "<><>>>>"))
    OUT.write_text(json.dumps({"cells": cells, "provenance": provenance("cpu")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
