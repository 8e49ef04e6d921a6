"""Table 3: which group? Every layer of a small network has a free path, a convolution and a rotation-equivariant convolution."""

from autosym.papers.images import Run

MODEL = "f-fc+conv+gconv:c4"
# As published. MAP: test NLL, accuracy; evidence: test NLL, accuracy, -log evidence per sample; % shares of FC, CONV, GCONV.
_NUMBERS = {
    "mnist": (0.172, 97.59, 0.023, 99.21, 0.328, (10, 15, 75)),
    "translated-mnist": (0.812, 90.78, 0.053, 98.27, 0.216, (0, 23, 77)),
    "rotated-mnist": (0.819, 91.02, 0.136, 95.55, 0.896, (8, 8, 83)),
    "cifar-10": (3.540, 68.33, 0.552, 80.94, 0.926, (0, 44, 56)),
    "rotated-cifar-10": (5.953, 48.30, 1.236, 55.68, 1.630, (4, 14, 82)),
}
START = 0.1  # largest evidence with the first seed; tried 1 and 0.1 on all five tasks, 0.3 on three (docs/lab/schedule.md)
RUNS = {
    run.name: run
    for task in _NUMBERS
    for method in ("map", "evidence")
    for run in [Run(task, MODEL, method, table="table3", epochs=150 if "cifar" in task else 60, width=2, start=START)]
}


def _by_path(shares: tuple[int, int, int]) -> dict[str, float]:
    return {path: share / 100 for path, share in zip(("f-fc", "conv", "gconv:c4"), shares, strict=True)}


PAPER = {
    (task, MODEL, "theta", method): numbers
    for task, (nll, accuracy, nll_2, accuracy_2, evidence, shares) in _NUMBERS.items()
    for method, numbers in (
        ("map", {"nll": nll, "accuracy": accuracy}),
        ("evidence", {"nll": nll_2, "accuracy": accuracy_2, "evidence": -evidence, "shares": _by_path(shares)}),
    )
}
