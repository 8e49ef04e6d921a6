"""Pictures of learned ranges: their path over training, and filters moved from end to end of them (Figs. 2 to 6 of the paper)."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autosym import findings

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
    """A column for each task: ranges over training, dashed for a point estimate; below, the run with the most filter banks.

    Those of point estimates are left out: their ranges are next to nothing.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tasks = list(dict.fromkeys(result["config"]["task"] for result in results))
    shown = {task: [r for r in results if r["config"]["task"] == task] for task in tasks}
    largest = {task: max(several, key=lambda r: len(_banks(r))) for task, several in shown.items()}
    most = max(len(_banks(result)) for result in largest.values())
    kinds = list(dict.fromkeys((r["config"]["model"], key) for r in results for key in r["history"][-1]["ranges"]))
    one = len({key for _, key in kinds}) == 1  # range, of which the axis has the name
    labels = {kind: kind[0] if one else ": ".join(kind) for kind in kinds}
    figure = plt.figure(figsize=(4.5 * len(tasks) + 1, 3.6 + 0.8 * most), layout="constrained")
    heights = [3.6, 0.8 * most] if most else [1]
    parts = figure.subfigures(len(heights), len(tasks), squeeze=False, height_ratios=heights)
    for column, task in enumerate(tasks):
        axis = parts[0][column].subplots()
        _draw_ranges(axis, task, shown[task], labels)
        axis.set_ylabel(kinds[0][1] if one else "")
    axis.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))  # of all, beside the last
    for column, task in enumerate(tasks):
        if most:
            _draw_banks(parts[1][column].subplots(most, findings.BANK, squeeze=False), largest[task])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_ranges(axis: Any, task: str, several: Sequence[Result], labels: Mapping[tuple[str, str], str]) -> None:
    colours = {kind: f"C{index}" for index, kind in enumerate(labels)}
    for result in several:
        style, lines = "--" if _is_point(result) else "-", result["history"]
        for key in lines[-1]["ranges"]:
            kind, values = (result["config"]["model"], key), [line["ranges"][key] for line in lines]
            axis.plot([line["epoch"] for line in lines], values, style, color=colours[kind], label=labels[kind])
    axis.set_title(task)
    axis.set_xlabel("epoch")
    axis.spines[["top", "right"]].set_visible(False)


def _is_point(result: Result) -> bool:
    return result["config"]["method"] == "point-estimate"


def _banks(result: Result) -> Sequence[Mapping[str, Any]]:
    return () if _is_point(result) else result.get("filter_banks") or ()


def _draw_banks(axes: Any, result: Result) -> None:
    """The strongest filter of a run, moved from end to end of each range: a row for each."""
    for axis in axes.flat:
        axis.set_axis_off()
    for row, bank in zip(axes, _banks(result), strict=False):
        for axis, picture in zip(row, unpacked(bank), strict=True):
            axis.imshow(picture, cmap="coolwarm", vmin=-127, vmax=127)
        row[0].set_title(f"{result['config']['model']}: {bank['name']}", fontsize=7, loc="left")
