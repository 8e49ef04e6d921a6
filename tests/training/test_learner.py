"""Evidence inside a loop of one's own, inside Lightning, and by the kernel."""

import copy
from types import SimpleNamespace as Namespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autosym
from autosym.nn import nets
from models import draw, mlp


def relaxed(dtype=torch.float64):
    torch.manual_seed(0)
    return nets.build("f-fc+conv", (1, 4, 4), 3, width=2, channels=(1, 2), strides=(1, 2), hidden=2).to(dtype)


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_the_penalty_is_the_prior_of_the_mean_loss(kind):
    """N scale (mean loss + penalty) is the negative log posterior, up to a constant: their gradients agree."""
    model, (x, y) = mlp(5, 4, 3), draw(kind, 20)
    likelihood = autosym.Gaussian(0.5) if kind == "gaussian" else autosym.Categorical()
    learner = autosym.Learner(model, (x, y), likelihood, prior_precision=3.0)
    loss = F.cross_entropy(model(x), y) if kind == "categorical" else 0.5 * (model(x) - y).square().sum(1).mean()
    scale = 20 * float(likelihood.scale().detach())
    given = torch.autograd.grad(scale * (loss + learner.penalty()), list(model.parameters()))
    log_prior = -1.5 * sum(p.square().sum() for p in model.parameters())
    joint = likelihood.log_likelihood(likelihood.statistic(model(x), y), 60) + log_prior
    for found, expected in zip(given, torch.autograd.grad(-joint, list(model.parameters())), strict=True):
        torch.testing.assert_close(found, expected.to(found), rtol=1e-9, atol=1e-9)


def test_the_gradient_of_the_penalty_may_be_added_instead():
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 20)
    learner = autosym.Learner(model, (x, y), prior_precision=7.0)
    (F.cross_entropy(model(x), y) + learner.penalty()).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    without = [p.grad.clone() for p in model.parameters()]
    learner.add_prior_gradient()
    for p, e, w in zip(model.parameters(), expected, without, strict=True):
        torch.testing.assert_close(p.grad, e)
        assert not torch.equal(p.grad, w)


def test_a_step_is_that_of_fit_and_leaves_the_mode_of_the_model():
    model, data = relaxed(), draw("categorical", 20, (1, 4, 4))
    with_dropout = nn.Sequential(model, nn.Dropout(0.5)).train()
    learner = autosym.Learner(with_dropout, data, sampled=False, trust=1.0)
    record = learner.step()
    assert with_dropout.training
    assert with_dropout[1].training
    at = autosym.evidence.laplace.at(with_dropout.eval(), data)
    prior = autosym.Prior(at.names)
    at.mackay(prior, trust=1.0)
    assert learner.prior.precision() == pytest.approx(prior.precision())
    assert float(record.log_evidence) == pytest.approx(float(at(prior).log_evidence.detach()))
    assert [path.path for path in learner.symmetry()][:2] == ["conv", "f-fc"]


@pytest.mark.parametrize("options", [{"sampled": True}, {"sampled": False, "subset": 8}], ids=str)
def test_every_step_has_draws_of_its_own(options):
    """At the same weights too: errors of sampled curvature would else never average out."""
    data = draw("categorical", 20, (1, 4, 4))

    def taken(seed):
        learner = autosym.Learner(relaxed(), data, seed=seed, **options)
        found = []
        for _ in range(2):
            learner.step()
            found.append(torch.cat([f.G.flatten() for f in learner.at.curvature.factors.values()]))
        return found

    (first, second), again = taken(3), taken(3)
    assert not torch.allclose(first, second)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])


def test_a_loop_of_its_own_raises_the_evidence_and_can_be_saved():
    torch.manual_seed(0)
    model, data = relaxed(), draw("categorical", 40, (1, 4, 4))
    learner = autosym.Learner(model, data, trust=1.0)
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    values = []
    for _ in range(6):
        for _ in range(10):
            optimiser.zero_grad()
            (F.cross_entropy(model(data[0]), data[1]) + learner.penalty()).backward()
            optimiser.step()
        values.append(float(learner.step().log_evidence))
    assert values[-1] > values[0]
    other = autosym.Learner(copy.deepcopy(model), data, trust=1.0)
    other.load_state_dict(learner.state_dict())
    assert float(other.step().log_evidence) == float(learner.step().log_evidence)


def test_what_is_wrong_with_a_learner_is_said():
    model, (x, y) = mlp(5, 4, 3), draw("categorical", 20)
    with pytest.raises(TypeError, match="unknown option epochs: Learner accepts step, damping"):
        autosym.Learner(model, (x, y), epochs=3)
    with pytest.raises(ValueError, match="number of samples is not known"):
        autosym.Learner(model, [(x, y)])
    with pytest.raises(ValueError, match=r"call step\(\) first"):
        autosym.Learner(model, (x, y)).symmetry()


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")  # Lightning's own
def test_lightning(tmp_path):
    pytest.importorskip("lightning", reason="lightning is not installed")
    from lightning.pytorch import LightningModule, Trainer

    from autosym.training.lightning import LearnSymmetry

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = relaxed(torch.float32)

        def training_step(self, batch, _):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.01)

    x, y = draw("categorical", 40, (1, 4, 4))
    data = TensorDataset(x.float(), y)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    quiet["accelerator"] = "cpu"
    callback = LearnSymmetry(data, every=2, burn_in=1, part="net")
    trainer = Trainer(max_epochs=5, default_root_dir=tmp_path, callbacks=[callback], **quiet)
    module = Module()
    trainer.fit(module, DataLoader(data, 8, shuffle=True))
    assert callback.learner.steps == 2
    assert torch.isfinite(trainer.callback_metrics["log_evidence"])
    assert any(delta != 1.0 for delta in callback.learner.prior.precision().values())
    assert module.net.training, "as Lightning left it"
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    again = LearnSymmetry(data, part="net")
    # Lightning's own checkpoints are pickles, which it loads without help of ours.
    Trainer(max_epochs=5, default_root_dir=tmp_path, callbacks=[again], **quiet).fit(
        Module(), DataLoader(data, 8), ckpt_path=tmp_path / "run.ckpt", weights_only=False
    )
    assert again.learner.prior.precision() == callback.learner.prior.precision()


@pytest.mark.parametrize(
    ("every", "burn_in", "expected"), [(1, 0, [1, 2, 3, 4, 5, 6]), (1, 2, [3, 4, 5, 6]), (2, 1, [3, 5]), (3, 0, [3, 6])]
)
def test_lightning_steps_after_burn_in(every, burn_in, expected):
    pytest.importorskip("lightning", reason="lightning is not installed")
    from autosym.training.lightning import LearnSymmetry

    callback, taken = LearnSymmetry(None, every, burn_in), []
    for epoch in range(1, 7):
        callback.learner = Namespace(step=lambda epoch=epoch: taken.append(epoch) or Namespace(log_evidence=0.0))
        callback.on_train_epoch_end(Namespace(current_epoch=epoch - 1), Namespace(log=lambda *_, **__: None))
    assert taken == expected


# ---- kernel evidence in fit


def test_fit_by_the_kernel_learns_precisions():
    torch.manual_seed(0)
    model, data = relaxed(), draw("categorical", 60, (1, 4, 4))
    fit = autosym.fit(model, data, epochs=6, burn_in=0, every=1, kernel=20)
    assert "in expectation: an estimate from 20 of 60 samples" in fit.evidence.bound_of
    assert len({round(delta, 6) for delta in fit.prior.precision().values()}) > 3
    assert sum(path.effective_parameters for path in fit.symmetry()) > 0
    with pytest.raises(ValueError, match="kernel evidence, which has no Kronecker factors"):
        fit.predictive(data[0][:2])


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return F.relu(x + self.second(F.relu(self.first(x))))


@pytest.mark.slow
def test_a_residual_network_with_a_thousand_classes_learns_its_priors():
    """One backward pass for all classes: Kronecker factors of the head alone would be 1000 x 1000, after 999 passes."""
    torch.manual_seed(0)
    classes, prototypes = 1000, torch.randn(1000, 3, 8, 8)
    y = torch.arange(2000) % classes
    x = prototypes[y] + 0.3 * torch.randn(2000, 3, 8, 8)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        Residual(16),
        nn.AvgPool2d(2),
        Residual(16),
        nn.Flatten(),
        nn.Linear(256, classes),
    )
    fit = autosym.fit(net, (x, y), epochs=12, batch_size=100, burn_in=2, every=2, kernel=100)
    lines = [line for line in fit.history if "log_evidence" in line]
    assert lines[-1]["log_evidence"] > lines[0]["log_evidence"]
    assert max(abs(torch.tensor(list(fit.prior.precision().values())).log())) > 0.5
