"""Paths of relaxed layers, as they might have been learned."""

import math

from autosym.evidence.shares import PathShare
from autosym.linear.conv import Conv
from autosym.linear.dense import Pool
from autosym.linear.groups import GROUPS, nested
from autosym.linear.path import NOTHING, Kept

KEEPS = {"conv": Conv.keeps, "s-conv": Conv.keeps, "pool": Pool.keeps}
KEEPS |= {f"gconv:{name}": Kept(equivariant=True, groups=nested(group)) for name, group in GROUPS.items()}


def path(name="conv", layer="1", share=1.0, symmetric=True, effective=5.0, parameters=10, omega=None, learned_omega=False):
    """A path with what paths of this name keep; a ``share`` of None is not a number."""
    share = math.nan if share is None else share
    keeps = KEEPS.get(name, Kept(every=True)) if symmetric else NOTHING
    return PathShare(layer, name, symmetric, {"linear": 1.0}, parameters, effective, share, omega or {}, keeps, learned_omega)


def network(*free_shares, **more):
    """The paths of a network of layers with a convolution and a free path."""
    rows = []
    for layer, share in enumerate(free_shares):
        rest = None if share is None else 1 - share
        rows += [path("conv", f"l{layer}", rest, **more), path("f-fc", f"l{layer}", share, symmetric=False, **more)]
    return rows
