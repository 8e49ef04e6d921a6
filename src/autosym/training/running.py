"""A fit between its start and its end."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.passes import budget
from autosym.curvature.verification import Verified
from autosym.evidence import costs, possible, whole
from autosym.evidence.kernel import Kernel
from autosym.evidence.laplace import Laplace, left_out
from autosym.evidence.whole import Whole
from autosym.runtime import processes
from autosym.runtime.batching import Data, Stream
from autosym.runtime.graphs import Captured
from autosym.training import evidence_steps, forecasting
from autosym.training.checkpoint import State
from autosym.training.evidence_steps import MANY, REST
from autosym.training.forecasting import Forecast
from autosym.training.ranges import Ranges
from autosym.training.schedule import EvidenceStep, Schedule
from autosym.training.snapshots import Progress, number
from autosym.training.steps import Weights

QUARTER = 4  # so many times the work of choosing an end must be within that of the run


@dataclass
class Run:
    """What a fit trains, on what, by which settings, and how far it has come."""

    model: nn.Module
    prior: Prior
    likelihood: Likelihood
    schedule: Schedule
    stream: Stream
    evidence_data: Data
    weights: Weights
    step: Captured  # of the weights, on one batch
    verified: Verified  # what is known of the model
    ranges: Ranges
    count: int  # samples
    seed: int
    memory: float | None
    search: bool = False  # whether the rate of a trained model is to be found
    given_precision: bool = True  # whether precisions start where the caller said
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        config = {"schedule": repr(self.schedule), "seed": self.seed, "samples": self.count, "likelihood": self.likelihood.name}
        config |= {"nu": repr(self.prior.nu), "prior precision": sorted(set(self.prior.precision().values()))}
        trained = (self.model, self.prior, self.likelihood, self.weights, self.stream)
        self.state = State(*trained, config, self.progress, self.ranges.tensors())
        sizes = (self.count, self.stream.together, self.weights.lr.device, self.memory)
        self.forecast = forecasting.of_memory(self.verified, self.schedule, *sizes)  # what it is expected to take

    def timed(self, forward: float) -> Forecast:
        """The forecast, with the time by that of a ``forward`` pass of one sample."""
        self.forecast = forecasting.with_time(self.forecast, self.verified, self.schedule, self.count, forward)
        return self.forecast

    def estimate(self, how: EvidenceStep, seed: int, rest: float = 0.0) -> Laplace | Kernel:
        """The expensive pass at the present weights."""
        at = (self.model, self.evidence_data, self.likelihood, self.prior)
        return evidence_steps.estimate(*at, how, seed, self.memory, self.verified, rest)

    def at_end(self) -> Laplace | Kernel:
        """The pass by which the ends of a run are compared: on all samples, at the draws that inference uses.

        With many outputs the least part of each sample's curvature is sampled.
        """
        self.ranges.settle()
        return self.estimate(self.schedule.last_step, self.seed, REST if self.verified.outputs > MANY else 0.0)

    def value(self, at: Laplace | Kernel) -> float | None:
        """The log evidence at the present precisions and noise, the same in all processes; None if it has failed."""
        return self._number(at, at)

    def whole_value(self, at: Laplace | Kernel) -> float | None:
        """That of the whole network at the present weights, precisions and noise; None if that of its factors ``at`` them has failed."""
        if not isinstance(at, Laplace):
            raise ValueError("kernel evidence has no factors for that of the whole network: fit without kernel=")
        found = whole.at(self.model, self.evidence_data, at, self.prior, seed=self.seed, memory=self.memory)
        return self._number(found, at)

    def _number(self, found: Laplace | Kernel | Whole, at: Laplace | Kernel) -> float | None:
        with torch.no_grad():
            value = float(found(self.prior).log_evidence)
        return number(processes.agreed(math.nan if possible.failure(at, self.prior) else value))

    def affords_whole(self, at: Laplace | Kernel, times: int) -> bool:
        """Whether the evidence of the whole network, so many ``times``, takes at most a quarter of this run's work; for all processes.

        Never where precisions are held, or factors are sampled at the end too: whoever asks for that wants no more work.
        """
        held = self.schedule.step == "none" or self.schedule.sampled_end
        if not isinstance(at, Laplace) or math.isfinite(self.prior.nu) or held:
            return False
        settings = (len(self.progress.lines), self.stream.together, QUARTER * times, self.memory)
        return bool(processes.agreed(costs.within_a_fit(self.model, self.evidence_data, at, *settings)))

    def room(self) -> float:
        """Bytes that one thing may take beside the model: ``memory``, or what a pass takes by default."""
        return budget(self.memory, self.weights.lr.device)

    def silent(self) -> Tensor:
        """Which entries of the prior are of paths that compute zero."""
        out = left_out(self.model, self.prior.names)
        return torch.tensor([name in out for name in self.prior.names])

    def steps(self) -> int:
        """How many steps of the weights the whole run may take."""
        return self.schedule.epochs * math.ceil(self.count / self.stream.together)

    def rate(self, epochs: float) -> float:
        """The rate when so many epochs are over."""
        schedule, stopped = self.schedule, self.progress.stopped
        if stopped is None:
            return self.progress.pace * schedule.rate(epochs / schedule.epochs)
        left = 0.5 * (1 + math.cos(math.pi * min(1.0, (epochs - stopped) / max(self._last_part(stopped), 1))))
        return self.progress.pace * schedule.rate(stopped / schedule.epochs) * max(left, 1e-4)

    def due(self, epoch: int) -> int:
        """How many of the schedule's evidence steps the one after this epoch stands for; 0 if none is to be taken now.

        Where the schedule's ``longest`` allows it, steps that gain little are followed by a longer pause. The last is always taken.
        """
        planned, waited = self.schedule.evidence_epochs(), self.waited(epoch)
        if epoch not in planned or self.progress.stopped is not None:
            return 0
        return waited if epoch == planned[-1] or waited >= self._pause() else 0

    def waited(self, epoch: int) -> int:
        """How many evidence steps were planned up to this epoch since the last that was taken; at most ``longest`` count."""
        last = max((line["epoch"] for line in self.progress.lines if line.get("log_evidence") is not None), default=0)
        return min(sum(last < planned <= epoch for planned in self.schedule.evidence_epochs()), self.schedule.longest)

    def _pause(self) -> int:
        """Planned steps from the last that was taken to the next: twice as many after each in a row that gained little."""
        pause = 1
        for line in reversed(self.progress.lines):
            if "recovered" in line or not line.get("little", True) or pause >= self.schedule.longest:
                break
            pause *= 2 if "little" in line else 1
        return min(pause, self.schedule.longest)

    def settles_after(self) -> int:
        """The epoch after which precisions stay as they are."""
        return self.progress.stopped or max(self.schedule.evidence_epochs(), default=0)

    def ended(self) -> bool:
        """Whether the run is over: after all epochs, or the last part of a run whose evidence stopped rising."""
        done, stopped = len(self.progress.lines), self.progress.stopped
        return self.progress.over or done >= (self.schedule.epochs if stopped is None else stopped + self._last_part(stopped))

    @property
    def may_stop(self) -> bool:
        """Whether it may end early: not while ranges move, and not without a last part at fixed precisions."""
        return self.schedule.settle > 0 and not self.ranges.learned

    def _last_part(self, stopped: int) -> int:
        """How many epochs follow at fixed precisions, if there are no more evidence steps after ``stopped``."""
        wanted = math.ceil(stopped * self.schedule.settle / (1 - self.schedule.settle))
        return min(wanted, self.schedule.epochs - stopped)
