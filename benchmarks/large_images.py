"""A relaxed ResNet-18 on images of 224x224: parameters, a training step and an evidence pass, beside the plain network.

    python benchmarks/large_images.py [--images 5000] [--out FILE]      on a GPU; times are medians, in seconds
    python benchmarks/large_images.py --small                           a check on a CPU, on images of 32x32

Images are noise: only times and sizes are of interest. A step is the one of ``autosym.fit``, for the plain network too (its batch
normalisation in eval mode). An evidence pass is Kronecker factors by sampled curvature, as evidence steps take them, and eigenvalues.
"""

import argparse
import json
import statistics
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
from autosym.runtime.graphs import Captured
from autosym.runtime.provenance import provenance
from autosym.runtime.tables import table
from autosym.training.steps import Weights
from real_networks import Block

PATHS = ("where", "where:8")


def resnet18(classes: int, width: int = 64) -> nn.Module:
    """As published: a 7x7 convolution of stride 2, max pooling, four stages of two basic blocks, global mean."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = width
    for stage in range(4):
        for block in range(2):
            layers.append(Block(channels, width << stage, 2 if stage and not block else 1))
            channels = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)).eval()


def step_seconds(net: nn.Module, x: Tensor, y: Tensor, steps: int) -> float:
    """The median time of a training step."""
    owned = {site.name: site.parameter for site in sites(net)}
    likelihood, weights = Categorical(), Weights(owned, len(x), "adam")
    weights.set_prior(Prior(list(owned)), likelihood)
    weights.lr.fill_(1e-4)
    step = Captured(partial(weights.step, net, likelihood), x.is_cuda)
    return _median(lambda: step(x, y), steps)


def evidence_pass(net: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float | None]:
    """Seconds and GiB at the peak."""
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    at = laplace.at(net, (x, y), sampled=True)
    float(at(Prior(at.names)).log_evidence.detach())
    return time.perf_counter() - begun, torch.cuda.max_memory_allocated() / 2**30 if x.is_cuda else None


def _median(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats + 5):  # the first ones record
        begun = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000, help="of the evidence pass")
    parser.add_argument("--small", action="store_true", help="a narrow network on small images")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    side, images, batch, classes, width, steps = (
        (32, 64, 8, 10, 8, 3) if options.small else (224, options.images, 32, 1000, 64, 30)
    )
    torch.manual_seed(0)
    x, y = torch.randn(images, 3, side, side, device=device), torch.randint(classes, (images,), device=device)
    plain = resnet18(classes, width).to(device)
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)  # as relax makes it
    size, own = sum(p.numel() for p in plain.parameters()), step_seconds(plain, x[:batch], y[:batch], steps)
    found = {"plain": {"parameters": size, "step": own}}
    for paths in PATHS:
        begun = time.perf_counter()
        net = autosym.relax(plain, x[:2], paths=paths)
        found[paths] = {"relax": time.perf_counter() - begun, "parameters": sum(p.numel() for p in net.parameters())}
        found[paths]["step"] = step_seconds(net, x[:batch], y[:batch], steps)
        found[paths]["evidence"], found[paths]["gib"] = evidence_pass(net, x, y)
    rows = [("", "parameters", "ratio", "step (ms)", "ratio", "evidence (s)", "GiB")]
    for name, one in found.items():
        sizes = (
            f"{one['parameters']:,}",
            f"{one['parameters'] / size:.2f}",
            f"{1e3 * one['step']:.2f}",
            f"{one['step'] / own:.2f}",
        )
        rows.append((name, *sizes, *(f"{one[key]:.1f}" if one.get(key) else "-" for key in ("evidence", "gib"))))
    print(f"ResNet-18 on {images} images of {side}x{side}, batch {batch}, {classes} classes\n{table(rows, '<>>>>>>')}")
    if options.out:
        about = {"side": side, "images": images, "batch": batch, "classes": classes, "provenance": provenance(device)}
        options.out.write_text(json.dumps(about | {"found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
