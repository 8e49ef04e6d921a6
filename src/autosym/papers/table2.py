"""Table 2: CIFAR-10, flipped and cropped. Which networks become convolutional, and how accurate are they?"""

from dataclasses import replace

from autosym.papers.images import Run

SETTINGS: dict[tuple[str, str], dict] = {
    ("fc", "theta"): {"epochs": 20, "every": 5},
    ("conv", "theta"): {"epochs": 400, "every": 5},
    ("fc+conv", "theta"): {"epochs": 60, "every": 5},
    ("f-fc", "theta"): {"epochs": 150},
    ("f-fc+conv", "theta"): {"epochs": 400, "every": 5, "lr": 0.03},
    ("s-fc", "u"): {"epochs": 100},
    ("s-conv", "u"): {"epochs": 200},
    ("s-fc+s-conv", "u"): {"epochs": 200},
    ("s-fc", "omega"): {"epochs": 60},
    ("s-conv", "omega"): {"epochs": 100},
    ("s-fc+s-conv", "omega"): {"epochs": 100},
}
FEWER = {"table2/fc+conv/map": 40}  # epochs, instead of those in SETTINGS
RUNS = {
    run.name: replace(run, epochs=FEWER.get(run.name, run.epochs))
    for (model, prior), settings in SETTINGS.items()
    for run in (Run("cifar-10", model, method, table="table2", prior=prior, **settings) for method in ("map", "evidence"))
}

# As published. MAP: test NLL, test accuracy; evidence: test NLL, test accuracy, -log evidence per sample.
_NUMBERS = {
    ("fc", "theta"): (2.423, 64.42, 1.319, 52.36, 1.896),
    ("conv", "theta"): (1.184, 82.81, 0.464, 84.07, 1.022),
    ("fc+conv", "theta"): (1.713, 76.93, 0.489, 83.32, 1.019),
    ("f-fc", "theta"): (4.291, 50.47, 1.307, 53.38, 2.119),
    ("f-fc+conv", "theta"): (1.343, 81.61, 0.468, 83.92, 1.277),
    ("s-fc", "u"): (5.614, 50.21, 1.496, 46.18, 1.926),
    ("s-conv", "u"): (0.604, 82.53, 0.562, 81.29, 1.037),
    ("s-fc+s-conv", "u"): (5.485, 58.80, 0.538, 81.55, 0.978),
    ("s-fc", "omega"): (7.783, 49.69, 1.319, 52.22, 1.813),
    ("s-conv", "omega"): (0.913, 81.84, 0.549, 81.20, 1.055),
    ("s-fc+s-conv", "omega"): (2.040, 77.97, 0.564, 80.63, 1.067),
}
PAPER = {
    ("cifar-10", model, prior, method): numbers
    for (model, prior), (nll, accuracy, nll_2, accuracy_2, evidence) in _NUMBERS.items()
    for method, numbers in (
        ("map", {"nll": nll, "accuracy": accuracy}),
        ("evidence", {"nll": nll_2, "accuracy": accuracy_2, "evidence": -evidence}),
    )
}
