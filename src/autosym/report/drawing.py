"""Tables in the terminal, and figures by matplotlib: the symmetry of a fitted model, and what all figures share.

Reports are pages of SVG (``charts``), which need no matplotlib.
"""

import io
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosym.runtime import files

if TYPE_CHECKING:
    from autosym.training.fitted import Fit

# Colours that colour-blind readers can tell apart (Okabe & Ito): symmetric paths blue and green, free ones orange.
COLOURS = {"conv": "#0072B2", "fc": "#D55E00", "f-fc": "#E69F00"}
OTHER_SYMMETRIC, OTHER_FREE = "#009E73", "#CC79A7"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: the first column is aligned left, the others right."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"\n[bold]{title}[/bold]", highlight=False)
    console.print(table)


def show_symmetry(task: str, symmetry: Sequence[Mapping[str, Any]]) -> None:
    """The share of every path in every layer, in the terminal."""
    layers = list(dict.fromkeys(path["layer"] for path in symmetry))
    paths = list(dict.fromkeys(path["path"] for path in symmetry))
    share = {(p["layer"], p["path"]): "" if p["share"] is None else f"{p['share']:.0%}" for p in symmetry}
    rows = [(layer, *(share.get((layer, path), "") for path in paths)) for layer in layers]
    print_table(f"Learned symmetry, {task.replace('+', ' and ')}: share of effective parameters", ("layer", *paths), rows)


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches. It is not made by pyplot, so it needs no window and is freed when unused."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path, dpi: int = 100) -> None:
    """Save a figure; the file is written whole or not at all."""
    figure.savefig(content := io.BytesIO(), dpi=dpi, format=path.suffix.removeprefix(".") or "png")
    files.write(path, content.getvalue())


def open_frame(axes: Any) -> None:
    """Hide the top and right lines of the frame."""
    axes.spines[["top", "right"]].set_visible(False)


def colour_of(path: Mapping[str, Any]) -> str:
    """One colour for each path of a layer, in every picture."""
    return COLOURS.get(path["path"], OTHER_SYMMETRIC if path["symmetric"] else OTHER_FREE)


def css_class(path: Mapping[str, Any]) -> str:
    """The colour of a path in report.css: the same as ``colour_of``."""
    return path["path"] if path["path"] in COLOURS else "symmetric" if path["symmetric"] else "free"


def by_layer(symmetry: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The paths of every layer, in order."""
    return {layer: list(paths) for layer, paths in groupby(symmetry, key=lambda path: path["layer"])}


def legend(symmetry: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """One path of each kind."""
    return list({path["path"]: path for path in symmetry}.values())


def draw_precisions(axes: Any, symmetry: Sequence[Mapping[str, Any]], title: str) -> None:
    """The learned prior precision of every linear map, by layer from input to output; if high, little of the map is left."""
    layers = list(dict.fromkeys(path["layer"] for path in symmetry))
    shapes = {"theta_1": "^", "u_1": "^", "theta_2": "v", "u_2": "v"}
    for path in symmetry:
        for name, precision in path["precision"].items():
            if name in ("linear", *shapes):
                place = layers.index(path["layer"])
                axes.plot(precision, place, shapes.get(name, "o"), color=colour_of(path), markersize=7, alpha=0.85)
    axes.set_xscale("log")
    axes.set_yticks(range(len(layers)), [layer.rsplit(".", 1)[-1] for layer in layers])
    axes.invert_yaxis()
    axes.set_xlabel("prior precision (▼ ▲ the two factors of a factored map)")
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    open_frame(axes)


def draw_shares(axes: Any, symmetry: Sequence[Mapping[str, Any]], title: str) -> None:
    """The share of each path's effective parameters, one bar per layer from input to output (the paper's Fig. 3)."""
    layers = list(dict.fromkeys(path["layer"] for path in symmetry))
    left = dict.fromkeys(layers, 0.0)
    labelled = set()
    for path in symmetry:
        name, layer = path["path"], path["layer"]
        label = None if name in labelled else f"{name} ({'symmetric' if path['symmetric'] else 'free'})"
        labelled.add(name)
        share = 100 * (path["share"] or 0.0)
        axes.barh(layers.index(layer), share, left=left[layer], color=colour_of(path), label=label, height=0.7)
        if share >= 12:  # less has no room for its number
            ink = "white" if path["symmetric"] else "black"
            axes.text(left[layer] + share / 2, layers.index(layer), f"{share:.0f} %", ha="center", va="center", color=ink)
        left[layer] += share
    short = [layer.rsplit(".", 1)[-1] for layer in layers]
    axes.set_yticks(range(len(layers)), layers if all(name.isdigit() for name in short) else short)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of effective parameters (%)")
    axes.set_ylabel("layer, from the input down")
    axes.set_title(title)
    open_frame(axes)


def draw_curves(axes: Any, history: Sequence[Mapping[str, Any]], key: str, title: str) -> None:
    """The number ``key`` over epochs, from the lines of a history that have it."""
    steps = [line for line in history if line.get(key) is not None]
    axes.plot([line["epoch"] for line in steps], [line[key] for line in steps], color="#1d1f21", marker=".", linewidth=1.5)
    axes.set_xlabel("epoch")
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    open_frame(axes)


def plot(fit: "Fit") -> Any:
    """A figure: shares and precisions by layer, and the evidence over epochs (the loss, if there was no evidence step)."""
    from matplotlib import pyplot as plt  # pyplot also makes notebooks show figures

    symmetry = fit.symmetry().as_dicts()
    figure = plt.figure(figsize=(13, max(3.6, 1.6 + 0.35 * len(symmetry))), layout="constrained")
    shares, evidence, precision = figure.subplots(1, 3)
    draw_shares(shares, symmetry, "Learned symmetry")
    draw_precisions(precision, symmetry, "Prior precisions")
    learned = any("log_evidence" in line for line in fit.history)
    draw_curves(evidence, fit.history, *(("log_evidence", "Log evidence (nats)") if learned else ("loss", "Training loss")))
    if symmetry:
        figure.legend(*shares.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    plt.close(figure)  # so that a notebook shows the figure once, not twice
    return figure
