"""autosym: learn which symmetry each layer of a network should have, from training data alone."""

from autosym.evidence import Evidence, log_evidence
from autosym.likelihoods import Categorical, Gaussian
from autosym.priors import Prior

__version__ = "0.1.0.dev0"
__all__ = ["Categorical", "Evidence", "Gaussian", "Prior", "__version__", "log_evidence"]
