"""Snapshots of a run: what it goes back to after a collapse, and what it may end with."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from autosym.bayes.priors import Prior


@dataclass(frozen=True)
class Start:
    """The model as it was given: its mean loss, that of guessing (the best constant output), and its evidence.

    ``log_evidence`` is at precisions and noise learned in closed form. It is None if the model explains nothing yet, if it has
    failed, or if precisions are not learned. ``lr`` is the rate that the run began with. ``least`` is the difference of losses
    from which on a model is better than guessing.
    """

    loss: float
    guess: float
    lr: float
    least: float
    log_evidence: float | None = None

    @property
    def explains(self) -> bool:
        """Whether the model is better than guessing, as one is that was trained before."""
        return self.guess - self.loss > self.least


@dataclass(frozen=True)
class Snapshot:
    """Everything that a run changes, as it was after ``epoch`` epochs, and the log evidence then (None: not taken).

    ``low`` is the least loss of an epoch up to then. ``tensors`` are in host memory, whatever the model's device: a run keeps three
    snapshots, and a GPU has better use for that memory.
    """

    epoch: int
    log_evidence: float | None
    low: float
    mixture_bound: float
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], prior: Prior, epoch: int, log_evidence: float | None, low: float) -> "Snapshot":
        """A copy of ``tensors`` and of the scales of ``prior``."""
        changing = {**tensors, **{f"scales/{name}": t for name, t in prior.scales.items()}}
        copied = {name: t.detach().to("cpu", copy=True) for name, t in changing.items()}
        return cls(epoch, log_evidence, low, prior.mixture_bound, copied)

    def model(self) -> dict[str, Tensor]:
        """The state of the model."""
        return {name.removeprefix("model/"): t for name, t in self.tensors.items() if name.startswith("model/")}

    @torch.no_grad()
    def put_back(self, tensors: Mapping[str, Tensor], prior: Prior, device: torch.device) -> None:
        """Copy it into ``tensors``, which stay where they are (a recorded CUDA graph reads them), and into ``prior``.

        ``device`` is the model's, for the scales of the prior.
        """
        for name, tensor in tensors.items():
            tensor.copy_(self.tensors[name])
        scales = {name.removeprefix("scales/"): t for name, t in self.tensors.items() if name.startswith("scales/")}
        prior.scales = {name: t.to(device, copy=True) for name, t in scales.items()}
        prior.mixture_bound = self.mixture_bound


@dataclass
class Progress:
    """How far a run has come, beside its tensors."""

    lines: list[dict[str, Any]] = field(default_factory=list)  # the history
    start: Start | None = None  # None: the run has not begun
    pace: float = 1.0  # the part of the schedule's rate that is used: less after each recovery
    recoveries: int = 0
    low: float = math.inf  # the least loss of an epoch so far
    good: int = 0  # the epochs of the snapshots to go back to, and of the one with the most evidence
    best: int = 0
    stopped: int | None = None  # the epoch after which precisions stay, if the evidence stopped rising before the schedule's
    over: bool = False  # whether it collapsed too often to go on
    snapshots: dict[int, Snapshot] = field(default_factory=dict)  # by epoch; 0 is the start

    def keep(self, snapshot: Snapshot) -> None:
        """Take a good snapshot, and drop those that are neither the start, nor this one, nor the best."""
        self.good = snapshot.epoch
        self.snapshots[snapshot.epoch] = snapshot
        value, best = snapshot.log_evidence, self.snapshots.get(self.best)
        if value is not None and (not self.best or best is None or best.log_evidence is None or value > best.log_evidence):
            self.best = snapshot.epoch
        self.snapshots = {epoch: s for epoch, s in self.snapshots.items() if epoch in (0, self.good, self.best)}

    def state(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        plain = {name: getattr(self, name) for name in ("lines", "pace", "recoveries", "good", "best", "stopped", "over")}
        kept = {epoch: [s.log_evidence, number(s.low), s.mixture_bound] for epoch, s in self.snapshots.items()}
        start = asdict(self.start) if self.start else None
        return plain | {"low": number(self.low), "start": start, "snapshots": kept}

    def tensors(self) -> dict[str, Tensor]:
        """Those of all snapshots, by epoch and name."""
        return {f"kept/{epoch}/{name}": t for epoch, s in self.snapshots.items() for name, t in s.tensors.items()}

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go back to what ``state()`` and ``tensors()`` were. A KeyError, TypeError or ValueError if they are no such thing."""
        found = {name: state[name] for name in ("pace", "recoveries", "good", "best", "stopped", "over")}
        snapshots = {}
        for epoch, (log_evidence, low, mixture_bound) in state["snapshots"].items():
            own = {n.split("/", 2)[2]: t for n, t in tensors.items() if n.startswith(f"kept/{epoch}/")}
            snapshots[int(epoch)] = Snapshot(int(epoch), log_evidence, math.inf if low is None else low, mixture_bound, own)
        start = None if state["start"] is None else Start(**state["start"])
        low = math.inf if state["low"] is None else state["low"]
        self.__dict__.update(found, lines=list(state["lines"]), low=low, start=start, snapshots=snapshots)


def number(value: float) -> float | None:
    """The value, or None if it is not finite, as JSON has it."""
    return value if math.isfinite(value) else None
