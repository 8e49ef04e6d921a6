"""Which schedule learns a symmetry fastest, without collapse? One change at a time, from a base, on digits in quadrants.

    python benchmarks/schedule.py embedded [--jobs 2]                        scikit-learn's digits, on a CPU
    python benchmarks/schedule.py mnist --data-dir DIR [--jobs 6]            MNIST, on a GPU

The accuracy is that on a held-out part of the training set: the test set chooses nothing. One JSON line a run, to --out; ``--figure`` draws
them. The loop here is that of ``autosym.fit`` with the parts that were only studied: averaged weights, averaged factors.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from autosym.bayes.likelihoods import Categorical
from autosym.bayes.priors import Prior
from autosym.curvature.kronecker import Curvature, Factors
from autosym.curvature.owners import sites, sizes
from autosym.evidence import laplace
from autosym.evidence.shares import symmetry
from autosym.nn import nets
from autosym.papers import datasets
from autosym.runtime.batching import Stream
from autosym.runtime.graphs import Captured
from autosym.runtime.provenance import provenance
from autosym.training.schedule import Schedule
from autosym.training.steps import Weights

TASKS = {"digit": 10, "digit+quadrant": 40}
BASE = Schedule(epochs=50, batch_size=128, lr=0.004, relative=False, trust=0.5, every=2)
PAPER = {
    "optimiser": "sgd",
    "lr": 0.01,
    "step": "gradient",
    "every": 5,
    "burn_in": 10,
    "sampled": False,
    "settle": 0.0,
    "warmup": 0.0,
}


@dataclass(frozen=True)
class Variant:
    """One change of the base schedule, or of what a schedule does not hold."""

    changes: dict = field(default_factory=dict)
    weight_average: float = 0.0  # evidence at an exponential average of the weights, kept by this part at every step
    factor_average: float = 0.0  # keep this part of the last factors in the next
    gain: bool = True  # initial outputs scaled so that the mean of n paths has the variance of one
    relative: bool = False  # rates in units of the initial size of each path's weights
    part: float = 1.0  # of the data, for curvature
    free_precision: float = 1.0  # where precisions of the free paths start


VARIANTS = {
    "base": Variant(),
    "MAP": Variant({"step": "none"}),
    "paper": Variant(PAPER, gain=False),
    "gradient steps": Variant({"step": "gradient"}),
    "trust 0.2": Variant({"trust": 0.2}),
    "trust 1": Variant({"trust": 1.0}),
    "trust 2": Variant({"trust": 2.0}),
    "trust unbounded": Variant({"trust": math.inf}),
    "damping 0.3": Variant({"damping": 0.3}),
    "every epoch": Variant({"every": 1}),
    "every 5 epochs": Variant({"every": 5}),
    "every 5, trust 1.25": Variant({"every": 5, "trust": 1.25}),
    "averaged weights": Variant(weight_average=0.998),
    "averaged factors": Variant(factor_average=0.7),
    "batch 64": Variant({"batch_size": 64}),
    "batch 256": Variant({"batch_size": 256}),
    "batch 512, lr x 2": Variant({"batch_size": 512, "lr": 2 * BASE.lr}),
    "lr / 2": Variant({"lr": BASE.lr / 2}),
    "lr x 2": Variant({"lr": 2 * BASE.lr}),
    "no gain": Variant(gain=False),
    "free paths from 100": Variant(free_precision=100.0),
    "exact": Variant({"sampled": False}),
    "a tenth of the data": Variant(part=0.1),
    "no burn-in": Variant({"burn_in": 0}),
    "relative 0.01": Variant({"lr": 0.01}, relative=True),
    "relative 0.02": Variant({"lr": 0.02}, relative=True),
    "relative 0.05": Variant({"lr": 0.05}, relative=True),
    "relative 0.1": Variant({"lr": 0.1}, relative=True),
    "relative 0.2": Variant({"lr": 0.2}, relative=True),
    "relative 0.05, trust 1": Variant({"lr": 0.05, "trust": 1.0}, relative=True),
    "relative 0.05, trust 2": Variant({"lr": 0.05, "trust": 2.0}, relative=True),
    "relative 0.05, trust 2, free from 10": Variant({"lr": 0.05, "trust": 2.0}, relative=True, free_precision=10.0),
    "relative 0.05, trust 2, free from 100": Variant({"lr": 0.05, "trust": 2.0}, relative=True, free_precision=100.0),
    "relative 0.05, unbounded": Variant({"lr": 0.05, "trust": math.inf}, relative=True),
    "relative 0.05, every 5, trust 2": Variant({"lr": 0.05, "trust": 2.0, "every": 5}, relative=True),
    "relative 0.05, a tenth": Variant({"lr": 0.05, "trust": 1.0}, relative=True, part=0.1),
    "SGD": Variant({"optimiser": "sgd", "lr": 0.05}),
}


def embedded(task: str, seed: int) -> tuple:
    images, labels = datasets.digits()
    rest, held_out = datasets.split(len(images), 360, seed)
    parts = []
    for part, rows in enumerate((rest, held_out)):
        canvas, quadrant = datasets.in_quadrants(images[rows], 2, 2 * seed + part)
        parts.append(((canvas - 0.12) / 0.28, labels[rows] + (10 * quadrant if task == "digit+quadrant" else 0)))
    return (
        parts[0],
        parts[1],
        partial(nets.build, in_shape=(1, 16, 16), width=12, channels=(1, 2, 4, 8), strides=(2,) * 4, hidden=8, start=1.0),
    )


def mnist(task: str, seed: int, folder: Path | None, samples: int) -> tuple:
    (images, labels), _ = datasets.mnist(folder)
    x, quadrant = datasets.quadrants(datasets.as_floats(images), seed)
    x, y = datasets.normalised(x, *datasets.MNIST), labels + (10 * quadrant if task == "digit+quadrant" else 0)
    return (x[:samples], y[:samples]), (x[50_000:], y[50_000:]), partial(nets.build, in_shape=(1, 32, 32), start=1.0)


def run(
    name: str, task: str, seed: int, source: str, folder: Path | None, epochs: int | None, samples: int, threads: int
) -> dict:
    """Train one variant and follow it; the loop of ``fit``, with averages."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # as in ``fit``
    variant = VARIANTS[name]
    device = "cuda" if source == "mnist" and torch.cuda.is_available() else "cpu"
    train, held_out, build = mnist(task, seed, folder, samples) if source == "mnist" else embedded(task, seed)
    schedule = replace(BASE, relative=variant.relative, **variant.changes, **({"epochs": epochs} if epochs else {}))
    if source == "embedded":
        schedule = replace(schedule, batch_size=schedule.batch_size // 2)
    if variant.part < 1:
        schedule = replace(schedule, subset=int(len(train[0]) * variant.part))
    torch.manual_seed(seed)
    net = build("f-fc+conv", classes=TASKS[task])
    if not variant.gain:
        _scale(net, 1 / math.sqrt(2))
    net.to(device)
    owned = {site.name: site.parameter for site in sites(net)}
    prior, likelihood = Prior(list(owned)), Categorical()
    for index, path in enumerate(owned):
        if ".f-fc." in path:
            prior.log_precision.data[index] = math.log(variant.free_precision)
    weights = Weights(
        owned, len(train[0]), schedule.optimiser, schedule.momentum, sizes=sizes(sites(net)) if schedule.relative else None
    )
    stream = Stream(train, schedule.batch_size, net, partial(likelihood.check, TASKS[task]), seed)
    held_out = tuple(t.to(device) for t in held_out)
    step = Captured(partial(weights.step, net, likelihood))
    average = {path: p.detach().clone() for path, p in owned.items()} if variant.weight_average else None
    last: Curvature | None = None
    lines, spent, start = [], 0.0, time.perf_counter()
    evidence_epochs = schedule.evidence_epochs()
    for epoch in range(1, schedule.epochs + 1):
        weights.set_prior(prior, likelihood)
        steps = math.ceil(len(train[0]) / schedule.batch_size)
        for number, (x, y) in enumerate(stream.epoch(epoch)):
            weights.lr.fill_(schedule.rate((epoch - 1 + number / steps) / schedule.epochs))
            step(x, y)
            if average is not None:
                torch._foreach_lerp_(list(average.values()), list(owned.values()), 1 - variant.weight_average)
        line = {"epoch": epoch, "loss": weights.take_loss() / len(train[0])}
        if not math.isfinite(line["loss"]):
            break
        final = epoch == schedule.epochs
        if epoch in evidence_epochs or final:
            begun = time.perf_counter()
            with _at(owned, None if final else average), torch.no_grad():
                exact = final or not schedule.sampled
                at = laplace.at(
                    net,
                    stream.data,
                    likelihood,
                    sampled=not exact,
                    subset=None if final else schedule.subset,
                    seed=seed + epoch,
                )
            if variant.factor_average and not final:
                last = _blend(last, at.curvature, variant.factor_average)
                at = replace(at, curvature=last, eigenvalues=tuple(last.eigenvalues().values()))
            if epoch in evidence_epochs and schedule.step == "mackay":
                at.mackay(prior, schedule.damping, schedule.trust)
            elif epoch in evidence_epochs and schedule.step == "gradient":
                optimiser = torch.optim.Adam(prior.parameters(), schedule.hyper_lr)
                for _ in range(schedule.hyper_steps):
                    optimiser.zero_grad()
                    (-at(prior).log_evidence).backward()
                    optimiser.step()
            with torch.no_grad():
                line["evidence"] = float(at(prior).log_evidence) / len(train[0])
                line["free_share"] = list(symmetry(net, prior, at).free_share().values())
                line["accuracy"] = (
                    100 * torch.cat([net(x).argmax(1) for x in held_out[0].split(2000)]).eq(held_out[1]).double().mean().item()
                )
            spent += time.perf_counter() - begun
        line["seconds"] = time.perf_counter() - start
        lines.append(line)
    done = {
        "variant": name,
        "task": task,
        "seed": seed,
        "data": source,
        "samples": len(train[0]),
        "epochs": schedule.epochs,
        "lines": lines,
        "evidence_seconds": spent,
    }
    return done | {"captured": bool(step.graphs), "provenance": provenance(device)}


def _scale(net: nets.Net, factor: float) -> None:
    for block in net.blocks:
        nets.scaled(block, dict.fromkeys(block, factor))


@contextmanager
def _at(owned: dict, average: dict | None) -> Iterator[None]:
    """The network at its averaged weights, for a while."""
    if average is None:
        yield
        return
    kept = {path: p.detach().clone() for path, p in owned.items()}
    with torch.no_grad():
        torch._foreach_copy_(list(owned.values()), list(average.values()))
        yield
        torch._foreach_copy_(list(owned.values()), list(kept.values()))


def _blend(last: Curvature | None, new: Curvature, keep: float) -> Curvature:
    if last is None:
        return new
    mixed = {
        name: Factors(torch.lerp(f.A, last.factors[name].A, keep), torch.lerp(f.G, last.factors[name].G, keep))
        for name, f in new.factors.items()
    }
    return replace(new, factors=mixed)


def gather(paths: list[Path]) -> None:
    """All runs, with the lines that hold evidence, in benchmarks/results/schedule.json, and a figure of how they ended."""
    keep = ("epoch", "loss", "evidence", "accuracy", "free_share", "seconds")
    runs = []
    for path in paths:
        for text in path.read_text().splitlines():
            run = json.loads(text)
            lines = [{k: _rounded(line[k]) for k in keep if k in line} for line in run["lines"] if "evidence" in line]
            runs.append(run | {"lines": lines})
    folder = Path(__file__).parent
    (folder / "results").mkdir(exist_ok=True)
    (folder / "results" / "schedule.json").write_text("[\n" + ",\n".join(json.dumps(run) for run in runs) + "\n]\n")
    figure(runs, folder.parent / "docs" / "schedule.png")


def _rounded(value):
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def figure(runs: list[dict], path: Path) -> None:
    """Evidence and held-out accuracy at the end of every run, by data and task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kinds = [
        k
        for k in dict.fromkeys((r["data"], r["samples"]) for r in runs)
        if sum((r["data"], r["samples"]) == k for r in runs) > 8
    ]
    colours = dict(zip(TASKS, ("#0072B2", "#D55E00"), strict=True))
    figure, axes = plt.subplots(2, len(kinds), figsize=(7.5 * len(kinds), 11), layout="constrained", squeeze=False)
    for column, (source, samples) in enumerate(kinds):
        chosen = [r for r in runs if (r["data"], r["samples"]) == (source, samples) and r["seed"] == 0]
        names = list(dict.fromkeys(r["variant"] for r in chosen))
        names.sort(key=lambda name: sum(r["lines"][-1]["evidence"] or -99 for r in chosen if r["variant"] == name))
        for row, (key, label) in enumerate(
            (("evidence", "log evidence per sample (nats)"), ("accuracy", "held-out accuracy (%)"))
        ):
            axis = axes[row][column]
            for task, colour in colours.items():
                ends = {r["variant"]: r["lines"][-1][key] for r in chosen if r["task"] == task}
                axis.plot(
                    [ends.get(name) for name in names], range(len(names)), "o", color=colour, label=task.replace("+", " and ")
                )
            axis.set_yticks(range(len(names)), names, fontsize=9)
            axis.set_xlabel(label)
            axis.grid(axis="x", alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_xlim(left=max(axis.get_xlim()[0], -5 if key == "evidence" else 60 if source == "embedded" else 90))
        axes[0][column].set_title(f"{'Embedded digits' if source == 'embedded' else 'MNIST'}, {samples:,} samples")
        axes[0][column].legend(frameon=False, loc="upper left")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", choices=("embedded", "mnist", "gather"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--samples", type=int, default=50_000, help="of MNIST, to train on")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/schedule.jsonl"))
    parser.add_argument("--from", dest="given", type=Path, nargs="*", default=[], help="what to gather: files of JSON lines")
    options = parser.parse_args()
    if options.source == "gather":
        return gather(options.given)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    todo = [(v, t, s) for s in options.seeds for v in options.variants for t in options.tasks]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool, open(options.out, "a") as file:
        given = (
            options.source,
            options.data_dir,
            options.epochs,
            options.samples,
            max(1, (os.cpu_count() or 1) // options.jobs),
        )
        for done in as_completed([pool.submit(run, *cell, *given) for cell in todo]):
            if done.exception() is not None:
                print("failed:", done.exception(), flush=True)
                continue
            result = done.result()
            print(json.dumps(result), file=file, flush=True)
            end = {"accuracy": math.nan, "evidence": math.nan, "free_share": [], **result["lines"][-1]}
            shares = " ".join(f"{100 * share:.0f}" for share in end["free_share"])
            print(f"{result['data']:8s} {result['task']:15s} {result['variant']:22s} accuracy {end['accuracy']:6.2f}", end="  ")
            print(f"evidence/N {end['evidence']:8.4f}  free % {shares:32s}", end=" ")
            print(f"{end['seconds']:5.0f} s, evidence {result['evidence_seconds']:4.0f} s", flush=True)


if __name__ == "__main__":
    main()
