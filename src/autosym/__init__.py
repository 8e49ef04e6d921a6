"""autosym: learn which symmetry each layer of a network should have, from training data alone."""

from autosym import nn as nn
from autosym import noether as noether
from autosym.answer.answers import Answer
from autosym.answer.comparison import Comparison, compare
from autosym.answer.discovering import discover
from autosym.answer.equivariance import assert_equivariant, equivariance_error
from autosym.bayes.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from autosym.bayes.priors import Prior
from autosym.evidence.predictive import Predictive, calibration_error
from autosym.evidence.record import Evidence
from autosym.evidence.shares import Symmetry
from autosym.evidence.whole import log_evidence
from autosym.nn.symmetrised import symmetrise
from autosym.report import answered, drawing, writing
from autosym.runtime import moved
from autosym.runtime.provenance import VERSION as __version__
from autosym.surgery.hardening import Hardening, harden
from autosym.surgery.lifting import Lifting, lift
from autosym.surgery.relaxing import Relaxation, relax
from autosym.surgery.simplifying import Simplification, simplify
from autosym.training.fitted import Fit, load
from autosym.training.fitting import fit
from autosym.training.learner import Learner
from autosym.training.schedule import Schedule

# Pages are made from fits and answers, so their room comes after theirs: the methods that write them are given here.
Fit.report, Fit.plot, Answer.report = writing.write, drawing.plot, answered.write

__all__ = [
    "Answer",
    "Bernoulli",
    "Categorical",
    "Comparison",
    "Evidence",
    "Fit",
    "Gaussian",
    "Hardening",
    "Learner",
    "Lifting",
    "Likelihood",
    "Poisson",
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
    "discover",
    "equivariance_error",
    "fit",
    "harden",
    "lift",
    "load",
    "log_evidence",
    "relax",
    "simplify",
    "symmetrise",
]

moved.redirect(__name__)
__getattr__ = moved.attribute(__name__)
