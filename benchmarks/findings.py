"""The tables of docs/ that are made of the files in benchmarks/results.

python benchmarks/findings.py           prints them all; ``tables_of_docs.py`` puts them into the pages
"""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import breaking as breaking_runs
import noether_truth as noether_runs
import range_curve as range_curves
import real_table

RESULTS = Path(__file__).parent / "results"
NETWORKS = {"cnn": "CNN", "resnet20": "ResNet-20", "depthwise": "depthwise", "sequence": "1-d"}
QUESTIONS = {  # of the truth suite: what keeps the symmetry, and what does not
    "teacher": "teachers: convolutional (yes), dense or half dense (no)",
    "quadrant": "quadrants: the digit (yes), digit and quadrant (no)",
    "turned": "quarter turns: digits turned (yes) or upright (no)",
    "flipped": "mirror images: the digit (yes), digit and whether mirrored (no)",
    "regression": "numbers given by such teachers, with noise",
    "relaxed": "the same, of a trained CNN made free by `relax`",
}
ESTIMATORS = {
    "kronecker": "Kronecker, per block (the default of training)",
    "kronecker shared": "Kronecker, shared",
    "diagonal": "diagonal",
    "blocks": "exact blocks, one for each path",
    "whole": 'whole network (`curvature="whole"`)',
    "whole by probes": "whole network by probes",
    "kernel sampled": "kernel of a quarter of the samples, mean of ten draws",
    "variational": "variational, matrix normal",
}


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def made(results: Sequence[dict[str, Any]], script: str) -> str:
    """The line under a table: which script, machine and commit."""
    found = [result["provenance"] for result in results]
    devices = sorted({one["device"] for one in found})
    versions = sorted({one["torch"].split("+")[0] for one in found})
    commits = sorted({re.sub(r"^(\w{7})\w*", r"\1", one["commit"]) for one in found})  # "-dirty", if it says so, stays
    several = "s" if len(commits) > 1 else ""
    return f"\n\n*`{script}`; {' and '.join(devices)}; torch {', '.join(versions)}; commit{several} {', '.join(commits)}.*"


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def folder(name: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((RESULTS / name).glob("*.json"))]


def span(values: Sequence[float], form: str, unit: float = 1.0) -> str:
    """ "least to most", or one number if they are the same."""
    low, high = (f"{bound / unit:{form}}" for bound in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


# ---- planted symmetries


def truth_counts() -> str:
    result = read("truth")
    kinds = {
        "paths in one network, then `simplify`": result,
        "the same, of cases in which something was learned": result["learned"],
        "two networks, each trained by itself, compared": result["compared"],
    }
    rows = []
    for name, counts in kinds.items():
        low, high = counts["interval"]
        right = f"{counts['right']} of {counts['cases']} ({100 * low:.0f} to {100 * high:.0f} %)"
        rows.append((name, right, counts["wrongly_found"], counts["wrongly_missed"]))
    return markdown(("asked by", "right (95 % interval)", "wrongly found", "wrongly missed"), rows) + made(
        [result], "python benchmarks/truth.py"
    )


def truth() -> str:
    rows = []
    for question, words in QUESTIONS.items():
        row = [words]
        for symmetric in (True, False):
            cases = [
                case
                for case in read("truth")["all"]
                if case["question"] == question and case["symmetric"] is symmetric and not case["compared"]
            ]
            worth = [max(case["nats"]) for case in cases]
            nats = f"{max(worth):.1f} at most" if symmetric else span(worth, ",.0f")
            right = f"{sum(case['right'] for case in cases)} of {len(cases)}"
            row += [right, span([case["fitted"] for case in cases], ".0f", 0.01), nats]
        rows.append(row)
    third = ("broken before `simplify` (%)", "best path (nats)")
    return markdown(("planted", "right, if it is there", *third, "right, if it is not", *third), rows)


def breaking_truth() -> str:
    """F-FC (or a convolution beside the group's) against waves and contrasts, on the same planted cases."""
    found: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for name in ("truth", "truth-breaking"):
        for case in read(name)["all"]:
            if not case["compared"]:
                key = tuple(case[part] for part in ("question", "symmetric", "samples", "seed", "strength"))
                found[key][name] = case
    pairs = [pair for pair in found.values() if len(pair) == 2]
    kinds: dict[str, Callable[[dict], bool]] = {
        "translations": lambda case: case["question"] not in ("turned", "flipped"),
        "quarter turns and mirror images": lambda case: case["question"] in ("turned", "flipped"),
    }
    rows = []
    for kind, belongs in kinds.items():
        some = [(pair["truth"], pair["truth-breaking"]) for pair in pairs if belongs(pair["truth"])]
        right = [f"{sum(pair[side]['right'] for pair in some)} of {len(some)}" for side in (0, 1)]
        more = []
        for symmetric in (True, False):
            same = [pair for pair in some if pair[0]["symmetric"] is symmetric]
            wins = sum(a["log_evidence"]["learned"] > b["log_evidence"]["learned"] for a, b in same)
            more.append(f"{wins} and {len(same) - wins} of {len(same)}")
        rows.append((kind, *right, *more))
    header = (
        "symmetry",
        "right: F-FC or CONV",
        "right: `where` or `turn`",
        "more evidence, where it is there",
        "where it is not",
    )
    results = [read("truth"), read("truth-breaking")]
    return markdown(header, rows) + made(results, "python benchmarks/truth.py --breaking")


# ---- approximations


def approximations() -> str:
    result = read("approximations")
    rows = []
    for name, words in ESTIMATORS.items():
        judged = [task["estimators"][name] for task in result["tasks"]]
        errors = [error for line in judged for error in line["error"].values()]
        same, best = (f"{sum(line[key] for line in judged)} of {len(judged)}" for key in ("same_symmetry", "same_best"))
        rows.append((words, f"{statistics.fmean(errors):+.1f}", span(errors, "+.1f"), same, best))
    header = ("estimator", "mean error (nats)", "from, to", "CONV or F-FC as AIS", "the best of four as AIS")
    worst = max(cell["ais_uncertainty"] for task in result["tasks"] for cell in task["cells"])
    line = made([result], "python benchmarks/approximations.py --seeds 3")
    return markdown(header, rows) + line[:-1] + f" AIS itself is uncertain by {worst:.1f} nats at most.*"


def whole() -> str:
    result = read("whole")
    cells, goals = result["cells"], result["goals"]

    def times(key: str) -> str:
        return span([cell[f"{key}_seconds"] / cell["fit_seconds"] for cell in cells], ".2g") + " times"

    fast = {key: f"{count} of {len(cells)}" for key, count in goals["as_fast_as_a_fit"].items()}
    within = f"{goals['within_three_standard_errors']} of {len(cells)}"
    rows = (
        ("Kronecker factors", span([c["kronecker"] - c["exact"] for c in cells], "+.0f"), "no error known", "", ""),
        ("whole, factorised", "0", "exact", times("exact"), fast["exact"]),
        ("whole, by probes", span([c["error"] for c in cells], "+.1f"), within, times("probes"), fast["probes"]),
        ("whole, the way of the least work (the default)", "", "", times("route"), fast["route"]),
    )
    header = ("evidence", "error (nats)", "within three standard errors", "time, in default fits", "no slower than a fit")
    return markdown(header, rows) + made([result], "python benchmarks/whole.py")


def whole_large() -> str:
    result = read("whole_large")
    rows = [("Kronecker factors", f"{result['kronecker']:,.0f}", "", "", "")]
    for one in result["estimates"]:
        name = "whole, `seconds=60`, TF32" if one["tf32"] else "whole, `seconds=60`, float32"
        error, cut = f"{one['standard_error']:,.0f}", f"{one['truncation']:,.0f}"
        rows.append((name, f"{one['log_evidence']:,.0f}", error, cut, f"{one['seconds']:.0f}"))
    header = ("evidence", "log evidence", "standard error", "truncation, at most", "seconds")
    return markdown(header, rows) + made([result], "python benchmarks/whole_large.py")


def precision_steps() -> str:
    """By the whole network, less by Kronecker factors."""
    result = read("precision_steps")
    pairs: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for cell in result["cells"]:
        pairs[cell["network"], cell["head"], cell["seed"]][cell["by"]] = cell
    row = []
    for key, form in (("log_evidence", "+.0f"), ("accuracy", "+.2f"), ("nll", "+.3f")):
        gains = [pair["whole"][key] - pair["kronecker"][key] for pair in pairs.values()]
        error = statistics.stdev(gains) / len(gains) ** 0.5
        row.append(
            f"{statistics.fmean(gains):{form}} ± {error:{form[1:]}} (more in {sum(gain > 0 for gain in gains)} of {len(gains)})"
        )
    header = ("log evidence of the whole network", "test accuracy (points)", "test NLL")
    return markdown(header, [row]) + made([result], "python benchmarks/precision_steps.py")


# ---- networks and paths


def trained() -> str:
    results = [one for one in folder("real") if one["config"].get("paths", "f-fc") == "f-fc"]
    cells: dict[tuple, list[dict]] = defaultdict(list)
    for one in results:
        cells[tuple(one["config"][key] for key in ("network", "task", "images"))].append(one)
    words = {True: "yes", False: "no", None: "?"}
    tasks = list(real_table.TASKS)
    rows = []
    for (network, task, images), runs in sorted(
        cells.items(), key=lambda item: (-item[0][2], tasks.index(item[0][1]), list(NETWORKS).index(item[0][0]))
    ):
        accuracies = [f"{real_table.mean(runs, stage, 'accuracy'):.2f}" for stage in ("before", "fit", "hardened")]
        nats = [f"{real_table.mean(runs, stage, 'log_evidence') / images:.3f}" for stage in ("before", "fit")]
        shares = [real_table.mean(runs, stage, "network_share") for stage in ("simplified", "fit")]
        free = next((f"{100 * share:.1f}" for share in shares if share is not None), "?")
        expert, said = real_table.TASKS[task].symmetric, real_table.answer(runs)
        found = words[said] if said is expert else f"**{words[said]}**"
        place = task.replace("-", ", ").replace("place", "with place")
        rows.append((NETWORKS[network], place, f"{images:,}", len(runs), *accuracies, *nats, free, words[expert], found))
    header = (
        *("network", "task", "images", "runs", "accuracy before", "after fit", "hardened"),
        *("log evidence / N before", "after", "free (%)", "do shifts keep the label?", "found"),
    )
    return markdown(header, rows) + made(results, "python benchmarks/real.py --data DIR")


def breaking(tasks: Sequence[str], networks: Sequence[str]) -> str:
    cells: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for one in folder("breaking"):
        cells[one["config"]["task"], one["config"]["model"]].append(one)
    tasks = [task for task in tasks if any((task, network) in cells for network in networks)]
    rows = []
    for task in tasks:
        for network in networks:
            runs = cells.get((task, network), [])
            if not runs:
                continue
            nats = [one["row"]["evidence"] * one["samples"] for one in runs]
            broken = [100 * one["broken"] for one in runs if one["broken"] is not None] if network != "conv" else []
            accuracy = f"{statistics.fmean(one['row']['accuracy'] for one in runs):.1f}"
            share = span(broken, ".0f") if broken else ""
            symmetric = {True: "yes", False: "no", None: "?"}[breaking_runs.TASKS[task].symmetric]
            named = (BREAKING_TASKS[task], symmetric) if network == networks[0] else ("", "")
            rows.append((*named, network, f"{statistics.fmean(nats):,.0f}", span(nats, ",.0f"), share, accuracy))
    used = [one for task in tasks for network in networks for one in cells.get((task, network), [])]
    header = ("task", "symmetric?", "network", "log evidence", "of seeds", "broken (%)", "accuracy (%)")
    return markdown(header, rows) + made(used, "python benchmarks/breaking.py --data DIR")


BREAKING_TASKS = {
    "digit": "embedded digits in quadrants: the digit",
    "place": "the same: digit and quadrant",
    "mnist-digit": "MNIST in quadrants: the digit",
    "mnist-place": "the same: digit and quadrant",
    "mnist-translated": "translated MNIST (translations)",
    "mnist-rotated": "rotated MNIST (quarter turns)",
    "mnist-regular": "MNIST as it is (quarter turns)",
    "cifar-rotated": "rotated CIFAR-10 (quarter turns)",
    "cifar-regular": "CIFAR-10 (quarter turns)",
}


def large_images() -> str:
    result = read("large_images")
    plain = result["found"]["plain"]
    rows = []
    for name, one in result["found"].items():
        size, step = one["parameters"] / plain["parameters"], one["step"] / plain["step"]
        grown, slower = ("", "") if name == "plain" else (f" ({size:.1f} times)", f" ({step:.1f} times)")
        evidence = f"{one['evidence']:.0f} s, {one['gib']:.0f} GiB" if "evidence" in one else ""
        rows.append((name, f"{one['parameters'] / 1e6:.1f} million{grown}", f"{1e3 * one['step']:.1f} ms{slower}", evidence))
    header = (
        "ResNet-18 at 224x224",
        "parameters",
        f"step of {result['batch']} images",
        f"evidence pass, {result['images']:,} images",
    )
    return markdown(header, rows) + made([result], "python benchmarks/large_images.py")


def costs(name: str) -> str:
    result = read(name)
    rows = []
    for title, lines in {**result["layers"], "whole network": result["networks"]}.items():
        for layer, line in lines.items():
            ratios = [f"{line[f'{key}_ratio']:.2f}x" for key in ("train_ms", "infer_ms", "kept_mib")]
            rows.append((title, layer, f"{line['parameters']:,}", *ratios))
    header = ("map", "layer", "parameters", "training", "inference", "kept for the backward pass")
    device = " --device cuda" if name.endswith("cuda") else ""
    return markdown(header, rows) + made([result], f"python benchmarks/costs.py{device}")


def _shares(line: dict) -> str:
    return " / ".join(f"{100 * share:.0f}" for share in line["free_share"])


def priors() -> str:
    result = read("priors")
    rows = [
        (line["task"], line["prior"], f"{line['accuracy']:.1f}", f"{line['log_evidence']:.0f}", _shares(line))
        for line in result["table"]
    ]
    header = ("task", "prior", "held-out accuracy (%)", "log evidence (Student-t: a bound)", "free share by block (%)")
    return markdown(header, rows) + made([result], "python benchmarks/priors.py --seeds 3")


def other_groups() -> str:
    result = read("other_groups")
    rows = []
    for line in result["table"]:
        moved, upright = (", ".join(f"{100 * share:.0f}" for share in line[key]) for key in ("moved", "upright"))
        rows.append((line["group"], moved, upright, f"{line['larger_on_moved']} of {line['seeds']}"))
    header = ("group", "share of its path, data moved by it (%, by seed)", "upright data", "larger where the symmetry is")
    return markdown(header, rows) + made([result], "python benchmarks/other_groups.py --epochs 100")


def ablation() -> str:
    result = read("ablation")
    rows = [
        (
            *(line[key] for key in ("task", "free", "depth")),
            f"{line['accuracy']:.1f}",
            f"{line['log_evidence']:.0f}",
            f"{line['parameters']:,.0f}",
            _shares(line),
            f"{line['seconds']:.0f}",
        )
        for line in result["table"]
    ]
    header = (
        "task",
        "free path",
        "in blocks",
        "accuracy (%)",
        "log evidence",
        "parameters",
        "free share by block (%)",
        "seconds",
    )
    return markdown(header, rows) + made([result], "python benchmarks/ablation.py --seeds 2")


# ---- what a fit says


def cautions() -> str:
    result = read("cautions")
    rows = []
    for name, gains in result["gains"].items():
        nats = list(gains.values())
        more = f"{sum(gain > 0 for gain in nats)} of {len(nats)}"
        rows.append((f"`{name}`", more, f"{span(nats, '+.0f')}, median {statistics.median(nats):+.0f}"))
    line = made([result], "python benchmarks/cautions.py --seeds 10 --epochs 5 10 20 40")
    return markdown(("caution", "more evidence after its advice", "nats"), rows) + line


def predictive() -> str:
    result = read("predictive")
    columns = {"point": "point estimate", "tuned probit": "tuned", "kronecker probit": "posterior as it is"}
    rows = []
    for seed, problems in result["seeds"].items():
        for name, found in problems.items():
            cells = [found.get(key) for key in columns]
            shown = [f"{one['nll']:.3f} / {one['calibration_error']:.3f}" if one else "" for one in cells]
            rows.append((name, seed, *shown))
    return markdown(("network", "seed", *columns.values()), rows) + made([result], "python benchmarks/predictive.py")


def normalisation() -> str:
    result = read("normalisation")
    fits: dict[str, list[dict]] = defaultdict(list)
    for one in result["fits"]:
        fits[one["normalisation"]].append(one)
    rows = [
        (
            name,
            *(f"{statistics.fmean(one[key] for one in found):.0f}" for key in ("before", "after")),
            f"{statistics.fmean(one['accuracy'] for one in found):.1f}",
            f"{statistics.fmean(one['loss'] for one in found):.3f}",
        )
        for name, found in fits.items()
    ]
    header = ("normalisation", "log evidence at the start", "at the end", "test accuracy (%)", "test loss")
    return markdown(header, rows) + made([result], "python benchmarks/normalisation.py")


def soak() -> str:
    result = read("soak")
    counts = [f"{result['minutes']:.0f} minutes", *(result[key] for key in ("rounds", "kills", "runs_killed_and_resumed"))]
    row = (*counts, len(result["drifts"]), span(result["resident_mib"], ".1f"))
    header = (
        "minutes",
        "rounds",
        "kills",
        "runs killed and resumed to the end",
        "numbers that drifted",
        "resident memory (MiB)",
    )
    return markdown(header, [row]) + made([result], "python benchmarks/soak.py")


def range_curve() -> str:
    """Where the evidence of digits that were turned is highest, in degrees."""
    cells = read("range_curve")["cells"]
    return markdown(range_curves.HEADER, range_curves.rows(cells)) + made(cells, "benchmarks/range_curve.py")


def noether_truth() -> str:
    """Conserved quantities that were found, by what is conserved."""
    header, *rows = noether_runs.tabulated(folder("noether_truth"), folder("noether_truth_before"))
    return markdown(header, rows) + made(folder("noether_truth"), "benchmarks/noether_truth.py")


def noether_hard() -> str:
    """The same of poor data."""
    header, *rows = noether_runs.tabulated_hard(folder("noether_truth"))
    return markdown(header, rows)


TABLES: dict[str, Callable[[], str]] = {
    "truth-counts": truth_counts,
    "truth": truth,
    "breaking-truth": breaking_truth,
    "approximations": approximations,
    "whole": whole,
    "whole-large": whole_large,
    "precision-steps": precision_steps,
    "trained": trained,
    "breaking": lambda: breaking(list(BREAKING_TASKS)[:4], ("conv", "where+conv", "where:8+conv", "f-fc+conv")),
    "breaking-groups": lambda: breaking(list(BREAKING_TASKS)[4:], breaking_runs.CHAINS),
    "large-images": large_images,
    "costs": lambda: costs("costs"),
    "costs-cuda": lambda: costs("costs-cuda"),
    "priors": priors,
    "other-groups": other_groups,
    "ablation": ablation,
    "cautions": cautions,
    "predictive": predictive,
    "normalisation": normalisation,
    "soak": soak,
    "range-curve": range_curve,
    "noether-truth": noether_truth,
    "noether-hard": noether_hard,
}


if __name__ == "__main__":
    print("\n\n".join(f"## {name}\n\n{table()}" for name, table in TABLES.items()))
