"""What becomes of one network of the zoo: relaxed, one evidence step, hardened, exported; each time, is it the same function?"""

from collections import Counter
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

import autosym
from autosym.bayes.priors import Prior
from autosym.evidence import kernel
from autosym.linear.path import Path
from autosym.nn.layers import Relaxed
from families import CLASSES, Family

PATHS = "auto"  # what relax does if nothing is asked for
SAME = 1e-8  # of the spread of the outputs over samples, in float64: below it two functions are one
CONVOLUTION, DENSE = ("conv",), ("pool", "rest")  # what relax makes of the given layers themselves
SHAKEN = 3  # relaxed layers whose free paths get weights before hardening; all others start at zero


@dataclass
class Visit:
    """Numbers of layers by outcome; how far the function moved, in units of the spread of its outputs; what went wrong, if anything."""

    model: str
    size: int
    paths: str = ""  # the free paths of convolutions
    parameters: int = 0
    relaxed_parameters: int = 0
    spread: float = 0.0
    relaxed: int = 0
    kept: int = 0
    frozen: int = 0
    relax_moved: float | None = None
    evidence: float | None = None
    harden_moved: float | None = None
    export_moved: float | None = None
    why: str = ""

    def kept_function(self, stage: str) -> bool:
        moved = asdict(self)[f"{stage}_moved"]
        return moved is not None and moved <= SAME


def visit(family: Family, paths: str = PATHS) -> Visit:
    """Relax, take one evidence step, harden, export; an error ends the visit, and is told."""
    torch.manual_seed(0)
    shape = (3, family.size, family.size)
    model = lived_in(family.build().double(), shape)
    found = Visit(family.model, family.size, parameters=_count(model))
    x, other, y = (torch.randn(3, *of, dtype=torch.float64) for of in (shape, shape, (CLASSES,)))
    with torch.no_grad():
        before = model(other)
    found.spread = float(_spread(before) / before.norm())
    stage = "relax"
    try:
        relaxed = autosym.relax(model, x, paths)
        outcomes = Counter(note.outcome for note in relaxed.relaxation.layers)
        found.relaxed, found.kept, found.frozen = (outcomes[outcome] for outcome in ("relaxed", "kept", "frozen"))
        found.paths = "+".join(
            sorted({path for note in relaxed.relaxation.layers for path in note.paths} - {*CONVOLUTION, *DENSE})
        )
        found.relaxed_parameters = _count(relaxed)
        found.relax_moved = _moved(relaxed, other, before)
        stage = "evidence"
        found.evidence = _evidence_step(relaxed, x, y)
        stage = "harden"
        _shake(relaxed)
        with torch.no_grad():
            wanted = relaxed(other)
        hard = autosym.harden(relaxed, (x, y), tolerance=0.0)
        found.harden_moved = _moved(hard, other, wanted)
        stage = "export"
        program = torch.export.export(hard, (other,))
        found.export_moved = _moved(program.module(), other, wanted)
    except Exception as error:
        found.why = f"{stage}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return found


@torch.no_grad()
def lived_in(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """No parameter is constant, and running statistics are near those of random images: whatever is dropped changes the outputs."""
    noise, dtype = torch.Generator().manual_seed(0), next(model.parameters()).dtype
    for parameter in model.parameters():
        if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
            small = abs(float(parameter.flatten()[0])) < 0.5  # biases and layer scales; all others are scales
            random = torch.rand(parameter.shape, generator=noise)
            parameter.copy_(random * 0.6 - 0.3 if small else random + 0.5)
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    model.train()(torch.randn(8, *shape, generator=noise, dtype=dtype))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.running_mean += 0.3 * norm.running_var.sqrt() * torch.randn(norm.running_mean.shape, generator=noise)
        norm.running_var *= 0.5 + torch.rand(norm.running_var.shape, generator=noise)
    return model.eval()


def _evidence_step(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The log evidence after one closed-form step of all precisions, by the kernel of all rows: exact, and cheap for few samples."""
    at = kernel.at(model, (x, y), "gaussian")  # whose curvature does not vanish where outputs are large
    prior = Prior(at.names)
    start = prior.log_precision.detach().clone()
    at.mackay(prior)
    value = float(at(prior).log_evidence)
    if not torch.isfinite(torch.tensor(value)) or torch.equal(start, prior.log_precision.detach()):
        raise ArithmeticError(f"the evidence step changed no precision, or ended at {value}")
    return value


@torch.no_grad()
def _shake(model: nn.Module) -> None:
    """Weights for the free paths of a few layers, first, middle and last, so that hardening has something to merge."""
    layers = [module for module in model.modules() if isinstance(module, Relaxed)]
    for index in sorted({0, len(layers) // 2, len(layers) - 1})[:SHAKEN] if layers else ():
        for name in layers[index].free:
            for part in layers[index][name].modules():
                if isinstance(part, Path):
                    part.weight += 0.3 * part.size() * torch.randn_like(part.weight)


def _spread(f: Tensor) -> Tensor:
    return (f - f.mean(0)).norm()


@torch.no_grad()
def _moved(model: nn.Module, x: Tensor, before: Tensor) -> float:
    """|f - f'| / |f - mean f|."""
    return float((model(x) - before).norm() / _spread(before))


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
