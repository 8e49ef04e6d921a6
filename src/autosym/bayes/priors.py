"""Priors: p(w_i) = N(0, I / delta_i), one log-precision per path. A bias is a path; the two factors of F-FC are two paths.

Other priors are scale mixtures of this one. With finite ``nu``, every row w_o of a path's matrix (the weights into one output)
has its own scale tau_o. The prior is then a multivariate Student-t:

    p(w_o | tau_o) = N(0, I / (delta tau_o)),     tau_o ~ Gamma(nu/2, nu/2)

By EM, q(tau_o) = Gamma(a, b) with a = (nu + d)/2 and b = (nu + delta E|w_o|^2)/2. Given the mean scales, curvature G becomes
tau^-1/2 G tau^-1/2. Nothing else changes.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class Prior(nn.Module):
    """Zero-mean priors of named paths: ``log_precision`` is the vector of log delta, in the order of ``names``."""

    def __init__(self, names: Sequence[str], precision: float | Mapping[str, float] = 1.0, nu: float = math.inf):
        super().__init__()
        self.names, self.nu = tuple(names), float(nu)
        if not self.nu > 0:
            raise ValueError(f"nu, the degrees of freedom of a Student-t prior, must be positive, got {nu}")
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
        self.scales: dict[str, Tensor] = {}  # mean tau of every row of a path, (K, out); absent while it is 1
        self.mixture_bound = 0.0  # what the mixture adds to the log evidence: E log p(tau) and the entropy of q(tau)

    def precision(self) -> dict[str, float]:
        """delta of every path, by name."""
        return dict(zip(self.names, self.log_precision.detach().exp().tolist(), strict=True))

    def log_density(self, square_norms: Tensor, sizes: Tensor) -> Tensor:
        """log p(w_i) of each path, from |w_i|^2 (weighted by the scales) and its number of parameters."""
        delta = self.log_precision.exp()
        return 0.5 * (sizes * (self.log_precision - math.log(2 * math.pi)) - delta * square_norms)

    def scale_of(self, name: str, weight: Tensor) -> Tensor | float:
        """tau of every weight of a path, in a shape that broadcasts to ``weight``, whose leading axes are the rows."""
        if name not in self.scales:
            return 1.0
        scales = self.scales[name].to(weight)
        leading = 0
        while math.prod(weight.shape[:leading]) < scales.numel():
            leading += 1
        return scales.reshape((*weight.shape[:leading], *(1,) * (weight.dim() - leading)))

    def set_scales(self, name: str, expected_square: Tensor, width: int) -> float:
        """The E-step for one path, from E|w_o|^2 (K, out) of rows of ``width`` weights. Returns its part of ``mixture_bound``."""
        delta = self.precision()[name]
        a = torch.full_like(expected_square, (self.nu + width) / 2)
        b = (self.nu + delta * expected_square) / 2
        self.scales[name] = a / b
        q = torch.distributions.Gamma(a, b)
        p = torch.distributions.Gamma(torch.full_like(a, self.nu / 2), torch.full_like(a, self.nu / 2))
        mean_log = torch.digamma(a) - b.log()
        bound = width / 2 * (mean_log - (a / b).log()) - torch.distributions.kl_divergence(q, p)
        return float(bound.sum())
