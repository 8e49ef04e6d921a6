"""The three sparse paths, for tests of what they are and of the steps they take."""

import pytest
import torch

from autosym.linear.sparse import Basis, SparseConv, SparseIn, SparseOut

# name, constructor by anchors, learn_omega and learn_z, all positions, shape of one input
SPARSE = [
    pytest.param(*case, id=case[0])
    for case in [
        ("conv", lambda p, *learn: SparseConv(2, 3, 3, p, *learn), 9, (2, 5, 4)),
        ("in", lambda p, *learn: SparseIn((2, 4, 3), 5, p, *learn), 12, (2, 4, 3)),
        ("out", lambda p, *learn: SparseOut(3, (5, 2, 4), p, *learn), 8, (5, 3)),
    ]
]


def set_omega(module, value):
    """The same omega in every basis of a module, in place."""
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, Basis):
                part.omega.fill_(value)
    return module


def dense_weights(path):
    """The weights that the anchors stand for, as those of the dense path."""
    phi = path.basis().detach()
    if isinstance(path, SparseConv):
        return (path.weight.detach().unflatten(-1, (-1, len(phi))) @ phi).flatten(-2)
    return path.weight.detach() @ phi if isinstance(path, SparseIn) else phi.T @ path.weight.detach()
