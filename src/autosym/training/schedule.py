"""How a fit proceeds: rates, batches, and when and how evidence moves the prior (the study behind the defaults: docs/schedule.md)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args

Step = Literal["mackay", "gradient", "none"]
LR = 0.05  # relative to the initial size of weights, in a long run

RULES: dict[str, tuple[Callable[[Any], bool], str]] = {  # of fields that hold a number, or a word
    "epochs": (lambda v: v >= 1, "at least 1"),
    "batch_size": (lambda v: v >= 1, "at least 1"),
    "optimiser": (lambda v: v in ("adam", "sgd"), "'adam' or 'sgd'"),
    "lr": (lambda v: 0 < v < math.inf, "positive"),
    "momentum": (lambda v: 0 <= v < 1, "in [0, 1)"),
    "warmup": (lambda v: 0 <= v < 1, "in [0, 1)"),
    "clip": (lambda v: v > 0, "positive"),
    "step": (lambda v: v in get_args(Step), "'mackay', 'gradient' or 'none'"),
    "burn_in": (lambda v: v >= 0, "0 or more"),
    "settle": (lambda v: 0 <= v < 1, "in [0, 1)"),
    "every": (lambda v: v >= 1, "at least 1"),
    "longest": (lambda v: v >= 1, "at least 1"),
    "damping": (lambda v: 0 < v <= 1, "in (0, 1]"),
    "trust": (lambda v: v > 0, "positive"),
    "hyper_steps": (lambda v: v >= 1, "at least 1"),
    "hyper_lr": (lambda v: v > 0, "positive"),
    "subset": (lambda v: v >= 1, "at least 1"),
    "kernel": (lambda v: v >= 1, "at least 1"),
    "start_cap": (lambda v: v > 0, "positive"),
}


def _check(record: Any) -> None:
    """Refuse a record of settings with a value that its field cannot have."""
    wrong = []
    for field in fields(record):
        kinds, value = (field.type, *get_args(field.type)), getattr(record, field.name)
        if value is None and type(None) in kinds:
            continue
        if (int in kinds and not isinstance(value, Integral)) or (float in kinds and not isinstance(value, Real)):
            wrong.append((field.name, value, "a whole number" if int in kinds else "a number"))
            continue
        if isinstance(value, Real) and type(value) not in (bool, int, float):  # a NumPy number
            object.__setattr__(record, field.name, int(value) if isinstance(value, Integral) else float(value))
        if field.name in RULES and not RULES[field.name][0](value):
            wrong.append((field.name, value, RULES[field.name][1]))
    if wrong:
        raise ValueError(f"a schedule cannot have {', '.join(f'{name} = {value!r} ({rule})' for name, value, rule in wrong)}")


@dataclass(frozen=True)
class EvidenceStep:
    """How one evidence step is taken: which curvature, and how far precisions and noise move by it."""

    step: Step = "mackay"  # closed form and damped, "gradient" (Adam), or "none" (MAP)
    damping: float = 1.0  # a closed-form step goes this part of the way, in log precision,
    trust: float = 2.0  # and at most this far (nats)
    hyper_steps: int = 20  # Adam steps of a "gradient" step,
    hyper_lr: float = 0.1  # and their rate; also that of the ranges of transformations (``symmetrise``), one step each time
    sampled: bool = True  # curvature by one backward pass in all instead of one for each output,
    subset: int | None = None  # and on so many samples
    kernel: int | None = None  # or by the kernel of so many samples, one output of each: for many classes

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "EvidenceStep":
        """The settings that a learner was given by name."""
        names = [field.name for field in fields(cls)]
        if unknown := set(options) - set(names):
            raise TypeError(f"unknown option {', '.join(sorted(unknown))}: Learner accepts {', '.join(names)}")
        return cls(**options)


@dataclass(frozen=True)
class Schedule:
    """How a fit proceeds: weights in every epoch, precisions (and noise) in some, between burn-in and settling.

    The fields of an evidence step are those of ``EvidenceStep``.
    """

    epochs: int = 100
    batch_size: int = 64
    optimiser: Literal["adam", "sgd"] = "adam"
    lr: float | None = None  # by default as the run is long (``for_steps``). Of Adam in units of the initial size (root mean
    relative: bool = True  # square) of each path's weights, so that all move alike; if False, and with SGD, of the weights
    momentum: float = 0.9
    warmup: float = 0.05  # the part of the run over which the rate rises from 0, before it falls as a cosine
    clip: float = math.inf  # of the norm of the likelihood's gradient
    step: Step = EvidenceStep.step
    burn_in: int | None = None  # epochs before the first evidence step; a tenth of the run by default
    settle: float = 0.2  # the last part of the run, at fixed precisions: Laplace holds at a mode
    every: int | None = None  # epochs between evidence steps; by default a 25th of the run, or 1 where ranges are learned
    longest: int = 1  # planned evidence steps that one may stand for while they gain little: 4 halves their number
    damping: float = EvidenceStep.damping
    trust: float = EvidenceStep.trust
    hyper_steps: int = EvidenceStep.hyper_steps
    hyper_lr: float = EvidenceStep.hyper_lr
    sampled: bool = EvidenceStep.sampled
    subset: int | None = EvidenceStep.subset
    kernel: int | None = EvidenceStep.kernel
    sampled_end: bool = False  # ``sampled`` of the evidence at the end
    start_cap: float = 1.0  # precisions start no higher with evidence: weights must hear the data before they are judged

    def __post_init__(self) -> None:
        _check(self)

    @staticmethod
    def of(given: "Schedule | Literal['paper'] | None", changes: Mapping[str, Any]) -> "Schedule":
        """The schedule that ``fit`` was given, with the fields that were given by name."""
        names = [field.name for field in fields(Schedule)]
        if unknown := set(changes) - set(names):
            raise TypeError(f"fit got {', '.join(sorted(unknown))}; a schedule has {', '.join(names)}")
        if given == "paper":
            return Schedule.paper(**changes)
        if isinstance(given, str):
            raise ValueError(f"schedule {given!r} is not known: 'paper', or a Schedule")
        return replace(given or Schedule(), **changes)

    @staticmethod
    def paper(epochs: int = 1000, **changes: Any) -> "Schedule":
        """The published schedule: SGD, exact curvature, 20 Adam steps on log precisions every 5 epochs after the tenth."""
        published: dict[str, Any] = {
            "batch_size": 128,
            "optimiser": "sgd",
            "lr": 0.01,
            "warmup": 0.0,
            "step": "gradient",
            "burn_in": min(10, epochs // 10),
            "settle": 0.0,
            "every": 5,
            "sampled": False,
        }
        return Schedule(epochs, **(published | changes))

    def for_steps(self, steps: int) -> "Schedule":
        """With a rate for a run of so many steps, if it has none: 0.05 from 8,000 on, more in shorter ones, 0.1 below 2,000.

        Short runs have no time for small steps; long ones diverge at 0.1. Rates in units of the weights themselves are 0.05.
        """
        if self.lr is not None:
            return self
        gain = math.sqrt(8000 / max(steps, 1)) if self.relative and self.optimiser == "adam" else 1.0
        return replace(self, lr=LR * min(2.0, max(1.0, gain)))

    def rate(self, done: float) -> float:
        """The rate when the part ``done`` of the run is over: up to ``lr``, then down as a cosine."""
        warm = min(1.0, (done + 1e-3) / self.warmup) if self.warmup else 1.0
        return self.peak * warm * max(0.5 * (1 + math.cos(math.pi * done)), 1e-4)

    @property
    def peak(self) -> float:
        """The largest rate."""
        return LR if self.lr is None else self.lr

    @property
    def pause(self) -> int:
        """Epochs from one evidence step to the next."""
        return max(1, round(self.epochs / 25)) if self.every is None else self.every

    @property
    def evidence_step(self) -> EvidenceStep:
        """How an evidence step of this run is taken."""
        return EvidenceStep(**{field.name: getattr(self, field.name) for field in fields(EvidenceStep)})

    @property
    def last_step(self) -> EvidenceStep:
        """How the evidence at the end is taken: on all samples."""
        return replace(self.evidence_step, sampled=self.sampled_end, subset=None)

    def evidence_epochs(self) -> range:
        """The epochs, counted from 1, that end with an evidence step."""
        if self.step == "none":
            return range(0)
        burn_in = self.epochs // 10 if self.burn_in is None else self.burn_in
        every = self.pause
        first = min(burn_in + every, self.epochs)  # a short run has one evidence step
        if burn_in >= self.epochs:
            raise ValueError(f"burn_in = {burn_in} leaves no evidence step in {self.epochs} epochs: lower it, or step='none'")
        return range(first, max(first, math.ceil(self.epochs * (1 - self.settle))) + 1, every)
