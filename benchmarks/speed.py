"""What is slow around the curvature pass, on a CPU: each row beside its floor or the slow way, in CPU seconds of one run.

    python benchmarks/speed.py [ROW ...] [--quick]        writes benchmarks/results/speed.json

Rows:
  import       ``import autosym`` beside ``import torch``
  resnet       a sampled evidence pass of a relaxed ResNet-18 on 256 images of 32x32, at its start, and with all paths away from zero;
               beside one gradient of the same network, and of the plain one
  simplify     ``fast`` beside a pass for each candidate, of fits of digits in quadrants; and whether both leave out the same paths
  symmetrise   an epoch with a step of precisions and range: 8 of 31 copies and a quarter of the samples in steps, beside all
Contenders take turns, each is run twice, and the smaller time counts: other work on the machine does not make a run faster.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosym
from autosym.evidence import laplace
from autosym.nn import nets
from autosym.papers import datasets
from autosym.runtime.provenance import provenance
from large_images import resnet18

OUT = Path(__file__).parent / "results" / "speed.json"
Contenders = dict[str, Callable[[], object]]


def imports(_: bool) -> dict[str, float]:
    """Of a process of its own each, without what Python itself takes."""

    def seconds(what: str) -> float:
        code = f"import time; begun = time.process_time(); {what}; print(time.process_time() - begun)"
        done = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
        return min(float(one.stdout) for one in done)

    found = {"torch": seconds("import torch"), "autosym": seconds("import autosym")}
    return found | {"beyond torch": found["autosym"] - found["torch"]}


def resnet(quick: bool) -> dict[str, float]:
    torch.manual_seed(0)
    count, width = (4, 4) if quick else (256, 64)
    plain, x, y = resnet18(10, width), torch.randn(count, 3, 32, 32), torch.randint(10, (count,))
    start = autosym.relax(plain, x[:2])
    moved = autosym.relax(plain, x[:2])
    for parameter in moved.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    found = timed(
        {
            "gradient, plain": partial(_gradient, plain, x, y),
            "gradient, relaxed": partial(_gradient, moved, x, y),
            "evidence, at its start": partial(laplace.at, start, (x, y), sampled=True),
            "evidence, all paths moved": partial(laplace.at, moved, (x, y), sampled=True),
        }
    )
    for state in ("at its start", "all paths moved"):
        found[f"evidence, {state} / gradient, relaxed"] = found[f"evidence, {state}"] / found["gradient, relaxed"]
    return found


def _gradient(net: nn.Module, x: Tensor, y: Tensor) -> None:
    torch.autograd.grad(F.cross_entropy(net(x), y), [p for p in net.parameters() if p.requires_grad], allow_unused=True)


def simplify(quick: bool) -> dict[str, float]:
    """Two questions of the demo: the digit (shifts keep it), and the digit with its quadrant."""
    found: dict[str, float] = {}
    images, labels = datasets.digits()
    count = 60 if quick else 800
    x, quadrant = datasets.in_quadrants(images[:count], 0, 0)
    x = (x - x.mean()) / x.std()
    for task, y in (("digit", labels[:count]), ("digit and quadrant", labels[:count] % 5 + 5 * (quadrant % 2))):
        torch.manual_seed(0)
        net = nets.build("f-fc+conv", (1, 16, 16), 10, 2 if quick else 8, (1, 2, 4, 8), (2, 2, 2, 2), hidden=8)
        data = (x, y)
        fit = autosym.fit(net, data, epochs=3 if quick else 40, curvature="kronecker")
        kept, passes = [], []
        at = laplace.at
        laplace.at = lambda *a, _at=at, _passes=passes, **k: _passes.append(1) or _at(*a, **k)
        try:
            for name, fast in (("a pass for each path", False), ("fast", True)):
                passes.clear()
                begun = time.process_time()
                done = autosym.simplify(fit, data, curvature="kronecker", fast=fast, refit=0).model.simplification
                found[f"{task}, {name}"] = time.process_time() - begun
                found[f"{task}, {name}, passes"] = len(passes)
                kept.append([path.left_out for path in done.paths])
        finally:
            laplace.at = at
        found[f"{task}, the same paths left out"] = float(kept[0] == kept[1])
        found[f"{task}, fast / a pass for each path"] = found[f"{task}, fast"] / found[f"{task}, a pass for each path"]
    return found


def symmetrise(quick: bool) -> dict[str, float]:
    """The second of two epochs."""
    torch.manual_seed(0)
    count, copies = (12, 5) if quick else (256, 31)
    x, y = torch.randn(count, 3, 16, 16), torch.randint(10, (count,))
    blocks = ((1, 2), (2, 2)) if quick else ((1, 2, 2, 4, 4, 8), (1, 2, 1, 2, 1, 2))
    found = {}
    for some, part in ((copies, 1), (min(8, copies), 1), (min(8, copies), 4)):
        model = autosym.symmetrise(nets.build("conv", (3, 16, 16), 10, 4, *blocks, hidden=4), "rotation", copies, in_steps=some)
        told: list[float] = []
        options = {"epochs": 2, "every": 1, "burn_in": 0, "sampled_end": True, "subset": count // part}
        log = lambda _, told=told: told.append(time.process_time())  # noqa: E731
        autosym.fit(model, (x, y), curvature="kronecker", log=log, **options)
        found[f"{some} copies, samples / {part}"] = told[1] - told[0]
    (slow, *_, fast) = found.values()
    return found | {"fast / all": fast / slow}


def timed(contenders: Contenders, repeats: int = 2) -> dict[str, float]:
    """CPU seconds of each, the least of several turns."""
    found = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        for name, work in contenders.items():
            begun = time.process_time()
            work()
            found[name] = min(found[name], time.process_time() - begun)
    return found


ROWS = {"import": imports, "resnet": resnet, "simplify": simplify, "symmetrise": symmetrise}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--quick", action="store_true", help="does it run at all? Printed only")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no row is called {', '.join(sorted(unknown))}: there are {', '.join(ROWS)}")
    torch.set_num_threads(1)
    result = json.loads(OUT.read_text()) if OUT.exists() else {"rows": {}}
    for name in options.rows or ROWS:
        found = ROWS[name](options.quick)
        print(name)
        for key, value in found.items():
            print(f"  {key:60s} {value:8.3g}", flush=True)
        result["rows"][name] = found | {"commit": provenance()["commit"]}
        if not options.quick:
            OUT.write_text(json.dumps(result | {"provenance": provenance("cpu")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
