"""Which path owns each parameter, the recorded pass, Kronecker factors and their eigenvalues."""

from autosym.curvature.kronecker import Curvature, Factors, kfac

__all__ = ["Curvature", "Factors", "kfac"]
