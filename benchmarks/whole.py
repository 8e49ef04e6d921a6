"""Is the evidence of the whole network, estimated by probes, the exact one? Twenty small networks that ``fit`` has trained.

    python benchmarks/whole.py            writes benchmarks/results/whole.json
    python benchmarks/whole.py --quick    two networks and a few epochs, printed only

All kinds of paths, with a head over the mean of positions or over all of them, 500 to 20,000 weights, on 400 embedded digits: which
digit, is it odd, how much ink in four strokes, and where its middle is. The exact evidence is by a matrix of all weights, or of all
samples and outputs. Probes have to be within three standard errors (and truncation) in 19 of 20, within five nats, and as fast as a fit
of default settings. Fits are shorter here; their seconds are scaled by epochs. All are seconds of one core, whatever else the machine does.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import autosym
import pool
from autosym.evidence import costs, whole
from autosym.nn import nets
from autosym.papers import datasets
from autosym.runtime.provenance import provenance
from autosym.training.schedule import Schedule

OUT = Path(__file__).parent / "results" / "whole.json"
SAMPLES, EPOCHS, NATS = 400, 50, 5.0
SIZES = {"width": 4, "channels": (1, 2), "strides": (2, 2), "hidden": 4}


@dataclass(frozen=True)
class Case:
    """A network: the paths of ``nets.build``, or layers of torch ("cnn", "mlp"), and what it is asked."""

    name: str
    head: str  # "pooled" or "flat"
    question: str
    width: int


CASES = [
    Case("conv", "pooled", "digit", 4),
    Case("conv", "pooled", "digit", 16),
    Case("conv", "flat", "digit", 6),
    Case("conv", "flat", "place", 8),
    Case("f-fc", "pooled", "digit", 6),
    Case("f-fc", "flat", "digit", 8),
    Case("f-fc", "pooled", "odd", 8),
    Case("fc", "pooled", "digit", 8),
    Case("fc", "flat", "place", 5),
    Case("s-fc", "pooled", "digit", 8),
    Case("s-fc", "flat", "odd", 8),
    Case("s-conv", "pooled", "digit", 12),
    Case("s-conv", "flat", "ink", 6),
    Case("gconv:c4", "pooled", "digit", 3),
    Case("gconv:c4", "flat", "digit", 4),
    Case("f-fc+conv", "pooled", "digit", 6),
    Case("f-fc+conv", "flat", "ink", 6),
    Case("f-fc+conv+gconv:c4", "pooled", "digit", 2),
    Case("cnn", "flat", "digit", 8),
    Case("mlp", "flat", "digit", 100),
]
LIKELIHOODS = {"digit": "categorical", "odd": "bernoulli", "ink": "poisson", "place": "gaussian"}


class Flat(nn.Module):
    """Relaxed blocks with ReLU, and a linear layer over all channels and positions."""

    def __init__(self, net: nets.Net, outputs: int):
        super().__init__()
        self.blocks, self.output = net.blocks, nn.LazyLinear(outputs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.output(x.flatten(1))


def network(case: Case, outputs: int, x: Tensor) -> nn.Module:
    width = case.width
    if case.name == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
        )
    if case.name == "cnn":
        first, second = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, 2, 1)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(16 * width, outputs))
    net = nets.build(case.name, x.shape[1:], outputs, **SIZES | {"width": width})
    if case.head == "pooled":
        return net
    flat = Flat(net, outputs)
    flat(x[:2])
    return flat


def task_data(question: str) -> tuple[Tensor, Tensor]:
    images, labels = datasets.digits()
    images, labels = images[:SAMPLES], labels[:SAMPLES]
    x = ((images - images.mean()) / images.std())[:, None]
    if question == "odd":
        return x, labels % 2
    if question == "ink":
        return x, (images.unflatten(1, (4, 2)).mean((2, 3)) * 8).round().long()
    if question == "place":
        along = torch.arange(8.0)
        middle = torch.stack([(images.sum(axis) * along).sum(1) / images.sum((1, 2)) for axis in (1, 2)], 1)
        return x, (middle - middle.mean(0)) / middle.std(0)
    return x, labels


def cell(case: Case, epochs: int) -> dict:
    """What Kronecker factors, a dense matrix and probes say of one network, in nats and seconds."""
    pair = task_data(case.question)
    outputs = {"digit": 10, "odd": 1, "ink": 4, "place": 2}[case.question]
    torch.manual_seed(0)
    model = network(case, outputs, pair[0])
    begun = time.process_time()
    fit = autosym.fit(model, pair, LIKELIHOODS[case.question], epochs=epochs)
    fitted = time.process_time()
    weights = sum(p.numel() for p in model.parameters())
    routes = costs.of(model, pair, fit.laplace).routes
    exact = whole.at(
        model, pair, fit.laplace, fit.prior, how=min(("weights", "rows"), key=lambda how: routes.get(how, math.inf))
    )
    known = time.process_time()
    found = whole.at(model, pair, fit.laplace, fit.prior, nats=NATS, how="probes")
    done = time.process_time()
    counted = costs.of(model, pair, fit.laplace)
    kronecker, value = fit.laplace(fit.prior), exact.evidence.log_evidence
    return {
        "weights": weights,
        "kronecker": float(kronecker.log_evidence.detach()),
        "exact": float(value.detach()),
        "probes": float(found.evidence.log_evidence.detach()),
        "error": float((found.evidence.log_evidence - value).detach()),
        "standard_error": found.evidence.standard_error,
        "truncation": found.truncation,
        "count": found.probes,
        "steps": found.steps,
        "effective_parameters": float(exact.gamma.sum()),
        "effective_parameters_error": float((found.gamma - exact.gamma).sum()),
        "fit_seconds": (fitted - begun) * Schedule().epochs / epochs,
        "exact_seconds": known - fitted,
        "probes_seconds": done - known,
        "route": counted.cheapest,
        "route_seconds": done - known if counted.cheapest == "probes" else known - fitted,
        "counted_of_a_fit": counted.least / counted.fit(Schedule().epochs, Schedule().batch_size),
    }


def judged(entries: list[dict]) -> dict:
    """Of how many networks each goal is reached."""
    return {
        "networks": len(entries),
        "within_three_standard_errors": sum(abs(e["error"]) <= 3 * e["standard_error"] + e["truncation"] for e in entries),
        "within_nats": sum(abs(e["error"]) <= NATS for e in entries),
        "as_fast_as_a_fit": {
            kind: sum(e[f"{kind}_seconds"] <= e["fit_seconds"] for e in entries) for kind in ("exact", "probes", "route")
        },
        "root_mean_square_of_error_by_standard_error": math.sqrt(
            sum((e["error"] / e["standard_error"]) ** 2 for e in entries) / len(entries)
        ),
    }


def show(entry: dict) -> str:
    name = f"{entry['name']} {entry['head']} {entry['question']}"
    values = (
        f"exact {entry['exact']:9.1f}  Kronecker {entry['kronecker'] - entry['exact']:+8.1f}  probes {entry['error']:+5.1f}"
    )
    doubt = f"+- {entry['standard_error']:.1f} ({entry['truncation']:.2f} by {entry['steps']} steps, {entry['count']} probes)"
    times = ", ".join(f"{kind} {entry[f'{kind}_seconds']:.1f} s" for kind in ("fit", "exact", "probes"))
    times += f", by default {entry['route']}"
    gamma = f"gamma {entry['effective_parameters']:.0f} {entry['effective_parameters_error']:+.1f}"
    return f"{name:33s} {entry['weights']:6d}  {values} {doubt}  {gamma}  {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="two networks and a few epochs; printed only")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    settings = {"epochs": 5 if options.quick else EPOCHS}
    lines = None if options.quick else options.out.with_suffix(".jsonl")
    entries = pool.answers(cell, CASES[:2] if options.quick else CASES, options.jobs, lines, settings, show=show)
    result = {"goals": judged(entries), "cells": entries, "settings": settings | {"nats": NATS}, "provenance": provenance()}
    if not options.quick:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(map(show, entries)))
    print(json.dumps(result["goals"], indent=1))


if __name__ == "__main__":
    main()
