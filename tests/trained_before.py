"""A small network that was trained before, and its data."""

import torch
import torch.nn.functional as F
from torch import nn

from autosym.bayes.priors import Prior
from autosym.evidence import laplace


def pictures(samples=160, seed=0):
    """Bars and dots at random places: their kind does not depend on the place."""
    generator = torch.Generator().manual_seed(seed)
    x, y = 0.2 * torch.randn(samples, 1, 8, 8, generator=generator), torch.arange(samples) % 3
    for i in range(samples):
        a, b = torch.randint(1, 7, (2,), generator=generator).tolist()
        x[i, 0, a, b] += 2
        x[i, 0, a, b - 1] += 2 * int(y[i] == 1)
        x[i, 0, a - 1, b] += 2 * int(y[i] == 2)
    return x, y


def plain(seed=0):
    torch.manual_seed(seed)
    body = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def trained_network():
    net, (x, y) = plain(), pictures()
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(60):
        for rows in torch.randperm(len(x)).split(32):
            optimiser.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()
    assert accuracy(net) > 0.9
    return net.eval()


def accuracy(net):
    x, y = pictures()
    with torch.no_grad():
        return float((net(x).argmax(1) == y).float().mean())


def learned(model, data, at=laplace.at):
    """The evidence at precisions learned in closed form."""
    found = at(model, data)
    prior = Prior(found.names)
    for _ in range(30 if at is laplace.at else 300):  # that of the kernel converges slowly
        found.mackay(prior)
    with torch.no_grad():
        return float(found(prior).log_evidence)


def line_of_points():
    torch.manual_seed(0)
    x = torch.randn(80, 3, dtype=torch.float64)
    return x, x @ torch.tensor([[1.0], [2.0], [0.0]], dtype=torch.float64) + 0.3 * torch.randn(80, 1, dtype=torch.float64)
