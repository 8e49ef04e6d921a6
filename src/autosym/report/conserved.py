"""The report of conserved quantities as one HTML file, built like ``page``."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from autosym.report import charts, page, words
from autosym.report.findings import finite


def html(contents: Mapping[str, Any]) -> str:
    """The page of ``Discovery.as_dict()``, with title, command and provenance if they are known."""
    return page.rendered("conserved.html.jinja", view(finite(contents)))


def view(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the template shows, by section."""
    quantities, undecided, drifting = contents["quantities"], contents.get("undecided", []), contents["drifting"]
    return {
        "title": contents.get("title") or "Trajectories",
        "headline": headline(quantities),
        "cautions": list(cautions(contents)),
        "figures": figures(contents),
        "quantities": [
            {
                **q,
                "text": formula(q["text"]),
                "number": i + 1,
                "strength": words.strength(q["nats"]) if q["nats"] > 0 else "none",
                "uri": picture(G),
                "size": len(G),
            }
            for i, (q, G) in enumerate(zip(quantities, contents["generators"], strict=True))
        ],
        "drifting": drifting,
        "bars": bars(contents["singular_values"], contents.get("standing_out", len(quantities) + len(drifting))),
        "curves": curves(quantities, undecided, drifting),
        "log_evidence": contents["log_evidence"],
        "log_evidence_without": contents["log_evidence_without"],
        "starts": contents["starts"],
        "residual": contents["residual"],
        "points": contents["points"],
        "truth": contents.get("parallelness") if "demo" in contents else None,
        "signs": {"positive": page.POSITIVE, "negative": page.NEGATIVE},
        "command": contents.get("command"),
        "provenance": contents.get("provenance") or {},
    }


def headline(quantities: Sequence[Mapping[str, Any]]) -> str:
    """How many symmetries there are, and their names if known."""
    count = len(quantities)
    if not count:
        return words.counted(0)
    named = [q["name"] for q in quantities if q["name"]]
    more = f"{count - len(named)} without a known name" if len(named) < count else ""
    listed = ", ".join([*named, *([more] if more else [])])
    return f"{count} conserved {'quantity' if count == 1 else 'quantities'}: {listed}."


def cautions(contents: Mapping[str, Any]):
    """What a reader should know before believing the headline."""
    gain = contents["log_evidence"] - contents["log_evidence_without"]
    if gain <= 0:
        yield "The model has no more evidence with symmetries than without: add states."
    for q in contents.get("undecided", []):
        yield f"Undecided: {formula(q['text'])}. {words.undecided(q['doubt'])}"
    if contents["drifting"]:
        yield f"Not conserved: {len(contents['drifting'])} {words.DRIFTING}."
    idle = [q["name"] or q["text"] for q in contents["quantities"] if q["nats"] < 1]
    if idle:
        yield (
            f"Not needed to explain the velocities: {'; '.join(idle)}. Less than 1 nat is lost without one of these, as the others "
            "move states in the same way. They do not change, and count with the set."
        )


def figures(contents: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The numbers at the top: name, value, unit."""
    gain = contents["log_evidence"] - contents["log_evidence_without"]
    found = [
        ("conserved quantities", "symmetries", contents["symmetries"], ""),
        ("log evidence", "log_evidence", contents["log_evidence"], "nats"),
        ("against no symmetry", "gain", gain, "nats"),
        ("states learned from", "points", contents["points"], ""),
    ]
    return [dict(zip(("name", "key", "value", "unit"), one, strict=True)) for one in found]


def picture(generator: Sequence[Sequence[float]]) -> str:
    """G as a small picture: blue is negative, orange positive, full colour is its largest entry."""
    largest = max(abs(entry) for row in generator for entry in row) or 1.0
    return page.png([[round(127 * entry / largest) for entry in row] for row in generator])


def bars(values: Sequence[float], counted: int, width: int = 320, height: int = 150) -> dict[str, Any]:
    """The singular values as bars; the ``counted`` first ones stand out."""
    largest, bottom, top = max(values, default=0.0) or 1.0, height - 20, 14
    step = (width - 8) / max(len(values), 1)
    drawn = [
        {
            "x": round(4 + i * step + 1, 1),
            "width": round(max(step - 2, 1.0), 1),
            "y": round(bottom - (bottom - top) * value / largest, 1),
            "height": round((bottom - top) * value / largest, 1),
            "value": value,
            "counted": i < counted,
        }
        for i, value in enumerate(values)
    ]
    labelled = len(values) * 26 <= width  # there is room for a number over every bar
    return {"width": width, "height": height, "bottom": bottom, "top": top, "bars": drawn, "labelled": labelled}


def curves(
    quantities: Sequence[Mapping[str, Any]], undecided: Sequence[Mapping[str, Any]], drifting: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The change of every quantity along held-out trajectories, all charts on one scale."""
    shown = [(q["name"] or q["text"], q, "symmetric") for q in quantities]
    shown += [(f"{q['name'] or q['text']} (undecided)", q, "fc") for q in undecided]
    shown += [(f"{q['name'] or q['text']} (drifts)", q, "fc") for q in drifting]
    known = [abs(v) for _, q, _ in shown for path in q["along"] for v in path if v is not None and math.isfinite(v)]
    bound = max(1.0, max(known, default=0.0))
    made = []
    for name, q, colour in shown:
        series = [
            {"name": f"{i + 1}", "values": list(path), "colour": colour, "dash": "", "place": 0.0}
            for i, path in enumerate(q["along"])
        ]
        states = range(len(q["along"][0])) if q["along"] else []
        chart = charts.lines(name, list(states), series, bounds=(-bound, bound)) if series else None
        made += [chart | {"drift": q["drift"]}] if chart else []
    return made


def formula(text: str) -> str:
    """A quantity in symbols with raised exponents and true minus signs."""
    return text.replace("^2", "²").replace("-", "−")
