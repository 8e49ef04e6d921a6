"""Every linear map under one prior: groups, the path law, and the paths."""

from autosym.linear.conv import Conv
from autosym.linear.dense import Bias, Dense, Pool
from autosym.linear.factored import FactoredIn, FactoredOut
from autosym.linear.group_conv import GroupConv
from autosym.linear.path import Kept, Path, Tangents
from autosym.linear.sparse import SparseConv, SparseIn, SparseOut

__all__ = [
    "Bias",
    "Conv",
    "Dense",
    "FactoredIn",
    "FactoredOut",
    "GroupConv",
    "Kept",
    "Path",
    "Pool",
    "SparseConv",
    "SparseIn",
    "SparseOut",
    "Tangents",
]
