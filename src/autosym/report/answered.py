"""The report of ``discover`` as one HTML file, built like ``page``: its headline is the verdict in one plain sentence."""

from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Any

from autosym.answer.answers import Answer
from autosym.report import page
from autosym.report.findings import finite
from autosym.report.writing import write_text

SPOKEN = {
    "translations": "shifts",
    "c2": "half turns",
    "c4": "quarter turns",
    "d4": "quarter turns and mirror images",
    "flip-horizontal": "left-right mirror images",
    "flip-vertical": "up-down mirror images",
}


def write(
    answer: Answer, path: str | File, title: str = "", command: str = "", provenance: Mapping[str, Any] | None = None
) -> File:
    """Write the answer as one HTML file that opens anywhere; needs the extra ``report`` (jinja2)."""
    contents = answer.as_dict() | {"title": title, "command": command, "provenance": dict(provenance or {})}
    return write_text(html(contents), File(path))


def html(contents: Mapping[str, Any]) -> str:
    """The page of ``Answer.as_dict()``, with title, command and provenance if they are known."""
    return page.rendered("answer.html.jinja", view(finite(contents)))


def headline(verdicts: Sequence[Mapping[str, Any]]) -> str:
    """All verdicts in one sentence."""
    by = {what: [spoken(v["symmetry"]) for v in verdicts if v["judgement"] == what] for what in ("yes", "no", "undecided")}
    said = [f"The data are symmetric under {_listed(by['yes'])}"] if by["yes"] else []
    if by["no"]:
        said.append(
            f"not under {_listed(by['no'], 'or')}" if said else f"The data are not symmetric under {_listed(by['no'], 'or')}"
        )
    if by["undecided"]:
        said.append(
            f"whether they are under {_listed(by['undecided'])} is undecided"
            if said
            else f"Whether the data are symmetric under {_listed(by['undecided'])} is undecided"
        )
    return f"{', '.join(said[:-1])}{', but ' if len(said) > 1 else ''}{said[-1]}."


def spoken(symmetry: str) -> str:
    """The name of a symmetry in plain words."""
    return SPOKEN.get(symmetry, symmetry)


def view(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the template shows, by section."""
    verdicts, candidates = contents["verdicts"], contents["candidates"]
    values = [c["log_evidence"] for c in candidates if c["log_evidence"] is not None]
    low, high = min(values, default=0.0), max(values, default=0.0)
    return {
        "title": contents.get("title") or "Which symmetries do these data have?",
        "headline": headline(verdicts),
        "verdicts": [
            v | {"name": spoken(v["symmetry"]), "breaking_text": nats(v["breaking"]), "tie_text": nats(v["tie"])}
            for v in verdicts
        ],
        "figures": figures(contents),
        "candidates": [
            c | {"behind": high - c["log_evidence"], "length": _length(c["log_evidence"], low, high)} for c in candidates
        ],
        "notes": contents["notes"],
        "samples": contents["samples"],
        "command": contents.get("command"),
        "provenance": contents.get("provenance") or {},
    }


def nats(margin: Mapping[str, Any]) -> str:
    """A margin with its error; one that a failed network gave is not a number."""
    if margin["nats"] is None:
        return "all of it" if margin["sign"] > 0 else "nothing"
    error = "an unknown error" if margin["error"] is None else f"{margin['error']:.0f} nats"
    return f"{margin['nats']:+.0f} ± {error}".replace("-", "−")


def figures(contents: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The numbers at the top: name, key, value."""
    best = next(c for c in contents["candidates"] if c["network"] == contents["best"])
    found: list[tuple[str, str, Any, str]] = [
        ("training samples", "samples", contents["samples"], ""),
        ("networks tried", "networks", len(contents["candidates"]), ""),
        ("fits", "runs", sum(c["runs"] for c in contents["candidates"]), ""),
        ("log evidence of the best", "evidence", best["log_evidence"], "nats"),
    ]
    return [dict(zip(("name", "key", "value", "unit"), one, strict=True), error=best["error"]) for one in found]


def _length(value: float, low: float, high: float) -> float:
    return 100.0 if high <= low else round(5 + 95 * (value - low) / (high - low), 1)


def _listed(names: Sequence[str], word: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"
