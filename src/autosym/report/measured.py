"""What a report measures on data: equivariance of the network and of the one that was given, and calibration."""

import copy
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from autosym.answer.equivariance import SHIFTS, equivariance_error
from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.curvature.passes import Pass, alike
from autosym.evidence.predictive import reliability, scores
from autosym.linear.groups import GROUPS, Group
from autosym.runtime.batching import Data, batches, to_model
from autosym.training.fitted import Fit

GROUPS_SHOWN = (SHIFTS, "c4", "flip-horizontal")


def measured(fit: Fit, data: Data, groups: Sequence[str | Group]) -> dict[str, Any]:
    """Equivariance errors if the inputs are images, and calibration if the targets are classes."""
    x = next(batches(data, 1), (torch.empty(0),))[0]
    fitting = [group for group in groups if _acts_on(group, x)]
    classes = likelihoods.classes(fit.likelihood, fit.estimate.outputs)
    return {
        "equivariance": equivariance(fit, data, fitting) if fitting else None,
        "calibration": calibration(fit.model, data, fit.likelihood) if classes else None,
    }


def equivariance(fit: Fit, data: Data, groups: Sequence[str | Group]) -> list[dict[str, Any]]:
    """The error of every layer under every group, and that of the network as it was given, where the fit knows it."""
    rows = [asdict(row) for row in equivariance_error(fit.model, groups, data)]
    if not fit.given or fit.nothing_gained:
        return rows
    before = copy.deepcopy(fit.model)
    before.load_state_dict(dict(fit.given))
    given = equivariance_error(before, groups, data)
    return [row | {"given": then.error} for row, then in zip(rows, given, strict=True)]


def kind(fit: Fit, data: Data) -> str:
    """Whether these are the training data."""
    own, shown = fit.estimate.fingerprint, Pass(fit.model, data, fit.likelihood, 1000, alone=True, allow_partial=True)
    for _ in shown:
        pass
    return "training" if own is not None and alike(shown.fingerprint.cpu(), own) else "given"


def _acts_on(group: str | Group, x: Tensor) -> bool:
    """Whether a group acts on such inputs: quarter turns need a square. ``equivariance_error`` refuses unknown names."""
    if x.dim() != 4 or (group == SHIFTS and max(x.shape[-2:]) < 2):
        return False
    found = GROUPS.get(group) if isinstance(group, str) else group
    try:
        if found is not None:
            found.check_size(x.shape[-2:])
    except ValueError:
        return False
    return True


@torch.no_grad()
def calibration(model: nn.Module, data: Data, likelihood: Likelihood) -> dict[str, Any]:
    """Confidence and accuracy of the network's class probabilities, in bins; overall accuracy; mean negative log-likelihood."""
    outputs, labels = [], []
    for x, y in batches(data, 1000):
        x, y = to_model(x, y, model, "the report's data")
        outputs.append(model(x).cpu())
        labels.append(y.cpu())
    if not outputs:
        raise ValueError("the report's data hold no samples: pass labelled samples, or data=None")
    f, y = torch.cat(outputs), torch.cat(labels)
    likelihood.check(f.shape[1], y)
    logits, y = likelihood.logits(f), y.long().flatten()
    assert logits is not None
    found = scores(logits, y)
    known = {"accuracy": found.accuracy, "nll": found.nll, "error": found.calibration_error}
    return {"samples": len(y), **known, "bins": reliability(logits.softmax(1), y)}
