"""What changed over the epochs of a run, as charts: evidence, shares, effective parameters, ranges, precisions."""

from collections.abc import Mapping, Sequence
from typing import Any

from autosym.curvature.owners import is_under
from autosym.report import charts
from autosym.report.drawing import by_layer, css_class, legend
from autosym.report.findings import LINES, thinned

DASHES = {"theta_1": "7 3", "u_1": "7 3", "bias": "1.5 3", "b_1": "1.5 3", "b_2": "4 3", "omega": "9 2 2 2"}
NUMBERS = 12000  # precisions on a page at most


def bounded(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A history with fewer lines if its lines hold many numbers: the page of any network stays below 2 MB."""
    widest = max((len(line.get("precision") or {}) for line in history), default=0)
    return thinned(history, max(2, min(LINES, NUMBERS // max(widest, 1))))


def curves(
    history: Sequence[Mapping[str, Any]],
    symmetry: Sequence[Mapping[str, Any]],
    samples: int | None,
    schedule: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Charts over epochs: evidence, its two parts, the loss, free shares by layer, effective parameters by path."""
    steps = [line for line in history if "log_evidence" in line]
    frame = _frame(history, steps, schedule)
    per, unit = (samples, "nats per sample") if samples else (1, "nats")

    def one(title: str, key: str, sign: int = 1) -> dict[str, Any] | None:
        values = [None if line.get(key) is None else sign * line[key] / per for line in steps]
        return charts.lines(title, _over(steps), [_series(title, values)], unit, **frame) if steps else None

    found = [one("Evidence", "log_evidence"), one("Fit", "log_likelihood"), one("Complexity", "occam", -1)]
    if history:
        loss = [line.get("loss") for line in history]
        found.append(charts.lines("Training loss", _over(history), [_series("Training loss", loss)], "per sample", **frame))
    if steps:
        found += [_free_shares(steps, frame), _effective(steps, symmetry, frame)]
    return [chart for chart in found if chart is not None]


def evidence_of(fits: Sequence[Mapping[str, Any]]) -> list[dict[str, Any] | None]:
    """The evidence of several fits (contents of reports) over epochs, one chart each, all on the same axes."""
    found, last = [], 2
    for fit in fits:
        history = bounded(fit.get("history") or [])
        steps = [line for line in history if line.get("log_evidence") is not None]
        found.append((_over(steps), [line["log_evidence"] / (fit.get("samples") or 1) for line in steps]))
        last = max([last, *_over(history)])
    known = [value for _, values in found for value in values]
    axes: dict[str, Any] = {"bounds": (min(known), max(known)), "span": (1, last)} if known else {}
    unit = "nats per sample" if all(fit.get("samples") for fit in fits) else "nats"
    return [charts.lines("Evidence", epochs, [_series("Evidence", values)], unit, **axes) for epochs, values in found]


def _frame(
    history: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], schedule: Mapping[str, Any]
) -> dict[str, Any]:
    """The axis that all charts over epochs share."""
    if not history:
        return {}
    last = max(history[-1]["epoch"], schedule.get("epochs") or 1)
    return {"span": (1, max(last, 2)), "learning": (steps[0]["epoch"], steps[-1]["epoch"]) if steps else None}


def _over(lines: Sequence[Mapping[str, Any]]) -> list[int]:
    return [line["epoch"] for line in lines]


def _series(name: str, values: Sequence[float | None], colour: str = "ink", **more: Any) -> dict[str, Any]:
    return {"name": name, "values": list(values), "colour": colour, "dash": "", "place": 0.0, **more}


def _free_shares(steps: Sequence[Mapping[str, Any]], frame: Mapping[str, Any]) -> dict[str, Any] | None:
    names = list(steps[-1].get("free_share") or {})
    series = []
    for index, name in enumerate(names):
        shares = [(line.get("free_share") or {}).get(name) for line in steps]
        values = [None if share is None else 100 * share for share in shares]
        series.append(_series(f"{index + 1}", values, "ramp", place=round(index / max(len(names) - 1, 1), 3)))
    return charts.lines("Free share by layer", _over(steps), series, "%", bounds=(0, 100), **frame) if series else None


def _effective(
    steps: Sequence[Mapping[str, Any]], symmetry: Sequence[Mapping[str, Any]], frame: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The effective parameters of each kind of path, summed over layers."""
    series = []
    for kind in legend(symmetry):
        stems = [f"{path['layer']}.{path['path']}".lstrip(".") for path in symmetry if path["path"] == kind["path"]]
        values = [
            sum(
                gamma or 0.0
                for name, gamma in line["effective_parameters"].items()
                if any(is_under(name, stem) for stem in stems)
            )
            if line.get("effective_parameters")
            else None
            for line in steps
        ]
        series.append(_series(kind["path"], values, css_class(kind)))
    return charts.lines("Effective parameters by path", _over(steps), series, **frame) if series else None


def range_charts(history: Sequence[Mapping[str, Any]], schedule: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The range of every transformation over epochs, in its unit."""
    steps = [line for line in history if line.get("ranges")]
    found = []
    for key in steps[-1]["ranges"] if steps else ():
        name, _, unit = key.removesuffix(")").rpartition(" (")
        values = [line["ranges"].get(key) for line in steps]
        found.append(charts.lines(name, _over(steps), [_series(name, values)], unit, **_frame(history, steps, schedule)))
    return [chart for chart in found if chart is not None]


def _owner(name: str, symmetry: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The path of a relaxed layer that owns a precision, if any."""
    return next((p for p in symmetry if is_under(name, f"{p['layer']}.{p['path']}".lstrip("."))), None)


def precisions(
    history: Sequence[Mapping[str, Any]], symmetry: Sequence[Mapping[str, Any]], schedule: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A chart of prior precisions for each relaxed layer, and one for all other parameters, on the same axes."""
    steps = [line for line in history if line.get("precision")]
    every = [value for line in steps for value in line["precision"].values() if value]
    if not every:
        return []
    frame = _frame(history, steps, schedule) | {"bounds": (min(every), max(every)), "log": True}
    titled = {layer: f"{number} · {layer}" for number, layer in enumerate(by_layer(symmetry), 1)}
    outside = sorted({name.rpartition(".")[0] for name in steps[-1]["precision"] if _owner(name, symmetry) is None})
    by_chart: dict[str, list[dict[str, Any]]] = {title: [] for title in titled.values()}
    for name in steps[-1]["precision"]:
        owner = _owner(name, symmetry)
        module, _, part = name.rpartition(".")
        label = name if owner is None else name[len(owner["layer"]) :].lstrip(".").replace(".basis", "")
        colour = "ramp" if owner is None else css_class(owner)
        place = outside.index(module) / max(len(outside) - 1, 1) if owner is None else 0.0
        values = [line["precision"].get(name) for line in steps]
        chart = "Other parameters" if owner is None else titled[owner["layer"]]
        by_chart.setdefault(chart, []).append(_series(label, values, colour, dash=DASHES.get(part, ""), place=round(place, 3)))
    drawn = [charts.lines(title, _over(steps), series, **frame) for title, series in by_chart.items() if series]
    return [chart for chart in drawn if chart is not None]
