"""Times on a GPU, each beside its floor or the slow way in the same run, and a check of the GPU's numbers against the CPU's.

    python benchmarks/gpu.py [ROW ...] [--profile] [--out FILE]     these rows of benchmarks/results/gpu.json; all take some minutes
    python benchmarks/gpu.py --small                                a few samples and narrow networks, on any device, printed only

Rows, on images of noise with a pattern for each class:
  agreement    log evidence in float64 on the GPU and on the CPU; steps recorded as CUDA graphs and launched ones
  eigenvalues  of many symmetric matrices, those of a relaxed ResNet-20 among them: solved together against torch's solver
  paper        F-FC+CONV (width 10, batch 128): an epoch against one of CONV; evidence passes against one gradient of all samples
  relaxed      a CNN of six layers, 32 to 128 channels, relaxed: a training step against the plain network's
  simplify     16 candidate paths: ``fast`` against a pass for each path
  symmetrise   rotation, 31 copies, eight blocks: an epoch with an evidence step, with fewer copies and samples in steps
  modes        ResNet-18 at 224x224, plain and relaxed: a gradient in float32, channels last, bfloat16 (autocast) and compiled (only the
               plain one), and by how much it differs from that in float32; only if it is named
An epoch is that of ``autosym.fit``: shuffling, the steps (recorded), the last smaller batch. An evidence pass is factors, eigenvalues and
the log evidence.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosym
from autosym.bayes.likelihoods import Categorical
from autosym.bayes.priors import Prior
from autosym.curvature import many_eigenvalues
from autosym.curvature.owners import sites
from autosym.evidence import laplace
from autosym.nn import nets
from autosym.runtime.batching import Stream
from autosym.runtime.graphs import Captured
from autosym.runtime.provenance import provenance
from autosym.training.steps import Weights
from large_images import resnet18
from real_networks import CNN

Pair = tuple[Tensor, Tensor]
GOALS = {  # seconds, or ratios, at full size on one H200
    "paper/f-fc+conv epoch": 0.5,
    "paper/f-fc+conv sampled evidence": 0.6,
    "paper/f-fc+conv exact evidence": 2.0,
    "relaxed/step, auto / plain": 2.0,
    "simplify/fast": 10.0,
    "symmetrise/60 epochs, 8 copies, a quarter of the samples in evidence steps": 100.0,
}
NETWORKS = ("conv", "f-fc+conv", "s-fc+s-conv", "f-fc+conv+gconv:c4")


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    paper: int = 50_000
    images: int = 60_000
    few: int = 8_000  # of simplify and symmetrise
    side: int = 32
    width: int = 10
    channels: int = 32
    averaged: int = 12  # the width of the network that is averaged over rotations
    copies: int = 31
    repeats: int = 3
    blocks: tuple[tuple[int, ...], tuple[int, ...]] = (
        (1, 2, 2, 4, 4, 8, 8, 16),
        (1, 2, 1, 2, 1, 2, 2, 2),
    )  # multiples, strides
    device: str = "cuda"


SMALL = Sizes(40, 40, 20, 8, 3, 2, 1, 5, 1, ((1, 2), (2, 2)), "cuda" if torch.cuda.is_available() else "cpu")


def images(count: int, channels: int, sizes: Sizes) -> Pair:
    """A smooth pattern for each class, always at the same place, in noise: easy to learn, and position matters."""
    torch.manual_seed(0)
    y = torch.arange(count, device=sizes.device) % 10
    patterns = F.interpolate(
        torch.randn(10, channels, 4, 4, device=sizes.device), size=(sizes.side, sizes.side), mode="bilinear"
    )
    return 2 * patterns[y] + 0.5 * torch.randn(count, channels, sizes.side, sizes.side, device=sizes.device), y


def agreement(_: Sizes) -> dict[str, float]:
    """The log evidence of small networks in float64, GPU against CPU, and whether recorded steps are those that are launched."""
    found = {}
    for name in NETWORKS if torch.cuda.is_available() else ():
        torch.manual_seed(0)
        net = nets.build(name, (1, 8, 8), 3, 2, (1, 2), (2, 2), hidden=2).double()
        data = (torch.randn(40, 1, 8, 8, dtype=torch.float64), torch.randint(3, (40,)))
        here = autosym.log_evidence(net, data)
        there = autosym.log_evidence(net.cuda(), (data[0].cuda(), data[1].cuda()))
        found[f"{name}, relative difference of evidence"] = abs(there - here) / abs(here)
        ends = []
        for wanted in (True, False):
            torch.manual_seed(0)
            trained = nets.build(name, (1, 8, 8), 3, 2, (1, 2), (2, 2), hidden=2).double().cuda()
            epoch(trained, data, 8, 30, wanted)
            ends.append(torch.cat([p.detach().flatten() for p in trained.parameters()]))
        found[f"{name}, recorded against launched steps"] = float((ends[0] - ends[1]).abs().max())
    return found


def eigenvalues(sizes: Sizes) -> dict[str, float]:
    """In float64; "away by" is the largest difference of an eigenvalue, of matrices with unit trace."""
    found: dict[str, float] = {}
    small = sizes.images != Sizes.images
    for count, side in ((9, 80),) if small else ((21, 1024), (209, 1024), (256, 256), (16, 2048)):
        x = torch.randn(count, side, side, dtype=torch.float64, device=sizes.device)
        given = x @ x.mT
        given /= given.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
        name = f"{count} of {side}x{side}"
        found[f"{name}, torch"] = seconds(partial(torch.linalg.eigvalsh, given), sizes, 1)
        values = many_eigenvalues.eigenvalues(given)
        if values is None:  # no GPU, or no Triton
            continue
        found[f"{name}, together"] = seconds(partial(many_eigenvalues.eigenvalues, given), sizes)
        found[f"{name}, together / torch"] = found[f"{name}, together"] / found[f"{name}, torch"]
        found[f"{name}, away by"] = float((values - torch.linalg.eigvalsh(given)).abs().max())
    return found


def paper(sizes: Sizes) -> dict[str, float]:
    data, found = images(sizes.paper, 1, sizes), {}
    for name in ("conv", "f-fc+conv"):
        net = nets.build(name, (1, sizes.side, sizes.side), 10, sizes.width, *sizes.blocks).to(sizes.device)
        found[f"{name} epoch"] = seconds(epoch(net, data, 128, 1), sizes)
        found[f"{name} gradient of all samples"] = seconds(partial(gradient, net, data), sizes)
        for kind in ("exact", "sampled"):
            if sizes.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found[f"{name} {kind} evidence"] = seconds(partial(evidence, net, data, sampled=kind == "sampled"), sizes)
            if sizes.device == "cuda":
                found[f"{name} {kind} evidence, peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
        found[f"{name} eigenvalues"] = seconds(laplace.at(net, data, sampled=True).curvature.eigenvalues, sizes)
    found["f-fc+conv epoch / conv epoch"] = found["f-fc+conv epoch"] / found["conv epoch"]
    for kind in ("exact", "sampled"):
        ours, floor = found[f"f-fc+conv {kind} evidence"], found["f-fc+conv gradient of all samples"]
        found[f"f-fc+conv {kind} evidence / gradient"] = ours / floor
    return found


def relaxed(sizes: Sizes) -> dict[str, float]:
    """Steps of batch 128; that of the plain network is by the same optimiser. An evidence pass of all images beside."""
    data, found = images(sizes.images, 1, sizes), {}
    plain = CNN(1, 10, sizes.channels).eval().to(sizes.device)
    for name in ("plain", "auto", "where"):
        torch.manual_seed(0)
        net = plain if name == "plain" else autosym.relax(plain, data[0][:2], paths=name).to(sizes.device)
        found[f"epoch, {name}"] = seconds(epoch(net, data, 128, 1), sizes)
        found[f"sampled evidence, {name}"] = seconds(partial(evidence, net, data, sampled=True), sizes, 1)
        if name != "plain":
            found[f"step, {name} / plain"] = found[f"epoch, {name}"] / found["epoch, plain"]
    found["gradient of all samples, plain"] = seconds(partial(gradient, plain, data), sizes)
    return found


def simplify(sizes: Sizes) -> dict[str, float]:
    """Of a fit of some epochs. The slow way is counted: a pass for each candidate, one before and one after.

    Where many paths are in doubt, ``fast`` computes the evidence of each, and saves nothing: the number of passes says so.
    """
    data, found = images(sizes.few, 3, sizes), {}
    net = nets.build("f-fc+conv+gconv:c4", (3, sizes.side, sizes.side), 10, sizes.width // 3, *sizes.blocks).to(sizes.device)
    epochs = 10 if sizes.few == Sizes.few else 2
    fit = autosym.fit(net, data, epochs=epochs, every=2, burn_in=0, sampled_end=True, curvature="kronecker")
    passes, at = [], laplace.at
    laplace.at = lambda *a, **k: passes.append(1) or at(*a, **k)
    try:
        for name, options in (("fast", {}), ("fast, sampled", {"sampled": True})):
            passes.clear()
            begun = time.perf_counter()
            done = autosym.simplify(fit, data, fast=True, **options).model.simplification
            synchronise(sizes)
            found[name], found[f"{name}, passes"] = time.perf_counter() - begun, len(passes)
    finally:
        laplace.at = at
    found["candidates"] = len(done.paths)
    for kind in ("exact", "sampled"):
        found[f"{kind} pass"] = seconds(partial(evidence, net, data, sampled=kind == "sampled"), sizes, 1)
    found["a pass for each path, counted"] = (len(done.paths) + 2) * found["exact pass"]
    found["fast / a pass for each path"] = found["fast"] / found["a pass for each path, counted"]
    return found


def symmetrise(sizes: Sizes) -> dict[str, float]:
    """The second of two epochs with an evidence step and a step of the range each; 60 of them and the end are a forecast."""
    data, found = images(sizes.few, 3, sizes), {}
    shape = (3, sizes.side, sizes.side)
    net = nets.build("conv", shape, 10, sizes.averaged, *sizes.blocks).to(sizes.device)
    found["epoch of the network itself"] = seconds(epoch(net, data, 64, 1), sizes)
    for copies, part in ((min(8, sizes.copies), 4), (sizes.copies, 1)):
        net = nets.build("conv", shape, 10, sizes.averaged, *sizes.blocks)
        model = autosym.symmetrise(net, "rotation", sizes.copies, in_steps=copies)
        begun = time.perf_counter()
        options = {"epochs": 2, "every": 1, "burn_in": 0, "settle": 0.0, "subset": len(data[0]) // part}
        fit = autosym.fit(model.to(sizes.device), data, curvature="kronecker", **options)
        synchronise(sizes)
        whole, told = time.perf_counter() - begun, [line["seconds"] for line in fit.history]
        each = told[-1] - told[-2]
        what = f"{copies} copies, {'all' if part == 1 else 'a quarter of the'} samples in evidence steps"
        found[f"epoch, {what}"] = each
        found[f"60 epochs, {what}"] = 60 * each + whole - told[-1]
    return found


def modes(sizes: Sizes) -> dict[str, float]:
    """TF32 is as torch has it. A mode that fails is NaN, with its error printed. Small, nothing is compiled, as that takes minutes."""
    torch.manual_seed(0)
    small = sizes.images != Sizes.images
    side, batch, width = (32, 2, 4) if small else (224, 32, 64)
    x, y = torch.randn(batch, 3, side, side, device=sizes.device), torch.randint(10, (batch,), device=sizes.device)
    plain, found = resnet18(10, width).to(sizes.device), {}
    for name, net in (("plain", plain), ("where", autosym.relax(plain, x[:2], paths="where").to(sizes.device))):
        exact = torch.cat([g.flatten() for g in _slopes(net, x, y)])
        compiled = () if small or name != "plain" else ("compiled",)
        for mode in ("float32", "channels last", "bfloat16", "bfloat16, channels last", *compiled):
            last = "channels last" in mode
            inputs = x.contiguous(memory_format=torch.channels_last) if last else x
            net = net.to(memory_format=torch.channels_last if last else torch.contiguous_format)
            run = torch.compile(net) if mode == "compiled" else net
            try:
                with torch.autocast(sizes.device, torch.bfloat16, enabled="bfloat16" in mode):
                    found[f"{name}, {mode}"] = seconds(partial(_slopes, run, inputs, y), sizes)
                    slopes = torch.cat([g.float().flatten() for g in _slopes(run, inputs, y)])
                found[f"{name}, {mode}, gradient away by"] = float((slopes - exact).norm() / exact.norm())
            except Exception as error:  # a mode that torch cannot do is a result
                print(f"  {name}, {mode}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
                found[f"{name}, {mode}"] = float("nan")
        torch.compiler.reset()
    return found


def _slopes(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(F.cross_entropy(net(x), y), [p for p in net.parameters() if p.requires_grad])


def gradient(net: nn.Module, data: Pair, batch: int = 8192) -> None:
    """One forward and one backward pass of all samples: less is not enough for any evidence."""
    for x, y in zip(data[0].split(batch), data[1].split(batch), strict=True):
        torch.autograd.grad(F.cross_entropy(net(x), y), [p for p in net.parameters() if p.requires_grad])


def evidence(net: nn.Module, data: Pair, sampled: bool) -> float:
    at = laplace.at(net, data, sampled=sampled)
    return float(at(Prior(at.names)).log_evidence.detach())


def epoch(net: nn.Module, data: Pair, batch_size: int, epochs: int, record: bool = True) -> Callable[[], None]:
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


def seconds(work: Callable[[], object], sizes: Sizes, repeats: int | None = None) -> float:
    """Median wall-clock seconds of work that has ended on the device; the first is not counted."""
    times, repeats = [], repeats or sizes.repeats
    for _ in range(repeats + 1):
        synchronise(sizes)
        start = time.perf_counter()
        work()
        synchronise(sizes)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def synchronise(sizes: Sizes) -> None:
    if sizes.device == "cuda":
        torch.cuda.synchronize()


def profile(sizes: Sizes, rows: int = 25) -> None:
    """The kernels that take the time of a training step of F-FC+CONV, launched one by one, and of its evidence passes."""
    data = images(sizes.paper, 1, sizes)
    net = nets.build("f-fc+conv", (1, sizes.side, sizes.side), 10, sizes.width, *sizes.blocks).to(sizes.device)
    one = (data[0][:128], data[1][:128])
    works = {"step": epoch(net, one, 128, 1, record=False)}
    works |= {kind: partial(evidence, net, data, kind == "sampled") for kind in ("sampled", "exact")}
    for name, work in works.items():
        work()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            work()
            synchronise(sizes)
        kernels = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
        total = sum(k.device_time_total for k in kernels) / 1e3
        print(f"{name}: {total:.2f} ms in {sum(k.count for k in kernels)} kernels")
        for kernel in kernels[:rows]:
            print(f"  {kernel.device_time_total / 1e3:8.3f} ms {kernel.count:6d}x {kernel.key[:100]}")


ROWS: dict[str, Callable[[Sizes], dict[str, float]]] = {
    "agreement": agreement,
    "eigenvalues": eigenvalues,
    "paper": paper,
    "relaxed": relaxed,
    "simplify": simplify,
    "symmetrise": symmetrise,
    "modes": modes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--small", action="store_true", help="does it run at all?")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step and of evidence passes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no row is called {', '.join(sorted(unknown))}: there are {', '.join(ROWS)}")
    sizes = SMALL if options.small else Sizes()
    if options.profile:
        profile(sizes)
    out, now = options.out, {"goals": GOALS, "sizes": vars(sizes)}
    result: dict = {"rows": {}, "made": {}} | (json.loads(out.read_text()) if out.exists() else {}) | now
    for name in options.rows or [row for row in ROWS if row != "modes"]:
        begun = time.perf_counter()
        result["rows"][name], result["made"][name] = ROWS[name](sizes), provenance(sizes.device)
        print(f"{name} ({time.perf_counter() - begun:.0f} s)")
        for key, value in result["rows"][name].items():
            goal = GOALS.get(f"{name}/{key}")
            print(f"  {key:80s} {value:10.4g}{f'   to reach: {goal}' if goal else ''}", flush=True)
        if not options.small:  # after each row: a later one may fail
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
