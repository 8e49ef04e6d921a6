"""Is the approximation good enough? Every estimate of the evidence beside annealed importance sampling, on networks of under 600 weights.

    python benchmarks/approximations.py            writes benchmarks/results/approximations.json
    python benchmarks/approximations.py --quick    a few temperatures, printed only

Tasks: 4x4 images whose targets a random network gives, a convolutional one (symmetric) or a dense one (not), by regression and
by classification. Students: one block of CONV, F-FC, F-FC+CONV or FC, SiLU, the mean over positions, a dense layer. Precisions and noise
are learned by ``fit`` (the best of three starts), weights are then brought to the mode, and every estimator is taken there, in float64,
with the same prior. AIS itself is checked on linear regression, where the evidence is known exactly.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

import ais
import autosym
import pool
from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.evidence import exact, kernel, laplace, variational, whole
from autosym.linear.dense import Bias, Dense
from autosym.nn import nets
from autosym.nn.layers import Affine
from autosym.runtime.provenance import provenance

OUT = Path(__file__).parent / "results" / "approximations.json"
SHAPE, SAMPLES, NOISE = (1, 4, 4), 80, 0.1
CHANNELS, STARTS = 2, 3
MODELS = ("conv", "f-fc", "f-fc+conv", "fc")
LAPLACE = (
    "kronecker",
    "kronecker shared",
    "diagonal",
    "blocks",
    "full",
    "kernel",
    "kernel sampled",
    "whole",
    "whole by probes",
)
ESTIMATORS = (*LAPLACE, "variational")


@dataclass(frozen=True)
class Task:
    """What a teacher plants: ``symmetric`` to translations or not, in targets of the named likelihood."""

    likelihood: str
    symmetric: bool
    seed: int

    @property
    def outputs(self) -> int:
        return 1 if self.likelihood == "gaussian" else 2


class Tiny(nn.Module):
    """One relaxed block of the named paths, SiLU (smooth, so that a sampler moves well), the mean over positions, a dense layer."""

    def __init__(self, name: str, outputs: int):
        super().__init__()
        self.block = nets.build(name, SHAPE, 1, 1, channels=(CHANNELS,), strides=(1,), start=1.0).blocks[0]
        self.output = Affine(Dense((CHANNELS,), (outputs,)), Bias((outputs,)))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(F.silu(self.block(x)).mean((-2, -1)))


def task_data(task: Task) -> ais.Pair:
    """Noise images; targets are the teacher's standardised outputs with a little noise, or the class of those it is surest of."""
    torch.manual_seed(task.seed)
    teacher = Tiny("conv" if task.symmetric else "fc", 1)
    x = torch.randn(4 * SAMPLES, *SHAPE, dtype=torch.float64)
    with torch.no_grad():
        y = teacher(x)
    y = (y - y.mean()) / y.std()
    if task.likelihood == "gaussian":
        return x[:SAMPLES], y[:SAMPLES] + NOISE * torch.randn_like(y[:SAMPLES])
    order = y[:, 0].argsort()
    chosen = torch.cat([order[: SAMPLES // 2], order[-SAMPLES // 2 :]])
    return x[chosen], (torch.arange(SAMPLES) >= SAMPLES // 2).long()


def at_the_mode(model: nn.Module, prior: Prior, likelihood: Likelihood, pair: ais.Pair) -> dict[str, float]:
    """The log evidence by every Laplace approximation. The weights are brought to the mode."""
    white = ais.Whitened(model, prior, likelihood, pair)
    white.to_mode()
    with torch.no_grad():
        ggn = white.ggn()
        sizes = [math.prod(shape) for _, shape, _ in white.parts]
        blocks = torch.block_diag(
            *(ggn[a - n : a, a - n : a] for n, a in zip(sizes, torch.tensor(sizes).cumsum(0), strict=True))
        )
        found = {name: white.laplace(m) for name, m in (("diagonal", ggn.diag().diag()), ("blocks", blocks), ("full", ggn))}
        take = partial(laplace.at, model, pair, likelihood)
        found["kronecker"] = float(take()(prior).log_evidence)
        found["kronecker shared"] = float(take(share_blocks=True)(prior).log_evidence)
        found["kernel"] = float(kernel.at(model, pair, likelihood)(prior).log_evidence)
        few = [kernel.at(model, pair, likelihood, samples=SAMPLES // 4, outputs="one", seed=s) for s in range(10)]
        found["kernel sampled"] = sum(float(at(prior).log_evidence) for at in few) / len(few)
        for name, how in (("whole", None), ("whole by probes", "probes")):
            found[name] = float(whole.at(model, pair, take(), prior, how=how).evidence.log_evidence)
    return {name: found[name] for name in LAPLACE}


def estimates(model: nn.Module, prior: Prior, likelihood: Likelihood, pair: ais.Pair, steps: int) -> dict[str, float]:
    """The log evidence by every estimator, at a mode."""
    return at_the_mode(model, prior, likelihood, pair) | {
        "variational": variational_bound(model, prior, likelihood, pair, steps)
    }


def variational_bound(
    model: nn.Module, prior: Prior, likelihood: Likelihood, pair: ais.Pair, steps: int, draws: int = 4
) -> float:
    """The bound of matrix normal posteriors that start at the mode, at fixed precisions and noise."""
    x, y = pair
    q = variational.Posterior(model)
    with torch.no_grad():
        q.log_precision.copy_(prior.log_precision)
        for part, precision in zip(q.parts, prior.log_precision, strict=True):  # no wider than the prior
            for root in (part.log_row, part.log_column):
                root.clamp_(max=float(-precision / 4 - 0.5))
    draw = torch.Generator().manual_seed(0)
    groups = []  # rates in units of the prior: a path that is gone has tiny weights
    for part, precision in zip(q.parts, prior.log_precision.tolist(), strict=True):
        groups += [{"params": [part.log_row, part.log_column], "lr": 0.02}]
        groups += [{"params": [part.mean], "lr": 0.02 * math.exp(-precision / 2)}]
        groups += [{"params": [part.row, part.column], "lr": 0.02 * math.exp(-precision / 4)}]
    optimiser = torch.optim.Adam(groups)
    anneal = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        statistic = variational.expected_statistic(model, q.sample(draws, draw), x, y, likelihood)
        fit = likelihood.log_likelihood(statistic, len(x) * (1 if y.dim() == 1 else y.shape[1]))
        (-q.evidence(fit, len(x)).log_evidence).backward()
        optimiser.step()
        anneal.step()
    torch.manual_seed(1)
    with torch.no_grad():
        return float(variational.at(model, pair, q, likelihood, count=2000).log_evidence)


@dataclass(frozen=True)
class Cell:
    """One student on one task."""

    likelihood: str
    symmetric: bool
    seed: int
    model: str


def best_fit(task: Task, name: str, pair: ais.Pair, epochs: int) -> autosym.Fit:
    """Of several starts that with the most evidence."""
    fits = []
    for start in range(STARTS):
        torch.manual_seed(100 * task.seed + start)
        fits.append(autosym.fit(Tiny(name, task.outputs), pair, task.likelihood, epochs=epochs, batch_size=SAMPLES))
    fit = max(fits, key=lambda fit: fit.evidence.log_evidence)
    fit.likelihood.requires_grad_(False)
    return fit


def cell(case: Cell, temperatures: int, steps: int, epochs: int) -> dict:
    """What every estimator says, and AIS."""
    task = Task(case.likelihood, case.symmetric, case.seed)
    pair = task_data(task)
    fit = best_fit(task, case.model, pair, epochs)
    found = estimates(fit.model, fit.prior, fit.likelihood, pair, steps)
    white = ais.Whitened(fit.model, fit.prior, fit.likelihood, pair)
    reference = ais.log_evidence(white.log_likelihood, white.size, temperatures, seed=task.seed)
    return {
        "parameters": white.size,
        "ais": reference.middle,
        "ais_uncertainty": reference.uncertainty,
        "ais_detail": asdict(reference),
        "estimates": found,
    }


def show(entry: dict) -> str:
    values = {name: round(value, 1) for name, value in entry["estimates"].items()}
    plant = "symmetric" if entry["symmetric"] else "broken"
    reference = f"AIS {entry['ais']:.1f} +- {entry['ais_uncertainty']:.1f}"
    return (
        f"{entry['likelihood']}, {plant}, seed {entry['seed']}, {entry['model']}: {reference} {values} {entry['seconds']:.0f} s"
    )


def linear_check(temperatures: int) -> list[dict]:
    """AIS beside the exact evidence of linear regression, of few weights and of as many as a network has."""
    lines = []
    for size in (8, 200):
        draw = torch.Generator().manual_seed(size)
        phi = torch.randn(SAMPLES, size, generator=draw, dtype=torch.float64)
        y = phi @ torch.randn(size, generator=draw, dtype=torch.float64) / math.sqrt(size)
        y = y + NOISE * torch.randn(SAMPLES, generator=draw, dtype=torch.float64)
        precision, noise = float(size), likelihoods.Gaussian(NOISE).requires_grad_(False)

        def log_likelihood(
            z: Tensor, phi: Tensor = phi, y: Tensor = y, s: float = size**-0.5, noise: Likelihood = noise
        ) -> Tensor:
            return vmap(lambda row: noise.log_likelihood((phi @ row * s - y).square().sum(), len(y)))(z)

        found = ais.log_evidence(log_likelihood, size, temperatures)
        known = float(exact.at(phi, y, precision, NOISE**2).log_evidence)
        lines.append(
            {"weights": size, "exact": known, "ais": found.middle, "ais_uncertainty": found.uncertainty, **asdict(found)}
        )
    return lines


def judged(cells: list[dict]) -> dict:
    """Of one task: the error of every estimator in nats, and whether it would choose as AIS does, CONV or F-FC, and of all."""
    by_name = {entry["model"]: entry for entry in cells}

    def best(value: Callable[[dict], float]) -> str:
        return max(by_name, key=lambda name: value(by_name[name]))

    reference = best(lambda entry: entry["ais"])
    symmetric = by_name["conv"]["ais"] > by_name["f-fc"]["ais"]
    lines = {}
    for estimator in ESTIMATORS:
        errors = [entry["estimates"][estimator] - entry["ais"] for entry in cells]
        conv, free = (by_name[name]["estimates"][estimator] for name in ("conv", "f-fc"))
        lines[estimator] = {
            "error": dict(zip(by_name, errors, strict=True)),
            "chooses": best(lambda entry, e=estimator: entry["estimates"][e]),
            "same_best": best(lambda entry, e=estimator: entry["estimates"][e]) == reference,
            "same_symmetry": (conv > free) == symmetric,
        }
    return {"ais_chooses": reference, "ais_symmetric": symmetric, "estimators": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--tasks", type=int, help="the first of them only")
    parser.add_argument("--quick", action="store_true", help="one task with few temperatures; printed only")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"temperatures": 500, "steps": 1500, "epochs": 400}
    if options.quick:
        settings = {"temperatures": 20, "steps": 20, "epochs": 40}
    tasks = [Task(kind, s, i) for i in range(options.seeds) for kind in ("gaussian", "categorical") for s in (True, False)]
    tasks = tasks[: 1 if options.quick else options.tasks]
    cells = [Cell(**asdict(task), model=name) for task in tasks for name in MODELS]
    lines = None if options.quick else options.out.with_suffix(".jsonl")
    found = pool.answers(cell, cells, options.jobs, lines, settings, show=show)
    of_task = {task: [entry for entry in found if all(entry[k] == v for k, v in asdict(task).items())] for task in tasks}
    result = {
        "linear": linear_check(settings["temperatures"]),
        "tasks": [asdict(task) | judged(entries) | {"cells": entries} for task, entries in of_task.items()],
        "settings": settings,
        "provenance": provenance(),
    }
    if not options.quick:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name in ESTIMATORS:
        judgements = [task["estimators"][name] for task in result["tasks"]]
        errors = [error for judgement in judgements for error in judgement["error"].values()]
        same, best = (sum(j[key] for j in judgements) for key in ("same_symmetry", "same_best"))
        mean = sum(map(abs, errors)) / len(errors)
        print(f"{name:18s} error {mean:7.1f} nats on average; same symmetry {same}, same best {best} of {len(judgements)}")


if __name__ == "__main__":
    main()
