"""How often is the answer right? Planted cases whose symmetry is known, by ``fit`` as it comes. None of them chose a default.

    python benchmarks/truth.py [--jobs 14] [--json]         all cases; writes benchmarks/results/truth.json
    python benchmarks/truth.py --only teacher --limit 4     some of them, printed only
    python benchmarks/truth.py --first-seed 20 --start 0.1  others, with another setting
    python benchmarks/truth.py --breaking                   with paths that hold only what breaks the symmetry

Six questions, each with data where the answer is yes and data where it is no:

- teacher: are labels, given by a random teacher network, invariant to translations? Convolutional teachers (yes), dense ones
  (no) and one of each that give half of the label (no, strength 0.5), three sizes of data.
- quadrant: digits in one of four quadrants; the digit (yes), or digit and quadrant (no).
- turned: shifted digits, turned by quarter turns (yes) or upright (no), two sizes of data.
- flipped: shifted digits, half of them mirrored; the digit (yes), or digit and whether it is mirrored (no), two sizes of data.
- regression: is a number, given by such teachers (the mean of one of each for strength 0.5) with a tenth of its spread in noise,
  invariant to translations? Two sizes of data.
- relaxed: the same of a convolutional network of plain torch, trained on such data and made free by ``relax``.

Networks have a free path and a convolution in every layer (F-FC+CONV), for turned and flipped digits a convolution and one over the
group; with ``--breaking`` waves of position and a convolution, or what breaks the group and a convolution over it. Paths that are worth
less than 10 nats are left out (``simplify``). The answer is yes if less than a twentieth of the effective parameters of the whole network
are then in paths that break the symmetry (``network_share``): thresholds that were chosen with other seeds (20 to 23). What is in them
before is kept too (``fitted``).

Beside them, and counted apart (``compared``), turned and flipped digits are shown to two networks that are trained by themselves, one over
the group and a convolutional one of as many channels: the answer is yes if the first has more evidence.

A network with less evidence than guessing has learned nothing, and reports say that instead of a symmetry: such cases are counted as
they came out, and left out of the counts of those that were learned.

Every case that is done is a line of truth.jsonl beside the result: a run that was stopped goes on where it was. A line of another
commit or other settings is not taken.
"""

import argparse
import json
import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import autosym
from autosym.evidence.shares import WHOLE
from autosym.nn import nets
from autosym.papers import datasets
from autosym.runtime.provenance import provenance
from pool import answers

OUT = Path(__file__).parent / "results" / "truth.json"
FIRST_SEED = 4000  # far from those the defaults, and the threshold, were looked at with
TEACHER = {"width": 8, "channels": (1, 1), "strides": (2, 2), "hidden": 2}
QUADRANT = {"width": 12, "channels": (1, 2, 4, 8), "strides": (2, 2, 2, 2), "hidden": 8}
GROUP = {"channels": (1, 2, 4), "strides": (2, 2, 2), "hidden": 8}
COST = {"quadrant": 8, "turned": 4, "flipped": 4, "teacher": 1, "regression": 1, "relaxed": 1}  # of one sample
REGRESSIONS = ("regression", "relaxed")
GROUPS = {"turned": ("c4", 3), "flipped": ("flip-horizontal", 6)}  # and fields: 12 channels, as conv


@dataclass(frozen=True)
class Case:
    """One planted case: the question, whether the symmetry is there, how many samples, the seed of everything.

    ``strength`` is that of what breaks the symmetry, where something does: the part of the label that a dense teacher gives.
    """

    question: str
    symmetric: bool
    samples: int
    seed: int
    strength: float = 1.0
    compared: bool = False


PLANTS = [(True, 1.0), (False, 1.0), (False, 0.5)]  # symmetric, strength


def planted(first_seed: int) -> list[Case]:
    """All of them, with seeds from ``first_seed`` on."""
    return [
        *(Case("teacher", s, n, first_seed + i, w) for n in (300, 900, 2700) for s, w in PLANTS for i in range(4)),
        *(Case("quadrant", s, 1437, first_seed + i) for s in (True, False) for i in range(4)),
        *(Case(q, s, n, first_seed + i, w) for q in REGRESSIONS for n in (300, 900) for s, w in PLANTS for i in range(3)),
        *(
            Case(q, s, n, first_seed + i, compared=c)
            for c in (False, True)
            for q in GROUPS
            for n in (500, 1437)
            for s in (True, False)
            for i in range(3)
        ),
    ]


def gratings(samples: int) -> Tensor:
    """Waves of twelve directions and lengths with a random phase and a little noise: (samples, 1, 8, 8)."""
    waves = [(1, 0), (0, 1), (1, 1), (1, -1), (2, 0), (0, 2), (2, 1), (1, 2), (2, -1), (1, -2), (2, 2), (2, -2)]
    rows, columns = torch.tensor(waves)[torch.randint(12, (samples,))].float()[:, :, None, None].unbind(1)
    position, phase = torch.arange(8.0), 2 * math.pi * torch.rand(samples, 1, 1)
    x = torch.cos(math.pi / 4 * (rows * position[:, None] + columns * position) + phase)[:, None]
    x = x + 0.1 * torch.randn_like(x)
    return x / x.std()


def teachers(case: Case) -> list[nets.Net]:
    """Random networks that give the label together: a convolutional one, a dense one, or both."""
    torch.manual_seed(case.seed)
    names = ["conv"] * (case.symmetric or case.strength < 1) + ["fc"] * (not case.symmetric)
    outputs = 1 if case.question in REGRESSIONS else 3 if len(names) == 1 else 2
    return [nets.build(name, (1, 8, 8), outputs, **TEACHER) for name in names]


def regression_data(case: Case) -> tuple[Tensor, Tensor]:
    """Gratings, and the mean of the teachers' standardised answers with a tenth of a standard deviation of noise."""
    networks, x = teachers(case), gratings(case.samples)
    with torch.no_grad():
        answers = [teacher(x) for teacher in networks]
    y = sum((answer - answer.mean()) / answer.std() for answer in answers) / len(answers)
    return x, y + 0.1 * torch.randn_like(y)


def trained(x: Tensor, y: Tensor) -> nn.Module:
    """A convolutional network of plain torch."""
    convolution = partial(nn.Conv2d, out_channels=8, kernel_size=3, padding=1, padding_mode="circular")
    layers = convolution(1), nn.Tanh(), convolution(8), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1)
    model = nn.Sequential(*layers)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(50):
        for rows in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            optimiser.step()
    return model


def teacher_data(case: Case) -> tuple[Tensor, Tensor]:
    """Gratings that the teachers are surest of, the same number of each class, with their answers.

    Of two teachers a class is the pair of their answers, so that one alone knows but half of the label.
    """
    networks = teachers(case)
    x = gratings(30 * case.samples)
    with torch.no_grad():
        margin, *others = [_margins(teacher, x) for teacher in networks]
    for other in others:
        margin = torch.minimum(margin[:, :, None], other[:, None, :]).flatten(1)
    classes = margin.shape[1]
    chosen = margin.argsort(0, descending=True)[: case.samples // classes]
    return x[chosen.T.flatten()], torch.arange(classes).repeat_interleave(case.samples // classes)


def _margins(teacher: nets.Net, x: Tensor) -> Tensor:
    """By how much the standardised logit of every class (N, C) is above those of the others."""
    logits = torch.cat([teacher(part) for part in x.split(4096)])
    logits = (logits - logits.mean(0)) / logits.std(0)
    classes = logits.shape[1]
    return torch.stack([logits[:, c] - logits[:, torch.arange(classes) != c].amax(1) for c in range(classes)], 1)


def digit_data(case: Case) -> tuple[Tensor, Tensor]:
    """Embedded digits as the case asks for, normalised."""
    images, labels = datasets.digits()
    rows = torch.randperm(len(images), generator=torch.Generator().manual_seed(case.seed))[: case.samples]
    x, y = images[rows], labels[rows]
    if case.question == "quadrant":
        x, quadrant = datasets.in_quadrants(x, 2, case.seed)
        y = y if case.symmetric else y + 10 * quadrant
    else:
        x = datasets.shifted(x, case.seed)[:, None]
        if case.question == "turned" and case.symmetric:
            x = datasets.turned(x[:, 0], case.seed + 1)[:, None]
        if case.question == "flipped":
            mirrored = torch.rand(len(x), generator=torch.Generator().manual_seed(case.seed + 1)) < 0.5
            x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
            y = y if case.symmetric else y + 10 * mirrored
    return (x - x.mean()) / x.std(), y


def answer(case: Case, epochs: int | None = None, start: float | None = None, breaking: bool = False) -> dict:
    """What ``fit`` says of a case, with its default of ``epochs`` and that of ``nets.build`` of ``start``, if there are no others."""
    number = case.question in REGRESSIONS
    pair = regression_data(case) if number else teacher_data(case) if case.question == "teacher" else digit_data(case)
    torch.manual_seed(case.seed + 1)
    options = {
        "seed": case.seed,
        **({} if epochs is None else {"epochs": epochs}),
        **({"likelihood": "gaussian"} if number else {}),
    }
    shape, classes = pair[0].shape[1:], 1 if number else int(pair[1].max()) + 1
    group, fields = GROUPS.get(case.question, (None, None))
    started = {} if start is None else {"start": start}
    evidence, detail = {}, {}
    if case.compared:
        rival = f"gconv:{group}"
        for name, width in (("conv", 12), (rival, fields)):
            net = nets.build(name, shape, classes, width, **GROUP)
            evidence[name] = autosym.fit(net, pair, **options).evidence.log_evidence.item()
        said = evidence[rival] > evidence["conv"]
    else:
        if case.question == "relaxed":
            net = autosym.relax(trained(*pair), pair[0][:8], paths="where" if breaking else "f-fc")
        elif case.question in GROUPS:
            name = f"turn:{group}+gconv:{group}" if breaking else f"conv+gconv:{group}"
            net = nets.build(name, shape, classes, fields, **GROUP, **started)
        else:
            sizes = QUADRANT if case.question == "quadrant" else TEACHER
            net = nets.build("where+conv" if breaking else "f-fc+conv", shape, classes, **sizes, **started)
        fit = autosym.fit(net, pair, **options)
        detail["fitted"] = fit.symmetry().network_share(group)
        simple = autosym.simplify(fit, pair)
        evidence["learned"] = simple.evidence.log_evidence.item()
        found = simple.symmetry()
        detail["nats"] = [path.nats for path in simple.model.simplification.paths]
        detail["broken"] = found.network_share(group)
        detail["by_layer"] = list((found.broken_share(group) if group else found.free_share()).values())
        said = detail["broken"] < WHOLE
    guess = math.log(2 * math.pi * math.e * float(pair[1].var())) / 2 if number else math.log(classes)  # nats a sample
    learned = max(evidence.values()) > -len(pair[0]) * guess
    return {"said": said, "right": said == case.symmetric, **detail, "log_evidence": evidence, "learned": learned}


def show(entry: dict) -> str:
    detail = entry["log_evidence"] if entry["compared"] else f"{entry['broken']:.1%} broken"
    plant = "symmetric" if entry["symmetric"] else f"broken by {entry['strength']:g}"
    verdict = "right" if entry["right"] else "WRONG"
    return (
        f"{verdict}  {entry['question']}, {entry['samples']}, {plant}, seed {entry['seed']}: {detail}  {entry['seconds']:.0f} s"
    )


def interval(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a proportion."""
    if total == 0:
        return 0.0, 1.0
    p, spread = right / total, z * z / total
    centre, half = p + spread / 2, z * math.sqrt(p * (1 - p) / total + spread / (4 * total))
    return (centre - half) / (1 + spread), (centre + half) / (1 + spread)


def summary(cases: list[dict]) -> dict:
    """Counts and intervals, over all cases and by question, size and plant."""

    def count(chosen: list[dict]) -> dict:
        right = sum(case["right"] for case in chosen)
        return {
            "cases": len(chosen),
            "right": right,
            "wrongly_found": sum(case["said"] and not case["symmetric"] for case in chosen),
            "wrongly_missed": sum(case["symmetric"] and not case["said"] for case in chosen),
            "interval": interval(right, len(chosen)),
        }

    def kind(case: dict) -> str:
        plant = "symmetric" if case["symmetric"] else f"broken ({case['strength']:g})"
        return f"{case['question']}{', compared' if case['compared'] else ''}, {case['samples']} samples, {plant}"

    asked, compared = ([case for case in cases if case["compared"] is c] for c in (False, True))
    return count(asked) | {
        "learned": count([case for case in asked if case["learned"]]),
        "compared": count(compared),
        "by_kind": {name: count([c for c in cases if kind(c) == name]) for name in dict.fromkeys(map(kind, cases))},
        "provenance": provenance(),
        "all": cases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", choices=sorted(COST))
    parser.add_argument("--limit", type=int, help="so many cases only")
    parser.add_argument("--epochs", type=int, help="other than the default of fit")
    parser.add_argument("--start", type=float, help="of paths that break a symmetry, other than the default of nets.build")
    parser.add_argument(
        "--breaking", action="store_true", default=None, help="with paths that hold only what breaks the symmetry"
    )
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="of others of these cases: to choose settings by")
    parser.add_argument("--out", type=Path, help="where to write (benchmarks/results/truth.json for a whole run)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout and nothing else there")
    options = parser.parse_args()
    cases = [case for case in planted(options.first_seed) if not (options.breaking and case.compared)]  # no path is compared
    chosen = [case for case in cases if options.only in (None, case.question)][: options.limit]
    settings = {key: value for key in ("epochs", "start", "breaking") if (value := getattr(options, key)) is not None}
    out = options.out or (OUT if chosen == planted(FIRST_SEED) and not settings else None)
    lines = out.with_suffix(".jsonl") if out else None
    found = answers(answer, chosen, options.jobs, lines, settings, lambda case: COST[case.question] * case.samples, show)
    result = summary(found) | {"settings": settings}
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
        return
    for name, line in {"all": result, **{k: result[k] for k in ("learned", "compared")}, **result["by_kind"]}.items():
        low, high = line["interval"]
        wrong = f"wrongly found {line['wrongly_found']}, wrongly missed {line['wrongly_missed']}"
        print(f"{name:40s} right {line['right']:2d} of {line['cases']:2d} ({low:.0%} to {high:.0%}); {wrong}")


if __name__ == "__main__":
    main()
