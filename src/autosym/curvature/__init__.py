"""Which path owns each parameter, the recorded pass, Kronecker factors and their eigenvalues."""

from autosym.curvature.kronecker import Curvature, Factors, FewColumns, kfac

__all__ = ["Curvature", "Factors", "FewColumns", "kfac"]
