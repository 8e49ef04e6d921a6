"""How often is the answer right? Planted cases whose symmetry is known, by ``fit`` as it comes. None of them chose a default.

    python benchmarks/truth.py [--jobs 2] [--json]          all cases; writes benchmarks/results/truth.json
    python benchmarks/truth.py --only teacher --limit 4     some of them, printed only

Three questions, each with data where the answer is yes and data where it is no:

- teacher: are labels, given by a random teacher network, invariant to translations? Convolutional and dense teachers, three sizes of
  data. The answer is yes if every layer of F-FC+CONV has a free share below 5 %.
- quadrant: digits in one of four quadrants; the digit (yes), or digit and quadrant (no). The same rule.
- turned: shifted digits, turned by quarter turns (yes) or upright (no). The answer is yes if a network over C4 has more evidence than
  a convolutional one.
"""

import argparse
import json
import math
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

import autosym
from autosym import data, nets
from autosym.provenance import provenance

OUT = Path(__file__).parent / "results" / "truth.json"
FIRST_SEED = 1000  # far from those the defaults were looked at with
STRICT = 0.05


@dataclass(frozen=True)
class Case:
    """One planted case: the question, whether the symmetry is there, how many samples, and the seed of everything."""

    question: str
    symmetric: bool
    samples: int
    seed: int


CASES = [
    *(Case("teacher", s, n, FIRST_SEED + i) for n in (300, 900, 2700) for s in (True, False) for i in range(4)),
    *(Case("quadrant", s, 1437, FIRST_SEED + i) for s in (True, False) for i in range(4)),
    *(Case("turned", s, 1437, FIRST_SEED + i) for s in (True, False) for i in range(5)),
]


def gratings(samples: int) -> Tensor:
    """Waves of twelve directions and lengths with a random phase and a little noise: (samples, 1, 8, 8)."""
    waves = [(1, 0), (0, 1), (1, 1), (1, -1), (2, 0), (0, 2), (2, 1), (1, 2), (2, -1), (1, -2), (2, 2), (2, -2)]
    rows, columns = torch.tensor(waves)[torch.randint(12, (samples,))].float()[:, :, None, None].unbind(1)
    position, phase = torch.arange(8.0), 2 * math.pi * torch.rand(samples, 1, 1)
    x = torch.cos(math.pi / 4 * (rows * position[:, None] + columns * position) + phase)[:, None]
    x = x + 0.1 * torch.randn_like(x)
    return x / x.std()


def teacher_data(case: Case, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Gratings that a random teacher is surest of, the same number of each class, with its answers."""
    torch.manual_seed(case.seed)
    teacher = nets.build("conv" if case.symmetric else "fc", (1, 8, 8), classes, 8, channels=(1, 1), strides=(2, 2), hidden=2)
    x = gratings(30 * case.samples)
    with torch.no_grad():
        logits = torch.cat([teacher(part) for part in x.split(4096)])
    logits = (logits - logits.mean(0)) / logits.std(0)
    margin = torch.stack([logits[:, c] - logits[:, torch.arange(classes) != c].amax(1) for c in range(classes)], 1)
    chosen = margin.argsort(0, descending=True)[: case.samples // classes]
    return x[chosen.T.flatten()], torch.arange(classes).repeat_interleave(case.samples // classes)


def digit_data(case: Case) -> tuple[Tensor, Tensor]:
    """Embedded digits as the case asks for, normalised."""
    images, labels = embedded_digits()
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(case.seed))[: case.samples]
    x, y = images[rows], labels[rows]
    if case.question == "quadrant":
        x, quadrant = data.in_quadrants(x, 2, case.seed)
        y = y if case.symmetric else y + 10 * quadrant
    else:
        x = data.shifted(x, case.seed)
        x = (data.turned(x, case.seed + 1) if case.symmetric else x)[:, None]
    return (x - x.mean()) / x.std(), y


def embedded_digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits, or where it is not installed the file that $AUTOSYM_DIGITS names (images, labels as .npz)."""
    if "AUTOSYM_DIGITS" not in os.environ:
        return data.digits()
    import numpy as np

    with np.load(os.environ["AUTOSYM_DIGITS"], allow_pickle=False) as file:
        return torch.tensor(file["images"], dtype=torch.float32), torch.tensor(file["labels"]).long()


def answer(case: Case, epochs: int | None) -> dict:
    """What ``fit`` says of a case."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    pair = teacher_data(case) if case.question == "teacher" else digit_data(case)
    torch.manual_seed(case.seed + 1)
    options = {"seed": case.seed, **({} if epochs is None else {"epochs": epochs})}
    if case.question == "turned":
        found = {}
        for name, width in (("conv", 12), ("gconv:c4", 3)):
            net = nets.build(name, (1, 8, 8), 10, width, channels=(1, 2, 4), strides=(2, 2, 2), hidden=8)
            found[name] = autosym.fit(net, pair, **options).evidence.log_evidence.item()
        said, detail = found["gconv:c4"] > found["conv"], {"log_evidence": found}
    else:
        shape, classes = pair[0].shape[1:], int(pair[1].max()) + 1
        form = {"channels": (1, 1), "strides": (2, 2), "hidden": 2} if case.question == "teacher" else QUADRANT
        fit = autosym.fit(
            nets.build("f-fc+conv", shape, classes, 8 if case.question == "teacher" else 12, **form), pair, **options
        )
        shares = list(fit.symmetry().free_share().values())
        said, detail = max(shares) < STRICT, {"free_share": shares}
    return asdict(case) | {"said": said, "right": said == case.symmetric, **detail, "seconds": time.perf_counter() - begun}


QUADRANT = {"channels": (1, 2, 4, 8), "strides": (2, 2, 2, 2), "hidden": 8}


def interval(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a proportion."""
    if total == 0:
        return 0.0, 1.0
    p, spread = right / total, z * z / total
    centre, half = p + spread / 2, z * math.sqrt(p * (1 - p) / total + spread / (4 * total))
    return (centre - half) / (1 + spread), (centre + half) / (1 + spread)


def summary(cases: list[dict]) -> dict:
    """Counts and intervals, over all cases and by question and size."""

    def count(chosen: list[dict]) -> dict:
        right = sum(case["right"] for case in chosen)
        return {
            "cases": len(chosen),
            "right": right,
            "wrongly_found": sum(case["said"] and not case["symmetric"] for case in chosen),
            "wrongly_missed": sum(case["symmetric"] and not case["said"] for case in chosen),
            "interval": interval(right, len(chosen)),
        }

    kinds = list(dict.fromkeys((case["question"], case["samples"]) for case in cases))
    by_kind = {f"{q}, {n} samples": count([c for c in cases if (c["question"], c["samples"]) == (q, n)]) for q, n in kinds}
    return count(cases) | {"by_kind": by_kind, "provenance": provenance(), "all": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", choices=sorted({case.question for case in CASES}))
    parser.add_argument("--limit", type=int, help="so many cases only")
    parser.add_argument("--epochs", type=int, help="other than the default of fit")
    parser.add_argument("--out", type=Path, help="where to write (benchmarks/results/truth.json for a whole run)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.only in (None, case.question)][: options.limit]
    found: dict[Case, dict] = {}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(answer, case, options.epochs): case for case in sorted(chosen, key=lambda c: -c.samples)}
        for done in as_completed(waiting):
            case = waiting[done]
            found[case] = done.result()
            if not options.json:
                detail = found[case].get("free_share") or found[case]["log_evidence"]
                verdict = "right" if found[case]["right"] else "WRONG"
                print(f"{verdict}  {case}  {detail}  {found[case]['seconds']:.0f} s", flush=True)
    result = summary([found[case] for case in chosen])
    whole = chosen == CASES and options.epochs is None
    if options.out or whole:
        path = options.out or OUT
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
        return
    for name, line in {"all": result, **result["by_kind"]}.items():
        low, high = line["interval"]
        wrong = f"wrongly found {line['wrongly_found']}, wrongly missed {line['wrongly_missed']}"
        print(f"{name:28s} right {line['right']:2d} of {line['cases']:2d} ({low:.0%} to {high:.0%}); {wrong}")


if __name__ == "__main__":
    main()
