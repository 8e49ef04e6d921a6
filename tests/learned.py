"""Paths of relaxed layers, as they might have been learned."""

import math
from dataclasses import replace

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


CHAIN = {"gconv:d4": "d4", "turn:d4": "c4", "turn:c4": "c2", "turn:c2": None, "f-fc": None}


def chain(*shares, layer="1"):
    """A layer with a chain of groups: d4, what keeps c4, what keeps c2, what keeps translations; and, given five shares, a free path."""
    rows = []
    for (name, group), share in zip(CHAIN.items(), shares, strict=False):
        row = path(name, layer, share, symmetric=name != "f-fc")
        rows.append(row if not row.symmetric else replace(row, keeps=Kept(True, groups=nested(GROUPS[group]) if group else ())))
    return rows
