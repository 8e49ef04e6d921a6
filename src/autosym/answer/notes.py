"""What an answer of ``discover`` says beside its verdicts: why one is undecided, what was left out or cut short, what would change it."""

import math
from collections.abc import Sequence

from autosym.answer import margins, sampling
from autosym.answer.margins import Margin

LATE = 1.1  # times the minutes that were given: what takes longer is said


def shortened(epochs: float, asked: int, in_time: bool) -> list[str]:
    if epochs > 0.99 * asked:
        return []
    more = "more minutes allow more" if in_time else "a larger budget allows more"
    return [
        f"long runs had {epochs / asked:.0%} of {asked} epochs, to stay within the {'minutes' if in_time else 'budget'}: {more}"
    ]


def narrow(seconds: float) -> str:
    return (
        f"{seconds / 60:g} minutes are too few for networks of two widths: one was tried, so a wider network may say otherwise"
    )


def idle(nothing: int, runs: int) -> list[str]:
    return [f"{nothing} of {runs} runs learned nothing: more epochs, or a larger budget, may change it"] if nothing else []


def unpriced(symmetries: Sequence[str]) -> list[str]:
    named = (
        f"no layers were asked about {' and '.join(symmetries)}: give a larger budget, or more minutes, to know which break it"
    )
    return [named] if symmetries else []


def few(samples: int) -> list[str]:
    few = f"{samples} samples are few, so margins are small whatever the budget: more samples tell more"
    return [few] if samples < sampling.LEAST[0] else []


def late(seconds: float, minutes: float | None) -> list[str]:
    late = minutes is not None and seconds > LATE * 60 * minutes
    return [f"it took {seconds / 60:.1f} min, longer than the {minutes:g} that were given"] if late else []


def why(
    ways: Sequence[Margin], tie: Margin, pairs: Margin | None, moved: float, weak: bool, shifts: bool, of_shifts: bool = False
) -> str:
    """Why two margins leave it open. ``shifts``: whether translations are among what is asked."""
    else_yes = margins.judge(ways, tie, pairs, max(moved, 2 * margins.RARE)) == "yes"
    if else_yes and moved <= margins.RARE:
        if of_shifts:
            return (
                "networks that keep it explain the data best, but the data change when they are shifted around the border: either "
                "labels depend on the place in a way that none of the networks can show, or the border never cuts what the images show"
            )
        ask = "" if shifts else " (ask about translations too)"
        return (
            "networks that keep it explain the data best, but the data change when they are moved: either labels depend on it "
            f"in a way that none of the networks can show{ask}, or the data lack moved images"
        )
    if else_yes and weak:
        return (
            "the networks explain so little of the labels that they would not notice if it were broken: more samples, longer runs or a "
            "larger network would tell"
        )
    if math.isinf(tie.error):
        return "of no network two runs from the same kind of start learned something, so nobody knows what chance is worth"
    largest = margins.telling(ways, "undecided", pairs, moved)
    if not margins.next_to_nothing(largest, pairs, moved):
        return f"breaking it gains {largest}, which is something, but less than what counts ({largest.bound:.0f} nats)"
    worth = f"the tie is worth {tie}, less than what counts ({max(tie.bound, margins.FEW):.0f} nats)"
    return f"breaking it gains {largest}, which is no more than chance, but {worth}"
