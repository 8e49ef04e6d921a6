"""Where is the evidence highest, if digits are turned by up to 45, 90 or 135 degrees? Evidence against the range of rotations.

    python benchmarks/range_curve.py [--data-dir DIR]     MNIST; writes benchmarks/results/range_curve.json; goes on where it stopped
    python benchmarks/range_curve.py --figure FILE        draws the results
    python benchmarks/range_curve.py --small              one small case of embedded digits, printed only

A network with one hidden layer is averaged over rotations. Its log evidence (Laplace) is measured at each range of a grid: with weights
and precisions fitted anew at that range, and with those of a fit that learned its range. Beside it is the loss on test digits, turned in
the same way: if that is lowest at the same range, the evidence is right. Controls at 90 degrees tell causes apart: digits without sixes
and nines, which turn into each other; digits without their slant (deskewed by second moments before they are turned); a network of ReLU.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosym
from autosym.evidence import gradient, laplace
from autosym.nn.symmetrised import Symmetrised
from autosym.nn.warping import warped
from autosym.papers import datasets
from autosym.papers.measuring import write
from autosym.runtime.provenance import provenance
from autosym.runtime.tables import table

OUT = Path(__file__).parent / "results" / "range_curve.json"
Pair = tuple[Tensor, Tensor]
GRID = (30, 45, 60, 75, 90, 105, 120, 135, 150, 165, 180)
COLUMNS = 3  # of the figure
STARTS = (30, 150)  # degrees, of the fits that learn their range: one from below, one from above
KINDS = {"all": "all digits", "no 6, 9": "without sixes and nines", "deskewed": "without slant", "relu": "all digits, ReLU"}


@dataclass(frozen=True)
class Case:
    """Digits of a kind, turned by up to so many degrees. The kind "relu" is all digits, by a network of ReLU in place of SiLU."""

    degrees: int
    kind: str
    seed: int


CASES = ((45, "all"), (90, "all"), (135, "all"), (90, "no 6, 9"), (90, "deskewed"), (90, "relu"))


@dataclass(frozen=True)
class Settings:
    """What all fits share."""

    samples: int = 1000
    test: int = 2000
    size: int = 14  # pixels of a side
    hidden: int = 64
    epochs: int = 60
    batch_size: int = 50
    lr: float = 0.4
    range_lr: float = 0.15
    copies: int = 15
    in_steps: int = 8


# ---- data


def deskewed(x: Tensor) -> Tensor:
    """Digits (N, 1, H, W) sheared upright about their centre of mass c.

    out(p) = x(c + A (p - c)), A = [[1, k], [0, 1]], k = cov(x, y) / var(y)
    """
    height, width = x.shape[-2:]
    down = torch.arange(height, dtype=x.dtype, device=x.device)[:, None] - (height - 1) / 2
    right = torch.arange(width, dtype=x.dtype, device=x.device) - (width - 1) / 2
    mass = x[:, 0] / x[:, 0].sum((1, 2), keepdim=True)

    def mean(of: Tensor) -> Tensor:
        return (mass * of).sum((1, 2))

    y, across = mean(down), mean(right)
    slant = (mean(down * right) - y * across) / (mean(down.square()) - y.square()).clamp_min(1e-6)
    one, zero = torch.ones_like(slant), torch.zeros_like(slant)
    return warped(x, torch.stack([one, slant, -slant * y, zero, one, zero], 1).reshape(-1, 2, 3), unit=1.0)


def prepared(images: Tensor, labels: Tensor, case: Case, count: int, size: int, part: int) -> Pair:
    """So many digits of a case, by lot: chosen, deskewed, turned each by its own angle, then resized."""
    if case.kind == "no 6, 9":
        kept = (labels != 6) & (labels != 9)
        images, labels = images[kept], labels[kept]
    seed = 2 * case.seed + part
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:count]
    x = datasets.as_floats(images[chosen])
    x = deskewed(x) if case.kind == "deskewed" else x
    return datasets.resized(datasets.rotated(x, seed, case.degrees), size), labels[chosen]


def tensors(case: Case, settings: Settings, sources: Sequence[Pair], device: str) -> tuple[Pair, Pair]:
    """Training and test pairs."""
    counts = (settings.samples, settings.test)
    parts = [prepared(*source, case, n, settings.size, i) for i, (source, n) in enumerate(zip(sources, counts, strict=True))]
    (x, y), (x_test, y_test) = parts
    return (x.to(device), y.to(device)), (x_test.to(device), y_test.to(device))


# ---- fits


def network(case: Case, settings: Settings, degrees: float, learn: bool) -> Symmetrised:
    torch.manual_seed(case.seed)
    act = nn.ReLU() if case.kind == "relu" else nn.SiLU()
    net = nn.Sequential(nn.Flatten(), nn.Linear(settings.size**2, settings.hidden), act, nn.Linear(settings.hidden, 10))
    widths = {"rotation": math.radians(degrees)}
    return autosym.symmetrise(net, widths, settings.copies, learn=learn, in_steps=settings.in_steps)


def fitted(case: Case, settings: Settings, train: Pair, degrees: float, learn: bool) -> autosym.Fit:
    """A fit from scratch. All ranges of a case have the same initial weights and batches."""
    return autosym.fit(
        network(case, settings, degrees, learn).to(train[0].device),
        train,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        lr=settings.lr,
        every=1 if learn else 4,
        hyper_lr=settings.range_lr,
        seed=case.seed,
    )


@torch.no_grad()
def measured(model: nn.Module, record: Any, test: Pair) -> dict[str, float]:
    """Evidence per sample and its two parts, and how well test digits are told apart."""
    logits = torch.cat([model(part) for part in test[0].split(500)])
    return {
        "evidence": float(record.log_evidence) / record.samples,
        "log_likelihood": float(record.log_likelihood) / record.samples,
        "occam": float(record.occam) / record.samples,
        "test_nll": float(F.cross_entropy(logits, test[1])),
        "accuracy": 100 * float((logits.argmax(1) == test[1]).double().mean()),
    }


def slopes(fit: autosym.Fit, train: Pair) -> dict[str, float]:
    """d evidence / d range at the weights and precisions of a fit, in nats per sample and degree: what a learned range follows.

    By the derivative, and by differences, which also see units of ReLU turn on and off.
    """
    raw, at = fit.model.transformations.raw, laplace.at(fit.model, train, fit.likelihood)
    ways = {"slope": gradient.differences, "derivative": gradient.gradient}
    unit = math.radians(1) / float(raw.sigmoid()) / len(train[0])  # range = softplus(raw)
    return {name: unit * float(way(fit.model, train, fit.prior, at, {"range": raw})["range"]) for name, way in ways.items()}


@torch.no_grad()
def at_fixed_weights(fit: autosym.Fit, train: Pair, test: Pair, grid: Sequence[float]) -> list[dict[str, float]]:
    """Weights and precisions of a fit, with every range of the grid in place of its own."""
    found, raw = [], fit.model.transformations.raw
    before = raw.clone()
    for degrees in grid:
        raw.fill_(math.log(math.expm1(math.radians(degrees))))
        record = laplace.at(fit.model, train, fit.likelihood)(fit.prior)
        found.append({"degrees": degrees} | measured(fit.model, record, test))
    raw.copy_(before)
    return found


def cell(case: Case, settings: Settings, grid: Sequence[float], sources: Sequence[Pair], device: str) -> dict[str, Any]:
    """Both curves of one case, and the ranges that fits learn from both starts."""
    begun = time.process_time()
    train, test = tensors(case, settings, sources, device)
    refitted, learned = [], []
    for degrees in grid:
        fit = fitted(case, settings, train, degrees, False)
        refitted.append({"degrees": degrees} | slopes(fit, train) | measured(fit.model, fit.evidence, test))
    for start in STARTS:
        fit = fitted(case, settings, train, start, True)
        path = [line["ranges"]["rotation (degrees)"] for line in fit.history if "ranges" in line]
        found = {"start": start, "degrees": fit.model.ranges()["rotation"].value, "path": [round(value, 1) for value in path]}
        fixed = at_fixed_weights(fit, train, test, grid)
        learned.append(found | measured(fit.model, fit.evidence, test) | {"fixed": fixed})
    return asdict(case) | {"refitted": refitted, "learned": learned, "seconds": time.process_time() - begun}


# ---- what the curves say


def peak(curve: Sequence[dict[str, float]], key: str = "evidence", sign: int = 1) -> float:
    """Degrees of the highest ``sign`` * ``key``: the top of the parabola through the best point and its neighbours; an end is itself."""
    x, y = [line["degrees"] for line in curve], [sign * line[key] for line in curve]
    best = max(range(len(y)), key=y.__getitem__)
    if best in (0, len(y) - 1):
        return float(x[best])
    (a, b, c), (u, v, w) = x[best - 1 : best + 2], y[best - 1 : best + 2]
    left, right = (v - u) / (b - a), (w - v) / (c - b)  # slopes half way to the neighbours
    return (a + b) / 2 + left / (left - right) * (c - a) / 2 if left > right else float(b)


def spread(values: Sequence[float], digits: int = 0) -> str:
    """ "mean ± standard error"."""
    error = f" ± {stdev(values) / math.sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{error}"


def by_case(cells: Sequence[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """The cells of every case, one for each seed."""
    found = {case: [c for c in cells if (c["degrees"], c["kind"]) == case] for case in CASES}
    return {case: several for case, several in found.items() if several}


def stop(curve: Sequence[dict[str, float]]) -> float:
    """Degrees at which the slope at refitted weights has first fallen to a tenth of its largest: a range that rises stops there."""
    steepest = max(range(len(curve)), key=lambda i: curve[i]["slope"])
    little = curve[steepest]["slope"] / 10
    for before, after in itertools.pairwise(curve[steepest:]):
        if after["slope"] <= little:
            part = (before["slope"] - little) / (before["slope"] - after["slope"])
            return before["degrees"] + part * (after["degrees"] - before["degrees"])
    return float(curve[-1]["degrees"])


def rows(cells: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row for each case: where the curves are highest, and what was learned."""
    found = []
    for (degrees, kind), several in by_case(cells).items():
        learned = [[c["learned"][i] for c in several] for i in range(len(STARTS))]
        found.append(
            (
                f"±{degrees}°, {KINDS[kind]}",
                spread([peak(c["refitted"]) for c in several]),
                spread([max(c["refitted"], key=lambda line: line["evidence"])["accuracy"] for c in several], 1),
                spread([stop(c["refitted"]) for c in several]),
                spread([peak(c["refitted"], "test_nll", -1) for c in several]),
                *(
                    f"{spread([one['degrees'] for one in ones])} ({fmean(peak(one['fixed']) for one in ones):.0f})"
                    for ones in learned
                ),
            )
        )
    return found


HEADER = (
    "digits turned by up to",
    "evidence highest at",
    "accuracy there (%)",
    "its slope gone from",
    "test loss lowest at",
    *(f"learned from {start}° (highest at these weights)" for start in STARTS),
)


def figure(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Evidence (above) and test loss (below) against the range, for every case: means over seeds, and every seed in grey."""
    from autosym.report.drawing import COLOURS, new_figure, open_frame, save_figure

    cases = by_case(cells)
    blocks = math.ceil(len(cases) / COLUMNS)
    canvas = new_figure(3.4 * COLUMNS, 5 * blocks)
    axes = canvas.subplots(2 * blocks, COLUMNS, sharex=True, squeeze=False)
    kinds = {"evidence": "log evidence / N", "test_nll": "test loss"}
    for place, ((degrees, kind), several) in enumerate(cases.items()):
        block, column = divmod(place, COLUMNS)
        for (key, label), axis in zip(kinds.items(), axes[2 * block : 2 * block + 2, column], strict=True):
            _curves(axis, several, key, (COLOURS["conv"], COLOURS["fc"]))
            axis.axvline(degrees, color="black", linewidth=1, linestyle=":")
            axis.set_ylabel(label if column == 0 else "")
            open_frame(axis)
        axes[2 * block, column].set_title(f"turned by up to ±{degrees}°\n{KINDS[kind]}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xticks(range(30, 181, 30))
        axis.set_xlabel("range of rotation (± degrees)")
    canvas.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    save_figure(canvas, path, 90)


def _curves(axis: Any, several: Sequence[dict[str, Any]], key: str, colours: tuple[str, str]) -> None:
    grid = [line["degrees"] for line in several[0]["refitted"]]
    refitted = [[line[key] for line in c["refitted"]] for c in several]
    fixed = [[line[key] for line in c["learned"][0]["fixed"]] for c in several]
    for values in refitted:
        axis.plot(grid, values, color="0.8", linewidth=1)
    means = [[fmean(column) for column in zip(*curves, strict=True)] for curves in (refitted, fixed)]
    axis.plot(grid, means[0], "o-", color=colours[0], markersize=4, label="refitted at each range")
    axis.plot(grid, means[1], "--", color=colours[1], label=f"at the weights of a learned range (from {STARTS[0]}°)")
    for start, mark in zip(range(len(STARTS)), "^v", strict=True):
        ends = [c["learned"][start] for c in several]
        label = f"learned from {STARTS[start]}°"
        axis.plot([e["degrees"] for e in ends], [e[key] for e in ends], mark, color="black", markersize=5, label=label)
    shown = [*itertools.chain(*refitted), *(one[key] for c in several for one in c["learned"])]
    margin = 0.05 * (max(shown) - min(shown))
    axis.set_ylim(min(shown) - margin, max(shown) + margin)  # fixed weights fall far below


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="holds the official files of MNIST")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the results, run nothing")
    parser.add_argument("--small", action="store_true", help="one small case of embedded digits, printed only")
    options = parser.parse_args()
    if options.figure:
        figure(json.loads(OUT.read_text())["cells"], options.figure)
        return
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.small:
        images, labels = datasets.digits()
        images = (255 * images).byte()
        sources = ((images[:1000], labels[:1000]), (images[1000:], labels[1000:]))
        settings = Settings(samples=100, test=100, size=8, hidden=8, epochs=3, copies=5, in_steps=3)
        found = [cell(Case(90, kind, 1), settings, (60, 90, 120), sources, device) for kind in KINDS]
        print(table([HEADER, *rows(found)], "<" + ">" * (len(HEADER) - 1)))
        return
    sources, settings = datasets.mnist(options.data_dir), Settings()
    known = json.loads(OUT.read_text()) if OUT.exists() else {"settings": asdict(settings), "cells": []}
    if known["settings"] != asdict(settings):
        raise SystemExit(f"{OUT} was made with other settings: move it away first")
    cells = known["cells"]
    for case in (Case(*case, seed) for seed in range(1, options.seeds + 1) for case in CASES):
        if not any(asdict(case).items() <= c.items() for c in cells):
            cells.append(cell(case, settings, GRID, sources, device) | {"provenance": provenance(device)})
            write({"settings": asdict(settings), "cells": cells}, OUT)
            print(case, *rows(cells[-1:])[0][1:], f"{cells[-1]['seconds']:.0f} s", flush=True)
    print(table([HEADER, *rows(cells)], "<" + ">" * (len(HEADER) - 1)))


if __name__ == "__main__":
    main()
