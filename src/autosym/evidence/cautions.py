"""Cautions: what a reader must know before relying on shares and ranges. Each is a value with its numbers, and prints as text.

``evidence.verdicts`` decides which cautions apply.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class OneClass:
    """All labels are the same, so there is nothing to learn."""

    samples: int
    label: int

    def __str__(self) -> str:
        return (
            f"Nothing can be learned: all {self.samples} labels are of class {self.label}, so there is nothing to tell apart."
        )


@dataclass(frozen=True)
class Dead:
    """``layers`` have no effective parameters at all, so their shares are NaN. ``lr`` was the learning rate."""

    layers: tuple[str, ...]
    lr: float | None = None

    def __str__(self) -> str:
        have = f"{_by_name(self.layers)} {'has' if len(self.layers) == 1 else 'have'} no effective parameters, so no shares"
        return f"{have}: the network died, or the data determine nothing. Try {_slower(self.lr)}, and standardised inputs."


@dataclass(frozen=True)
class Guessing:
    """The log evidence per sample is not above ``chance``, the value for guessing one of the classes."""

    per_sample: float
    chance: float
    classes: int
    dead: Dead | None = None

    def __str__(self) -> str:
        figures = (
            f"{self.per_sample:.3f} nats per sample, is not better than guessing one of {self.classes} classes "
            f"({self.chance:.3f})"
        )
        remedy = f". {self.dead}" if self.dead else ", though accuracy may be better; train longer, or on more data."
        return f"Nothing is established yet: the log evidence, {figures}{remedy}"


class Failed:
    """The Laplace approximation has failed, so the evidence must not be used (``evidence.possible``)."""

    lr: float | None

    @property
    def why(self) -> str:
        raise TypeError(f"{type(self).__name__} does not say why")

    def unranked(self) -> str:
        """What a comparison says beside such a model."""
        return f"its evidence must not be used, so it is not ranked: {self.why}"

    def __str__(self) -> str:
        return (
            f"The evidence must not be used: {self.why}. The Laplace approximation has failed here, and shares, precisions and "
            f"predictive() say nothing. The network's own outputs and its accuracy are not affected. Try {_slower(self.lr)}."
        )


@dataclass(frozen=True)
class Impossible(Failed):
    """The log evidence is larger than ``most``, the most that it can be, or NaN."""

    log_evidence: float
    most: float
    lr: float | None = None

    @property
    def why(self) -> str:
        if math.isnan(self.log_evidence):
            return "the log evidence is not a number"
        reason = "the prior does not know which class is which" if self.most else "it is the logarithm of a probability"
        return (
            f"a log evidence of {self.log_evidence:.3g} cannot be, as for these labels it is at most {self.most:.3g} ({reason})"
        )


@dataclass(frozen=True)
class Saturated(Failed):
    """Labels are ``explained`` (1: all, with certainty), but with fewer ``effective_parameters`` than at a mode of the posterior."""

    effective_parameters: float
    explained: float
    lr: float | None = None

    @property
    def why(self) -> str:
        return (
            f"{self.effective_parameters:.2g} effective parameters are too few for labels that are explained to {self.explained:.0%}; "
            "at a mode of the posterior there are more (the softmax is saturated)"
        )


@dataclass(frozen=True)
class Unused:
    """``layers`` have less than one effective parameter: too little to judge their shares by."""

    layers: tuple[str, ...]

    def __str__(self) -> str:
        have = "has" if len(self.layers) == 1 else "have"
        return f"{_by_name(self.layers)} {have} less than one effective parameter, too little to judge by."


@dataclass(frozen=True)
class Little:
    """The evidence is hardly better than guessing: it explains ``part`` of what guessing leaves to explain."""

    part: float

    def __str__(self) -> str:
        return (
            f"The evidence is {self.part:.0%} better than guessing, which is little: a model that does not try to tell some "
            "classes apart may then have more evidence than one that does. Train longer, or on more data, before you rely on a "
            "symmetry."
        )


@dataclass(frozen=True)
class OneStep:
    """Precisions were learned once."""

    def __str__(self) -> str:
        return "Precisions were learned in one step only: train longer before you rely on the shares."


@dataclass(frozen=True)
class Rising:
    """The evidence still rose by ``nats`` when precisions were learned for the last time."""

    nats: float

    def __str__(self) -> str:
        return (
            f"The evidence was still rising when precisions were learned for the last time, by {self.nats:.3g} nats over the "
            "last steps: train longer before you rely on the shares."
        )


@dataclass(frozen=True)
class Moving:
    """Learned ranges that still moved at their last steps: name, value before, last value."""

    ranges: tuple[tuple[str, float, float], ...]

    def __str__(self) -> str:
        moved = ", ".join(f"{name} went from {before:.3g} to {last:.3g}" for name, before, last in self.ranges)
        return f"Over the last quarter of the steps {moved}: train longer, or take more or longer steps (every=1, hyper_lr)."


Caution = OneClass | Dead | Guessing | Failed | Unused | Little | OneStep | Rising | Moving


def _by_name(layers: Sequence[str]) -> str:
    return f"Layer{'' if len(layers) == 1 else 's'} {', '.join(layer or '(the model)' for layer in layers)}"


def _slower(lr: float | None) -> str:
    return f"a smaller learning rate (lr={lr / 3:.2g} for {lr:.2g})" if lr else "a smaller learning rate"
