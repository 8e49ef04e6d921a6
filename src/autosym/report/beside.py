"""Two fits side by side as one HTML file, made from their contents (``findings``) and of the pieces of their own pages."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autosym.curvature.passes import alike
from autosym.evidence import verdicts
from autosym.evidence.record import nats
from autosym.report import page, words
from autosym.report.curves import evidence_of
from autosym.report.findings import finite, known

CLOSE = 10.0  # nats: another seed may change the evidence by as much


def html(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The page of two fits; each has its column, on a phone the first is above the second."""
    return page.rendered("beside.html.jinja", view([finite(one), finite(other)]))


def view(fits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything the template shows."""
    shown = [page.view(fit) for fit in fits]
    names = [one["title"] for one in shown]
    headline, cautions = compared(fits, names)
    return {
        "title": " and ".join(names),
        "headline": headline,
        "cautions": cautions,
        "fits": [one | {"curve": curve} for one, curve in zip(shown, evidence_of(fits), strict=True)],
        "figures": _paired([one["figures"] for one in shown]),
        "equivariance": _paired([_output(one["equivariance"]) for one in shown]),
        "legend": list({path["path"]: path for one in shown for path in one["legend"]}.values()),
        "provenance": shown[0]["provenance"],
    }


def compared(fits: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[str, list[str]]:
    """Which of two fits has more evidence, in one sentence, and cautions with what to do."""
    one, other = ((fit.get("evidence") or {}).get("log_evidence") for fit in fits)
    if one is None or other is None or not all(fit.get("fingerprint") for fit in fits):
        return "The evidence is not compared: a file does not say it.", ["Run both again with this version to compare them."]
    sums, others = (torch.tensor(fit["fingerprint"], dtype=torch.float64).reshape(5) for fit in fits)
    if any(fits[0].get(key) != fits[1].get(key) for key in ("likelihood", "samples")) or not alike(sums, others):
        return "The evidence is not compared: the fits are of different data.", []
    failed = [name for fit, name in zip(fits, names, strict=True) if verdicts.failed(known(fit))]
    if failed:
        return f"The evidence is not compared: that of {failed[0]} must not be used.", []
    lead, (first, second) = abs(one - other), names if one >= other else names[::-1]
    seeds = ["Another seed may change the evidence by as much. Fit both with other seeds before you decide."]
    if lead < 1:
        return f"The evidence does not decide between {first} and {second}: they differ by {nats(lead)} nats.", seeds
    said = f"The evidence prefers {first} to {second} by {nats(lead)} nats, which is {words.strength(lead)}."
    return said, seeds if lead < CLOSE else []


def _output(table: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The errors of the network itself, by group."""
    cells = table["rows"][0]["cells"] if table else []
    groups = table["groups"] if table else []
    return [
        {"name": group, "key": "equivariance", "value": cell["error"], "unit": "error"}
        for group, cell in zip(groups, cells, strict=True)
    ]


def _paired(columns: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Figures of several fits by name; what a fit lacks is None."""
    names = list(dict.fromkeys(figure["name"] for column in columns for figure in column))
    by_name = [{figure["name"]: figure for figure in column} for column in columns]
    return [{"name": name, "cells": [column.get(name) for column in by_name]} for name in names]
