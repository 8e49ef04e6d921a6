"""What do sparse and factored layers cost beside plain convolutions? Time and memory, training and inference.

    python benchmarks/costs.py [--device cuda] [--batch 128]    writes benchmarks/results/costs.json (costs-cuda.json)

Layers of the network of Tables 1 and 2 (a = 10, 32x32), by themselves and whole networks. Training is one forward and backward pass,
inference one forward pass without a graph; contenders take turns and the median counts (on a CPU of one thread's time). Memory is that
of the parameters, of what autograd keeps between the passes beyond parameters and input, and, on a GPU, the peak of a training pass.
Ratios are to the convolution of torch with circular padding, or to the network of CONV.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from autosym.nn import layers, nets
from autosym.runtime.provenance import provenance

RESULTS = Path(__file__).parent / "results"
SHAPES = (((10, 32, 32), (20, 16, 16)), ((40, 16, 16), (40, 8, 8)), ((80, 8, 8), (80, 4, 4)))
NETWORKS = ("conv", "s-conv", "f-fc", "s-fc", "f-fc+conv", "s-fc+s-conv")
MIB = 2**20


class Halved(nn.Module):
    """A map at full size, then one of the four polyphase grids, as the networks downsample."""

    def __init__(self, path: nn.Module):
        super().__init__()
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        return layers.polyphase(self.path(x), 2)


def contenders(shape: tuple[int, ...], out: tuple[int, ...], dense: bool) -> dict[str, nn.Module]:
    """The layers from ``shape`` to ``out``, which is half as wide and high."""
    pixels = [s[1] * s[2] // 2 for s in (shape, out)]
    made = {
        "torch": Halved(nn.Conv2d(shape[0], out[0], 3, padding=1, padding_mode="circular")),
        "conv": Halved(layers.conv(shape, out)),
        "s-conv": Halved(layers.s_conv(shape, out, 7)),
        "f-fc": layers.Factored(shape, out),
        "s-fc": layers.SparseFactored(shape, out, *pixels),
    }
    return made | ({"fc": layers.fc(shape, out)} if dense else {})


def kept(module: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps for the backward pass, besides parameters and the input; every storage once."""
    known = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers(), x)}
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = module(x)  # alive while sizes are taken, so that no storage is counted under another's address
    del output
    return sum(sizes.values())


def costs(modules: dict[str, nn.Module], x: Tensor, repeats: int) -> dict[str, dict]:
    """Milliseconds and MiB of every module on one batch."""

    def train(module: nn.Module) -> None:
        module.zero_grad()
        module(x).square().mean().backward()

    def infer(module: nn.Module) -> None:
        with torch.no_grad():
            module(x)

    times: dict[tuple[str, str], list[float]] = {}
    for round_ in range(repeats + 1):
        for name, module in modules.items():
            for kind, step in (("train", train), ("infer", infer)):
                taken = _seconds(lambda step=step, module=module: step(module), x.device)
                if round_:  # the first is a warm-up
                    times.setdefault((name, kind), []).append(taken)
    found = {}
    for name, module in modules.items():
        found[name] = {
            "parameters": sum(p.numel() for p in module.parameters()),
            "train_ms": 1e3 * statistics.median(times[name, "train"]),
            "infer_ms": 1e3 * statistics.median(times[name, "infer"]),
            "parameters_mib": sum(p.numel() * p.element_size() for p in module.parameters()) / MIB,
            "kept_mib": kept(module, x) / MIB,
            "peak_mib": _peak(lambda module=module: train(module), x.device),
        }
    base = found["torch" if "torch" in found else "conv"]
    for line in found.values():
        line |= {f"{key}_ratio": line[key] / base[key] for key in ("train_ms", "infer_ms", "kept_mib")}
    return found


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    """On a CPU those of the one thread: others that use the machine are not counted."""
    if device.type != "cuda":
        begun = time.process_time()
        step()
        return time.process_time() - begun
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    step()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _peak(step: Callable[[], None], device: torch.device) -> float | None:
    """MiB that a step takes at most beyond what is there before it; only a GPU's allocator tells."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device(options.device)
    out = options.out or RESULTS / ("costs-cuda.json" if device.type == "cuda" else "costs.json")
    result: dict = {"batch": options.batch, "layers": {}, "provenance": provenance(options.device)}
    for shape, to in SHAPES:
        modules = {name: module.to(device) for name, module in contenders(shape, to, device.type == "cuda").items()}
        result["layers"][f"{shape} to {to}"] = costs(
            modules, torch.randn(options.batch, *shape, device=device), options.repeats
        )
        del modules
    networks = {name: nets.build(name, (3, 32, 32), 10).to(device) for name in NETWORKS}
    result["networks"] = costs(networks, torch.randn(options.batch, 3, 32, 32, device=device), options.repeats)
    for title, lines in {**result["layers"], "networks": result["networks"]}.items():
        print(title)
        for name, line in lines.items():
            ratios = ", ".join(f"{key} {line[f'{key}_ratio']:.2f}x" for key in ("train_ms", "infer_ms", "kept_mib"))
            print(
                f"  {name:12s} {line['parameters']:9d} parameters, {line['train_ms']:8.2f} ms, {line['infer_ms']:8.2f} ms; {ratios}"
            )
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
