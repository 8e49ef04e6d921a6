"""Is a model fit for curvature? Gradients must match its paths, and no output may depend on batchmates or on chance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autosym.bayes.likelihoods import Likelihood
from autosym.curvature.owners import Site, sites
from autosym.curvature.tape import Tape
from autosym.linear.path import Tangents
from autosym.runtime import arithmetic, processes
from autosym.runtime.arithmetic import NotFinite
from autosym.runtime.batching import all_finite, check_module, to_model

ROUNDING = 100.0  # units in the last place of a sum's largest term that its sum may be off by


@dataclass(frozen=True)
class Verified:
    """Facts about a model that passed the checks for curvature, so that later passes need not check again."""

    sites: tuple[Site, ...]
    bytes_per_sample: float  # that a pass needs: what autograd and tangents keep, and three times the largest columns or rows
    outputs: int
    exchangeable: bool = False  # whether permuting the outputs is a symmetry of the prior (see ``_are_alike``)
    sides: Mapping[str, tuple[int, int, int, int]] = field(default_factory=dict)  # K, out, in and positions of each path
    element_size: int = 4  # bytes of a number


@arithmetic.true_float32()
def verify(model: nn.Module, x: Tensor, expand_bias: bool = False, owned: Sequence[Site] | None = None) -> Verified:
    """Compare every parameter's gradient with the one that its path's rows and columns give, on a few samples.

    They differ if a parameter acts outside its path (used in a function, reparametrised), or if a path is wrongly defined.
    """
    x = x.clone()  # a storage of its own, so that its bytes count these samples alone
    columns: dict[str, Tensor] = {}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t.detach()  # an output that kept itself would never be freed

    owned = sites(model, expand_bias) if owned is None else owned
    see = lambda name, path, x: columns.__setitem__(name, path.columns(x))  # noqa: E731
    with Tape(owned, see, weights=True, reduce=False) as tape, torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            f = tape.record(model, x)
        with f.device:  # whatever torch.set_default_device says
            cotangent = _direction(f.shape[1]).to(f).expand_as(f)
        rows = {name: rows for names, rows in tape.backward(f, cotangent) for name in names}
        gradients = torch.autograd.grad(f, [site.parameter for site in owned], cotangent, allow_unused=True)
    direction, head = cotangent[0], []
    for site, gradient in zip(owned, gradients, strict=True):
        expected = _summed(rows[site.name], columns[site.name])
        actual = torch.zeros_like(expected) if gradient is None else gradient.flatten()
        if _differ(expected, actual, rows[site.name], columns[site.name]):
            raise ValueError(
                f"the gradient of {site.name} is not what its layer's inputs and outputs give: it is also used outside "
                f"{type(site.module).__name__}, or reparametrised; use it once, as the layer's own weight, or freeze it"
            )
        if _is_head(rows[site.name], direction):
            head.append(expected * site.parameter.detach().flatten())
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    activations = sum(size for where, size in kept.items() if where not in weights)
    activations += sum(path.tangents.nbytes for path in tape.paths.values() if isinstance(path, Tangents))
    largest = max(t.numel() * t.element_size() for t in (*columns.values(), *rows.values()))
    sides = {name: (*rows[name].shape[2:], columns[name].shape[3], columns[name].shape[1]) for name in columns}
    alike = _are_alike(f.detach(), direction, head)
    return Verified(tuple(owned), (activations + 3 * largest) / len(x), f.shape[1], alike, sides, f.element_size())


def _summed(rows: Tensor, columns: Tensor) -> Tensor:
    """The gradient (K out in,) by the path law: the sum over samples and positions of rows times columns."""
    return torch.einsum("bsko,bski->koi", rows, columns).flatten()


def _differ(expected: Tensor, actual: Tensor, rows: Tensor, columns: Tensor) -> bool:
    """Whether two gradients differ by more than rounding of their terms does, which are large where a symmetry makes them cancel."""
    gap = _largest(expected - actual)
    if gap <= 1e-2 * _largest(expected) + 1e-6 * max(1.0, _largest(actual)):
        return False
    return gap > ROUNDING * torch.finfo(expected.dtype).eps * _largest(_summed(rows.abs(), columns.abs()))


def _largest(t: Tensor) -> float:
    """max |t|, in one pass over memory."""
    low, high = torch.aminmax(t.detach())
    return max(-float(low), float(high))


def _direction(outputs: int) -> Tensor:
    """A direction of the outputs without any pattern. It sums to zero, as a log-softmax at the end changes no such direction."""
    direction = torch.arange(1.0, outputs + 1).cos()
    return direction - direction.mean() if outputs > 1 else torch.ones(1)


def _are_alike(f: Tensor, direction: Tensor, terms: Sequence[Tensor]) -> bool:
    """Whether the outputs are f = sum of c W a over paths, with the same inputs a and factor c for every row of W.

    Each path has one precision for all rows of its W. So permuting the outputs, or changing their sign, is a symmetry of the
    prior, whatever the layers below are. A head with frozen weights, or with fixed numbers for some class, is not of this form,
    unless they are zero. It is tested along one ``direction``, by the ``terms`` of paths of which ``_is_head`` holds.
    """
    parts = [(f * direction).double(), *(-t.double() for t in terms)]
    return bool(terms) and abs(sum(float(t.sum()) for t in parts)) <= 1e-5 * sum(float(t.abs().sum()) for t in parts)


def _is_head(rows: Tensor, direction: Tensor) -> bool:
    """Whether rows (B, S, 1, D) are multiples of the direction of outputs that they come from, so W has one row for each output."""
    if rows.shape[2:] != (1, len(direction)):
        return False
    along = (rows @ direction / direction.square().sum())[..., None] * direction
    return float(rows.norm()) > 0 and float((rows - along).norm()) <= 1e-4 * float(rows.norm())


def check_factor(name: str, letter: str, factor: Tensor) -> None:
    """Refuse a Kronecker factor, or a part of one, whose sums were too large for its precision."""
    if not all_finite(factor):
        raise NotFinite(
            f"the factor {letter} of {name} overflowed {factor.dtype}: rescale the inputs or the targets, use model.double(), "
            "or pass dtype=torch.float64 to log_evidence"
        )


def check_factors(factors: Mapping[tuple[str, str], Tensor]) -> None:
    """``check_factor`` of all, by name and letter. On a GPU each look would wait for it, so there is one, unless something is wrong."""
    if factors and not all_finite(torch.stack([factor.sum() for factor in factors.values()])):
        for (name, letter), factor in factors.items():
            check_factor(name, letter, factor)


def verified(
    model: nn.Module, x: Tensor, y: Tensor, likelihood: Likelihood, targets: Tensor | None = None, known: str = ""
) -> Verified:
    """Refuse a model, a few samples and a likelihood that do not fit together. An error in one process is an error in all.

    ``targets`` are all that are at hand, those of these samples by default; an error about them says ``known`` of them.
    """
    refuse_batch_dependence(model)
    squares: dict[str, Tensor] = {}
    see = lambda name, path, x: squares.__setitem__(name, path.columns(x).square().sum())  # noqa: E731
    with processes.agreeing():
        owned = sites(model)
        x, y = to_model(x, y, model, "the first samples")
        found = verify(model, x, owned=owned)
        with Tape(owned, see) as tape, torch.enable_grad():
            recorded = tape.record(model, x)
            f = recorded.detach()
            for name, square in squares.items():
                check_factor(name, "A", square)
            _check_targets(likelihood, f.shape[1], y if targets is None else targets, known)
            likelihood.check_outputs(f, model)
            for names, rows in tape.backward(recorded, _root(likelihood, f, y).to(f)[:, :, 0]):
                check_factor(", ".join(names), "G", rows.square().sum())
    return found


def _check_targets(likelihood: Likelihood, outputs: int, targets: Tensor, known: str) -> None:
    try:
        likelihood.check(outputs, targets)
    except ValueError as error:
        if not known:
            raise
        raise ValueError(f"{error} ({known})") from error


def _root(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """The root of the output Hessian, if the likelihood gives sound numbers for outputs f (B, D)."""
    statistic, root = likelihood.statistic(f, y), likelihood.root(f)
    if not torch.isfinite(statistic).all():
        raise ValueError(
            f"the {likelihood.name} log-likelihood of the first samples is {float(statistic)}: look at the model's outputs"
        )
    if root.dim() != 3 or root.shape[:2] != f.shape or not 0 < root.shape[2] <= f.shape[1] or not torch.isfinite(root).all():
        raise ValueError(
            f"the root of the {likelihood.name} likelihood must be finite, of shape (B, {f.shape[1]}, rank) with a rank of at most "
            f"{f.shape[1]}, but for {len(f)} samples it is of shape {tuple(root.shape)}: mend its root()"
        )
    return root


def linearised(
    model: nn.Module, x: Tensor, root: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The outputs f (B, D), and for every path its columns (B, S, K, in) and rows (B, C, S, K, out).

    C counts the columns of root(f): (B, D, C). The sum over positions of rows times columns is the Jacobian of root(f)^T f.
    Copies of a sample (``averaging``) are treated as positions.
    """
    columns: dict[str, Tensor] = {}

    def together(t: Tensor) -> Tensor:
        return t.unflatten(0, (len(x), -1)).flatten(1, 2)

    see = lambda name, path, x: columns.__setitem__(name, together(path.columns(x)))  # noqa: E731
    with Tape(sites(model), see, reduce=False) as tape, torch.enable_grad():
        f = tape.record(model, x)
        rows: dict[str, list[Tensor]] = {name: [] for name in columns}
        for cotangent in root(f.detach()).unbind(2):
            for names, row in tape.backward(f, cotangent):
                for name in names:
                    rows[name].append(together(row.detach()))
    return f.detach(), {name: (columns[name], torch.stack(rows[name], 1)) for name in columns}


def refuse_batch_dependence(model: nn.Module) -> None:
    """Refuse models whose output for a sample depends on its batchmates, or on chance."""
    check_module(model)
    if torch.is_inference_mode_enabled():
        raise ValueError("curvature needs a graph: call it outside torch.inference_mode() (torch.no_grad() is fine)")
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"{name} ({kind}) uses the statistics of the batch, so a sample's output depends on its batchmates and the "
                "evidence on the batch size: call model.eval(), with running statistics"
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.training and module.running_mean is not None:
            raise ValueError(f"{name} ({kind}) is in train mode and would change its running statistics: call model.eval()")
        random = isinstance(module, nn.RReLU) or (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0)
        if random and module.training:
            raise ValueError(f"{name} ({kind}) is in train mode, so its outputs are random: call model.eval()")
