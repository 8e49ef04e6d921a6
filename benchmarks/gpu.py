"""Times on a GPU: an epoch of F-FC+CONV (width 10, one channel, batch 128) and evidence passes, beside a check against the CPU.

    python benchmarks/gpu.py [--samples 50000] [--profile] [--out FILE]

An epoch is that of ``autosym.fit``: shuffling, the steps (recorded as CUDA graphs), the last smaller batch. An evidence pass is factors,
eigenvalues and the log evidence.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import autosym
from autosym.bayes.likelihoods import Categorical
from autosym.bayes.priors import Prior
from autosym.curvature.owners import sites
from autosym.evidence import laplace
from autosym.nn import nets
from autosym.runtime.batching import Stream
from autosym.runtime.graphs import Captured
from autosym.runtime.provenance import provenance
from autosym.training.steps import Weights

GOALS = {
    "f-fc+conv/epoch": 0.7,
    "f-fc+conv/exact evidence": 3.0,
    "f-fc+conv/sampled evidence": 1.0,
}  # seconds, at 50,000 samples
NETWORKS = ("conv", "f-fc+conv", "s-fc+s-conv", "f-fc+conv+gconv:c4")


def agreement() -> dict[str, dict[str, float]]:
    """The log evidence of small networks in float64, GPU against CPU, and whether recorded steps are those that are launched."""
    found = {}
    for name in NETWORKS:
        torch.manual_seed(0)
        net = nets.build(name, (1, 8, 8), 3, 2, (1, 2), (2, 2), hidden=2).double()
        data = (torch.randn(40, 1, 8, 8, dtype=torch.float64), torch.randint(3, (40,)))
        here = autosym.log_evidence(net, data)
        there = autosym.log_evidence(net.cuda(), (data[0].cuda(), data[1].cuda()))
        found[name] = {"cpu": here, "gpu": there, "relative difference": abs(there - here) / abs(here)}
        ends = []
        for wanted in (True, False):
            torch.manual_seed(0)
            trained = nets.build(name, (1, 8, 8), 3, 2, (1, 2), (2, 2), hidden=2).double().cuda()
            epoch(trained, data, 8, 30, wanted)
            ends.append(torch.cat([p.detach().flatten() for p in trained.parameters()]))
        found[name]["recorded against launched steps"] = float((ends[0] - ends[1]).abs().max())
    return found


def epoch(net: nn.Module, data: tuple[Tensor, Tensor], batch_size: int, epochs: int, record: bool = True) -> Callable[[], None]:
    """Train for some epochs; returns a function that trains for one more."""
    owned = {site.name: site.parameter for site in sites(net)}
    likelihood, weights = Categorical(), Weights(owned, len(data[0]), "adam")
    stream = Stream(data, batch_size, net, lambda targets: None, 0)
    step = Captured(partial(weights.step, net, likelihood), record)

    def one() -> None:
        weights.set_prior(Prior(list(owned)), likelihood)
        for x, y in stream.epoch(0):
            weights.lr.fill_(1e-3)
            step(x, y)
        weights.take_loss()

    for _ in range(epochs):
        one()
    return one


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Median wall-clock seconds of work that has ended on the device; the first is not counted."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def profile(work: Callable[[], object], rows: int = 25) -> None:
    """The kernels that take the time of some work."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    kernels = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    print(f"{sum(k.device_time_total for k in kernels) / 1e3:.1f} ms in {sum(k.count for k in kernels)} kernels")
    for kernel in kernels[:rows]:
        print(f"  {kernel.device_time_total / 1e3:8.2f} ms {kernel.count:6d}x {kernel.key[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--profile", action="store_true", help="print the kernels of a sampled evidence pass")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    options = parser.parse_args()
    result: dict = {"agreement": agreement(), "seconds": {}, "samples": options.samples, "batch": 128}
    torch.manual_seed(0)
    data = (torch.randn(options.samples, 1, 32, 32, device="cuda"), torch.randint(10, (options.samples,), device="cuda"))
    for name in ("conv", "f-fc+conv"):
        net = nets.build(name, (1, 32, 32), 10, 10).cuda()
        result["seconds"][f"{name}/epoch"] = seconds(epoch(net, data, 128, 1))
        for kind in ("exact", "sampled"):
            evidence = partial(_evidence, net, data, kind == "sampled")
            torch.cuda.reset_peak_memory_stats()
            result["seconds"][f"{name}/{kind} evidence"] = seconds(evidence)
            result["seconds"][f"{name}/{kind} evidence, peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        curvature = laplace.at(net, data, sampled=True).curvature
        result["seconds"][f"{name}/eigenvalues"] = seconds(curvature.eigenvalues)
        if options.profile:
            profile(partial(_evidence, net, data, True))
    result["goals"] = {name: {"goal": goal, "reached": result["seconds"][name]} for name, goal in GOALS.items()}
    result["provenance"] = provenance("cuda")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def _evidence(net: nn.Module, data: tuple[Tensor, Tensor], sampled: bool) -> float:
    at = laplace.at(net, data, sampled=sampled)
    return float(at(Prior(at.names)).log_evidence.detach())


if __name__ == "__main__":
    main()
