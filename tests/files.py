"""Tiny MNIST and CIFAR-10 in their official layouts, an exported network, and a pickle that does something."""

import gzip
import os

import torch
from torch import nn

from autosym.papers import datasets


def idx(tensor, magic=None, count=None):
    """The IDX file of a tensor of bytes; a wrong magic number or count on request."""
    shape = [len(tensor) if count is None else count, *tensor.shape[1:]]
    numbers = [0x800 + tensor.ndim if magic is None else magic, *shape]
    return b"".join(n.to_bytes(4, "big") for n in numbers) + bytes(tensor.flatten().tolist())


def mnist_parts(train=5, test=3):
    """Training and test parts, by the names of their files."""
    x, x_test = (torch.randint(256, (n, 28, 28), dtype=torch.uint8) for n in (train, test))
    y, y_test = (torch.randint(10, (n,), dtype=torch.uint8) for n in (train, test))
    return dict(zip(datasets.MNIST_MD5, (x, y, x_test, y_test), strict=True))


def write_mnist(folder, parts, zipped=True, **replaced):
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in parts.items():
        content = replaced.get(name, idx(tensor))
        (folder / (name if zipped else name.removesuffix(".gz"))).write_bytes(gzip.compress(content, 1) if zipped else content)


def write_cifar10(folder, sizes=(2, 3, 4, 5, 6, 2)):
    """Batches of so many images, the last for tests. Returns the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    images = [torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8) for n in sizes]
    labels = [torch.randint(10, (len(x),), dtype=torch.uint8) for x in images]
    for name, x, y in zip(datasets.CIFAR10_FILES, images, labels, strict=True):
        rows = [bytes([int(label), *image.flatten().tolist()]) for image, label in zip(x, y, strict=True)]
        (folder / name).write_bytes(b"".join(rows))
    return torch.cat(images[:5]), torch.cat(labels[:5]), images[5], labels[5]


def network():
    layers = [nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 3)).eval()


def save(model, path, sizes=None, example=None):
    example = torch.randn(2, 1, 8, 8) if example is None else example
    torch.export.save(torch.export.export(model, (example,), dynamic_shapes=sizes), path)
    return path


class Bait:
    """An object whose pickle makes a folder when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)
