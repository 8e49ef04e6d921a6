"""Priors: p(w_i) = N(0, I / delta_i), one log-precision per path (a bias is a path, the two factors of F-FC are two)."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class Prior(nn.Module):
    """Isotropic Gaussians over named paths: ``log_precision`` is the vector of log delta, in the order of ``names``."""

    def __init__(self, names: Sequence[str], precision: float | Mapping[str, float] = 1.0):
        super().__init__()
        self.names = tuple(names)
        if isinstance(precision, Mapping):
            wrong = [*(set(names) - set(precision)), *(set(precision) - set(names))]
            if wrong:
                raise ValueError(
                    f"prior_precision must name every path and no other; wrong: {', '.join(sorted(wrong))}; the paths are "
                    f"{', '.join(self.names)}"
                )
            values = [float(precision[name]) for name in self.names]
        else:
            values = [float(precision)] * len(self.names)
        bad = {name: value for name, value in zip(self.names, values, strict=True) if not 0 < value < math.inf}
        if bad:
            raise ValueError(f"a prior precision must be positive and finite, got {bad}")
        self.log_precision = nn.Parameter(torch.tensor(values, dtype=torch.float64).log())

    def precision(self) -> dict[str, float]:
        """delta by name of path."""
        return dict(zip(self.names, self.log_precision.detach().exp().tolist(), strict=True))

    def log_density(self, square_norms: Tensor, sizes: Tensor) -> Tensor:
        """log p(w_i) of each path, from |w_i|^2 and the number of its parameters."""
        delta = self.log_precision.exp()
        return 0.5 * (sizes * (self.log_precision - math.log(2 * math.pi)) - delta * square_norms)
