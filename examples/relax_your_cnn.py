"""Your own CNN in, an answer out: does each of its layers need to know where it looks?

A small plain CNN is trained on scikit-learn's digits, put in one of the four quadrants of an image. It is relaxed, fitted and hardened for
two questions: "which digit?" does not depend on the place, "which digit, and in which quadrant?" does.

    python examples/relax_your_cnn.py              # about a minute on two CPU cores; needs pip install "autosym[data]"
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autosym
from autosym.papers import datasets


class YourCNN(nn.Module):
    """Nothing of autosym's: convolutions, batch normalisation, strides, global pooling."""

    def __init__(self, classes: int):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(24)
        self.conv3 = nn.Conv2d(24, 24, 3, stride=2, padding=1)
        self.out = nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.norm2(self.conv2(x)))
        x = F.relu(self.conv3(x))
        return self.out(x.mean((2, 3)))


def digits_in_quadrants(ask_quadrant: bool) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images (N, 1, 16, 16) with labels."""
    images, digits = datasets.digits()
    pairs = []
    for seed, indices in enumerate(datasets.split(len(images), test=360, seed=0)):
        x, quadrant = datasets.in_quadrants(images[indices], jitter=2, seed=seed)
        pairs.append(((x - 0.08) / 0.22, digits[indices] + (10 * quadrant if ask_quadrant else 0)))
    return pairs[0], pairs[1]


def train(model: nn.Module, pair: tuple[Tensor, Tensor], epochs: int) -> None:
    """As you would do it."""
    x, y = pair
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, pair: tuple[Tensor, Tensor]) -> float:
    return float((model(pair[0]).argmax(1) == pair[1]).double().mean())


def answer(ask_quadrant: bool, epochs: int) -> nn.Module:
    """Train, relax, fit, read, harden; returns the hardened model."""
    torch.manual_seed(0)
    train_pair, test_pair = digits_in_quadrants(ask_quadrant)
    cnn = YourCNN(40 if ask_quadrant else 10)
    train(cnn, train_pair, epochs)

    model = autosym.relax(cnn, train_pair[0][:8], fold=True)
    print(model.relaxation, end="\n\n")

    fit = autosym.fit(model, train_pair, epochs=epochs)
    print(fit.symmetry(), end="\n\n")

    plain = autosym.harden(fit, train_pair)
    print(plain.hardening, end="\n\n")
    sizes = [sum(p.numel() for p in m.parameters()) for m in (cnn, model, plain)]
    for name, net, size in zip(("your CNN", "relaxed and fitted", "hardened"), (cnn, model, plain), sizes, strict=True):
        print(f"{name:20} {size:7} parameters, test accuracy {accuracy(net, test_pair):.1%}")
    return plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25, help="of training, and of the fit")
    epochs = parser.parse_args().epochs
    for ask_quadrant, question in ((False, "Which digit?"), (True, "Which digit, and in which quadrant?")):
        print(f"\n==== {question}\n")
        answer(ask_quadrant, epochs)


if __name__ == "__main__":
    main()
