"""What a fit will take, said before it happens: memory before the first step, time as soon as a forward pass was timed.

    memory = optimiser + max(batch, part of a pass + factors, twice where ends are compared)
    time   = forward (epochs 3 + steps 3.4 + ends (1 + columns))  of all samples, and d^3 for the eigenvalues of each factor

Everything is beside the model and its data. Factors are counted for all paths; those of paths that compute zero are not made.
"""

import math
import warnings
from dataclasses import dataclass, replace

import torch

from autosym.curvature.kronecker import few_columns
from autosym.curvature.passes import budget
from autosym.curvature.verification import Verified
from autosym.evidence.costs import STEP
from autosym.runtime import room
from autosym.training.evidence_steps import MANY
from autosym.training.schedule import Schedule

PASS, COLUMN = 3.4, 1.2  # forward passes in a sampled pass, and in one more backward pass (demo's network, one CPU thread)
FEWER = 0.3  # columns that are taken one by one, of many outputs
SOLVING = 5e9  # d^3 of eigenvalues that a CPU solves in a second
COPIES = 8  # of the weights in an optimiser step: gradient, moments, precisions, and what a step makes of them
SNAPSHOTS = 3 * 3  # kept, and what each holds: weights and two moments
GIB = 2**30


@dataclass(frozen=True)
class Forecast:
    """Bytes beside model and data, and seconds, that a fit is expected to take.

    ``seconds`` are at most: a run may stop early, and takes fewer evidence steps while little moves. They are None until a forward
    pass was timed.
    """

    optimiser: int  # with its snapshots, where these are in the same memory
    batch: int  # activations of a training batch
    part: int  # of a part of the pass over the data: ``memory=`` bounds it
    factors: int  # Kronecker factors of all paths
    largest: str  # the path with the largest ones
    free: int | None  # that there is; None: not known
    seconds: float | None = None
    evidence_seconds: float | None = None  # of them for evidence steps, and for the evidence at the end

    @property
    def memory(self) -> int:
        """The most at one time: in a training step, or in a pass at the end, with the factors of the best end so far."""
        return self.optimiser + max(self.batch, self.part + 2 * self.factors)

    @property
    def fits(self) -> bool:
        return self.free is None or self.memory <= self.free

    def __str__(self) -> str:
        there = "" if self.free is None else f" of {self.free / GIB:.1f} free"
        parts = f"batch {self.batch / GIB:.2f}, pass {self.part / GIB:.2f}, factors {self.factors / GIB:.2f}"
        time = "" if self.seconds is None else f"; at most {_duration(self.seconds)}, {self._part():.0%} for evidence"
        return f"expects {self.memory / GIB:.2f} GiB{there} beside model and data ({parts}){time}"

    def _part(self) -> float:
        return (self.evidence_seconds or 0.0) / max(self.seconds or 0.0, 1e-9)

    def check(self) -> None:
        """Warn if it does not fit, and refuse what cannot: factors larger than all memory there is. Both say what to do."""
        if self.free is None or self.fits:
            return
        if self.factors > self.free:
            raise MemoryError(
                f"the Kronecker factors take {self.factors / GIB:.1f} GiB, most of it those of {self.largest}, and "
                f"{self.free / GIB:.1f} are free: replace that layer by a factored one (f-fc), freeze it by "
                "requires_grad_(False), or fit with kernel=150"
            )
        warnings.warn(f"this fit {self}, which does not fit: {self._remedy()}", stacklevel=2)

    def _remedy(self) -> str:
        most = max((self.batch, "batch"), (self.part, "part"), (2 * self.factors, "factors"))[1]
        return {
            "batch": "use a smaller batch_size=",
            "part": "pass a smaller memory= (GiB, for the activations of a pass)",
            "factors": f"freeze {self.largest}, whose factors are the largest, or fit with kernel=150; a smaller memory= helps a little",
        }[most]


def of_memory(
    known: Verified, schedule: Schedule, samples: int, together: int, device: torch.device, memory: float | None = None
) -> Forecast:
    """What a fit of so many ``samples``, ``together`` in a batch, will take in memory."""
    weights = sum(site.parameter.nbytes for site in known.sites)
    sides = {} if schedule.kernel is not None else known.sides
    factors = {
        name: known.element_size * k * (out**2 + inside * few_columns(inside, positions, samples))
        for name, (k, out, inside, positions) in sides.items()
    }
    part = min(8192 if device.type == "cuda" else 256, samples, max(1, int(budget(memory, device) / known.bytes_per_sample)))
    return Forecast(
        weights * (COPIES + (0 if device.type == "cuda" else SNAPSHOTS)),
        int(min(together, samples) * known.bytes_per_sample),
        int(part * known.bytes_per_sample),
        sum(factors.values()),
        max(factors, key=factors.__getitem__, default=""),
        room.free(device),
    )


def with_time(forecast: Forecast, known: Verified, schedule: Schedule, samples: int, forward: float) -> Forecast:
    """The same with the time, from that of a ``forward`` pass of one sample, in seconds."""
    steps, columns = len(schedule.evidence_epochs()), known.outputs * (FEWER if known.outputs > MANY else 1.0)
    sides = () if schedule.kernel is not None else known.sides.values()
    solving = sum(k * (out**3 + few_columns(inside, s, samples) ** 3) for k, out, inside, s in sides) / SOLVING
    used = 1.0 if schedule.subset is None else min(schedule.subset / samples, 1.0)
    step = (1 + used * (PASS - 1)) * samples * forward + solving  # the likelihood is of all samples
    end = (PASS + (0 if schedule.sampled_end else COLUMN * (columns - 1))) * samples * forward + solving
    evidence = steps * step + (2 if steps else 1) * end
    return replace(forecast, seconds=schedule.epochs * samples * STEP * forward + evidence, evidence_seconds=evidence)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{math.ceil(seconds / 60)} min"
