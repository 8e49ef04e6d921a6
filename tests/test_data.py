import sys

import pytest
import torch

from autosym import data


def drawn(count=40):
    """Images without a zero pixel: where they are on the canvas is plain to see."""
    return torch.rand(count, 3, 4) + 0.5


def test_digits_are_the_embedded_ones():
    pytest.importorskip("sklearn")
    images, labels = data.digits()
    assert images.shape == (1797, 8, 8)
    assert labels.shape == (1797,)
    assert images.dtype == torch.float32
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert labels.unique().tolist() == list(range(10))
    assert labels.bincount().min() > 170


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"scikit-learn: pip install 'autosym\[data\]'"):
        data.digits()


def test_without_jitter_the_image_is_in_its_quadrant_and_nowhere_else():
    images = drawn()
    canvas, quadrant = data.in_quadrants(images, 0, seed=0)
    assert canvas.shape == (40, 1, 6, 8)
    assert quadrant.unique().tolist() == [0, 1, 2, 3]
    for image, place, q in zip(images, canvas[:, 0], quadrant.tolist(), strict=True):
        rows, columns = [(0, 0), (0, 4), (3, 0), (3, 4)][q]  # numbered by rows
        torch.testing.assert_close(place[rows : rows + 3, columns : columns + 4], image, rtol=0, atol=0)
        assert torch.count_nonzero(place) == image.numel()


@pytest.mark.parametrize("jitter", [1, 2])
def test_jitter_is_a_circular_roll_of_at_most_so_many_pixels(jitter):
    images = drawn(200)
    still, quadrant = data.in_quadrants(images, 0, seed=3)
    moved, same = data.in_quadrants(images, jitter, seed=3)
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
    canvas, quadrant = data.in_quadrants(images, 2, seed=1)
    torch.manual_seed(99)
    again, same = data.in_quadrants(images, 2, seed=1)
    assert torch.equal(canvas, again)
    assert torch.equal(quadrant, same)
    other, different = data.in_quadrants(images, 2, seed=2)
    assert not torch.equal(canvas, other)
    assert not torch.equal(quadrant, different)


def test_images_are_left_as_they_were():
    images = drawn()
    before = images.clone()
    data.in_quadrants(images, 2, seed=0)
    assert torch.equal(images, before)


def test_split_is_disjoint_and_complete():
    train, test = data.split(50, 12, seed=0)
    assert (len(train), len(test)) == (38, 12)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(50))
    assert test.tolist() != sorted(test.tolist()), "a random part, not the first"


def test_split_is_deterministic_by_seed():
    first, again, other = data.split(50, 12, seed=0), data.split(50, 12, seed=0), data.split(50, 12, seed=1)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[1], other[1])
