"""What is the evidence of a whole network at real size worth, and in what time? F-FC+CONV on 60,000 digits, on a GPU.

    python benchmarks/whole_large.py --data DIR --seconds 60     writes benchmarks/results/whole_large.json
    python benchmarks/whole_large.py --small                     random images and a tiny network, printed only

DIR holds MNIST in its official layout (``papers.datasets``). Only torch, numpy and safetensors are needed. Without a checkout, set
AUTOSYM_COMMIT to the commit.

A network of eight blocks (1.7 million weights) is fitted for a few epochs. Then products with the Gauss-Newton matrix are timed, alone and
in blocks, and the evidence is estimated within so many seconds: with TF32, and with all bits of float32. Both have the same probes.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

import autosym
from autosym.curvature.gauss_newton import GaussNewton
from autosym.nn import nets
from autosym.runtime import arithmetic
from autosym.runtime.provenance import provenance
from real_tasks import TASKS, Cell, Pair, tensors

OUT = Path(__file__).parent / "results" / "whole_large.json"
BLOCKS = (1, 8)  # vectors in a product
TINY = {"width": 2, "channels": (1, 2), "strides": (2, 2), "hidden": 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--task", choices=("digit", "place"), default="digit", help="10 or 40 classes")
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each estimate")
    parser.add_argument("--memory", type=float, help="GiB for a batch")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if options.small:
        noise = torch.Generator().manual_seed(0)
        pair = torch.randn(60, 1, 8, 8, generator=noise), torch.randint(3, (60,), generator=noise)
        classes, sizes, options.epochs = 3, TINY, 3
    else:
        pair, _ = tensors(Cell("cnn", options.task, options.images), options.data)
        classes, sizes = TASKS[options.task].classes, {}
    pair = pair[0].to(device), pair[1].to(device)
    result = measured(pair, classes, sizes, options) | {"provenance": provenance(device)}
    print("\n".join(table(result)))
    if not options.small:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def measured(pair: Pair, classes: int, sizes: dict, options: argparse.Namespace) -> dict:
    """Seconds of a fit and of products, and the evidence by Kronecker factors and of the whole network."""
    torch.manual_seed(0)
    net = nets.build("f-fc+conv", pair[0].shape[1:], classes, **sizes).to(pair[0].device)
    begun = time.perf_counter()
    fit = autosym.fit(net, pair, epochs=options.epochs)
    weights = sum(p.numel() for p in net.parameters())
    result = {
        "samples": len(pair[0]),
        "outputs": classes,
        "weights": weights,
        "epochs": options.epochs,
        "fit_seconds": time.perf_counter() - begun,
        "kronecker": float(fit.evidence.log_evidence),
        "log_likelihood": float(fit.evidence.log_likelihood),
        "effective_parameters": float(fit.laplace.effective_parameters(fit.prior).detach().sum()),
        "products": [product(fit, pair, k, tf32, options.memory) for tf32 in (True, False) for k in BLOCKS],
        "estimates": [],
    }
    for tf32 in (True, False):
        begun = time.perf_counter()
        found = fit.refine(pair, seconds=options.seconds, how="probes", tf32=tf32, memory=options.memory)
        result["estimates"].append(
            {
                "tf32": tf32,
                "log_evidence": float(found.evidence.log_evidence.detach()),
                "standard_error": found.evidence.standard_error,
                "truncation": found.estimate.truncation,
                "probes": found.estimate.probes,
                "steps": found.estimate.steps,
                "effective_parameters": float(found.estimate.gamma.sum()),
                "seconds": time.perf_counter() - begun,
            }
        )
        print(table(result)[-1], flush=True)
    return result


def product(fit: autosym.Fit, pair: Pair, count: int, tf32: bool, memory: float | None) -> dict:
    """Seconds of a product with so many vectors at once; of one vector, how far it is from that with all bits of float32."""
    vectors = torch.randn(count, sum(p.numel() for p in fit.model.parameters()), generator=torch.Generator().manual_seed(0))
    vectors = vectors.to(pair[0].device, torch.float64)

    def timed(tf32: bool) -> tuple[Tensor, float]:
        H = GaussNewton(fit.model, pair, fit.likelihood, memory=memory, tf32=tf32)
        with arithmetic.true_float32(not tf32):
            H(vectors)  # the first one looks for algorithms
            begun = time.perf_counter()
            found = H(vectors)
            float(found.sum())
            return found, time.perf_counter() - begun

    found, seconds = timed(tf32)
    exact = timed(False)[0] if tf32 and count == 1 else found
    error = float((found - exact).norm() / exact.norm())
    return {"vectors": count, "tf32": tf32, "seconds_each": seconds / count, "relative_error": error}


def table(result: dict) -> list[str]:
    lines = [
        f"{result['samples']} samples, {result['outputs']} outputs, {result['weights']} weights; "
        f"fit of {result['epochs']} epochs {result['fit_seconds']:.1f} s; Kronecker {result['kronecker']:.1f}, "
        f"effective parameters {result['effective_parameters']:.0f}"
    ]
    for p in result["products"]:
        kind = "TF32" if p["tf32"] else "float32"
        lines.append(
            f"product, {p['vectors']} at once, {kind}: {p['seconds_each']:.3f} s each, error {p['relative_error']:.1e}"
        )
    for e in result["estimates"]:
        kind = "TF32" if e["tf32"] else "float32"
        doubt = f"+- {e['standard_error']:.1f}, and {e['truncation']:.1f} by truncation"
        work = f"{e['probes']} probes of {e['steps']} steps, {e['seconds']:.1f} s"
        lines.append(f"whole, {kind}: {e['log_evidence']:.1f} {doubt} ({work}); effective {e['effective_parameters']:.0f}")
    return lines


if __name__ == "__main__":
    main()
