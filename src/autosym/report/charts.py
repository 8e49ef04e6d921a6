"""Charts as geometry: scales, ticks and lines in the units of a small drawing, ready for the template to draw as SVG."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autosym.report.words import power_of_ten

WIDTH, HEIGHT = 320, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 10, 24  # margins, with room for the ticks' words
FRAME = {
    "width": WIDTH,
    "height": HEIGHT,
    "left": LEFT,
    "right": WIDTH - RIGHT,
    "top": TOP,
    "bottom": HEIGHT - BOTTOM,
}


def lines(
    title: str,
    x: Sequence[float],
    series: Sequence[Mapping[str, Any]],
    unit: str = "",
    log: bool = False,
    bounds: tuple[float, float] | None = None,
    span: tuple[float, float] | None = None,
    learning: tuple[float, float] | None = None,
) -> dict[str, Any] | None:
    """A line for each of ``series`` (``name``, ``values``, ``colour``, ``dash``) over epochs; None if there is nothing to draw.

    ``bounds`` fixes the vertical axis and ``span`` the horizontal one, so that charts can be compared. ``learning`` holds the first
    and the last epoch with an evidence step.
    """
    known = [v for one in series for v in one["values"] if _drawn(v, log)]
    if not known:
        return None
    low, high = bounds or (min(known), max(known))
    ticks = log_ticks(low, high) if log else linear_ticks(low, high)
    change = math.log10 if log else float
    bottom, top = change(min(low, ticks[0])), change(max(high, ticks[-1]))
    first, last = span or (min(x), max(x))
    across = _scale(first, last, LEFT, WIDTH - RIGHT)
    up = _scale(bottom, top, HEIGHT - BOTTOM, TOP)
    places = [round(across(e), 1) for e in x]
    drawn = []
    for one in series:
        heights = [round(up(change(v)), 1) if _drawn(v, log) else None for v in one["values"]]
        drawn.append({**one, "pieces": _pieces(list(zip(places, heights, strict=True)))})
    return {
        "title": title,
        "unit": unit,
        **FRAME,
        "series": drawn,
        "y_ticks": [{"at": round(up(change(t)), 1), "label": tick(t, log)} for t in ticks],
        "x_ticks": [
            {"at": round(across(t), 1), "label": f"{t:g}"}
            for t in linear_ticks(first, last, 5, whole=True)
            if first <= t <= last and across(t) > LEFT + 36  # leaves room for the word "epoch"
        ],
        "learning": None if learning is None else [round(across(epoch), 1) for epoch in learning],
        "rows": [
            {"epoch": e, "at": at, "values": [one["values"][i] for one in series]}
            for i, (e, at) in enumerate(zip(x, places, strict=True))
        ],
    }


def _drawn(value: float | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and (value > 0 or not log)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """The linear map from [low, high] to [start, end]; if low = high, the middle."""
    if high <= low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _pieces(points: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """Splits a line at missing numbers: a gap in the numbers is a gap in the line."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append((x, y))
    return [piece for piece in pieces if piece]


def linear_ticks(low: float, high: float, about: int = 4, whole: bool = False) -> list[float]:
    """Round numbers that cover [low, high], in steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around [low, high], at most about six of them."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    step = math.ceil((last - first) / 5)
    return [10.0**power for power in range(first, last + step, step)]


def tick(value: float, log: bool = False) -> str:
    """The label of a tick; powers of ten have a raised exponent."""
    if not log:
        return f"{value:g}".replace("-", "−")
    return power_of_ten(round(math.log10(value)))


def diagonal(bins: Sequence[Mapping[str, Any]], size: int = 300) -> dict[str, Any]:
    """A reliability diagram: accuracy over confidence in bins, and the line where both are equal."""
    left, right, top, bottom = 34, size - 8, 8, size - 28
    across, up = _scale(0, 1, left, right), _scale(0, 1, bottom, top)
    largest = max((one["count"] for one in bins), default=0) or 1
    bars = [
        {
            "x": round(across(one["from"]) + 0.75, 1),
            "width": round(across(one["to"]) - across(one["from"]) - 1.5, 1),
            "y": round(up(one["accuracy"]), 1),
            "height": round(bottom - up(one["accuracy"]), 1),
            "gap": round(up(one["confidence"]), 1),
            "weight": round(0.35 + 0.65 * math.sqrt(one["count"] / largest), 2),
            **one,
        }
        for one in bins
        if one["count"] and one["accuracy"] is not None and one["confidence"] is not None
    ]
    ticks = [{"x": round(across(t), 1), "y": round(up(t), 1), "label": f"{100 * t:.0f}"} for t in (0, 0.25, 0.5, 0.75, 1)]
    return {"size": size, "left": left, "right": right, "top": top, "bottom": bottom, "bars": bars, "ticks": ticks}
