"""Table 1: digits in one of four quadrants. Which digit? is symmetric under translation; which digit, in which quadrant? is not."""

from autosym.experiments.images import Run

TASKS = ("digit", "digit+quadrant")
CELLS = [
    Run("table1", task, model, method)
    for model in ("fc", "conv", "f-fc+conv")
    for method in ("map", "evidence")
    for task in TASKS
]
RUNS = {run.name: run for run in CELLS}

# Test accuracy as published; evidence is there called differentiable Laplace. The learned network by MAP is not in the paper.
PAPER = {
    (task, model, "theta", method): {"accuracy": accuracy}
    for (model, method), accuracies in {
        ("fc", "map"): (95.73, 95.10),
        ("conv", "map"): (99.38, 24.68),
        ("fc", "evidence"): (97.04, 95.46),
        ("conv", "evidence"): (99.23, 24.50),
        ("f-fc+conv", "evidence"): (98.86, 99.00),
    }.items()
    for task, accuracy in zip(TASKS, accuracies, strict=True)
}
