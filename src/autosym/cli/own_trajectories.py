"""``autosym noether DATA``: the conserved quantities of a user's trajectories."""

import json as json_format
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autosym.cli.asked import ALL, MaybeData, MaybeInt, MaybeName, MaybePath, Print, refuse_overwriting
from autosym.noether import Discovery, Search, discover, systems
from autosym.papers.measuring import write
from autosym.report import conserved
from autosym.report.drawing import save_figure
from autosym.report.writing import write_text
from autosym.runtime.provenance import provenance

DEMOS = {
    "oscillator": (systems.oscillators(1), Search(points=20)),
    "two-oscillators": (systems.oscillators(2), Search()),
    "pendulum": (systems.pendulum(), Search()),
    "three-bodies": (systems.planar_bodies(3), Search()),
}


def noether(
    data: MaybeData = None,
    demo: MaybeName = None,
    space: int = 1,
    quantities: MaybeInt = None,
    points: MaybeInt = None,
    seed: int = 0,
    plot: MaybePath = None,
    out: MaybePath = None,
    force: bool = False,
    printing: Print = ALL,
) -> None:
    """Find the conserved quantities of degree two in trajectories: how many, which, and the evidence for each.

    Args:
        data: an .npz file with trajectories (or x) of shape (N, T, 2n), positions first, and dt (or t, the T times).
        demo: instead of data, a system with a known answer: oscillator, two-oscillators, pendulum or three-bodies.
        space: dimensions of the space in which bodies move; used to name the quantities.
        quantities: how many to look for at once (2 n^2 by default), or at most if n > 2 (24 by default).
        points: how many states to learn from (40 by default, 60 if n > 2).
        seed: random seed of the states, the features and the starts.
        plot: also draw singular values and generators to this file.
        out: also write result.json and report.html to this folder.
        force: replace an earlier run in that folder.
        printing: how much to print.

    Examples:
        autosym noether --demo oscillator
        autosym noether data.npz --space 2 --out r
    """
    if (data is None) == (demo is None):
        raise ValueError("name either a file of trajectories, or a system by --demo: " + ", ".join(DEMOS))
    refuse_overwriting([] if out is None else [out], force)
    torch.set_num_threads(1)  # matrices are small: more threads would only wait for each other
    if demo is not None:
        found, result = _demo(demo, quantities, points, seed)
    else:
        assert data is not None
        trajectories, dt, derivatives = read(data)
        found = discover(trajectories, dt, derivatives, space, _changed(Search(), quantities, points), seed)
        result = found.as_dict()
    if plot is not None:
        save_figure(found.plot(), plot)
    if out is not None:
        result |= {"title": demo or (data and data.name), "command": _command(data, demo, space, quantities, points, seed)}
        page = _written(result | {"provenance": provenance()}, out)
    print(json_format.dumps(result, allow_nan=False) if printing.json else _words(found, result))
    if out is not None:
        printing.say(page)


def _command(data: Path | None, demo: str | None, space: int, quantities: int | None, points: int | None, seed: int) -> str:
    """The command that repeats a search."""
    options = {"--demo": demo, "--space": space, "--quantities": quantities, "--points": points, "--seed": seed}
    given = [word for key, value in options.items() if value is not None for word in (key, str(value))]
    return shlex.join(["autosym", "noether", *([str(data)] if data else []), *given])


def _written(result: dict[str, Any], out: Path) -> str:
    """Write result.json, and report.html beside it if jinja2 is installed; returns a line that says what was written."""
    write(result, out / "result.json")
    try:
        return f"Written: {out / 'result.json'} and {write_text(conserved.html(result), out)}"
    except ImportError as error:
        return f"Written: {out / 'result.json'}; no report: {error}"


def _changed(search: Search, quantities: int | None, points: int | None) -> Search:
    asked: dict[str, Any] = {"quantities": quantities, "points": points}
    return replace(search, **{key: value for key, value in asked.items() if value is not None})


def _demo(name: str, quantities: int | None, points: int | None, seed: int) -> tuple[Discovery, dict[str, Any]]:
    """Twenty short trajectories of a system, and what is found in them, with the truth."""
    if name not in DEMOS:
        raise ValueError(f"no demo is called {name!r}; there are: {', '.join(DEMOS)}")
    system, search = DEMOS[name]
    generator = torch.Generator().manual_seed(seed)
    x = system.trajectories(system.starts(20, generator), 0.1, 20)
    found = discover(x, 0.1, space=system.space, search=_changed(search, quantities, points), seed=seed)
    truth = found.parallelness(system.conserved) if system.conserved else []
    return found, found.as_dict() | {"parallelness": truth, "demo": name, "true_symmetries": len(system.conserved)}


def _words(found: Discovery, result: dict[str, Any]) -> str:
    if "demo" not in result:
        return str(found)
    near = ", ".join(f"{value:.4f}" for value in result["parallelness"])
    return f"{found}\nThe truth: {result['true_symmetries']}" + (f"; parallelness with them: {near}" if near else "")


def read(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Trajectories, step or times, and velocities (if any) from an .npz file; nothing in it is executed."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with np.load(path, allow_pickle=False) as file:
            held = {key: file[key] for key in file.files}
    except (ValueError, TypeError, AttributeError, OSError) as error:  # TypeError: one array, as in .npy
        raise ValueError(f"{path} is not an .npz of arrays: write one by numpy.savez(path, trajectories=x, dt=0.1)") from error
    x, dt = (next((held[key] for key in keys if key in held), None) for keys in (("trajectories", "x"), ("dt", "t")))
    if x is None or dt is None:
        raise ValueError(f"{path} holds {', '.join(held) or 'nothing'}: it needs trajectories (or x) and dt (or t)")
    return x, dt, held.get("derivatives")
