"""Small pictures for searches: a dot, a lying bar or a standing bar, somewhere on 8x8 pixels."""

import torch


def pictures(samples=60, seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    x = 0.3 * torch.randn(samples, 1, 8, 8, generator=draw, dtype=torch.float64)
    y = torch.arange(samples) % 3
    shapes = torch.zeros(3, 1, 8, 8, dtype=torch.float64)
    shapes[0, 0, 1, 1] = shapes[1, 0, 1, :4] = shapes[2, 0, :4, 1] = 2.0
    for image, label in zip(x, y.tolist(), strict=True):
        down, right = torch.randint(8, (2,), generator=draw).tolist()
        image += shapes[label].roll((down, right), (-2, -1))
    return x.to(dtype), y
