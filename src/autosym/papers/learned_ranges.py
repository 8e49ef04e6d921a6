"""Pictures of learned ranges: how they change over training, and filters moved across each range (Figs. 2 to 6 of the paper)."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autosym.report import findings
from autosym.report.drawing import new_figure, open_frame, save_figure

Result = Mapping[str, Any]


def packed(bank: Mapping[str, Any]) -> dict[str, Any]:
    """A filter bank with each picture as text: base64 of its levels, rows of int8."""
    pictures = np.asarray(bank["pictures"], dtype=np.int8)
    texts = [base64.b64encode(picture.tobytes()).decode() for picture in pictures]
    return {"name": bank["name"], "size": list(pictures.shape[1:]), "pictures": texts}


def unpacked(bank: Mapping[str, Any]) -> list[np.ndarray]:
    """The levels of every picture (height, width), from -127 to 127."""
    return [np.frombuffer(base64.b64decode(text), np.int8).reshape(bank["size"]) for text in bank["pictures"]]


def draw(results: Sequence[Result], path: Path) -> None:
    """Ranges over training, with a column for each task and a row for each unit; point estimates are dashed.

    Below, for each task, are the filter banks of the run with most of them. Point estimates are left out: their ranges are near zero.
    """
    tasks = list(dict.fromkeys(result["config"]["task"] for result in results))
    shown = {task: [r for r in results if r["config"]["task"] == task] for task in tasks}
    largest = {task: max(several, key=lambda r: len(_banks(r))) for task, several in shown.items()}
    most = max(len(_banks(result)) for result in largest.values())
    kinds = list(dict.fromkeys((r["config"]["model"], key) for r in results for key in r["history"][-1]["ranges"]))
    units = list(dict.fromkeys(_unit(key) for _, key in kinds))
    heights = [2.8 * len(units) + 0.6, *([0.8 * most] if most else [])]
    figure = new_figure(4 * len(tasks) + 2, sum(heights))
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    axes = parts[0].subplots(len(units), len(tasks), sharex="col", sharey="row", squeeze=False)
    for unit, row in zip(units, axes, strict=True):
        names = [kind for kind in kinds if _unit(kind[1]) == unit]
        for task, axis in zip(tasks, row, strict=True):
            _draw_ranges(axis, shown[task], names)
        row[0].set_ylabel(unit)
        handles = {label: line for axis in row for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        row[-1].legend(handles.values(), handles, frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    for task, top, bottom in zip(tasks, axes[0], axes[-1], strict=True):
        top.set_title(task)
        bottom.set_xlabel("epoch")
    for task, part in zip(tasks, parts[-1].subfigures(1, len(tasks), squeeze=False)[0] if most else (), strict=most > 0):
        _draw_banks(part.subplots(most, findings.BANK, squeeze=False), largest[task])
    save_figure(figure, path, 110)


def _unit(key: str) -> str:
    """The unit in a key: "degrees" in "rotation (degrees)"."""
    return key.rpartition("(")[2].rstrip(")")


def _draw_ranges(axis: Any, several: Sequence[Result], names: Sequence[tuple[str, str]]) -> None:
    """Ranges of one unit over training, for all runs of a task."""
    one = len({key for _, key in names}) == 1  # range only: the name of the model is label enough
    for result in several:
        style, lines = "--" if _is_point(result) else "-", result["history"]
        for index, (model, key) in enumerate(names):
            if model == result["config"]["model"]:
                values = [line["ranges"][key] for line in lines]
                label = model if one else f"{model}: {key.partition(' (')[0]}"
                axis.plot([line["epoch"] for line in lines], values, style, color=f"C{index}", label=label)
    open_frame(axis)


def _is_point(result: Result) -> bool:
    return result["config"]["method"] == "point-estimate"


def _banks(result: Result) -> Sequence[Mapping[str, Any]]:
    return () if _is_point(result) else result.get("filter_banks") or ()


def _draw_banks(axes: Any, result: Result) -> None:
    """The strongest filter of a run, moved from end to end of a range: one row for each range."""
    for axis in axes.flat:
        axis.set_axis_off()
    for row, bank in zip(axes, _banks(result), strict=False):
        for axis, picture in zip(row, unpacked(bank), strict=True):
            axis.imshow(picture, cmap="coolwarm", vmin=-127, vmax=127)
        row[0].set_title(f"{result['config']['model']}: {bank['name']}", fontsize=7, loc="left")
