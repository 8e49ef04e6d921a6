"""Small models and data that many tests share, in float64."""

from itertools import pairwise
from unittest import mock

import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import Dataset

import autosym
import oracles
from autosym.bayes.likelihoods import LIKELIHOODS
from autosym.curvature.kronecker import kfac
from autosym.curvature.owners import sites
from autosym.nn import nets

OPTIMISERS = ("adam", "sgd")
KINDS = ("categorical", "gaussian", "poisson")  # likelihoods of models with any number of outputs
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def draw(likelihood, samples, shape=(5,), outputs=3):
    x = torch.randn(samples, *shape, dtype=torch.float64)
    if likelihood == "poisson":
        return x, torch.randint(4, (samples, outputs))
    y = torch.randint(outputs, (samples,)) if likelihood == "categorical" else torch.randn(samples, outputs).double()
    return x, y


def randomised(model):
    """The model in float64 with weights, also the biases, that are not zero."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.double()


def curvature(model, data, likelihood="categorical", **options):
    return kfac(model, data, LIKELIHOODS[likelihood](), **options)


def owned(model):
    """Name of the path, name of its parameter, for every site."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(site.name, names[id(site.parameter)]) for site in sites(model)]


def exact_blocks(model, name, x, y, likelihood, count):
    return oracles.blocks(oracles.block_ggn(model, name, x, y, likelihood), count)


def mlp(*widths, activation=nn.Tanh):
    parts = [part for i, o in pairwise(widths) for part in (nn.Linear(i, o), activation())]
    return randomised(nn.Sequential(*parts[:-1]))


def convnet(padding_mode="zeros", activation=nn.ReLU, **keys):
    """(2, 6, 5) -> 3 by two convolutions and a linear layer."""
    first = nn.Conv2d(2, 4, 3, padding=1, padding_mode=padding_mode, **keys)
    second = nn.Conv2d(4, 2, (3, 1), padding_mode=padding_mode)
    net = nn.Sequential(first, activation(), second, activation(), nn.Flatten(), nn.LazyLinear(3))
    net(torch.randn(1, 2, 6, 5))
    return randomised(net)


def assert_same(one, two, rtol=1e-10, atol=1e-10):
    assert one.samples == two.samples
    assert one.outputs == two.outputs
    assert_close(one.statistic, two.statistic, rtol=rtol, atol=atol)
    assert one.factors.keys() == two.factors.keys()
    for name, f in one.factors.items():
        assert_close((f.A, f.G), (two.factors[name].A, two.factors[name].G), rtol=rtol, atol=atol)


def eye(size):
    return torch.eye(size, dtype=torch.float64)


def regression(samples=40, size=5, outputs=2, noise=0.5):
    """Features, and targets that are linear in them up to noise."""
    x = torch.randn(samples, size, dtype=torch.float64)
    return x, x @ torch.randn(size, outputs).double() + noise * torch.randn(samples, outputs)


def linear(size=5, outputs=2):
    return nn.Linear(size, outputs, bias=False).double()


def small(name="f-fc+conv", classes=3):
    return nets.build(name, (2, 4, 4), classes, 2, channels=(1, 2), strides=(1, 2), hidden=2)


def relaxed(name="f-fc+conv"):
    return randomised(small(name))


def images(likelihood="categorical", samples=24):
    x, y = draw(likelihood, samples, (2, 4, 4))
    return x.float(), y if likelihood == "categorical" else y.float()


def columns(samples=60):
    """Images of two classes that are easily told apart: by the column that is bright."""
    y = torch.arange(samples) % 2
    return 0.1 * torch.randn(samples, 1, 4, 4) + 3 * torch.eye(4)[y][:, None, None], y


def certain(lr=0.3):
    """A fit to ``columns``, and these data: at this rate the softmax saturates, and the evidence is more than it can be.

    It is made to end at its last epoch: ``fit`` itself goes back to a snapshot whose evidence can be.
    """
    torch.manual_seed(0)
    data = columns()
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    with mock.patch.multiple(
        "autosym.training.fitting", choose=lambda run, curvature: (run.at_end(), 20, "kronecker"), settle=lambda run: None
    ):
        return autosym.fit(autosym.relax(net, data[0][:4]), data, epochs=20, batch_size=20, lr=lr), data


class Samples(Dataset):
    """A dataset that is no tensor."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]
