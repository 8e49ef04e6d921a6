"""Modules made of paths: relaxed layers, the networks of the papers, and symmetrised models."""

from autosym.nn.layers import Affine, Branch, Factored, Relaxed, SparseFactored, conv, fc, gconv, s_conv, turn, where
from autosym.nn.nets import build
from autosym.nn.symmetrised import symmetrise

__all__ = [
    "Affine",
    "Branch",
    "Factored",
    "Relaxed",
    "SparseFactored",
    "build",
    "conv",
    "fc",
    "gconv",
    "s_conv",
    "symmetrise",
    "turn",
    "where",
]
