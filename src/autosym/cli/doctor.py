"""``autosym doctor``: is this installation sound? Versions, hardware, extras, write access, and the numbers against closed forms."""

import importlib
import importlib.metadata
import math
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from autosym.answer.equivariance import equivariance_error
from autosym.bayes.likelihoods import Gaussian
from autosym.evidence import exact
from autosym.evidence.whole import log_evidence
from autosym.nn import nets
from autosym.papers import datasets
from autosym.runtime.provenance import provenance
from autosym.surgery.hardening import harden
from autosym.surgery.relaxing import relax
from autosym.training.fitting import fit as fitted

EXTRAS = {  # of pip install "autosym[all]": module, package, what it is for
    "rich": ("rich", "tables and progress"),
    "tyro": ("tyro", "the command line"),
    "matplotlib": ("matplotlib", "plots and reports"),
    "jinja2": ("jinja2", "reports"),
    "sklearn": ("scikit-learn", "the embedded digits of demos"),
    "pooch": ("pooch", "downloads of MNIST and CIFAR-10"),
    "PIL": ("pillow", "folders of images"),
}
Test = Callable[[], str]


@dataclass(frozen=True)
class Check:
    """What was looked at, whether it is as it should be (None: it works without), and what was found."""

    name: str
    sound: bool | None
    found: str


def examined() -> list[Check]:
    """All checks, in the order in which they are printed."""
    return [*_versions(), *_hardware(), *_extras(), *_folders(), *_numbers()]


def _versions() -> list[Check]:
    own = provenance()
    commit = f", commit {own['commit'][:12]}" if own["commit"] else ""
    needed = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "safetensors"))
    return [
        Check("autosym", True, f"{own['autosym']}{commit}"),
        Check("python", True, f"{own['python']} on {platform.platform()}"),
        Check("torch", True, f"{own['torch']}; {needed}"),
    ]


def _hardware() -> list[Check]:
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    more = f"more threads than {cores} cores: they wait for each other; set OMP_NUM_THREADS={cores}"
    found = [Check("threads", threads <= cores, f"{threads} on {cores} cores" if threads <= cores else f"{threads}, {more}")]
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            memory = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
            found.append(Check(f"GPU {number}", True, f"{torch.cuda.get_device_name(number)}, {memory}"))
    elif torch.version.cuda:
        found.append(Check("GPU", None, f"torch is built for CUDA {torch.version.cuda}, but sees no GPU: check the driver"))
    else:
        found.append(Check("GPU", None, "none: this torch is built for the CPU"))
    return found


def _extras() -> list[Check]:
    missing = []
    for module, (package, purpose) in EXTRAS.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            missing.append(f"{package} ({purpose}): {error}")
    if not missing:
        return [Check("extras", True, ", ".join(package for package, _ in EXTRAS.values()))]
    return [Check("extras", None, f'pip install "autosym[all]" brings {missing_one}') for missing_one in missing]


def _folders() -> list[Check]:
    found = []
    for name, folder in (("this folder", Path.cwd()), ("data folder", datasets.place())):
        place = next(parent for parent in (folder, *folder.parents) if parent.exists())
        try:
            with tempfile.TemporaryFile(dir=place):
                found.append(Check(name, True, f"{folder} can be written"))
        except OSError as error:
            found.append(
                Check(name, None, f"{folder} cannot be written ({error.strerror}): name another by --out or $AUTOSYM_DATA")
            )
    return found


def _numbers() -> list[Check]:
    """Each test says what it found, or raises an error."""
    tests: dict[str, Test] = {
        "evidence": _evidence,
        "equivariance": _equivariance,
        "relax, fit, harden": _whole_way,
    }
    if torch.cuda.is_available():
        tests["GPU against CPU"] = _on_gpu
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tests are small: on a busy machine more threads wait for each other, for seconds
    try:
        return [_tried(name, test) for name, test in tests.items()]
    finally:
        torch.set_num_threads(threads)


def _tried(name: str, test: Test) -> Check:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Check(name, True, test())
    except Exception as error:  # whatever it is, it belongs into the report
        return Check(name, False, f"{type(error).__name__}: {error}")


def _near(what: str, one: float, other: float, tolerance: float) -> str:
    error = abs(one - other) / max(abs(other), 1.0)
    if not error <= tolerance:
        raise ArithmeticError(f"{what}: {one:.12g} is not {other:.12g}")
    return f"{what} to {error:.0e}" if other else f"{what} {error:.0e}"


def _evidence() -> str:
    """Laplace is exact for a linear regression at its posterior mean."""
    x, precision = torch.randn(40, 3, dtype=torch.float64), torch.full((3,), 2.0, dtype=torch.float64)
    y = x @ torch.randn(3, 1, dtype=torch.float64) + 0.3 * torch.randn(40, 1, dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(exact.posterior(x, y, precision, torch.tensor(0.09, dtype=torch.float64))[0].mT)
    right = float(exact.at(x, y, 2.0, 0.09).log_evidence)
    noise = Gaussian(0.3)
    found = [log_evidence(model, (x, y), noise, 2.0, curvature=way) for way in ("kronecker", "whole")]
    return "a linear regression's: " + ", ".join(
        _near(way, value, right, 1e-9) for way, value in zip(("Kronecker", "whole"), found, strict=True)
    )


def _equivariance() -> str:
    model = nets.build("gconv:c4", (1, 8, 8), 3, 2, (1, 2), (2, 2), hidden=2).double().eval()
    error = equivariance_error(model, "c4", torch.randn(4, 1, 8, 8, dtype=torch.float64)).output()["c4"]
    return _near("turning the image changes the output of a group convolution by", error, 0.0, 1e-10)


def _whole_way() -> str:
    x, y = torch.randn(120, 1, 8, 8), torch.arange(120) % 2
    x[y == 1, :, 2:6, 3] += 4.0
    model = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    relaxed = relax(model, x[:8])
    with torch.no_grad():
        _near("relax changes outputs by", float((relaxed(x) - model(x)).abs().max()), 0.0, 1e-4)
    fit = fitted(relaxed, (x, y), epochs=10, batch_size=32)
    plain = harden(fit, (x, y))
    right = float((plain(x).argmax(1) == y).double().mean())
    if right < 0.9:
        raise ArithmeticError(f"a bar in noise is told in {right:.0%} of cases only")
    return f"log evidence {float(fit.evidence.log_evidence):.1f} (guessing {-len(y) * math.log(2):.1f}), {right:.0%} right"


def _on_gpu() -> str:
    model = nets.build("f-fc+conv", (1, 8, 8), 3, 2, (1, 2), (2, 2), hidden=2).double()
    data = torch.randn(40, 1, 8, 8, dtype=torch.float64), torch.arange(40) % 3
    here = log_evidence(model, data)
    there = log_evidence(model.cuda(), (data[0].cuda(), data[1].cuda()))
    return _near("log evidence", there, here, 1e-9)
