"""The tables of docs/findings.md, from the files of benchmarks/results that are there.

python benchmarks/findings.py
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def truth(result: dict) -> str:
    head = ""
    kinds = {"all": result, "those with more evidence than guessing": result["learned"], "comparisons": result["compared"]}
    for name, counts in kinds.items():
        low, high = counts["interval"]
        head += f"Of {name}: {counts['right']} of {counts['cases']} right ({low:.0%} to {high:.0%}), "
        head += f"{counts['wrongly_found']} wrongly found, {counts['wrongly_missed']} wrongly missed.\n\n"
    rows = [
        (name, f"{line['right']} of {line['cases']}", line["wrongly_found"], line["wrongly_missed"])
        for name, line in result["by_kind"].items()
    ]
    return head + markdown(("planted", "right", "wrongly found", "wrongly missed"), rows)


def approximations(result: dict) -> str:
    tasks = result["tasks"]
    names = list(tasks[0]["estimators"])
    rows = []
    for name in names:
        judged = [task["estimators"][name] for task in tasks]
        errors = [error for line in judged for error in line["error"].values()]
        same, best = (f"{sum(line[key] for line in judged)} of {len(judged)}" for key in ("same_symmetry", "same_best"))
        mean, least, most = sum(errors) / len(errors), min(errors), max(errors)
        rows.append((name, f"{mean:+.1f}", f"{least:+.1f} to {most:+.1f}", same, best))
    worst = max(cell["ais_uncertainty"] for task in tasks for cell in task["cells"])
    linear = ", ".join(
        f"{line['weights']} weights: exact {line['exact']:.2f}, AIS {line['ais']:.2f} ± {line['ais_uncertainty']:.2f}"
        for line in result["linear"]
    )
    head = f"AIS is uncertain by at most {worst:.1f} nats; on linear regression, {linear}.\n\n"
    return head + markdown(("estimator", "mean error (nats)", "from, to", "CONV or F-FC as AIS", "the best as AIS"), rows)


def shares(line: dict) -> str:
    return " / ".join(f"{100 * share:.0f}" for share in line["free_share"])


def priors(result: dict) -> str:
    rows = [
        (line["task"], line["prior"], f"{line['accuracy']:.1f}", f"{line['log_evidence']:.0f}", shares(line), line["seeds"])
        for line in result["table"]
    ]
    return markdown(("task", "prior", "held-out accuracy (%)", "log evidence", "free share by block (%)", "seeds"), rows)


def other_groups(result: dict) -> str:
    def percent(values: Sequence[float]) -> str:
        return " ".join(f"{100 * value:.0f}" for value in values)

    rows = [
        (line["group"], percent(line["moved"]), percent(line["upright"]), f"{line['larger_on_moved']} of {line['seeds']}")
        for line in result["table"]
    ]
    return markdown(("group", "share of its path on moved digits, by seed (%)", "on upright ones", "larger on moved"), rows)


def ablation(result: dict) -> str:
    rows = [
        (
            line["task"],
            line["free"],
            line["depth"],
            f"{line['accuracy']:.1f}",
            f"{line['log_evidence']:.0f}",
            f"{line['parameters']:.0f}",
            shares(line),
            f"{line['seconds']:.0f}",
        )
        for line in result["table"]
    ]
    header = ("task", "free path", "in blocks", "accuracy (%)", "log evidence", "parameters", "free share (%)", "seconds")
    return markdown(header, rows)


def costs(result: dict) -> str:
    rows = []
    for title, lines in {**result["layers"], "network": result["networks"]}.items():
        for name, line in lines.items():
            ratios = [f"{line[key]:.1f} ({line[f'{key}_ratio']:.2f}x)" for key in ("train_ms", "infer_ms", "kept_mib")]
            rows.append((title, name, line["parameters"], *ratios))
    head = f"{result['provenance']['device']}, batch {result['batch']}.\n\n"
    return head + markdown(("map", "layer", "parameters", "training (ms)", "inference (ms)", "kept for backward (MiB)"), rows)


TABLES = {
    "truth": truth,
    "approximations": approximations,
    "priors": priors,
    "other_groups": other_groups,
    "ablation": ablation,
    "costs": costs,
    "costs-cuda": costs,
}


def main() -> None:
    for name, table in TABLES.items():
        path = RESULTS / f"{name}.json"
        print(f"## {name}\n")
        print(table(json.loads(path.read_text())) if path.exists() else "not run yet", end="\n\n")


if __name__ == "__main__":
    main()
