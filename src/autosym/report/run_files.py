"""Reads the files of a run, decides which runs can be compared, and says what is wrong with a broken file."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path as File
from typing import Any

import torch

from autosym.curvature.passes import alike
from autosym.evidence import verdicts
from autosym.evidence.shares import PathShare
from autosym.linear.conv import Conv
from autosym.linear.dense import Pool
from autosym.linear.groups import GROUPS, nested
from autosym.linear.path import NOTHING, Kept
from autosym.report.findings import finite, known, ranked, thinned
from autosym.runtime.files import of_this_version as of_this_version
from autosym.runtime.files import read as read

PATH = {field.name for field in fields(PathShare) if field.default is MISSING}  # keys that every version has written


def load(run: File) -> dict[str, Any]:
    """What the files of a run say: result.json, with report.json and history.jsonl if they exist; or one file of results."""
    folder, file = (run, run / "result.json") if run.is_dir() else (run.parent, run)
    if not file.exists():
        raise FileNotFoundError(
            f"{file} does not exist: name the folder of a run (by `autosym fit` or `autosym run NAME`; `discover` writes its own "
            "report.html), or its result.json"
        )
    result = read(file)
    if not isinstance(result, dict) or not isinstance(result.get("symmetry"), list):
        raise ValueError(f"{file} is not the result of a fit. {_instead(folder, result)}")
    unknown = [path for path in result["symmetry"] if not isinstance(path, dict) or not set(path) >= PATH]
    if unknown:
        raise ValueError(f"{file} is of another version: a path in its symmetry lacks some of {', '.join(sorted(PATH))}")
    more: Any = {}
    if run.is_dir() and (folder / "report.json").exists():
        more = read(folder / "report.json")
    elif run.is_dir() and (folder / "history.jsonl").exists():
        more = {"history": _read_lines(folder / "history.jsonl")}
    if not isinstance(more, dict):
        raise ValueError(f"{folder / 'report.json'} is not what a run writes: delete it, or run again")
    with of_this_version(run):
        paths, history = [_as_written_now(path) for path in result["symmetry"]], thinned(more.get("history") or [])
        return finite({"title": _named(result) or str(run), **more, **result, "symmetry": paths, "history": history})


def _instead(folder: File, result: Any) -> str:
    """What to do with a file that is not the result of a fit."""
    for key, command in (("verdicts", "discover"), ("quantities", "noether")):
        if _key(result, key):
            return f"`autosym {command}` has written its own page: open {folder / 'report.html'}"
    if _key(result, "rows"):
        return "It is the summary of several runs: `autosym table` shows it. Make one by `autosym run NAME`"
    return "Make one by `autosym run NAME`"


def _as_written_now(path: Mapping[str, Any]) -> dict[str, Any]:
    """A path in the format of today: an older file does not say what a path keeps, but its name tells."""
    if "keeps" in path:
        return dict(path)
    name, group = path["path"], path["path"].removeprefix("gconv:")
    kept = {"conv": Conv.keeps, "s-conv": Conv.keeps, "pool": Pool.keeps}.get(name, Kept(every=True))
    if group != name:
        kept = Kept(equivariant=True, groups=nested(GROUPS[group]) if group in GROUPS else (group,))
    learned = any(part.endswith("omega") for part in path["precision"])
    return {**path, "keeps": asdict(kept if path["symmetric"] else NOTHING), "learned_omega": learned}


def _named(result: Mapping[str, Any]) -> str:
    return " · ".join(str(result["config"][key]) for key in ("task", "model", "method") if _key(result.get("config"), key))


def compare_runs(run: File, others: Iterable[File]) -> list[dict[str, Any]]:
    """The evidence of several runs on the same data, as ``alternatives`` gives it."""
    loaded = {str(one): load(one) for one in (run, *others)}
    rows, sums, kinds = [], {}, {}
    for name, found in loaded.items():
        with of_this_version(File(name)):
            if not all(found.get(key) for key in ("evidence", "samples", "fingerprint", "likelihood")):
                raise LookupError("it does not say its evidence, or not on which data")
            sums[name] = torch.tensor(found["fingerprint"], dtype=torch.float64).reshape(5)
            kinds[name] = (found.get("schedule") or {}).get("step"), found["evidence"].get("bound_of")
            title = f"{_named(found) or found['title']} ({name})"
            failed = verdicts.failed(known(found))
            row: dict[str, Any] = {
                "name": title,
                "log_evidence": float(found["evidence"]["log_evidence"]),
                "failed": failed is not None,
            }
            rows.append(row | {"warnings": [failed.unranked()] if failed else []})
    first, *rest = loaded
    for name in rest:
        if any(loaded[first][key] != loaded[name][key] for key in ("likelihood", "samples")) or not alike(
            sums[first], sums[name]
        ):
            what = "; ".join(f"{n}: {loaded[n]['samples']} samples, {loaded[n]['likelihood']}" for n in (first, name))
            raise ValueError(
                "evidence can be compared only on the same data (images, sizes, labels) and with the same likelihood, but these differ: "
                f"{what}"
            )
    for name, row in zip(loaded, rows, strict=True):
        row["warnings"] += _unlike(kinds[name], kinds.values())
    return ranked(rows)


def _unlike(own: tuple[Any, Any], kinds: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    """How the evidence of a run differs from other runs: precisions not learned, or a bound."""
    steps, bounds = (set(values) for values in zip(*kinds, strict=True))
    if own[0] == "none" and len(steps) > 1:
        yield "its precisions were not learned, but other models learned theirs: learn them too, or its prior may decide"
    if own[1] and len(bounds) > 1:
        yield f"its value is a lower bound of {own[1]}; other models have an estimate: fit all with the same nu"


def _key(value: Any, key: str) -> bool:
    return isinstance(value, dict) and key in value


def _read_lines(file: File) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON lines ({error}): it may have been cut off; run it again") from error
    if not all(isinstance(line, dict) and isinstance(line.get("epoch"), int) for line in lines):
        raise ValueError(f"{file} is not a history: every line must have an epoch; run it again")
    return lines
