"""A soak: the same run over and over, killed at random, resumed, beside evidence passes, for as long as asked.

    python benchmarks/soak.py --minutes 60 --out benchmarks/results/soak.json

A run is started in a process of its own, killed (-9) after a random part of its epochs, and resumed, as often as it takes to finish; its
checkpoint, history and evidence must then be those of one that was never interrupted, bit for bit. In between, this process takes evidence,
kernel evidence, predictions and fits with checkpoints of the same data, whose numbers must stay the same, and its resident memory is noted:
after a warm-up it may not grow. Results are what was seen; the exit status is 1 if something drifted or grew.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import autosym
from autosym.evidence import kernel, laplace
from autosym.nn import nets
from autosym.runtime.provenance import provenance

EPOCHS = 12
GROWTH = 16 * 2**20  # bytes that the resident memory may rise after the warm-up: of the allocator, not of a leak
WARM_UP = 0.25  # of the rounds
RESULTS = Path(__file__).parent / "results" / "soak.json"


def problem() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(96, 1, 8, 8, generator=draw), torch.randint(3, (96,), generator=draw)
    torch.manual_seed(1)
    return nets.build("f-fc+conv", (1, 8, 8), 3, width=2, channels=(1, 2, 2), strides=(1, 2, 2), hidden=2), (x, y)


def jitter(x: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    return x + 0.1 * torch.randn(x.shape, generator=noise)


def train(folder: Path, epochs: int = EPOCHS, resume: bool = True) -> autosym.Fit:
    """The run: deterministic, augmented, with a checkpoint at the end of every epoch."""
    torch.set_num_threads(1)  # in this process and in those it starts: bits depend on the number of threads
    model, data = problem()
    options: dict[str, Any] = {"checkpoint": folder / "c.safetensors", "checkpoint_seconds": 0, "history": folder / "h.jsonl"}
    return autosym.fit(model, data, epochs=epochs, batch_size=16, augment=jitter, resume=resume, **options)


def resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Soak:
    """What was seen so far."""

    rounds: int = 0
    kills: int = 0
    resumed: int = 0  # runs that were finished after a kill or more
    memory: list[int] = field(default_factory=list)
    drifts: list[str] = field(default_factory=list)

    def growth(self) -> int:
        """The rise of resident memory after the warm-up: the median of the last quarter over that of the first after it."""
        rest = self.memory[int(WARM_UP * len(self.memory)) :]
        quarter = max(1, len(rest) // 4)
        return sorted(rest[-quarter:])[quarter // 2] - sorted(rest[:quarter])[quarter // 2]

    def same(self, what: str, expected: Any, found: Any) -> None:
        if expected != found:
            self.drifts.append(f"round {self.rounds}: {what} was {expected}, is {found}")


def saved(folder: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """The tensors of a checkpoint as bytes, and the history without its times."""
    tensors = {
        name: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, t in load_file(folder / "c.safetensors").items()
    }
    lines = [json.loads(line) for line in (folder / "h.jsonl").read_text().splitlines()]
    return tensors, [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def killed_and_resumed(folder: Path, draw: random.Random, soak: Soak, kills: int) -> None:
    """Run to the end, killed so many times on the way: after a random number of lines of history and milliseconds."""
    folder.mkdir()
    command = [sys.executable, __file__, "--run", str(folder)]
    for _ in range(kills):
        process = subprocess.Popen(command)
        lines, history = draw.randrange(1, EPOCHS), folder / "h.jsonl"
        while process.poll() is None and (not history.exists() or len(history.read_text().splitlines()) < lines):
            time.sleep(0.005)
        time.sleep(0.05 * draw.random())
        soak.kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True)
    soak.resumed += 1


def passes(folder: Path) -> dict[str, Any]:
    """What one process does over and over; every number is to be the same each time."""
    model, data = problem()
    at = laplace.at(model, data)
    prior = autosym.Prior(at.names, 0.7)
    found = {
        "evidence": at(prior).log_evidence.item(),
        "sampled": autosym.log_evidence(model, data, sampled=True, seed=3),
        "kernel": kernel.at(model, data, samples=32)(prior).log_evidence.item(),
    }
    fit = train(folder, epochs=3, resume=False)
    found["fit"] = fit.evidence.log_evidence.item()
    found["predictive"] = fit.predictive(data[0][:4]).covariance.sum().item()
    found["hardened"] = autosym.harden(fit, data)(data[0]).sum().item()
    return found


def soak(minutes: float, kills: int = 3, least: int = 8) -> Soak:
    """Rounds until the time is over, at least so many; one run in the first and in every tenth is killed and resumed."""
    end, draw, seen = time.monotonic() + 60 * minutes, random.Random(0), Soak()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "whole").mkdir()
        train(folder / "whole")
        whole, expected = saved(folder / "whole"), passes(folder / "passes")
        while time.monotonic() < end or seen.rounds < least:
            if seen.rounds % 10 == 0:
                parts = folder / f"parts{seen.rounds}"
                killed_and_resumed(parts, draw, seen, kills)
                seen.same(
                    "a resumed checkpoint", *({k: hash(v) for k, v in tensors.items()} for tensors, _ in (whole, saved(parts)))
                )
                seen.same("a resumed history", whole[1], saved(parts)[1])
            seen.same("a number", expected, passes(folder / "passes"))
            seen.memory.append(resident())
            seen.rounds += 1
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kills", type=int, default=3, help="of every run that is resumed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        train(options.run)
        return 0
    start = time.perf_counter()
    seen = soak(options.minutes, options.kills)
    result = {
        "minutes": (time.perf_counter() - start) / 60,
        "rounds": seen.rounds,
        "kills": seen.kills,
        "runs_killed_and_resumed": seen.resumed,
        "drifts": seen.drifts,
        "resident_mib": [round(seen.memory[i * (len(seen.memory) - 1) // 20] / 2**20, 1) for i in range(21)],
        "growth_after_warm_up_mib": seen.growth() / 2**20,
        "growth_allowed_mib": GROWTH / 2**20,
        "provenance": provenance("cpu"),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return int(bool(seen.drifts) or seen.growth() > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
