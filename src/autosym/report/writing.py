"""Writes a report as one HTML file: from a fit, or from the files of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Any

from autosym.report import beside as side_by_side
from autosym.report import findings, page, run_files
from autosym.runtime import files, processes
from autosym.runtime.batching import Data
from autosym.training.fitted import Fit


def write(
    fit: Fit, path: str | File, data: Data | None = None, *, beside: Fit | Mapping[str, Fit] | None = None, **options: Any
) -> File:
    """Write what was learned as one HTML file that opens anywhere; needs the extra ``report`` (jinja2).

    ``data`` are labelled samples, best held out: they serve to measure equivariance and calibration. ``beside`` is another fit, or
    ``{"its title": fit}``: the page then shows both side by side. ``options`` go to ``findings.contents``: ``compare`` (the evidence of
    alternatives), ``groups``, ``title``.
    """
    if beside is None:
        return write_page(findings.contents(fit, data, **options), File(path))
    ((title, other),) = beside.items() if isinstance(beside, Mapping) else [("the other fit", beside)]
    options = {"title": "this fit", **options}
    pair = (findings.contents(fit, data, **options), findings.contents(other, data, **(options | {"title": title})))
    return write_text(side_by_side.html(*pair), File(path))


def write_page(contents: Mapping[str, Any], path: File) -> File:
    """Write the page of ``contents`` to the file ``path``, or to report.html if ``path`` is a folder."""
    return write_text(page.html(contents), path)


def write_text(text: str, path: File) -> File:
    """Write a page, whole or not at all, to the file ``path``, or to report.html if ``path`` is a folder."""
    path = path / "report.html" if path.is_dir() else path
    if processes.first():
        files.write(path, text)
    return path


def write_pair(run: File, other: File, path: File | None = None) -> File:
    """Write the page of two runs side by side from their files, to ``path`` or as beside.html in the folder of the first."""
    pair = [run_files.load(one) for one in (run, other)]
    if pair[0]["title"] == pair[1]["title"]:
        pair = [found | {"title": f"{found['title']} ({file})"} for found, file in zip(pair, (run, other), strict=True)]
    with run_files.of_this_version(run), run_files.of_this_version(other):
        return write_text(side_by_side.html(*pair), path or (run if run.is_dir() else run.parent) / "beside.html")


def write_run(run: File, path: File | None = None, compare: Sequence[File] = ()) -> File:
    """Write the page of a run from its files, to ``path`` or beside them; ``compare`` adds the evidence of other runs."""
    contents = run_files.load(run)
    if compare:
        contents["compare"] = run_files.compare_runs(run, compare)
    with run_files.of_this_version(run):
        return write_page(contents, path or (run if run.is_dir() else run.parent))


def try_write_run(run: File) -> str:
    """Write the page of a run beside its files if jinja2 is installed; returns a line that says where, or why not."""
    try:
        return f"Report: {write_run(run)}"
    except ImportError as error:
        return f"No report: {error}; then `autosym report {run}`"
