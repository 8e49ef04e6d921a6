"""Whether data change when they are moved: exact where they have the symmetry, and it is noticed where they have not."""

import pytest
import torch

from autosym.answer import moving
from autosym.answer.margins import RARE, Margin, judge


def patterns(samples, seed, moves=True, told=False, numbers=False):
    """Noisy copies of three patterns, turned by quarter turns if ``moves``; ``told``: labels say whether by none or two."""
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(99))
    y = torch.randint(3, (samples,), generator=draw)
    turns = torch.randint(4, (samples,), generator=draw) if moves else torch.zeros(samples, dtype=torch.long)
    x = torch.stack([kinds[kind].rot90(turn, (-2, -1)) for kind, turn in zip(y.tolist(), turns.tolist(), strict=True)])
    x = x + torch.randn(x.shape, generator=draw)
    y = y + 3 * (turns % 2) if told else y
    return x, (y.float() + 0.1 * torch.randn(samples, generator=draw))[:, None] if numbers else y


@pytest.mark.parametrize("numbers", [False, True])
def test_data_with_the_symmetry_are_as_likely_as_their_copies(numbers):
    found = torch.tensor([moving.probability("c4", *patterns(60, seed, numbers=numbers)) for seed in range(60)])
    assert 0.35 < found.mean() < 0.65  # uniform: 0.5 +- 0.04
    assert (found <= 0.1).sum() <= 14  # 6 expected; 14 with a chance of one in a thousand


@pytest.mark.parametrize("numbers", [False, True])
def test_labels_that_tell_how_an_image_was_turned_are_noticed(numbers):
    assert moving.probability("c4", *patterns(300, 0, told=True, numbers=numbers)) <= RARE


def test_images_that_are_all_upright_change_when_they_are_turned():
    assert moving.probability("c4", *patterns(300, 0, moves=False)) <= RARE


def test_translations_are_shifts_by_half_a_side():
    x, y = patterns(200, 1, moves=False)
    sides = torch.randint(2, (2, 200), generator=torch.Generator().manual_seed(3))
    moved = torch.stack([image.roll((4 * int(a), 4 * int(b)), (-2, -1)) for image, a, b in zip(x, *sides, strict=True)])
    assert moving.probability("translations", moved, y) > RARE
    assert moving.probability("translations", moved, y + 3 * sides[0]) <= RARE
    assert moving.probability("translations", x[..., :7], y) == 1.0  # no group on odd sides


def test_some_samples_of_every_batch():
    x, y = torch.arange(1000.0)[:, None], torch.arange(1000) // 100  # sorted by class
    kept, labels = moving.some((x, y), 1000, 100)
    assert 100 <= len(kept) <= 104  # batches begin anew
    assert set(labels.tolist()) == set(range(10))
    assert torch.equal(kept[:, 0].long() // 100, labels)
    assert len(moving.some((x, y), 1000, 5000)[0]) == 1000


def test_a_second_witness_decides_only_if_breaking_gains_something():
    tie, gains, none = Margin(-30.0, 40.0, 4), Margin(38.0, 74.0, 4), Margin(5.0, 74.0, 4)
    assert judge([gains], tie) == "undecided"
    assert judge([gains], tie, moved=RARE) == "no"
    assert judge([none], tie, moved=RARE) == "undecided"
    assert judge([none], Margin(300.0, 20.0, 4), moved=RARE) == "yes"  # where objects have one pose, moved ones are not needed


def test_a_network_that_explains_little_does_not_vouch_for_a_symmetry():
    strong = [Margin(0.0, 56.0, 4)], Margin(194.0, 43.0, 4)
    assert judge(*strong) == "yes"
    assert judge(*strong, weak=True) == "undecided"
    assert judge([Margin(500.0, 20.0, 4)], strong[1], weak=True) == "no"
