"""Data of the experiments: the embedded digits and the transformed variants of the papers. Deterministic by seed."""

import torch
from torch import Tensor


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1797 embedded handwritten digits: images (N, 8, 8) in [0, 1] and labels (N,). No download."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the embedded digits come with scikit-learn: pip install 'autosym[data]'") from error
    bunch = load_digits()
    return torch.tensor(bunch.images, dtype=torch.float32) / 16, torch.tensor(bunch.target)


def split(count: int, test: int, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of a random training and test part."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[test:], order[:test]


def in_quadrants(images: Tensor, jitter: int, seed: int) -> tuple[Tensor, Tensor]:
    """Each image (N, H, W) in one of the four quadrants of a (N, 1, 2H, 2W) canvas, rolled by up to ``jitter`` pixels.

    Returns the canvases and the quadrants (N,), numbered by rows. The roll is circular: a digit near the border wraps.
    """
    count, height, width = images.shape
    draw = torch.Generator().manual_seed(seed)
    quadrant = torch.randint(4, (count,), generator=draw)
    shift = torch.randint(-jitter, jitter + 1, (count, 2), generator=draw)
    canvas = images.new_zeros(count, 1, 2 * height, 2 * width)
    for i, image in enumerate(images):
        down, right = divmod(int(quadrant[i]), 2)
        canvas[i, 0, :height, :width] = image
        canvas[i] = canvas[i].roll((down * height + int(shift[i, 0]), right * width + int(shift[i, 1])), (1, 2))
    return canvas, quadrant


def turned(images: Tensor, seed: int) -> Tensor:
    """Each square image (N, H, H) turned by a random multiple of 90 degrees."""
    quarter_turns = torch.randint(4, (len(images),), generator=torch.Generator().manual_seed(seed))
    return torch.stack([image.rot90(int(k)) for image, k in zip(images, quarter_turns, strict=True)])


def shifted(images: Tensor, seed: int) -> Tensor:
    """Each image (N, H, W) rolled, circularly, by a random number of rows and columns."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randint(size, (len(images),), generator=draw) for size in images.shape[1:])
    return torch.stack([image.roll((int(r), int(c)), (0, 1)) for image, r, c in zip(images, rows, columns, strict=True)])
