"""Evidence: one file per estimator, all of one shape. ``at`` makes the expensive pass once and returns a cheap function."""

from autosym.evidence.record import Evidence
from autosym.evidence.whole import log_evidence
from autosym.runtime import moved

__all__ = ["Evidence", "log_evidence"]

__getattr__ = moved.attribute("autosym", "evidence")
