"""Cost of one curvature pass, side by side with what users have today, as ratios measured in one process.

    python benchmarks/curvature.py [--quick]

Every contender computes Kronecker factors of the same networks on the same data and is run in turn, several times; the median counts.
The floor of an exact pass is one forward, C backward passes to layer outputs only, and the factor products; of a sampled one,
one of each. Results go to benchmarks/results/cpu.json: ``ratios["conv/exact/laplace-torch-best"] = 2.0`` means ours is 2.0x faster.
"""

import argparse
import copy
import json
import os
import platform
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autosym
from autosym.bayes.likelihoods import Categorical
from autosym.curvature.kronecker import kfac
from autosym.curvature.owners import sites
from autosym.curvature.tape import Tape
from autosym.linear.path import gram
from autosym.nn import layers, nets
from autosym.runtime.provenance import provenance

BATCH = 250


def convolutional() -> nn.Module:
    """Five 3x3 convolutions and a linear head, 279,050 parameters."""
    widths = (3, 32, 64, 64, 128, 128)
    parts: list[nn.Module] = []
    for i in range(5):
        parts += [nn.Conv2d(widths[i], widths[i + 1], 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(2)] if i in (0, 2) else [])]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def perceptron() -> nn.Module:
    """784-512-512-10, 669,706 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def floor(net: nn.Module, x: Tensor, backwards: int) -> None:
    """Forward, output-only backwards and factor products: no bookkeeping, no output Hessian, no checks."""
    for part in x.split(BATCH):
        seen: list[tuple] = []
        with Tape(sites(net), lambda name, path, x, seen=seen: seen.append((path, x))) as tape:
            f = tape.record(net, part)
            for path, inputs in seen:
                path.gram(inputs)
            for _ in range(backwards):
                for _, rows in tape.backward(f, torch.ones_like(f)):
                    gram(rows)


def contenders(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """Every way to get the factors, by name."""
    from curvlinops import KFACLinearOperator
    from laplace import Laplace
    from laplace.curvature import AsdlGGN, BackPackGGN, CurvlinopsGGN

    loader = DataLoader(TensorDataset(x, y), BATCH)
    batches = list(loader)
    parameters = list(net.parameters())

    untouched = copy.deepcopy(net)  # another library's hooks on a network keep BackPACK from it

    def laplace(backend: type, **options: bool) -> object:
        model = untouched if backend is BackPackGGN else net
        fitted = Laplace(
            model, "classification", subset_of_weights="all", hessian_structure="kron", backend=backend, backend_kwargs=options
        )
        fitted.fit(loader)
        return fitted

    def operator(kind: str) -> object:
        arguments = (net, nn.CrossEntropyLoss(reduction="sum"), parameters, batches)
        built = KFACLinearOperator(*arguments, fisher_type=kind, check_deterministic=False, separate_weight_and_bias=True)
        built.compute_kronecker_factors()
        return built

    def step() -> None:
        for a, b in batches:
            torch.autograd.grad(F.cross_entropy(net(a), b), parameters)

    return {
        "forward+backward": step,
        "floor/exact": lambda: floor(net, x, 10),
        "floor/sampled": lambda: floor(net, x, 1),
        "ours/exact": lambda: kfac(net, (x, y), Categorical(), batch_size=BATCH),
        "ours/sampled": lambda: kfac(net, (x, y), Categorical(), batch_size=BATCH, sampled=True),
        "laplace-torch-curvlinops/exact": lambda: laplace(CurvlinopsGGN),
        "laplace-torch-asdl/exact": lambda: laplace(AsdlGGN),
        "laplace-torch-backpack/exact": lambda: laplace(BackPackGGN),
        "laplace-torch-curvlinops/sampled": lambda: laplace(CurvlinopsGGN, stochastic=True),
        "curvlinops/exact": lambda: operator("type-2"),
        "curvlinops/sampled": lambda: operator("mc"),
    }


def measure(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float | str]:
    """Median seconds of each, in turn; the first round only warms up. A contender that fails is named with its error."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    failed: dict[str, str] = {}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            if name in failed:
                continue
            start = time.perf_counter()
            try:
                run()
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"[:200]
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: failed.get(name) or statistics.median(seconds[name]) for name in runs}


def compare(seconds: dict[str, float | str]) -> dict[str, float]:
    """How many times faster ours is than each contender, than the best backend of laplace-torch, and than the floor."""
    ratios = {}
    for kind in ("exact", "sampled"):
        ours = seconds[f"ours/{kind}"]
        assert isinstance(ours, float)
        peers = {name.split("/")[0]: t for name, t in seconds.items() if name.endswith(kind) and isinstance(t, float)}
        ratios |= {f"{kind}/{name}": t / ours for name, t in peers.items() if name != "ours"}
        best = [t for name, t in peers.items() if name.startswith("laplace-torch")]
        if best:
            ratios[f"{kind}/laplace-torch-best"] = min(best) / ours
    return ratios


class BlockDiagonal(nn.Module):
    """A factored layer with its factors as block-diagonal matrices, as published."""

    def __init__(self, layer: layers.Factored):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layer.theta_2, self.layer.theta_1
        channels, out_channels = first.weight.shape[0], second.weight.shape[0]
        h = (x.flatten(1) @ torch.block_diag(*first.weight).mT).unflatten(1, (channels, out_channels)).transpose(1, 2)
        h = h + self.layer.b_2(x)
        y = h.reshape(len(x), -1) @ torch.block_diag(*second.weight).mT
        return y.reshape(len(x), *second.out_shape) + self.layer.b_1(x)


def step(block_diagonal: bool, batch: int, repeats: int) -> tuple[float, float]:
    """Seconds of a training step of F-FC+CONV (width 10, 32x32) and the MiB it needs beyond the network, in a process of its own."""
    torch.set_num_threads(1)
    net = nets.build("f-fc+conv", (1, 32, 32), 10, 10)
    if block_diagonal:
        for block in net.blocks:
            block["f-fc"] = BlockDiagonal(block["f-fc"])
    x, y = torch.randn(batch, 1, 32, 32), torch.randint(10, (batch,))
    parameters = list(net.parameters())
    before = _peak_MiB()
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        torch.autograd.grad(F.cross_entropy(net(x), y), parameters)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), max(_peak_MiB() - before, 1.0)


def _peak_MiB() -> float:
    """The most memory this process has held: not ru_maxrss, which a child inherits from its parent."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 1024


def factored(batch: int, repeats: int) -> dict[str, dict[str, float]]:
    """A training step of F-FC+CONV by batched products and with block-diagonal matrices: seconds and memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        (ours, ours_memory), (theirs, their_memory) = (
            pool.submit(step, kind, batch, repeats).result() for kind in (False, True)
        )
    return {"seconds": {"ours": ours, "block_diagonal": theirs}, "MiB": {"ours": ours_memory, "block_diagonal": their_memory}}


def share_of_training(samples: int) -> dict[str, float]:
    """What evidence adds to the default schedule on a CPU: F-FC+CONV of the demo, 20 epochs, with and without evidence steps."""
    seconds = {}
    x, y = torch.randn(samples, 1, 16, 16), torch.randint(10, (samples,))
    for name in ("none", "mackay"):
        torch.manual_seed(0)
        net = nets.build("f-fc+conv", (1, 16, 16), 10, 12, (1, 2, 4, 8), (2, 2, 2, 2), hidden=8)
        fitted = autosym.fit(net, (x, y), epochs=20, step=name, sampled_end=True)
        seconds[name] = fitted.history[-1]["seconds"]
    return {"with evidence": seconds["mackay"], "without": seconds["none"], "share": 1 - seconds["none"] / seconds["mackay"]}


def growth(repeats: int) -> dict[str, float]:
    """Seconds of our exact and sampled pass as samples, width and classes grow (a perceptron, one hidden layer)."""
    found = {}
    for samples, width, classes in ((1000, 128, 10), (2000, 128, 10), (1000, 256, 10), (1000, 128, 40)):
        net = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, classes))
        data = (torch.randn(samples, 256), torch.randint(classes, (samples,)))
        runs = {
            kind: lambda net=net, data=data, s=s: kfac(net, data, Categorical(), sampled=s, batch_size=BATCH)
            for kind, s in (("exact", False), ("sampled", True))
        }
        for kind, t in measure(runs, repeats).items():
            found[f"N={samples} width={width} classes={classes} {kind}"] = t
    return found  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny data, one repeat: does it run at all?")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    repeats, shrink = (1, 25) if options.quick else (3, 1)
    result: dict = {"seconds": {}, "ratios": {}}
    for name, net, x in (
        ("conv", convolutional(), torch.randn(500 // shrink, 3, 32, 32)),
        ("mlp", perceptron(), torch.randn(5000 // shrink, 1, 28, 28)),
    ):
        y = torch.randint(10, (len(x),))
        result["seconds"][name] = measure(contenders(net, x, y), repeats)
        result["ratios"] |= {f"{name}/{key}": value for key, value in compare(result["seconds"][name]).items()}
    result["factored"] = factored(128 // shrink or 2, repeats)
    for key, name in (("seconds", "step"), ("MiB", "memory")):
        found = result["factored"][key]
        result["ratios"][f"f-fc+conv/{name}/block-diagonal"] = found["block_diagonal"] / found["ours"]
    result["share_of_training"] = share_of_training(1437 // shrink)
    result["growth"] = growth(repeats)
    result["peak_memory_MiB"] = _peak_MiB()
    result["provenance"] = provenance() | {"processor": _processor(), "threads": 1}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, seconds in result["seconds"].items():
        for contender, t in seconds.items():
            print(f"{name:5s} {contender:36s} {t if isinstance(t, str) else f'{t:8.3f} s'}")
    print("\nours is faster by (below 1: slower)")
    for name, ratio in result["ratios"].items():
        print(f"  {name:44s} {ratio:8.2f}x")
    print(
        f"\nevidence is {result['share_of_training']['share']:.0%} of training time with the default schedule (demo's network)"
    )
    print(f"Written: {options.out}")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return f"{platform.machine()}, {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
