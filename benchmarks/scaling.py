"""How do time and memory grow? An evidence pass and a training step against samples, classes, channels, image size, layers and processes.

    python benchmarks/scaling.py [--quick]        writes benchmarks/results/scaling.json and prints the table of docs/performance.md

Two networks, from ``BASE`` on, one size at a time doubled: a factored map beside a convolution ("f-fc+conv"), and waves of position beside
it ("where+conv"). Time is CPU seconds of one thread, the least of three. Memory is what a process of its own takes at most beyond what it
held before. The exponent p of cost ~ size^p is the slope between the last two sizes, both on a logarithmic scale. In two processes each
takes half of the samples: the time is that of one of them.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from autosym.bayes.likelihoods import Categorical
from autosym.bayes.priors import Prior
from autosym.curvature.owners import sites
from autosym.evidence import laplace
from autosym.nn import nets
from autosym.runtime.provenance import provenance
from autosym.runtime.tables import table
from autosym.training.steps import Weights

OUT = Path(__file__).parent / "results" / "scaling.json"
BATCH = 64  # of a training step, and of an evidence pass


@dataclass(frozen=True)
class Size:
    """Of data and network."""

    name: str = "f-fc+conv"
    samples: int = 256
    classes: int = 10
    channels: int = 8
    side: int = 16
    layers: int = 2

    def network(self) -> nn.Module:
        """Layers of stride 1 and of as many channels each, and a head of one hidden layer."""
        torch.manual_seed(0)
        shape, ones = (3, self.side, self.side), (1,) * self.layers
        return nets.build(self.name, shape, self.classes, self.channels, ones, ones, hidden=1)

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(self.samples, 3, self.side, self.side), torch.arange(self.samples) % self.classes


BASE = Size()
GROWTH: dict[str, tuple[int, ...]] = {
    "samples": (128, 256, 512, 1024),
    "classes": (5, 10, 20, 40),
    "channels": (4, 8, 16, 32),
    "side": (8, 16, 32),
    "layers": (1, 2, 4),
}
QUICK: dict[str, tuple[int, ...]] = {"samples": (4, 8), "layers": (1, 2)}


def works(size: Size) -> dict[str, Callable[[], object]]:
    """What is measured: evidence passes and a step."""
    net, data = size.network(), size.data()
    owned = {site.name: site.parameter for site in sites(net)}
    likelihood, weights = Categorical(), Weights(owned, size.samples, "adam")
    weights.set_prior(Prior(list(owned)), likelihood)
    weights.lr.fill_(1e-6)
    x, y = (t.repeat(-(-BATCH // size.samples), *(1 for _ in t.shape[1:]))[:BATCH] for t in data)
    passes = {
        kind: partial(laplace.at, net, data, sampled=kind == "sampled", batch_size=BATCH) for kind in ("exact", "sampled")
    }
    return {**passes, "step": partial(weights.step, net, likelihood, x, y)}


def measured(size: Size, repeats: int) -> dict[str, float]:
    """CPU seconds of each work."""
    found = {}
    for name, work in works(size).items():
        times = []
        for _ in range(repeats):
            begun = time.process_time()
            work()
            times.append(time.process_time() - begun)
        found[name] = min(times)
    return found


def memory(size: Size, name: str) -> float:
    """MiB of a work, in a process of its own: memory that was freed before is not taken for new memory."""
    context = get_context("fork")
    answer = context.SimpleQueue()
    process = context.Process(target=_peak, args=(size, name, answer))
    process.start()
    found = answer.get()
    process.join()
    return found


def _peak(size: Size, name: str, answer: object) -> None:
    works(replace(size, samples=2, channels=1, side=4, layers=1, classes=2))[name]()  # what is allocated once is not counted
    work = works(size)[name]
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
    before = _status("VmRSS")
    work()
    answer.put(max(1.0, _status("VmHWM") - before))  # type: ignore[attr-defined]  (less cannot be told)


def in_processes(size: Size, parts: int, repeats: int) -> dict[str, float]:
    """CPU seconds, of the first of several processes; steps are of a batch of its own."""
    with tempfile.TemporaryDirectory() as folder:
        context = get_context("spawn")
        answer = context.SimpleQueue()
        running = [context.Process(target=_one, args=(rank, parts, folder, size, repeats, answer)) for rank in range(parts)]
        for process in running:
            process.start()
        found = answer.get()
        for process in running:
            process.join()
    return found


def _one(rank: int, parts: int, folder: str, size: Size, repeats: int, answer: object) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=parts)
    found = measured(size, repeats)
    dist.barrier()
    if not rank:
        answer.put(found)  # type: ignore[attr-defined]
    dist.destroy_process_group()


def exponent(sizes: tuple[int, ...], costs: list[float]) -> float:
    """The slope of log cost between the last two sizes."""
    return math.log(costs[-1] / costs[-2]) / math.log(sizes[-1] / sizes[-2])


def report(result: dict) -> str:
    """As a table."""
    figures = ("exact", "sampled", "step", "exact, MiB", "step, MiB")
    rows = [("network", "size", *figures)]
    for name, grown in result["networks"].items():
        for what, cells in grown.items():
            sizes = tuple(int(size) for size in cells)
            costs = [[cell[key] for cell in cells.values() if key in cell] for key in figures]
            rows.append((name, f"{what} {sizes[-2]} to {sizes[-1]}", *(_cell(sizes, several) for several in costs)))
    return table(rows, "<<>>>>>")


def _cell(sizes: tuple[int, ...], costs: list[float]) -> str:
    return "" if not costs else f"{costs[-2]:.3g} to {costs[-1]:.3g} (^{exponent(sizes, costs):.1f})"


def _status(key: str) -> float:
    return (
        next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)) / 1024
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, printed only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    base, repeats = (replace(BASE, samples=4, side=8, channels=2), 1) if options.quick else (BASE, 3)
    result: dict = {"networks": {}, "base": vars(base), "provenance": provenance("cpu")}
    kinds, growth = ("f-fc+conv", "where+conv"), QUICK if options.quick else GROWTH
    taken = {  # first, as this process has taken nothing yet
        (name, what, n, work): memory(replace(base, name=name, **{what: n}), work)
        for name in kinds
        for what, sizes in growth.items()
        for n in sizes
        for work in ("exact", "step")
    }
    measured(base, 1)  # libraries choose their algorithms
    for name in kinds:
        grown = result["networks"][name] = {}
        for what, sizes in growth.items():
            grown[what] = {n: measured(replace(base, name=name, **{what: n}), repeats) for n in sizes}
            for n, cell in grown[what].items():
                cell |= {f"{work}, MiB": taken[name, what, n, work] for work in ("exact", "step")}
            print(f"{name}, {what}", flush=True)
        if not options.quick:
            large = replace(base, name=name, samples=4 * base.samples)
            grown["processes"] = {parts: in_processes(large, parts, repeats) for parts in (1, 2)}
    print(report(result))
    if not options.quick:
        OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
