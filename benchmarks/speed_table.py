"""The tables of times and of growing costs, from the files of gpu.py, speed.py and scaling.py."""

from findings import made, markdown, read
from scaling import exponent

SOLVED = ("21 of 1024x1024", "209 of 1024x1024", "256 of 256x256", "16 of 2048x2048")


def gpu() -> str:
    """Rows of gpu.py that have a goal, and what they are compared with in the same run."""
    result = read("gpu")
    rows, goals = result["rows"], result["goals"]
    paper, relaxed, simplify, symmetrise = (rows[name] for name in ("paper", "relaxed", "simplify", "symmetrise"))
    gradient = f"a gradient of all: {paper['f-fc+conv gradient of all samples']:.2f} s"
    lines = [
        (what, f"{paper[f'f-fc+conv {key}']:.2f} s", beside, f"{goals[f'paper/f-fc+conv {key}']:g} s")
        for what, key, beside in (
            ("epoch of F-FC+CONV, 50,000 images", "epoch", f"CONV: {paper['conv epoch']:.2f} s"),
            ("its sampled evidence pass", "sampled evidence", gradient),
            ("its exact evidence pass", "exact evidence", gradient),
        )
    ]
    lines += [
        (
            f"step of a relaxed CNN, {paths}, 60,000 images",
            f"{relaxed[f'step, {name} / plain']:.2f} times the plain network's",
            f"its epoch: {relaxed['epoch, plain']:.2f} s",
            f"{goals['relaxed/step, auto / plain']:g} times" if name == "auto" else "",
        )
        for name, paths in (("auto", "F-FC"), ("where", "waves"))
    ]
    few, many = ("8 copies, a quarter of the samples in evidence steps", "31 copies, all samples in evidence steps")
    lines += [
        (
            f"`simplify(fast=True)`, {simplify['candidates']} candidates, 8,000 images",
            f"{simplify['fast']:.0f} s, {simplify['fast, passes']} passes; {simplify['fast, sampled']:.0f} s with sampled curvature",
            f"a pass for each: {simplify['a pass for each path, counted']:.0f} s",
            f"{goals['simplify/fast']:g} s",
        ),
        (
            "`symmetrise`, rotation, 8,000 images, 60 epochs with a step each, `in_steps=8`",
            f"{symmetrise[f'60 epochs, {few}']:.0f} s",
            f"31 copies, all samples: {symmetrise[f'60 epochs, {many}']:.0f} s; without averaging: "
            f"{60 * symmetrise['epoch of the network itself']:.0f} s",
            f"{goals[f'symmetrise/60 epochs, {few}']:g} s",
        ),
    ]
    head = ("work", "ours", "beside it, in the same run", "goal")
    return markdown(head, lines) + _made(result, "paper", "relaxed", "simplify", "symmetrise")


def modes() -> str:
    """A gradient of ResNet-18 at 224x224, plain and relaxed, by the ways that torch has of computing it."""
    result = read("gpu")
    found, lines = result["rows"]["modes"], []
    for mode in ("float32", "channels last", "bfloat16", "bfloat16, channels last", "compiled"):
        cells = [mode]
        for name in ("plain", "where"):
            time, away = found.get(f"{name}, {mode}"), found.get(f"{name}, {mode}, gradient away by")
            cells.append("" if time is None else f"{1e3 * time:.1f}" + (f" ({100 * away:.1f} %)" if away else ""))
        lines.append(tuple(cells))
    return markdown(("computed in", "plain (ms)", "relaxed with waves (ms)"), lines) + _made(result, "modes")


def _made(result: dict, *rows: str) -> str:
    own = [{"provenance": result["made"][row]} for row in rows]
    return made(own, "python benchmarks/gpu.py" + (f" {rows[0]}" if len(rows) == 1 else ""))


def eigenvalues() -> str:
    """Many matrices solved together, against torch's solver."""
    result = read("gpu")
    found = result["rows"]["eigenvalues"]
    lines = [
        (
            name.replace("x", "×"),
            f"{1e3 * found[f'{name}, torch']:.0f}",
            f"{1e3 * found[f'{name}, together']:.0f}",
            f"{found[f'{name}, torch'] / found[f'{name}, together']:.1f}",
            f"{found[f'{name}, away by']:.0e}",
        )
        for name in SOLVED
    ]
    header = ("matrices", "torch's solver (ms)", "together (ms)", "times as fast", "eigenvalues differ by at most")
    return markdown(header, lines) + _made(result, "eigenvalues")


def cpu() -> str:
    """The rows of speed.py, beside their floor or the slow way."""
    rows = read("speed")["rows"]
    imports, resnet, simplify, draws = (rows[name] for name in ("import", "resnet", "simplify", "symmetrise"))
    floor = f"a gradient of the same network: {resnet['gradient, relaxed']:.2f} s (of the plain one: {resnet['gradient, plain']:.2f} s)"
    asked = ("digit", "digit and quadrant")

    def both(key: str, form: str) -> str:
        return " and ".join(f"{simplify[f'{name}, {key}']:{form}}" for name in asked)

    slow, fast = draws["31 copies, samples / 1"], draws["8 copies, samples / 1"]
    lines = [
        (
            "`import autosym`",
            f"`import torch`: {imports['torch']:.2f} s",
            f"{imports['autosym']:.2f} s",
            f"{imports['beyond torch']:.2f} s more",
        ),
        (
            "sampled evidence pass, relaxed ResNet-18 at its start, 256 images of 32x32",
            floor,
            f"{resnet['evidence, at its start']:.1f} s",
            f"{resnet['evidence, at its start / gradient, relaxed']:.1f}x",
        ),
        (
            "the same with all paths away from zero",
            "the same",
            f"{resnet['evidence, all paths moved']:.1f} s",
            f"{resnet['evidence, all paths moved / gradient, relaxed']:.1f}x",
        ),
        (
            "`simplify(fast=True)`, 4 candidates, 800 digits, two questions",
            f"a pass for each path, {both('a pass for each path, passes', 'd')} passes: {both('a pass for each path', '.1f')} s",
            f"{both('fast, passes', 'd')} passes: {both('fast', '.1f')} s",
            f"{both('fast / a pass for each path', '.2f')}x",
        ),
        (
            "`symmetrise` by rotation, 31 copies, an epoch with an evidence step, 256 images",
            f"31 copies in steps: {slow:.1f} s",
            f"`in_steps=8`: {fast:.1f} s; with a quarter of the samples in evidence steps: {draws['8 copies, samples / 4']:.2f} s",
            f"{fast / slow:.2f}x; {draws['fast / all']:.2f}x",
        ),
    ]
    return markdown(("work", "floor, or the slow way", "ours", "ratio"), lines) + made(
        [read("speed")], "python benchmarks/speed.py"
    )


GROWN = {"side": "side of the image"}
COSTS = {  # keys of scaling.py, their heads, and units
    "exact": ("exact evidence pass (s)", 1),
    "sampled": ("sampled pass (s)", 1),
    "step": ("training step (ms)", 1000),
    "exact, MiB": ("memory of an exact pass (MiB)", 1),
    "step, MiB": ("of a step (MiB)", 1),
}


def growth() -> str:
    """Costs before and after the last doubling of a size, and the exponent."""
    result = read("scaling")
    networks = result["networks"]
    lines = []
    for what in next(iter(networks.values())):
        for name, grown in networks.items():
            sizes = tuple(int(size) for size in grown[what])
            shown = []
            for key, (_, unit) in COSTS.items():
                found = [unit * cell[key] for cell in grown[what].values() if key in cell]
                shown.append(
                    f"{found[-2]:.3g} to {found[-1]:.3g}, **{round(exponent(sizes, found), 1) + 0.0:.1f}**" if found else ""
                )
            lines.append((f"{GROWN.get(what, what)}, {sizes[-2]} to {sizes[-1]}", f"`{name.partition('+')[0]}`", *shown))
    return markdown(("doubled", "network", *(head for head, _ in COSTS.values())), lines) + made(
        [result], "python benchmarks/scaling.py"
    )


TABLES = {"gpu": gpu, "gpu-modes": modes, "gpu-eigenvalues": eigenvalues, "cpu": cpu, "growth": growth}
