"""Cautions: what a reader must know before relying on shares and ranges. Each is a value with its numbers; its text ends with what to do.

``evidence.verdicts`` decides which cautions apply.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autosym.evidence.record import nats, per_sample


@dataclass(frozen=True)
class OneClass:
    """All labels are the same, so there is nothing to learn."""

    samples: int
    label: int

    @property
    def headline(self) -> str:
        return f"Nothing can be learned: all {self.samples} labels are of class {self.label}."

    @property
    def details(self) -> str:
        return "Add samples of other classes."

    def __str__(self) -> str:
        return f"{self.headline} {self.details}"


@dataclass(frozen=True)
class Dead:
    """``layers`` have no effective parameters at all, so their shares are NaN. ``lr`` was the learning rate."""

    layers: tuple[str, ...]
    lr: float | None = None

    def __str__(self) -> str:
        have = f"{_by_name(self.layers)} {'has' if len(self.layers) == 1 else 'have'} no effective parameters, so no shares"
        return f"{have}. Try {_slower(self.lr)}, and standardised inputs."


@dataclass(frozen=True)
class Guessing:
    """The log evidence per sample is not above ``chance``, the value for guessing one of the classes."""

    per_sample: float
    chance: float
    classes: int
    dead: Dead | None = None

    @property
    def headline(self) -> str:
        return "Nothing is established yet: the evidence is not better than guessing."

    @property
    def details(self) -> str:
        found = f"The log evidence is {per_sample(self.per_sample)} nats per sample"
        guessed = f"guessing one of {self.classes} classes has {per_sample(self.chance)}"
        return f"{found}; {guessed}. {self.dead or 'Train longer, or on more data.'}"

    def __str__(self) -> str:
        return f"{self.headline} {self.details}"


class Failed:
    """The Laplace approximation has failed, so the evidence must not be used (``evidence.possible``)."""

    lr: float | None

    @property
    def why(self) -> str:
        raise TypeError(f"{type(self).__name__} does not say why")

    @property
    def headline(self) -> str:
        return "The evidence must not be used: the Laplace approximation has failed."

    def unranked(self) -> str:
        """What a comparison says beside such a model."""
        return f"its evidence must not be used, so it is not ranked: {self.why}. Fit it again with {_slower(self.lr)}"

    @property
    def details(self) -> str:
        doubt = "Do not rely on shares, precisions or predictive(); accuracy is not affected."
        return f"{self.why[0].upper()}{self.why[1:]}. {doubt} Try {_slower(self.lr)}."

    def __str__(self) -> str:
        return f"{self.headline} {self.details}"


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
        return f"the log evidence, {nats(self.log_evidence)}, is above {nats(self.most)}, the most that these labels allow"


@dataclass(frozen=True)
class Saturated(Failed):
    """Labels are ``explained`` (1: all, with certainty), but with fewer ``effective_parameters`` than at a mode of the posterior."""

    effective_parameters: float
    explained: float
    lr: float | None = None

    @property
    def why(self) -> str:
        few = f"{self.effective_parameters:.2g} effective parameters cannot explain {self.explained:.0%} of the labels"
        return f"the softmax is saturated ({few})"


@dataclass(frozen=True)
class Unused:
    """``layers`` have less than one effective parameter: too little to judge their shares by."""

    layers: tuple[str, ...]

    def __str__(self) -> str:
        have = "has" if len(self.layers) == 1 else "have"
        return (
            f"{_by_name(self.layers)} {have} less than one effective parameter, too little to judge by. Use more data to judge."
        )


@dataclass(frozen=True)
class Little:
    """The evidence is hardly better than guessing: it explains ``part`` of what guessing leaves to explain."""

    part: float

    def __str__(self) -> str:
        return (
            f"The evidence is only {self.part:.0%} better than guessing. A model that ignores some classes may then win. "
            "Train longer, or on more data, before you rely on a symmetry."
        )


@dataclass(frozen=True)
class OneStep:
    """Precisions were learned once."""

    def __str__(self) -> str:
        return "Precisions were learned in one step only. Train longer before you rely on the shares."


@dataclass(frozen=True)
class Rising:
    """The evidence still rose by ``nats`` when precisions were learned for the last time."""

    nats: float

    def __str__(self) -> str:
        return f"The evidence was still rising, by {self.nats:.3g} nats over the last steps. Train longer before you rely on the shares."


@dataclass(frozen=True)
class Moving:
    """Learned ranges that still moved at their last steps: name, value before, last value."""

    ranges: tuple[tuple[str, float, float], ...]

    def __str__(self) -> str:
        moved = ", ".join(f"{name} from {before:.3g} to {last:.3g}" for name, before, last in self.ranges)
        return (
            f"Ranges still moved in the last quarter of the steps: {moved}. Train longer, or use every=1 and a larger hyper_lr."
        )


@dataclass(frozen=True)
class Borders:
    """``layers`` keep shifts up to borders only: by zero padding a network can tell position, whatever its paths do."""

    layers: tuple[str, ...]

    def __str__(self) -> str:
        some = _by_name(self.layers) if len(self.layers) < 4 else f"{len(self.layers)} layers"
        return (
            f"{some} keep{'s' if len(self.layers) == 1 else ''} shifts up to borders only, and a network can tell position by its borders "
            'without a path for it. autosym.lift(cnn, images, "translations") makes one that cannot, and autosym.discover compares them.'
        )


Caution = OneClass | Dead | Guessing | Failed | Unused | Little | OneStep | Rising | Moving | Borders


def _by_name(layers: Sequence[str]) -> str:
    return f"Layer{'' if len(layers) == 1 else 's'} {', '.join(layer or '(the model)' for layer in layers)}"


def _slower(lr: float | None) -> str:
    return f"a smaller learning rate (lr={lr / 3:.2g} for {lr:.2g})" if lr else "a smaller learning rate"
