"""Which group do my data ask for? Three networks with a fixed symmetry, compared by evidence; then one that may choose.

Digits (8x8, scikit-learn's own) are shifted at random and, on request, turned by quarter turns. Nothing is held out.

    python examples/compare_groups.py --turned
    python examples/compare_groups.py --epochs 10 --samples 300       # a quick look
"""

import argparse

import torch

import autosym
from autosym.nn import nets
from autosym.papers import datasets


def digits(samples: int, turned: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Shifted, perhaps turned, and normalised digits (N, 1, 8, 8)."""
    images, labels = datasets.digits()
    x = datasets.shifted(images[:samples], seed=0)
    x = datasets.turned(x, seed=1) if turned else x
    return ((x - x.mean()) / x.std())[:, None], labels[:samples]


def network(paths: str) -> torch.nn.Module:
    """The same width in channels for all: a field of C4 has four."""
    width = 3 if "c4" in paths else 12
    return nets.build(paths, (1, 8, 8), 10, width, channels=(1, 2, 4), strides=(2, 2, 2), hidden=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turned", action="store_true", help="turn every digit by a random multiple of 90 degrees")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--samples", type=int, default=1797)
    options = parser.parse_args()
    torch.manual_seed(0)
    pair = digits(options.samples, options.turned)

    models = {name: network(name) for name in ("f-fc", "conv", "gconv:c4")}
    found = autosym.compare(models, pair, epochs=options.epochs, progress=True)
    print(f"\n{'Turned' if options.turned else 'Upright'} digits: which network explains them?\n\n{found}\n")

    chosen = autosym.fit(network("f-fc+conv+gconv:c4"), pair, epochs=options.epochs)
    print(f"One network that may choose, layer by layer:\n\n{chosen.symmetry()}")


if __name__ == "__main__":
    main()
