"""The tables of times on a GPU, from the file of gpu.py."""

from findings import made, markdown, read

SOLVED = ("21 of 1024x1024", "209 of 1024x1024", "256 of 256x256", "16 of 2048x2048")


def gpu() -> str:
    """Rows of gpu.py that have a goal, and what they are compared with in the same run."""
    result = read("gpu")
    paper, relaxed, goals = result["rows"]["paper"], result["rows"]["relaxed"], result["goals"]
    gradient = paper["f-fc+conv gradient of all samples"]
    rows = [
        ("epoch of F-FC+CONV, 50,000 images", paper["f-fc+conv epoch"], f"CONV: {paper['conv epoch']:.2f} s", "epoch"),
        (
            "its sampled evidence pass",
            paper["f-fc+conv sampled evidence"],
            f"a gradient of all: {gradient:.2f} s",
            "sampled evidence",
        ),
        (
            "its exact evidence pass",
            paper["f-fc+conv exact evidence"],
            f"a gradient of all: {gradient:.2f} s",
            "exact evidence",
        ),
    ]
    lines = [(what, f"{own:.2f} s", floor, f"{goals[f'paper/f-fc+conv {key}']:g} s") for what, own, floor, key in rows]
    lines += [
        (
            f"step of a relaxed CNN, {paths}, 60,000 images",
            f"{relaxed[f'step, {name} / plain']:.2f} times the plain network's",
            f"its epoch: {relaxed['epoch, plain']:.2f} s",
            f"{goals['relaxed/step, auto / plain']:g} times" if name == "auto" else "",
        )
        for name, paths in (("auto", "F-FC"), ("where", "waves"))
    ]
    return markdown(("work", "ours", "beside it, in the same run", "goal"), lines) + made([result], "python benchmarks/gpu.py")


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
    return markdown(header, lines) + made([result], "python benchmarks/gpu.py eigenvalues")


TABLES = {"gpu": gpu, "gpu-eigenvalues": eigenvalues}
