"""Linear maps, each with its own prior: the paths, the path law, and groups."""

from autosym.linear.contrasts import BiasContrast, GroupContrast, PoolContrast
from autosym.linear.conv import Conv
from autosym.linear.dense import Bias, Centred, Dense, Pool
from autosym.linear.factored import FactoredIn, FactoredOut
from autosym.linear.group_conv import GroupConv
from autosym.linear.path import Kept, Path, Tangents
from autosym.linear.sparse import SparseConv, SparseIn, SparseOut
from autosym.linear.where import Where, WhereBias

__all__ = [
    "Bias",
    "BiasContrast",
    "Centred",
    "Conv",
    "Dense",
    "FactoredIn",
    "FactoredOut",
    "GroupContrast",
    "GroupConv",
    "Kept",
    "Path",
    "Pool",
    "PoolContrast",
    "SparseConv",
    "SparseIn",
    "SparseOut",
    "Tangents",
    "Where",
    "WhereBias",
]
