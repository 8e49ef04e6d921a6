"""A callback for Lightning (``pip install lightning``): evidence steps at the ends of epochs, the prior's gradient before every step."""

from typing import Any

from lightning.pytorch.callbacks import Callback
from torch import nn

from autosym.runtime.batching import Data
from autosym.training.learner import Learner


class LearnSymmetry(Callback):
    """``Trainer(callbacks=[LearnSymmetry(data)])`` learns the priors of a LightningModule whose loss is a mean negative log-likelihood.

    ``data`` are the training data without augmentation. ``part`` names the network inside the LightningModule, if it holds others too.
    An evidence step comes every ``every`` epochs after ``burn_in``. ``options`` are those of ``Learner``, which is kept as ``learner``.
    """

    def __init__(self, data: Data, every: int = 2, burn_in: int = 0, part: str = "", **options: Any):
        self.data, self.every, self.burn_in, self.part, self.options = data, every, burn_in, part, options
        self.learner: Learner | None = None
        self._state: dict[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Make the learner, or continue with the one of a checkpoint."""
        if stage == "fit":
            self.learner = Learner(pl_module.get_submodule(self.part), self.data, **self.options)
            if self._state is not None:
                self.learner.load_state_dict(self._state)

    def on_before_optimizer_step(self, trainer: Any, pl_module: nn.Module, optimizer: Any) -> None:
        """The prior's part of the gradient."""
        assert self.learner is not None
        self.learner.add_prior_gradient()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """An evidence step, logged as ``log_evidence``."""
        epoch = trainer.current_epoch + 1
        if self.learner is not None and epoch > self.burn_in and (epoch - self.burn_in) % self.every == 0:
            pl_module.log("log_evidence", float(self.learner.step().log_evidence), sync_dist=False, rank_zero_only=False)

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoints."""
        return {} if self.learner is None else self.learner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until ``setup``, where the learner is made."""
        self._state = state_dict or None
        if self.learner is not None and self._state is not None:
            self.learner.load_state_dict(self._state)
