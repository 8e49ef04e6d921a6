"""How ``autosym fit`` comes to a network: what the data do not support is left out, and if nothing was learned it tries again.

A few hundred images leave training by evidence to chance. A run may collapse, or end with evidence that is not above guessing. Kronecker
factors make the evidence too small, so before another run is made the evidence of the whole network is taken, if that is no more work
than the fit was. A further run has another seed and a smaller rate.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autosym.evidence.cautions import Failed, Guessing
from autosym.evidence.verdicts import UNESTABLISHED
from autosym.papers.measuring import fit_in
from autosym.surgery.simplifying import simplify
from autosym.training.fitted import Fit
from autosym.training.guarding import NothingLearned
from autosym.training.schedule import Schedule

TRIES = 3
APART = 1000  # seeds between tries, so that runs with the seeds 0, 1 and 2 do not share theirs
SLOWER = 2.0  # the rate of the first run is so many times that of the others


@dataclass
class Tries:
    """Runs on ``data`` by networks that ``build`` makes by their seeds: ``tries`` at most. Files of the first are in ``out`` itself."""

    out: Path
    build: Callable[[int], nn.Module]
    data: tuple[Tensor, Tensor]
    schedule: Schedule
    seed: int
    tries: int = TRIES
    simplified: bool = True
    resume: bool = False
    progress: bool = False
    made: list[dict[str, Any]] = field(
        default_factory=list
    )  # each with its seed, rate, log evidence, and why nothing was learned
    before: float = 0.0  # seconds that earlier calls have trained for

    def best(self) -> Fit:
        """The first fit that learned something; if none did, the one with the most evidence."""
        found: list[Fit] = []
        for number in range(self.tries):
            fitted = self._made(number)
            found += [] if fitted is None else [fitted]
            if fitted is not None and not nothing(fitted):
                break
        if not found:
            raise NothingLearned(self.made[0]["why"])
        last = found[-1]
        best = max(found, key=_rank) if nothing(last) else last
        for one in self.made:
            one["kept"] = one["seed"] == best.seed
        return best

    def notes(self) -> list[str]:
        """What to say about it: which runs learned nothing, which one was kept, and whether it was not simplified."""
        failed = [f"{one['seed']} at rate {one['lr']:.2g}" for one in self.made if one["why"]]
        kept = next(one for one in self.made if one["kept"])
        found = [f"nothing was learned with seed {failed[0]}"] if len(failed) == 1 else []
        found = found or ([f"nothing was learned with seeds {', '.join(failed)}"] if failed else [])
        if len(self.made) > 1:
            how = "which has the most evidence" if kept["why"] else "the first that is better than guessing"
            found = [f"{found[0]}; the network is of seed {kept['seed']}, {how}"]
        if kept["why"] and self.simplified:
            found.append("no path was left out, as nothing was learned")
        return found

    def _made(self, number: int) -> Fit | None:
        """The fit of one try, simplified if it learned something; None if it collapsed."""
        seed = self.seed + APART * number
        schedule = replace(self.schedule, lr=self.schedule.peak / (SLOWER if number else 1.0))
        told: list[dict[str, Any]] = []
        out = self.out / f"try-{number + 1}" if number else self.out
        try:
            fitted = fit_in(
                out, self.build(seed), self.data, schedule, seed, self.resume, progress=self.progress, log=told.append
            )
        except NothingLearned as error:
            self.made.append({"seed": seed, "lr": schedule.lr, "log_evidence": None, "why": str(error)})
            return None
        earlier = fitted.history[: len(fitted.history) - len(told)]
        self.before += earlier[-1]["seconds"] if earlier else 0.0
        fitted = self._ended(fitted)
        value = float(fitted.evidence.log_evidence.detach())
        known = {"seed": seed, "lr": fitted.schedule.lr, "log_evidence": value if math.isfinite(value) else None}
        self.made.append(known | {"why": nothing(fitted)})
        return fitted

    def _ended(self, fitted: Fit) -> Fit:
        """Without the paths that the data do not support; with the evidence of the whole network if Kronecker's is not above guessing."""
        ended = priced(fitted, self.data, self.progress) if self.simplified else fitted
        guessing = any(isinstance(caution, Guessing) for caution in ended.symmetry().cautions)
        if guessing and ended.affords_whole(self.data):
            ended = ended.refine(self.data)
        return fitted if nothing(ended) else ended


def priced(fitted: Fit, data: tuple[Tensor, Tensor], progress: bool = False) -> Fit:
    """The fit without the paths that the data do not support, if there are any to leave out."""
    possible = fitted.schedule.step != "none" and fitted.symmetry().optional()
    return simplify(fitted, data, curvature="kronecker", progress=progress) if possible else fitted


def nothing(fitted: Fit) -> str:
    """Why nothing was learned, or nothing."""
    found = (caution for caution in fitted.symmetry().cautions if isinstance(caution, UNESTABLISHED))
    return next((caution.headline for caution in found), "")


def _rank(fitted: Fit) -> tuple[bool, float]:
    failed = any(isinstance(caution, Failed) for caution in fitted.symmetry().cautions)
    return not failed, float(fitted.evidence.log_evidence.detach())
