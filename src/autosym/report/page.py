"""The report as one HTML file, made from its contents (``findings``). It can be read without network and without scripts."""

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from autosym.evidence.record import nats, per_sample
from autosym.evidence.verdicts import STRICT
from autosym.report import charts, words
from autosym.report.curves import bounded, curves, precisions, range_charts
from autosym.report.drawing import by_layer, css_class, legend
from autosym.report.findings import PICTURES, decided, finite
from autosym.runtime.provenance import VERSION

NEGATIVE, POSITIVE = (58, 142, 208), (224, 112, 42)  # weights of filters; visible on light and on dark
LAYERS = 16  # with more layers than this, each shows fewer pictures
MEASURED = {"training": "training ", "held out": "held-out "}  # samples; other data have no name
HYPERPARAMETERS = {"sigma_noise": "noise (standard deviation)"}  # others keep their own names
COMPARED = {
    "invariant": "should stay the same",
    "map": "should move along",
    "lifted map": "should move along, fields permuted",
    "lifted or invariant": "should stay the same, or its fields permuted",
}
MEASURABLE = 1e-5  # an equivariance error that is not larger is rounding


def html(contents: Mapping[str, Any]) -> str:
    """The page. If ``contents`` lacks something, the page says so and what to do about it."""
    return rendered("report.html.jinja", view(finite(contents)))


def rendered(template: str, shown: Mapping[str, Any]) -> str:
    """A template filled with ``shown``; text is escaped."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError("a report needs jinja2: pip install 'autosym[report]'") from error
    environment = Environment(
        loader=PackageLoader("autosym.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    shown_as = {"number": number, "percent": percent, "nats": in_nats, "figure": figure, "css": css_class}
    environment.filters |= shown_as
    environment.globals["version"] = VERSION
    return environment.get_template(template).render(shown)


def view(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the template shows, by section."""
    symmetry = contents["symmetry"]
    schedule = contents.get("schedule") or {}
    history = bounded(contents.get("history") or [])
    calibration, ranges = contents.get("calibration"), contents.get("ranges") or []
    found = decided(contents)
    rejected = contents.get("epoch") == 0 and not found.nothing
    return {
        "headline": words.NOT_GAINED if rejected else words.headline(found, ranges),
        "layers": [
            {"number": layer.number, "name": layer.name, "paths": rows, "words": words.predicate([layer])}
            for layer, rows in zip(found.layers, by_layer(symmetry).values(), strict=True)
        ],
        "cautions": [*([words.REJECTED] if rejected else []), *words.cautions(found)],
        "title": contents.get("title") or "A fit by autosym",
        "invariance": words.invariance(ranges),
        "started": words.started(ranges),
        "ranges": range_charts(history, schedule),
        "banks": [{"name": b["name"], "uris": [png(levels) for levels in b["pictures"]]} for b in contents.get("banks") or []],
        "figures": key_figures(contents),
        "rule": words.RULE if any(layer.verdict in ("strict", "nearly", "mixed") for layer in found.layers) else "",
        "whole": words.whole(contents.get("broken") or {}),
        "simplified": words.simplified(contents.get("simplification")),
        "measured_on": MEASURED.get(contents.get("measured_on") or "", ""),
        "legend": legend(symmetry),
        "evidence": contents.get("evidence"),
        "samples": contents.get("samples"),
        "kept_epoch": _earlier(contents),
        "curves": curves(history, symmetry, contents.get("samples"), schedule),
        "precisions": precisions(history, symmetry, schedule),
        "signs": {"positive": POSITIVE, "negative": NEGATIVE},
        "filters": filter_rows(contents.get("filters") or [], symmetry),
        "equivariance": equivariance(contents.get("equivariance") or []),
        "compare": comparison(contents.get("compare") or []),
        "calibration": calibration,
        "reliability": charts.diagonal(calibration["bins"]) if calibration else None,
        "command": contents.get("command"),
        "config": contents.get("config") or {},
        "schedule": schedule,
        "provenance": contents.get("provenance") or {},
    }


# ---- numbers


def number(value: Any, digits: int = 3) -> str:
    """A number to ``digits`` figures, with a true minus and powers of ten; None is a dash. Text stays as it is."""
    if value is None:
        return "–"
    if isinstance(value, (bool, str)) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f").replace("-", "−")
    size = abs(value)
    if size and not 1e-3 <= size < 1e6:
        power = math.floor(math.log10(size) + 1e-12)
        return f"{value / 10.0**power:.{min(digits, 3) - 1}f} × {words.power_of_ten(power)}".replace("-", "−")
    decimals = max(0, digits - 1 - math.floor(math.log10(size))) if size else 0
    return f"{value:,.{decimals}f}".replace(",", "\u202f").replace("-", "−")


def in_nats(value: float | None, error: float = 0.0) -> str:
    """A log evidence, in the digits of the command line."""
    return "–" if value is None else nats(value, error).replace("-", "−")


def figure(found: Mapping[str, Any]) -> str:
    """A number of the top, by its unit."""
    value, unit = found["value"], found["unit"]
    if unit == "share":
        return percent(value)
    if unit == "nats per sample":
        return per_sample(value).replace("-", "−")
    return in_nats(value, found.get("error", 0.0)) if unit == "nats" else number(value, 2 if unit == "error" else 4)


def percent(value: float | None) -> str:
    """A share as per cent, to one decimal; "< 0.1 %" if it would round to 0; None is a dash."""
    if value is None:
        return "–"
    return "< 0.1\u202f%" if 0 < value < 0.0005 else f"{100 * value:.1f}\u202f%"


def key_figures(contents: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The numbers at the top: name, value, how to show it."""
    row, evidence = contents.get("row") or {}, contents.get("evidence") or {}
    calibration = contents.get("calibration") or {}
    samples = contents.get("samples")
    total = evidence.get("log_evidence")
    each = total / samples if total is not None and samples else row.get("evidence")
    tested = row.get("accuracy") is not None  # a row of results is about held-out samples
    accuracy, error = (
        (row["accuracy"] / 100, row.get("calibration_error")) if tested else map(calibration.get, ("accuracy", "error"))
    )
    kind = MEASURED.get("held out" if tested else contents.get("measured_on") or "", "")
    of = "" if kind else " on the data given"
    learned = contents.get("hyperparameters") or {"sigma_noise": contents.get("sigma_noise")}  # as earlier files have it
    found = [
        ("log evidence", "evidence", total, "nats"),
        ("log evidence per sample", "evidence_per_sample", each, "nats per sample"),
        (f"{kind}accuracy{of}", "accuracy", accuracy, "share"),
        (f"{kind}calibration error{of}", "calibration_error", error, "share"),
        ("effective parameters", "effective_parameters", contents.get("effective_parameters"), ""),
        ("parameters", "parameters", contents.get("parameters", row.get("parameters")), ""),
        ("training samples", "samples", samples, ""),
        *((HYPERPARAMETERS.get(name, name), name, value, "") for name, value in learned.items()),
    ]
    return [dict(zip(("name", "key", "value", "unit"), one, strict=True)) for one in found if one[2] is not None]


# ---- filters


def filter_rows(filters: Sequence[Mapping[str, Any]], symmetry: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The pictures of each part of each path, by layer, as data URIs."""
    kinds = {(path["layer"], path["path"]): path for path in symmetry}
    found: dict[str, dict[str, Any]] = {}
    numbers = {layer: number for number, layer in enumerate(by_layer(symmetry), 1)}
    shown = max(1, min(PICTURES, LAYERS * PICTURES // max(len(numbers), 1)))
    for one in filters:
        entry = found.setdefault(one["layer"], {"name": one["layer"], "number": numbers.get(one["layer"]), "parts": []})
        path = kinds.get((one["layer"], one["path"]), {"path": one["path"], "symmetric": False, "share": None})
        entry["parts"].append(
            {
                "label": one["path"] if one["part"] in ("", "linear") else f"{one['path']} {one['part']}",
                "path": path,
                "uris": [png(levels) for levels in one["pictures"][:shown]],
                "of": one["of"],
                "scale": one["scale"],
                "size": f"{len(one['pictures'][0])} × {len(one['pictures'][0][0])}",
                "faded": path["share"] is not None and path["share"] < STRICT,
            }
        )
    return list(found.values())


def png(levels: Sequence[Sequence[int]]) -> str:
    """Levels from -127 to 127 as a data URI: blue to orange, more transparent near 0 (by the square root), for any background.

    A palette of 61 colours keeps a picture at a few hundred bytes.
    """
    shades = range(-30, 31)
    palette = bytes(c for shade in shades for c in (NEGATIVE if shade < 0 else POSITIVE))
    alpha = bytes(round(255 * math.sqrt(abs(shade) / 30)) for shade in shades)
    rows = b"".join(b"\0" + bytes(round(max(-127, min(127, level)) * 30 / 127) + 30 for level in row) for row in levels)
    header = struct.pack(">IIBBBBB", len(levels[0]), len(levels), 8, 3, 0, 0, 0)
    parts = ((b"IHDR", header), (b"PLTE", palette), (b"tRNS", alpha), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    chunks = (struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d)) for kind, d in parts)
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()


# ---- measured equivariance, alternatives


def equivariance(errors: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """A table of layers by groups, the output first; ``length`` is the error on a log scale from rounding (1e-7) to 1.

    A layer without any error, now or before, is left out: its outputs are zero, or not finite.
    """
    if not errors:
        return None
    groups = list(dict.fromkeys(row["group"] for row in errors))
    cells = {(row["layer"], row["group"]): row for row in errors}
    named = list(dict.fromkeys((row["layer"], row["kind"]) for row in errors))
    rows = []
    for layer, kind in sorted(named, key=lambda one: one[0] != ""):
        row = [cells.get((layer, group), {"error": None, "compared": None}) for group in groups]
        if layer and all(cell["error"] is None and cell.get("given") is None for cell in row):
            continue
        compared = dict.fromkeys(COMPARED.get(cell["compared"], cell["compared"]) for cell in row if cell["compared"])
        rows.append({"layer": layer, "kind": kind, "compared": " or ".join(compared), "cells": [_cell(cell) for cell in row]})
    given = any(cell["given"] is not None for row in rows for cell in row["cells"])
    return {"groups": groups, "rows": rows, "given": given}


def _cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    error, given = cell["error"], cell.get("given")
    length = 0.0 if not error else max(0.0, min(1.0, 1 + math.log10(error) / 7))
    rounding = error is not None and max(error, given or 0.0) <= MEASURABLE
    return {"error": error, "given": given, "length": round(100 * length, 1), "rounding": rounding}


def _lead(best: float | None, own: float | None, behind: float) -> float:
    """By how many nats the best is more probable, errors of the evidence included; without probabilities, by the evidence alone."""
    return math.log(best / own) if best and own else behind


def comparison(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The alternatives, the best first, failed ones last, and how far behind they are: in nats, as odds, in words."""

    def rank(row: Mapping[str, Any]) -> tuple[bool, float]:
        return bool(row.get("failed")), math.inf if row["log_evidence"] is None else -row["log_evidence"]

    ordered = sorted(rows, key=rank)
    best = ordered[0]["log_evidence"] if ordered and not ordered[0].get("failed") else None
    found = []
    for row in ordered:
        ranked = best is not None and row["log_evidence"] is not None and not row.get("failed")
        behind = best - row["log_evidence"] if ranked else None
        lead = _lead(ordered[0].get("probability"), row.get("probability"), behind) if behind else None
        odds, strength = (words.odds(lead), words.strength(lead)) if lead is not None else (None, None)
        strength = "it has failed" if row.get("failed") else strength
        known = {"probability": row.get("probability"), "behind": behind, "odds": odds, "strength": strength}
        found.append({"name": row["name"], "log_evidence": row["log_evidence"], "warnings": row.get("warnings") or [], **known})
    return found


def _earlier(contents: Mapping[str, Any]) -> int | None:
    """The epoch whose network was kept, if it is not the last."""
    epoch, history = contents.get("epoch"), contents.get("history") or ()
    return epoch if epoch and history and epoch < history[-1]["epoch"] else None
