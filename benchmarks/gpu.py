"""Times on a GPU: an epoch of F-FC+CONV (width 10, one channel, batch 128) and evidence passes, beside a check against the CPU.

python benchmarks/gpu.py [--samples 50000] [--out FILE]
"""

import argparse
import json
import time
from pathlib import Path

import torch

import autosym
from autosym import nets
from autosym.curvature import kfac
from autosym.experiments.provenance import provenance
from autosym.likelihoods import Categorical
from autosym.priors import Prior
from autosym.proximal import Weights
from autosym.sites import sites

NETWORKS = ("conv", "f-fc+conv", "s-fc+s-conv", "f-fc+conv+gconv:c4")


def agreement() -> dict[str, dict[str, float]]:
    """The log evidence of small networks in float64, GPU against CPU."""
    found = {}
    for name in NETWORKS:
        torch.manual_seed(0)
        net = nets.build(name, (1, 8, 8), 3, 2, (1, 2), (2, 2), hidden=2).double()
        data = (torch.randn(40, 1, 8, 8, dtype=torch.float64), torch.randint(3, (40,)))
        here = autosym.log_evidence(net, data)
        there = autosym.log_evidence(net.cuda(), tuple(t.cuda() for t in data))
        found[name] = {"cpu": here, "gpu": there, "relative difference": abs(there - here) / abs(here)}
        fitted = autosym.fit(
            net.float(), tuple(t.cuda().float() if t.is_floating_point() else t.cuda() for t in data), epochs=4
        )
        fitted.predictive(data[0][:3].cuda())
    return found


def seconds(work, warm: bool = True) -> float:
    """Wall-clock seconds of work that has ended on the device."""
    if warm:
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    options = parser.parse_args()
    result: dict = {"agreement": agreement(), "seconds": {}, "samples": options.samples}
    torch.manual_seed(0)
    x, y = torch.randn(options.samples, 1, 32, 32, device="cuda"), torch.randint(10, (options.samples,), device="cuda")
    for name in ("conv", "f-fc+conv"):
        net = nets.build(name, (1, 32, 32), 10, 10).cuda()
        owned = {site.name: site.parameter for site in sites(net)}
        prior, likelihood = Prior(list(owned)), Categorical()
        weights = Weights(owned, options.samples, "adam")

        def epoch(net=net, weights=weights, prior=prior, likelihood=likelihood) -> None:
            for rows in torch.randperm(options.samples, device="cuda").split(128):
                weights.step(net, likelihood, prior, x[rows], y[rows], 1e-3)

        result["seconds"][f"{name}/epoch"] = seconds(epoch)
        for kind, sampled in (("exact", False), ("sampled", True)):
            result["seconds"][f"{name}/{kind} factors"] = seconds(
                lambda net=net, s=sampled: kfac(net, (x, y), Categorical(), sampled=s, batch_size=1000)
            )
        curvature = kfac(net, (x[:5000], y[:5000]), likelihood, sampled=True, batch_size=1000)
        result["seconds"][f"{name}/eigenvalues"] = seconds(curvature.eigenvalues)
    result["peak_memory_GiB"] = torch.cuda.max_memory_allocated() / 2**30
    result["provenance"] = provenance("cuda")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
