import math
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from autosym.papers import datasets


def drawn(count=40):
    """Images without a zero pixel: where they are on the canvas is plain to see."""
    return torch.rand(count, 3, 4) + 0.5


def test_digits_are_the_embedded_ones():
    pytest.importorskip("sklearn")
    images, labels = datasets.digits()
    assert images.shape == (1797, 8, 8)
    assert labels.shape == (1797,)
    assert images.dtype == torch.float32
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert labels.unique().tolist() == list(range(10))
    assert labels.bincount().min() > 170


def test_digits_can_come_from_a_file(monkeypatch, tmp_path):
    np.savez(tmp_path / "digits.npz", images=np.full((2, 8, 8), 0.5), labels=np.array([3, 4]))
    monkeypatch.setenv("AUTOSYM_DIGITS", str(tmp_path / "digits.npz"))
    images, labels = datasets.digits()
    assert images.dtype == torch.float32
    assert images.shape == (2, 8, 8)
    assert labels.tolist() == [3, 4]


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"scikit-learn: pip install 'autosym\[data\]'"):
        datasets.digits()


def test_without_jitter_the_image_is_in_its_quadrant_and_nowhere_else():
    images = drawn()
    canvas, quadrant = datasets.in_quadrants(images, 0, seed=0)
    assert canvas.shape == (40, 1, 6, 8)
    assert quadrant.unique().tolist() == [0, 1, 2, 3]
    for image, place, q in zip(images, canvas[:, 0], quadrant.tolist(), strict=True):
        rows, columns = [(0, 0), (0, 4), (3, 0), (3, 4)][q]  # numbered by rows
        torch.testing.assert_close(place[rows : rows + 3, columns : columns + 4], image, rtol=0, atol=0)
        assert torch.count_nonzero(place) == image.numel()


@pytest.mark.parametrize("jitter", [1, 2])
def test_jitter_is_a_circular_roll_of_at_most_so_many_pixels(jitter):
    images = drawn(200)
    still, quadrant = datasets.in_quadrants(images, 0, seed=3)
    moved, same = datasets.in_quadrants(images, jitter, seed=3)
    assert torch.equal(quadrant, same), "the jitter does not change the quadrants of a seed"
    shifts = range(-jitter, jitter + 1)
    seen = set()
    for before, after in zip(still, moved, strict=True):
        found = [(d, r) for d in shifts for r in shifts if torch.equal(before.roll((d, r), (1, 2)), after)]
        assert len(found) == 1
        seen.update(found)
    assert len(seen) == len(shifts) ** 2, "every roll occurs"


def test_placing_is_deterministic_by_seed():
    images = drawn()
    canvas, quadrant = datasets.in_quadrants(images, 2, seed=1)
    torch.manual_seed(99)
    again, same = datasets.in_quadrants(images, 2, seed=1)
    assert torch.equal(canvas, again)
    assert torch.equal(quadrant, same)
    other, different = datasets.in_quadrants(images, 2, seed=2)
    assert not torch.equal(canvas, other)
    assert not torch.equal(quadrant, different)


def test_images_are_left_as_they_were():
    images = drawn()
    before = images.clone()
    datasets.in_quadrants(images, 2, seed=0)
    assert torch.equal(images, before)


def test_split_is_disjoint_and_complete():
    train, test = datasets.split(50, 12, seed=0)
    assert (len(train), len(test)) == (38, 12)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(50))
    assert test.tolist() != sorted(test.tolist()), "a random part, not the first"


def test_split_is_deterministic_by_seed():
    first, again, other = datasets.split(50, 12, seed=0), datasets.split(50, 12, seed=0), datasets.split(50, 12, seed=1)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])


def test_shifting_is_a_roll_by_any_number_of_rows_and_columns():
    images = drawn(200)
    moved = datasets.shifted(images, seed=0)
    rolls = [(r, c) for r in range(3) for c in range(4)]
    found = [
        [k for k in rolls if torch.equal(before.roll(k, (0, 1)), after)] for before, after in zip(images, moved, strict=True)
    ]
    assert all(len(ks) == 1 for ks in found)
    assert {ks[0] for ks in found} == set(rolls)


# Variants


def pictures(count=30, channels=2, height=6, width=8):
    return torch.rand(count, channels, height, width, dtype=torch.float64) + 0.5


def test_bytes_become_floats_and_are_normalised():
    images = torch.randint(256, (4, 5, 6), dtype=torch.uint8)
    images[0, 0, :2] = torch.tensor([0, 255])
    floats = datasets.as_floats(images)
    assert floats.shape == (4, 1, 5, 6)
    assert floats[0, 0, 0, :2].tolist() == [0.0, 1.0]
    assert torch.equal(floats[:, 0], images.float() / 255)
    assert torch.equal(datasets.as_floats(images[:, None].expand(4, 3, 5, 6)), floats.expand(4, 3, 5, 6))
    torch.testing.assert_close(datasets.normalised(floats, *datasets.MNIST), (floats - 0.1307) / 0.3081)
    colours, (mean, std) = pictures(channels=3), datasets.CIFAR10
    got = datasets.normalised(colours, mean, std)
    for c in range(3):
        torch.testing.assert_close(got[:, c], (colours[:, c] - mean[c]) / std[c])
    with pytest.raises(ValueError, match=r"do not suit the 1 channel"):
        datasets.normalised(floats, mean, std)
    with pytest.raises(ValueError, match="uint8"):
        datasets.as_floats(floats)


def test_quadrants_are_each_image_on_its_canvas_resized():
    images = pictures(40, height=7, width=9)
    got, quadrant = datasets.quadrants(images, seed=0, size=10)
    assert quadrant.unique().tolist() == [0, 1, 2, 3]
    for image, result, q in zip(images, got, quadrant.tolist(), strict=True):
        rows, columns = [(0, 0), (0, 9), (7, 0), (7, 9)][q]  # numbered by rows
        canvas = torch.zeros(1, 2, 14, 18, dtype=torch.float64)
        canvas[0, :, rows : rows + 7, columns : columns + 9] = image
        small = F.interpolate(canvas, (10, 10), mode="bilinear", align_corners=False, antialias=True)
        torch.testing.assert_close(result, small[0], rtol=0, atol=1e-14)


def test_quadrants_of_digits_are_32_pixels_wide_in_the_unit_range():
    got, _ = datasets.quadrants(torch.rand(8, 1, 28, 28), seed=0)
    assert got.shape == (8, 1, 32, 32)
    assert got.dtype == torch.float32
    assert got.min() >= 0
    assert got.max() <= 1


def test_resizing_is_bilinear_between_pixel_centres():
    images = pictures(3, height=28, width=28)
    up = F.interpolate(images, (32, 32), mode="bilinear", align_corners=False)
    torch.testing.assert_close(datasets.resized(images), up, rtol=0, atol=1e-12)
    ramp = torch.arange(8, dtype=torch.float64).expand(1, 1, 8, 8)
    torch.testing.assert_close(datasets.resized(ramp, 16)[0, 0, 3, 1:-1], torch.arange(14, dtype=torch.float64) / 2 + 0.25)
    spike = torch.zeros(1, 1, 16, 16, dtype=torch.float64)
    spike[0, 0, 8, 8] = 16.0
    assert float(datasets.resized(spike, 4).sum()) == pytest.approx(1.0, rel=1e-2), "antialiased: no pixel is skipped"


def seen_through(image, matrix):
    """Slow oracle of out(p) = image(A p): every pixel on its own, bilinear from its four neighbours, zero outside."""
    height, width = image.shape
    out = torch.zeros_like(image)
    for i in range(height):
        for j in range(width):
            x, y = j - (width - 1) / 2, i - (height - 1) / 2
            column = matrix[0][0] * x + matrix[0][1] * y + (width - 1) / 2
            row = matrix[1][0] * x + matrix[1][1] * y + (height - 1) / 2
            for r in (math.floor(row), math.floor(row) + 1):
                for c in (math.floor(column), math.floor(column) + 1):
                    if 0 <= r < height and 0 <= c < width:
                        out[i, j] += (1 - abs(row - r)) * (1 - abs(column - c)) * image[r, c]
    return out


@pytest.mark.parametrize("shape", [(6, 8), (7, 4), (5, 5)])
def test_turning_and_scaling_are_those_of_every_pixel(shape):
    images = pictures(4, 1, *shape)
    draws = 2 * torch.rand(4, generator=torch.Generator().manual_seed(3), dtype=torch.float64) - 1
    turned, scaled = datasets.rotated(images, 3, degrees=70.0), datasets.scaled(images, 3, factor=2.0)
    for image, draw, turn, scale in zip(images[:, 0], draws.tolist(), turned[:, 0], scaled[:, 0], strict=True):
        cos, sin = math.cos(math.radians(70 * draw)), math.sin(math.radians(70 * draw))
        torch.testing.assert_close(turn, seen_through(image, [[cos, -sin], [sin, cos]]), rtol=0, atol=1e-12)
        size = 2.0**draw  # above 1 the image grows
        torch.testing.assert_close(scale, seen_through(image, [[1 / size, 0], [0, 1 / size]]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("height", [6, 7])
def test_quarter_turns_are_those_of_rot90(height):
    images = pictures(4, height=height, width=height)
    got = datasets.turn(images, torch.tensor([90.0, -90.0, 180.0, 0.0], dtype=torch.float64))
    for image, result, k in zip(images, got, (1, -1, 2, 0), strict=True):
        torch.testing.assert_close(result, image.rot90(k, (1, 2)), rtol=0, atol=1e-12)


def test_a_quarter_turn_of_an_oblong_image_keeps_its_square_middle():
    images = pictures(2, height=4, width=8)
    got = datasets.turn(images, torch.full((2,), 90.0))
    torch.testing.assert_close(got[..., 2:6], images[..., 2:6].rot90(1, (2, 3)), rtol=0, atol=1e-12)
    assert got[..., [0, 1, 6, 7]].abs().max() < 1e-12


def test_angles_and_factors_fill_their_range():
    """A bright pixel to the right of the centre shows the angle, the width of a bright square the factor."""
    images = torch.zeros(4000, 1, 33, 33)
    images[:, :, 15:18, 25:28] = 1.0
    at = torch.arange(33.0) - 16
    angles = []
    for degrees in (180.0, 30.0):
        got = datasets.rotated(images, 1, degrees)[:, 0]
        x, y = (got * at).sum((1, 2)), (got * at[:, None]).sum((1, 2))
        angles.append(torch.atan2(-y, x).rad2deg())
    assert angles[0].abs().max() > 178
    assert angles[0].histc(6, -180, 180).min() > 550
    assert 29.5 < angles[1].abs().max() < 30.5
    assert angles[1].histc(6, -30.5, 30.5).min() > 550
    images[:, :, 11:22, 11:22] = 1.0
    images[:, :, :, 25:] = 0.0
    widths = datasets.scaled(images, 1)[:, 0, 16].sum(1)  # of a square of 11
    assert 5 < widths.min() < 6
    assert 21 < widths.max() < 23


def test_translation_moves_pixels_and_fills_with_zeros():
    images = pictures(400, 2, 5, 7)
    moved = datasets.translated(images, 0, pixels=2)
    padded = F.pad(images, (2, 2, 2, 2))
    windows = {(r, c): padded[:, :, 2 - r : 7 - r, 2 - c : 9 - c] for r in range(-2, 3) for c in range(-2, 3)}
    hits = torch.stack([(window == moved).flatten(1).all(1) for window in windows.values()])
    assert (hits.sum(0) == 1).all(), "each is one of the moves"
    assert hits.sum(1).min() > 2, "each move occurs"
    assert (datasets.translated(images, 0, pixels=50).flatten(1).sum(1) == 0).any(), "farther than the image is wide"
    assert torch.equal(datasets.translated(images, 0, pixels=0), images)


VARIANTS = {
    "quadrants": lambda x, seed: datasets.quadrants(x, seed)[0],
    "rotated": datasets.rotated,
    "scaled": datasets.scaled,
    "translated": lambda x, seed: datasets.translated(x, seed, pixels=2),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_deterministic_by_seed_and_leave_the_images(variant, monkeypatch):
    images = pictures()
    before = images.clone()
    first = VARIANTS[variant](images, 1)
    torch.manual_seed(99)
    assert torch.equal(first, VARIANTS[variant](images, 1))
    assert not torch.equal(first, VARIANTS[variant](images, 2))
    torch.testing.assert_close(VARIANTS[variant](images.float(), 1), first.float(), rtol=0, atol=1e-4)  # the same draws
    assert torch.equal(images, before)
    monkeypatch.setattr(datasets, "CHUNK", 7)
    torch.testing.assert_close(VARIANTS[variant](images, 1), first, rtol=0, atol=1e-14)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("images", [torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, 4, 4), torch.zeros(0, 1, 4, 4)])
def test_variants_refuse_what_are_not_images(variant, images):
    with pytest.raises(ValueError, match=r"floats \(N, C, H, W\)"):
        VARIANTS[variant](images, 0)


# Augmentation


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("pad", [0, 2, 9])
def test_flip_and_crop_is_that_of_each_image(pad, dtype):
    x = torch.randint(1, 256, (60, 3, 5, 7)).to(dtype)
    got = datasets.flip_and_crop(x, torch.Generator().manual_seed(4), pad)
    assert got.dtype == dtype
    draw = torch.Generator().manual_seed(4)
    (down, right), flip = torch.randint(-pad, pad + 1, (2, 60), generator=draw), torch.randint(2, (60,), generator=draw)
    for n in range(60):
        padded = F.pad(x[n].flip(2) if flip[n] else x[n], (pad, pad, pad, pad))
        top, left = pad - int(down[n]), pad - int(right[n])
        assert torch.equal(got[n], padded[:, top : top + 5, left : left + 7])


def test_every_flip_and_crop_is_equally_likely_for_every_image():
    image = torch.rand(1, 1, 4, 5)
    got = datasets.flip_and_crop(image.expand(3600, -1, -1, -1), torch.Generator().manual_seed(0), pad=1)
    _, counts = got.flatten(1).unique(dim=0, return_counts=True)
    assert len(counts) == 2 * 3 * 3
    assert 130 < counts.min() <= counts.max() < 270, "200 each, up to five standard deviations"


@pytest.mark.parametrize(
    ("move", "reach"),
    [(lambda x: datasets.flip_and_crop(x, torch.Generator().manual_seed(0)), 4), (lambda x: datasets.translated(x, 0), 8)],
    ids=["augmentation", "translation"],
)
def test_by_default_moves_reach_as_far_as_published_and_no_farther(move, reach):
    images = torch.zeros(1000, 1, 41, 41)
    images[:, :, 20, 20] = 1.0
    _, _, *places = move(images).nonzero(as_tuple=True)
    for along in places:
        assert len(along) == 1000
        assert (along - 20).unique().tolist() == list(range(-reach, reach + 1))


def test_augmentation_goes_on_with_its_generator():
    x, generator = pictures(), torch.Generator().manual_seed(0)
    before = x.clone()
    first, second = datasets.flip_and_crop(x, generator), datasets.flip_and_crop(x, generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, datasets.flip_and_crop(x, generator.manual_seed(0)))
    assert torch.equal(x, before)


def test_augmentation_never_looks_at_values():
    """On the meta device there are none: an operation that waits for the device, or one on the host, would fail."""
    x = torch.empty(8, 3, 32, 32, device="meta")
    out = datasets.flip_and_crop(x, torch.Generator())
    assert out.shape == x.shape
    assert out.is_meta
    with pytest.raises(RuntimeError):
        bool(out.any())
