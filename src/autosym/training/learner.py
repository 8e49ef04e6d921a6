"""Evidence inside a training loop of your own: the prior's part of the loss, and a step of precisions and noise when you ask for one.

    loss = F.cross_entropy(model(x), y) + evidence.penalty()         every batch; or evidence.add_prior_gradient() after backward()
    evidence.step()                                                  every few epochs

``fit`` does both with a proximal step and a schedule; here the loop, its optimiser and its schedule are yours.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autosym.bayes import likelihoods
from autosym.bayes.likelihoods import Likelihood
from autosym.bayes.priors import Prior
from autosym.curvature.owners import sites
from autosym.evidence.kernel import Kernel
from autosym.evidence.laplace import Laplace
from autosym.evidence.record import Evidence
from autosym.evidence.shares import Symmetry, symmetry
from autosym.runtime import processes
from autosym.runtime.batching import Data, size_of
from autosym.training.evidence_steps import estimate, improve
from autosym.training.fitted import with_cautions
from autosym.training.schedule import EvidenceStep, Schedule


class Learner:
    """Priors of all paths of ``model``, learned from ``data`` as they are (each sample once, without augmentation).

    ``options`` are the fields of ``EvidenceStep``: step, damping, trust, hyper_steps, hyper_lr, sampled, subset, kernel.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        likelihood: str | Likelihood = "categorical",
        prior_precision: float | Mapping[str, float] = 1.0,
        memory: float | None = None,
        seed: int = 0,
        **options: Any,
    ):
        self.how = EvidenceStep.of(options)
        count = size_of(data)
        if count is None:
            raise ValueError("the number of samples is not known: pass tensors, a dataset, or a loader of one")
        self.model, self.data, self.count = processes.unwrapped(model), data, count
        self.likelihood = likelihoods.of(likelihood)
        self.owned = {site.name: site.parameter for site in sites(self.model)}
        self.prior = Prior(list(self.owned), prior_precision)
        self.memory, self.seed = memory, seed
        self.at: Laplace | Kernel | None = None  # the evidence as it was at the last step
        self.steps = 0

    def penalty(self) -> Tensor:
        """-log p(w) / N, sum_i delta_i |w_i|^2 / (2 N scale): add it to the mean negative log-likelihood of a batch.

        For regression the loss is half the mean squared error, summed over outputs: 0.5 * (f - y).square().sum(1).mean().
        """
        weight = self._weights()
        return sum((weight[name] * p.square().sum() / 2 for name, p in self.owned.items()), start=torch.zeros(()))

    @torch.no_grad()
    def add_prior_gradient(self) -> None:
        """Add the gradient of ``penalty`` to the gradients of backward(). For loops whose loss you cannot change."""
        weight = self._weights()
        for name, parameter in self.owned.items():
            if parameter.grad is not None:
                parameter.grad.add_(parameter, alpha=weight[name])

    def step(self) -> Evidence:
        """One pass over the data at the present weights, then a step of precisions and noise; returns the evidence after it."""
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()  # dropout and batch statistics have no evidence
        try:
            self.steps += 1
            seed = self.seed + self.steps
            self.at = estimate(self.model, self.data, self.likelihood, self.prior, self.how, seed, self.memory)
            improve(self.prior, self.likelihood, self.at, self.how)
        finally:
            for module, training in modes.items():
                module.training = training
        with torch.no_grad():
            return self.at(self.prior)

    def symmetry(self) -> Symmetry:
        """For every layer and path: precision, effective parameters, relative share, as of the last step."""
        if self.at is None:
            raise ValueError("no evidence step was taken yet: call step() first")
        found = symmetry(self.model, self.prior, self.at)
        with torch.no_grad():
            schedule = Schedule(step=self.how.step)
            return with_cautions(found, self.at(self.prior), self.at, self.prior, self.likelihood, schedule)

    def state_dict(self) -> dict[str, Any]:
        """What your own checkpoint must hold beside the model's weights."""
        hyperparameters = {name: tensor.detach() for name, tensor in self.likelihood.hyperparameters().items()}
        return {"prior": self.prior.state_dict(), "likelihood": hyperparameters, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.prior.load_state_dict(state["prior"])
        own = self.likelihood.hyperparameters()
        if own.keys() != state["likelihood"].keys():
            raise ValueError(
                f"the state is of another likelihood: it holds {list(state['likelihood'])} and the {self.likelihood.name} likelihood "
                f"{list(own)}; make the Learner with the one it is of"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state["likelihood"][name])
        self.steps = int(state["steps"])

    def _weights(self) -> dict[str, float]:
        scale = float(self.likelihood.scale().detach()) * self.count
        if not 0 < scale < math.inf:
            raise ValueError(
                f"the scale of the likelihood, 1 / noise variance, is {scale / self.count}: the noise has collapsed"
            )
        return {name: delta / scale for name, delta in self.prior.precision().items()}
