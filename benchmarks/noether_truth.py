"""How often is ``noether.discover`` right? Systems whose conserved quantities are known, by size and noise of their trajectories.

    python benchmarks/noether_truth.py                                every case without a result, in benchmarks/results/noether_truth
    python benchmarks/noether_truth.py --seconds 500 --only 'free-*'  some of them; starts no new one after 500 seconds
    python benchmarks/noether_truth.py --tried --results DIR          other systems, which the rule was chosen by
    python benchmarks/noether_truth.py --table                        what was found, by the right answer

The right number of quantities of degree two is written down with each system. A quantity is right if its cosine with the span of the
true ones is at least SAME. A case runs in one thread: start a copy for each core.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autosym.noether import discover
from autosym.noether.candidates import least_drift
from autosym.noether.found import SAME, Discovery, Quantity
from autosym.noether.systems import System
from autosym.runtime.provenance import provenance
from autosym.runtime.tables import table
from resumable import run_each, stored

OUT = Path(__file__).parent / "results" / "noether_truth"
BEFORE = OUT.with_name("noether_truth_before")  # the first four conditions by the rule of commit d4e857f
DT, STATES = 0.1, 40


@dataclass(frozen=True)
class Truth:
    """A potential V(q), or a whole H(x) if ``whole``, and how many quantities of degree two are conserved."""

    count: int
    positions: int
    potential: Callable[..., Tensor]
    size: float = 1.0  # of the starts
    whole: bool = False
    space: int | None = None  # by default that of one body

    def system(self, name: str) -> System:
        n = self.positions

        def hamiltonian(x: Tensor) -> Tensor:
            return (
                self.potential(*x.unbind(-1))
                if self.whole
                else x[..., n:].square().sum(-1) / 2 + self.potential(*x[..., :n].unbind(-1))
            )

        return System(name, 2 * n, self.space or n, hamiltonian, ())


def radial(shape: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """V as a function of r^2 alone."""
    return lambda x, y: shape(x * x + y * y)


TRIED = {  # the rule was chosen by these
    "quartic": Truth(0, 1, lambda q: q**4 / 4),
    "pendulum": Truth(0, 1, lambda q: -q.cos(), 1.5),
    "coupled": Truth(0, 2, lambda x, y: x**2 / 2 + 1.35 * y**2 + x**4 / 4 + 0.075 * y**4 + x**2 * y**2 / 2),
    "two-quartics": Truth(0, 2, lambda x, y: x**4 / 4 + y**4 / 2 + x * y / 2),
    "oscillator": Truth(1, 1, lambda q: q**2),
    "central-quartic": Truth(1, 2, radial(lambda s: s**2 / 4)),
    "central-soft": Truth(1, 2, radial(lambda s: -2 * (s + 1).rsqrt())),
    "strip": Truth(2, 2, lambda x, y: y**4 / 4),
    "isotropic": Truth(4, 2, radial(lambda s: s / 2)),
}
REPORTED = {
    "double-well": Truth(0, 1, lambda q: q**4 / 4 - q**2 / 2),
    "morse": Truth(0, 1, lambda q: (1 - (-q).exp()) ** 2, 0.7),
    "anharmonic": Truth(0, 2, lambda x, y: x**2 / 2 + 1.35 * y**2 + x**4 / 4 + 0.075 * y**4 + x**2 * y**2 / 2),
    "two-pendula": Truth(0, 2, lambda x, y: -x.cos() - 2 * y.cos() + (x - y) ** 2 / 4, 1.5, space=1),
    "toda": Truth(0, 2, lambda x, y: x.exp() + (y - x).exp() + (-y).exp()),
    "henon-heiles": Truth(0, 2, lambda x, y: (x**2 + y**2) / 2 + x**2 * y - y**3 / 3, 0.3),
    "nearly-central": Truth(0, 2, lambda x, y: (x**2 + y**2) ** 2 / 4 + x**2 / 20 + x**3 / 60),
    "bent": Truth(0, 2, lambda x, y: (y - x**2 / 2) ** 2 + x**2 / 2),
    "central-gauss": Truth(1, 2, radial(lambda s: -3 * (-s / 2).exp()), 0.7),
    "central-log": Truth(1, 2, radial(lambda s: (1 + s).log())),
    "central-sextic": Truth(1, 2, radial(lambda s: s / 4 + s**3 / 24)),
    "central-turned": Truth(  # the same in other coordinates: a quantity without a name
        1, 2, lambda x, y, p, q: p**2 / 2 + q**2 - p * q / 2 + ((x**2 + x * y / 2 + y**2 / 2) ** 2) / 2, whole=True
    ),
    "pair": Truth(2, 2, lambda a, b: (a - b) ** 2 / 2 + (a - b) ** 4 / 4, space=1),
    "free-line": Truth(2, 1, lambda q: 0 * q),
    "free-plane": Truth(6, 2, lambda x, y: 0 * x),
    "two-springs": Truth(2, 2, lambda x, y: x**2 / 2 + 1.35 * y**2, space=1),
}


@dataclass(frozen=True)
class Condition:
    """How trajectories are made. ``hard``: what makes them poor data, "" if they are good."""

    trajectories: int = 30
    noise: float = 0.0  # of the states
    dt: float = DT
    states: int = STATES
    near: float | None = None  # how far starts are from the first one
    second: float = 1.0  # the size of the second position and momentum at the start
    hard: str = ""


CONDITIONS = (
    Condition(),
    Condition(10),
    Condition(100),
    Condition(noise=0.01),
    Condition(60, dt=0.5, states=5, hard="5 states, 0.5 apart"),
    Condition(dt=1.0, hard="states 1 apart"),
    Condition(near=0.03, hard="starts within 0.03"),
    Condition(second=0.01, hard="a coordinate of size 0.01"),
)


@dataclass(frozen=True)
class Case:
    system: str
    truth: Truth
    condition: Condition
    seed: int

    @property
    def name(self) -> str:
        hard = f"-{self.condition.hard.replace(' ', '_').replace(',', '')}" if self.condition.hard else ""
        return f"{self.system}-{self.condition.trajectories}-{self.condition.noise:g}-{self.seed}{hard}"


def cases(systems: dict[str, Truth], first_seed: int) -> list[Case]:
    """Every system in every condition: all systems in the first, then all in the next."""
    return [
        Case(name, truth, condition, first_seed + place)
        for place, condition in enumerate(CONDITIONS)
        for name, truth in systems.items()
        if truth.positions > 1 or condition.second == 1
    ]


def data(case: Case) -> Tensor:
    """Trajectories with noise, (N, T, M)."""
    generator, how = torch.Generator().manual_seed(case.seed), case.condition
    system = case.truth.system(case.system)
    starts = case.truth.size * system.starts(how.trajectories, generator)
    if how.near is not None:
        starts = starts[:1] + how.near * torch.randn(starts.shape, generator=generator, dtype=starts.dtype)
    starts[:, 1 :: case.truth.positions] *= how.second
    x = system.trajectories(starts, how.dt, how.states - 1)
    return x + how.noise * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def true_span(system: System, truth: Truth, scale: float) -> Tensor:
    """An orthonormal basis (count, D) of what is conserved, with x in units of ``scale``: what does not drift without noise."""
    starts = truth.size * system.starts(40, torch.Generator().manual_seed(0))
    drifts, directions = least_drift(system.trajectories(starts, DT, STATES - 1) / scale)
    assert truth.count == int((drifts < 1e-3).sum()), f"{system.name}: {drifts[:8].tolist()}"
    return torch.linalg.qr(directions[: truth.count].mT)[0].mT


def is_true(found: Discovery, quantities: Sequence[Quantity], span: Tensor) -> list[bool]:
    """Whether each quantity lies in the span of the true ones."""
    vectors = [torch.cat([torch.tensor(q.A).flatten(), torch.tensor(q.b) / found.scale]).double() for q in quantities]
    return [bool((span @ one).norm() >= SAME * one.norm()) for one in vectors]


def run(case: Case, work: Path) -> dict[str, Any]:
    """Ask ``discover``; which of its quantities are true."""
    x, begun = data(case), time.perf_counter()
    try:
        found = discover(x, case.condition.dt, space=case.truth.space or case.truth.positions, seed=case.seed)
    except ValueError as error:
        found = str(error)
    return row(case, found, time.perf_counter() - begun) | {"provenance": provenance()}


def row(case: Case, found: Discovery | str, seconds: float) -> dict[str, Any]:
    """``found`` is the reason, if the data were refused."""
    how = case.condition
    known = {
        "config": {"system": case.system, "trajectories": how.trajectories, "noise": how.noise, "seed": case.seed},
        "right": case.truth.count,
        "hard": how.hard,
    }
    if isinstance(found, str):
        return known | {"refused": found, "found": [], "undecided": [], "seconds": seconds}
    span = true_span(case.truth.system(case.system), case.truth, found.scale)
    undecided = vars(found).get("undecided", ())  # earlier versions had none
    return known | {
        "found": is_true(found, found.quantities, span),
        "undecided": is_true(found, undecided, span),
        "drifts": [q.drift for q in (*found.quantities, *undecided)],
        "nats": [q.nats for q in (*found.quantities, *undecided)],
        "gain": found.log_evidence - found.log_evidence_without,
        "seconds": seconds,
    }


def kind(result: dict[str, Any]) -> str:
    """What is conserved, for a row of the table."""
    if result["config"]["system"].startswith("nearly"):
        return "nearly one"
    return {0: "none", 1: "one"}.get(result["right"], "two or more")


def tabulated(results: Sequence[dict[str, Any]], earlier: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A header and a row for each kind: wrong answers and true quantities found, by the earlier rule and by this one."""

    def key(result: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(result["config"].values())

    before = {key(result): result for result in earlier}
    rows = [
        [
            "conserved",
            "cases",
            "with a false one (before)",
            "true ones found (before)",
            "true ones undecided",
            "others undecided",
        ]
    ]
    for group in ("none", "nearly one", "one", "two or more"):
        now = [result for result in results if kind(result) == group and not result.get("hard")]
        then = [before[key(result)] for result in now]
        false = [sum(not all(result["found"]) for result in both) for both in (now, then)]
        true = [sum(sum(result["found"]) for result in both) for both in (now, then)]
        right = sum(result["right"] for result in now)
        counted = f"{true[0]} ({true[1]}) of {right}" if right else ""
        open_ = [sum(result["undecided"].count(which) for result in now) for which in (True, False)]
        rows.append([group, str(len(now)), f"{false[0]} ({false[1]})", counted, str(open_[0]) if right else "", str(open_[1])])
    return rows


def tabulated_hard(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A header and a row for each kind of poor data."""
    rows = [
        ["trajectories", "cases", "refused", "with a false one", "true ones found", "true ones undecided", "others undecided"]
    ]
    for hard in dict.fromkeys(condition.hard for condition in CONDITIONS if condition.hard):
        now = [result for result in results if result.get("hard") == hard]
        refused, right = sum("refused" in result for result in now), sum(result["right"] for result in now)
        false = sum(not all(result["found"]) for result in now)
        open_ = [sum(result["undecided"].count(which) for result in now) for which in (True, False)]
        found = f"{sum(sum(result['found']) for result in now)} of {right}"
        rows.append([hard, str(len(now)), str(refused), str(false), found, *map(str, open_)])
    return rows


def shown(result: dict[str, Any]) -> str:
    name = "-".join(map(str, result["config"].values()))
    false, open_ = result["found"].count(False), len(result["undecided"])
    refused = ", refused" if "refused" in result else ""
    return f"{name}: {sum(result['found'])} of {result['right']}, {false} false, {open_} undecided{refused}, {result['seconds']:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names of cases, with wildcards")
    parser.add_argument("--tried", action="store_true", help="the systems and seeds that the rule was chosen by")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path, default=OUT)
    parser.add_argument("--work", type=Path, default=Path("runs") / "noether_truth")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print(table(tabulated(stored(given.results), stored(BEFORE)), "<>>>>>"))
        print(table(tabulated_hard(stored(given.results)), "<>>>>>>"))
        return 0
    torch.set_num_threads(1)
    asked = [case for case in (cases(TRIED, 0) if given.tried else cases(REPORTED, 100)) if fnmatch(case.name, given.only)]
    return run_each(asked, run, shown, given.results, given.work, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
