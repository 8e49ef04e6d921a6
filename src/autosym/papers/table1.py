"""Table 1: digits in one of four quadrants. The task "digit" is symmetric under translation; "digit+quadrant" is not."""

from autosym.papers.images import Run

TASKS = ("digit", "digit+quadrant")
SETTINGS: dict[tuple[str, str], dict] = {
    ("fc", "map"): {"epochs": 20},
    ("fc", "evidence"): {"epochs": 20, "every": 5},
    ("conv", "map"): {"epochs": 40},
    ("conv", "evidence"): {"epochs": 40, "every": 5},
    ("f-fc+conv", "map"): {"epochs": 80},
    ("f-fc+conv", "evidence"): {"epochs": 100},
}
CELLS = [
    Run(task, model, method, table="table1", **settings) for (model, method), settings in SETTINGS.items() for task in TASKS
]
RUNS = {run.name: run for run in CELLS}

# Test accuracy as published. The paper calls evidence "differentiable Laplace". It has no MAP result for the learned network.
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
