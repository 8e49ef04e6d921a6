"""Makes a network of ``nets.build`` again from what a file says of it. The file is not trusted: it must match the weights beside it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autosym.linear.sparse import Sparse
from autosym.nn import nets

LARGEST = 2**28  # numbers (1 GiB) that a file can ask for


def rebuilt(arguments: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nets.Net:
    """``nets.build(**arguments)`` with initial weights, if ``weights`` have its names and shapes; refused before it takes any memory."""
    if len(arguments["channels"]) > len(weights):  # checked first: each block makes modules, even on the meta device
        raise ValueError(f"it has {len(arguments['channels'])} blocks, but {len(weights)} tensors")
    with torch.device("meta"):
        network = nets.build(**arguments)
    if {name: t.shape for name, t in network.state_dict().items()} != {name: t.shape for name, t in weights.items()}:
        raise ValueError("its network differs from the weights beside it")
    size = sum(t.numel() for t in (*network.parameters(), *network.buffers()))
    for path in network.modules():
        if isinstance(path, Sparse):  # its initial values are fitted to dense weights at all positions
            anchors, positions = len(path.basis.z), len(path.basis.positions)
            size += positions * (anchors + path.weight.numel() // anchors)
    if size > LARGEST:
        raise ValueError(f"its network takes {size} numbers, more than {LARGEST}")
    return nets.build(**arguments)
