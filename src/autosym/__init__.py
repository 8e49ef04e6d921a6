"""autosym: learn which symmetry each layer of a network should have, from training data alone."""

from autosym import noether as noether
from autosym.averaging import symmetrise
from autosym.comparison import Comparison, compare
from autosym.conversion import Relaxation, relax
from autosym.equivariance import assert_equivariant, equivariance_error
from autosym.evidence import Evidence, log_evidence
from autosym.hardening import Hardening, harden
from autosym.likelihoods import Categorical, Gaussian
from autosym.loop import Learner
from autosym.predictive import Predictive, calibration_error
from autosym.priors import Prior
from autosym.schedules import Schedule
from autosym.simplifying import Simplification, simplify
from autosym.symmetry import Symmetry
from autosym.training import Fit, fit

__version__ = "0.1.0.dev0"
__all__ = [
    "Categorical",
    "Comparison",
    "Evidence",
    "Fit",
    "Gaussian",
    "Hardening",
    "Learner",
    "Predictive",
    "Prior",
    "Relaxation",
    "Schedule",
    "Simplification",
    "Symmetry",
    "__version__",
    "assert_equivariant",
    "calibration_error",
    "compare",
    "equivariance_error",
    "fit",
    "harden",
    "log_evidence",
    "relax",
    "simplify",
    "symmetrise",
]
