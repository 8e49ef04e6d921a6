"""Likelihoods: log-probability and the closed-form square root of the output Hessian.

    Lambda(f) = -d^2 log p(y | f) / df^2 = scale * R R^T          one column of R: (B, D, rank) per backward pass

``root`` is R. ``scale`` holds the hyperparameter (1 / noise variance), so that one curvature pass serves every noise.
``statistic`` summarises the data: with it the log-likelihood follows for every value of the hyperparameter.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@runtime_checkable
class Likelihood(Protocol):
    """p(y | f) of targets y (B, ...) given outputs f (B, D) of a model. You can write your own.

    Inherit from this class and write ``name``, ``check``, ``statistic`` and ``root``; the rest has defaults. A class that does
    not inherit needs every member. Samples are independent. Only ``scale`` and ``log_likelihood`` depend on hyperparameters,
    such as the noise of a Gaussian. To learn them, be a torch module too: ``class Mine(nn.Module, Likelihood)``.
    """

    name: str  # shown in reports; ``compare`` refuses fits whose likelihoods have different names

    @abstractmethod
    def check(self, outputs: int, targets: Tensor) -> None:
        """Raise a ValueError if ``targets`` do not suit a model with ``outputs`` outputs."""

    def check_outputs(self, outputs: Tensor, model: nn.Module) -> None:
        """Raise a ValueError if outputs (B, D) are not f, e.g. because they are already probabilities. Default: accept all."""
        return

    @abstractmethod
    def statistic(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A sum over samples that determines ``log_likelihood``: sum_n log p(y_n | f_n) if there is no hyperparameter."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """-sum_n log p(y_n | f_n) / scale, up to a constant: the training loss of the weights. Default: -statistic."""
        return -self.statistic(outputs, targets)

    def log_likelihood(self, statistic: Tensor, count: int) -> Tensor:
        """sum_n log p(y_n | f_n), linear in ``statistic`` and ``count`` (samples times outputs). Default: the statistic."""
        return statistic

    def scale(self) -> Tensor:
        """c in Lambda(f) = c R R^T: the factor that depends on a hyperparameter, e.g. 1 / sigma^2. Default: 1."""
        return torch.ones((), dtype=torch.float64)

    @abstractmethod
    def root(self, outputs: Tensor) -> Tensor:
        """R (B, D, rank), rank at most D, with c R R^T = Lambda(f) = -d^2 log p(y | f) / df^2.

        If the Hessian depends on y, use its mean under p(y | f) (the Fisher information): it is never negative.
        """

    def diagonal(self, outputs: Tensor) -> Tensor:
        """The diagonal of R R^T, (B, D). Default: from the root."""
        return self.root(outputs).square().sum(2)

    def column(self, outputs: Tensor, index: Tensor) -> Tensor:
        """Column ``index`` (B,) of the root of each sample: (B, D). Default: from ``root``, padded with zeros to D columns."""
        root = self.root(outputs)
        spare = outputs.shape[1] - root.shape[2]
        if spare < 0:
            raise ValueError(f"the root of the {self.name} likelihood has more columns than outputs: give it at most as many")
        index = index.to(root.device)[:, None, None].expand(-1, outputs.shape[1], 1)
        return F.pad(root, (0, spare)).gather(2, index)[:, :, 0]

    def logits(self, outputs: Tensor) -> Tensor | None:
        """(..., K) from outputs (..., D): softmax gives the probabilities of classes 0..K-1. Default: None, y is not a class.

        With classes, reports show accuracy and calibration, and compare the evidence with guessing, -N log K.
        """
        return None

    def predict(self, mean: Tensor, covariance: Tensor, draws: Tensor | None) -> dict[str, Tensor] | None:
        """The prediction of y if f ~ N(mean (B, D), covariance (B, D, D)), for ``Predictive``.

        Return ``probabilities`` (B, K) = E softmax(logits(f)), or ``expected`` = E y and ``variance`` = var y, both (B, D). If
        ``draws`` (S, B, D) of f are given, take means over them. If not, use a closed form, or return None to ask for draws.
        Default: probabilities from draws; an empty dict if y is not a class.
        """
        if draws is None:
            return None
        logits = self.logits(draws)
        return {} if logits is None else {"probabilities": logits.softmax(-1).mean(0)}

    def expected(self, mean: Tensor, variance: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        """E statistic, and E diagonal (B, D), if f ~ N(mean, variance) independently. Default: None; the bound uses draws."""
        return None

    def hyperparameters(self) -> dict[str, Tensor]:
        """Leaf tensors that are learned, by name, for gradient steps and checkpoints. Default: parameters of the module."""
        return dict(self.named_parameters()) if isinstance(self, nn.Module) else {}

    def figures(self) -> dict[str, float]:
        """Hyperparameters in readable units, for histories and reports. Default: every hyperparameter that is one number."""
        return {name: float(t.detach()) for name, t in self.hyperparameters().items() if t.numel() == 1}

    def update(self, statistic: Tensor, count: float | Tensor, damping: float = 1.0, trust: float = math.inf) -> Tensor:
        """Maximise ``log_likelihood``, sigma^2 <- statistic / count; return the factor by which ``scale`` grew.

        ``count`` is samples times outputs, minus the effective parameters. In log space, the step is the fraction ``damping`` of
        the way, at most ``trust``. Default: no step; a ValueError if there are hyperparameters to learn.
        """
        if learned := [name for name, t in self.hyperparameters().items() if t.requires_grad]:
            raise ValueError(
                f"the {self.name} likelihood learns {', '.join(learned)} but has no closed-form step: write its update(), or use "
                "step='gradient'"
            )
        return torch.ones(())


class Categorical(nn.Module, Likelihood):
    """p(y | f) = softmax(f)_y; Lambda = diag(p) - p p^T, which has rank D - 1.

    The root is the closed-form Cholesky factor (Tanabe & Sagae 1992). It has D - 1 columns, which saves one backward pass:
    R_jj = sqrt(p_j q_j / r_j) and R_ij = - p_i sqrt(p_j / (q_j r_j)) for i > j, with r_j = p_j + p_{j+1} + ... and q_j = r_j - p_j.
    """

    name = "categorical"

    def check(self, outputs: int, targets: Tensor) -> None:
        """Refuse targets that do not suit a model with ``outputs`` outputs."""
        if outputs < 2:
            other = "likelihood='gaussian' for numbers" if targets.is_floating_point() else "likelihood='bernoulli'"
            raise ValueError(f"the model has one output, but a categorical likelihood needs one per class: use two, or {other}")
        if targets.is_floating_point() or targets.dim() != 1:
            kind = "one-hot or probabilities" if targets.shape[1:] == (outputs,) else "not class indices"
            shape = ", ".join(map(str, ("N", *targets.shape[1:])))  # N: fit checks a few samples first
            raise ValueError(
                f"targets of shape ({shape}) and type {targets.dtype} are {kind}: the categorical likelihood takes integer "
                f"class indices of shape (N,); use {_as_indices(targets)}"
            )
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < outputs:
            first, last = int(targets.min()), int(targets.max())
            more = [f"give the model {last + 1} outputs, one for each class"] if first >= 0 else []
            numbered = [] if first == 0 and len(targets.unique()) > outputs else ["number them from 0, without gaps"]
            raise ValueError(
                f"labels run from {first} to {last}, but the model has {outputs} outputs, so they must lie in 0..{outputs - 1}: "
                + ", or ".join(numbered + more)
            )

    def check_outputs(self, outputs: Tensor, model: nn.Module) -> None:
        """Refuse a model that ends in a softmax: two in a row change the likelihood. A log-softmax does not, and may stay."""
        rounding = max(1e-5, 2 * torch.finfo(outputs.dtype).eps)
        f = outputs.detach().double()
        if not bool((f >= 0).all() & ((f.sum(1) - 1).abs() <= rounding).all()):
            return
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Softmax)]
        raise ValueError(
            f"the outputs of the model are probabilities, by {f'{names[-1]} (Softmax)' if names else 'a softmax in its forward()'}: "
            "the categorical likelihood applies the softmax itself; leave it out of the model (a log-softmax may stay)"
        )

    def statistic(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """sum_n log p(y_n | f_n)."""
        return -F.cross_entropy(outputs, targets.long(), reduction="sum")

    def root(self, outputs: Tensor) -> Tensor:
        # In logarithms: if a probability rounds to 0, the slope of its square root is infinite.
        p = outputs.log_softmax(-1)
        tail = p.flip(-1).logcumsumexp(-1).flip(-1)  # log r_j; q_j is r_{j+1}
        here, rest, part = tail[:, None, :-1], tail[:, None, 1:], p[:, None, :-1]
        classes = torch.arange(p.shape[1], device=p.device)
        row, column = classes[:, None], classes[:-1]
        below = p[:, :, None] + (part - here - rest) / 2
        diagonal = ((part - here + rest) / 2).expand_as(below)
        size = torch.where(row > column, below, torch.where(row == column, diagonal, -torch.inf)).exp()
        return torch.where(row > column, -size, size)

    def diagonal(self, outputs: Tensor) -> Tensor:
        """The diagonal of R R^T, (B, D)."""
        p = outputs.softmax(-1)
        return p * (1 - p)

    def column(self, outputs: Tensor, index: Tensor) -> Tensor:
        """Column c = ``index`` (B,) of another root with D columns, sqrt(p_c) (e_c - p): (B, D)."""
        p = outputs.softmax(-1)
        index = index.to(p.device)[:, None]
        return p.gather(1, index).sqrt() * (torch.zeros_like(p).scatter_(1, index, 1.0) - p)

    def logits(self, outputs: Tensor) -> Tensor:
        """The outputs."""
        return outputs

    def predict(self, mean: Tensor, covariance: Tensor, draws: Tensor | None) -> dict[str, Tensor] | None:
        """E softmax(f); without draws, softmax(mean / sqrt(1 + pi/8 v)), of f less its mean over classes, which no probability sees."""
        if draws is None:
            rows = covariance - covariance.mean(1, keepdim=True)
            draws = _probit(mean - mean.mean(1, keepdim=True), rows - rows.mean(2, keepdim=True))
        return super().predict(mean, covariance, draws)


class Gaussian(nn.Module, Likelihood):
    """p(y | f) = N(y | f, sigma^2 I); Lambda = I / sigma^2, root I, scale 1 / sigma^2. The noise is learned."""

    name = "gaussian"

    def __init__(self, sigma_noise: float = 1.0):
        super().__init__()
        if not 0 < sigma_noise < math.inf:
            raise ValueError(f"sigma_noise must be positive and finite, got {sigma_noise}")
        self.log_variance = nn.Parameter(torch.tensor(2 * math.log(sigma_noise), dtype=torch.float64))

    def check(self, outputs: int, targets: Tensor) -> None:
        """Refuse targets that do not suit a model with ``outputs`` outputs."""
        if targets.shape[1:] != (outputs,) or not targets.is_floating_point():
            hint = ""
            if targets.dim() == 1 and outputs == 1:
                hint = ": use targets[:, None] (broadcasting would compare every target with every output)"
            elif not targets.is_floating_point():
                hint = ": use targets.float(), or likelihood='categorical' for class labels"
            raise ValueError(
                f"targets {tuple(targets.shape)} of type {targets.dtype} do not match outputs {(len(targets), outputs)}{hint}"
            )

    def statistic(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The sum of squared errors."""
        return (outputs - targets).square().sum()

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The negative log-likelihood at unit scale, without constants."""
        return self.statistic(outputs, targets) / 2

    def log_likelihood(self, statistic: Tensor, count: int) -> Tensor:
        """log N of ``count`` numbers (samples times outputs) whose squared errors sum to ``statistic``."""
        return -0.5 * (statistic * self.scale() + count * (self.log_variance + math.log(2 * math.pi)))

    def scale(self) -> Tensor:
        return (-self.log_variance).exp()

    def root(self, outputs: Tensor) -> Tensor:
        return torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device).expand(len(outputs), -1, -1)

    def diagonal(self, outputs: Tensor) -> Tensor:
        """The diagonal of R R^T, (B, D)."""
        return torch.ones_like(outputs)

    def column(self, outputs: Tensor, index: Tensor) -> Tensor:
        """Column ``index`` (B,) of the identity: (B, D)."""
        return torch.zeros_like(outputs).scatter_(1, index.to(outputs.device)[:, None], 1.0)

    def predict(self, mean: Tensor, covariance: Tensor, draws: Tensor | None) -> dict[str, Tensor] | None:
        """N(mean, v + sigma^2): exact, so draws are not used."""
        return {"expected": mean, "variance": _variance(covariance) + 1 / float(self.scale().detach())}

    def expected(self, mean: Tensor, variance: Tensor, targets: Tensor) -> tuple[Tensor, Tensor] | None:
        """E |y - f|^2 = |y - mean|^2 + sum of variances."""
        return self.statistic(mean, targets).double() + variance.sum().double(), self.diagonal(mean)

    def figures(self) -> dict[str, float]:
        """The standard deviation of the noise."""
        return {"sigma_noise": math.exp(float(self.log_variance.detach()) / 2)}

    @torch.no_grad()
    def update(self, statistic: Tensor, count: float | Tensor, damping: float = 1.0, trust: float = math.inf) -> Tensor:
        """sigma^2 <- SSE / count."""
        before, variance = self.log_variance.clone(), (statistic / count).clamp_min(torch.finfo(torch.float64).tiny)
        self.log_variance.add_((damping * (variance.log() - before)).clamp(-trust, trust))
        return torch.exp(before - self.log_variance)


class Bernoulli(Likelihood):
    """p(y = 1 | f) = p = 1 / (1 + exp(-f)), f one logit; Lambda = p (1 - p). Targets are 0 or 1, (N,) or (N, 1)."""

    name = "bernoulli"

    def check(self, outputs: int, targets: Tensor) -> None:
        """Refuse targets that do not suit a model with ``outputs`` outputs."""
        if outputs != 1:
            raise ValueError(
                f"the model has {outputs} outputs, but a Bernoulli likelihood takes one logit: use one or likelihood='categorical'"
            )
        _check_shape(self.name, 1, targets)
        if len(other := targets[(targets != 0) & (targets != 1)]):
            raise ValueError(
                f"the targets hold {other[0].item():g}, but a Bernoulli likelihood takes 0 and 1: use (targets > 0).long() "
                "for -1 and 1, or likelihood='categorical' for more than two classes"
            )

    def check_outputs(self, outputs: Tensor, model: nn.Module) -> None:
        """Refuse an ``nn.Sequential`` that ends in a sigmoid: the sigmoid of a probability is another likelihood."""
        name, last = "", model
        while isinstance(last, nn.Sequential) and len(
            last
        ):  # elsewhere the last layer to be registered need not be the last to run
            name, last = f"{name}.{len(last) - 1}".lstrip("."), last[-1]
        if isinstance(last, nn.Sigmoid) and bool(((outputs >= 0) & (outputs <= 1)).all()):
            raise ValueError(
                f"the outputs of the model are probabilities, by {name or 'the model'} (Sigmoid): the Bernoulli likelihood "
                "applies the sigmoid itself; leave it out of the model"
            )

    def statistic(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """sum_n y_n log p_n + (1 - y_n) log(1 - p_n)."""
        return -F.binary_cross_entropy_with_logits(outputs, targets.reshape(outputs.shape).to(outputs), reduction="sum")

    def root(self, outputs: Tensor) -> Tensor:
        """sqrt(p (1 - p)), in logarithms: the slope stays finite if p rounds to 0 or 1."""
        return ((F.logsigmoid(outputs) + F.logsigmoid(-outputs)) / 2).exp()[:, :, None]

    def logits(self, outputs: Tensor) -> Tensor:
        """(0, f) for the classes 0 and 1."""
        return torch.cat([torch.zeros_like(outputs), outputs], -1)

    def predict(self, mean: Tensor, covariance: Tensor, draws: Tensor | None) -> dict[str, Tensor] | None:
        """(1 - E p, E p); without draws, by the probit approximation p(mean / sqrt(1 + pi/8 v))."""
        return super().predict(mean, covariance, _probit(mean, covariance) if draws is None else draws)


class Poisson(Likelihood):
    """p(y | f) = exp(y f - exp(f)) / y!, f log-rates; Lambda = diag(exp(f)). Targets are counts (N, D), or (N,) if D = 1."""

    name = "poisson"

    def check(self, outputs: int, targets: Tensor) -> None:
        """Refuse targets that do not suit a model with ``outputs`` outputs."""
        _check_shape(self.name, outputs, targets)
        values = targets.double()
        if len(other := values[(values < 0) | (values % 1 != 0)]):
            raise ValueError(
                f"the targets hold {other[0].item():g}, but a Poisson likelihood takes counts, 0, 1, ...: use likelihood='gaussian'"
            )

    def statistic(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """sum_n y_n f_n - exp(f_n) - log y_n!, in float64, because large counts cancel."""
        return self.expected(outputs, torch.zeros_like(outputs), targets)[0]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """sum_n exp(f_n) - y_n f_n."""
        return (outputs.exp() - targets.reshape(outputs.shape) * outputs).sum()

    def root(self, outputs: Tensor) -> Tensor:
        """diag(exp(f / 2))."""
        return torch.diag_embed((outputs / 2).exp())

    def predict(self, mean: Tensor, covariance: Tensor, draws: Tensor | None) -> dict[str, Tensor] | None:
        """E y = E exp(f) = exp(mean + v / 2) and var y = E y + (E y)^2 (exp(v) - 1), exact; with draws, their moments."""
        if draws is None:
            variance = _variance(covariance)
            rate = (mean + variance / 2).exp()
            return {"expected": rate, "variance": rate + rate.square() * variance.expm1()}
        rates = draws.exp()
        return {"expected": rates.mean(0), "variance": rates.mean(0) + rates.var(0, correction=0)}

    def expected(self, mean: Tensor, variance: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """E exp(f) = exp(mean + v / 2)."""
        counts, rate = targets.reshape(mean.shape).double(), (mean.double() + variance.double() / 2).exp()
        return (counts * mean - rate - torch.lgamma(counts + 1)).sum(), rate.to(mean)


def _variance(covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=1, dim2=2)


def _probit(mean: Tensor, covariance: Tensor) -> Tensor:
    """Logits (1, B, D) whose sigmoid, or softmax, approximates the mean over f (MacKay)."""
    return (mean / (1 + math.pi / 8 * _variance(covariance)).sqrt())[None]


def _check_shape(name: str, outputs: int, targets: Tensor) -> None:
    """Refuse targets of other shapes than (N, D), or (N,) for one output."""
    if targets.shape[1:] == (outputs,) or (outputs == 1 and targets.dim() == 1):
        return
    shapes = "(N,) or (N, 1)" if outputs == 1 else f"(N, {outputs})"
    hint = "use targets.flatten(1)" if math.prod(targets.shape[1:]) == outputs else "give one for each output of the model"
    raise ValueError(
        f"targets of shape (N{''.join(f', {n}' for n in targets.shape[1:]) or ','}) do not match a model with {outputs} "
        f"output{'' if outputs == 1 else 's'}: the {name} likelihood takes {shapes}; {hint}"
    )


def _as_indices(targets: Tensor) -> str:
    """Code that converts ``targets`` to class indices, for the error message."""
    if math.prod(targets.shape[1:]) != 1:
        return "targets.argmax(1) if they are one-hot, or likelihood='gaussian'"
    flat = "targets.squeeze(1)" if targets.dim() == 2 else "targets.flatten()" if targets.dim() > 2 else "targets"
    if not targets.is_floating_point():
        return flat
    return f"{flat}.long() if they are whole numbers, else likelihood='gaussian', with targets (N, 1) and a model of one output"


LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "categorical": Categorical,
    "gaussian": Gaussian,
    "bernoulli": Bernoulli,
    "poisson": Poisson,
}
MEMBERS = [name for name in (*Likelihood.__annotations__, *vars(Likelihood)) if not name.startswith("_")]


def of(kind: str | Likelihood) -> Likelihood:
    """The likelihood with this name, or the given object."""
    if isinstance(kind, str):
        if kind not in LIKELIHOODS:
            raise ValueError(f"unknown likelihood {kind!r}: use {' or '.join(map(repr, LIKELIHOODS))}, or one of your own")
        return LIKELIHOODS[kind]()
    if isinstance(kind, type):
        raise TypeError(f"the likelihood is the class {kind.__name__}: give an object, {kind.__name__}()")
    lacking = [member for member in MEMBERS if not hasattr(kind, member)]
    if lacking and not hasattr(kind, "statistic"):
        raise TypeError(f"the likelihood is a {type(kind).__name__}: inputs and targets are one pair, as in (model, (x, y))")
    if lacking:
        raise TypeError(
            f"the likelihood {type(kind).__name__} lacks {', '.join(lacking)}: write them, or inherit from autosym.Likelihood"
        )
    return kind


def classes(likelihood: Likelihood, outputs: int) -> int | None:
    """The number of classes; None if targets are not classes."""
    logits = likelihood.logits(torch.zeros(1, outputs))
    return None if logits is None else logits.shape[-1]


def relabels(likelihood: Likelihood, outputs: int) -> bool:
    """Whether permuting outputs permutes the classes in the same way; with one output, whether its sign swaps two classes."""
    f = torch.arange(1.0, outputs + 1).cos()[None]  # no two are alike
    logits = likelihood.logits(f)
    if logits is None or logits.shape[-1] != max(outputs, 2):
        return False
    p = logits.softmax(-1)
    orders = [*range(1, outputs), 0], [1, 0, *range(2, outputs)]  # all permutations are products of these two
    moved = [(-f, p.flip(-1))] if outputs == 1 else [(f[:, order], p[:, order]) for order in orders]
    return all(torch.allclose(likelihood.logits(g).softmax(-1), q) for g, q in moved)  # type: ignore[union-attr]
