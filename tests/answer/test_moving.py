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
    found = torch.tensor([moving.probability("c4", *patterns(60, seed, numbers=numbers), not numbers) for seed in range(60)])
    assert 0.35 < found.mean() < 0.65  # uniform: 0.5 +- 0.04
    assert (found <= 0.1).sum() <= 14  # 6 expected; 14 with a chance of one in a thousand


@pytest.mark.parametrize("numbers", [False, True])
def test_labels_that_tell_how_an_image_was_turned_are_noticed(numbers):
    assert moving.probability("c4", *patterns(300, 0, told=True, numbers=numbers), not numbers) <= RARE


def test_images_that_are_all_upright_change_when_they_are_turned():
    assert moving.probability("c4", *patterns(300, 0, moves=False), True) <= RARE


def test_translations_are_shifts_by_half_a_side():
    x, y = patterns(200, 1, moves=False)
    sides = torch.randint(2, (2, 200), generator=torch.Generator().manual_seed(3))
    moved = torch.stack([image.roll((4 * int(a), 4 * int(b)), (-2, -1)) for image, a, b in zip(x, *sides, strict=True)])
    assert moving.probability("translations", moved, y, True) > RARE
    assert moving.probability("translations", moved, y + 3 * sides[0], True) <= RARE
    assert moving.probability("translations", x[..., :7], y, True) == 1.0  # no group on odd sides


def test_images_that_tell_nothing_are_no_witness():
    x, y = patterns(40, 0)
    assert moving.probability("c4", torch.zeros_like(x), y, True) == 1.0
    assert moving.probability("c4", torch.full_like(x, torch.nan), y, True) == 1.0
    assert moving.probability("c4", x[:1], y[:1], True) == 1.0
    assert moving.probability("c4", patterns(40, 0, moves=False)[0], torch.full((40, 1), 0.1), False) == 1.0  # a constant
    blank = x * (torch.arange(40) % 5 == 0)[:, None, None, None]  # four of five are blank: the median distance is 0
    assert 1 / (moving.COPIES + 1) <= moving.probability("c4", blank, y, True) <= 1


def test_equal_images_are_moved_alike():
    """Each image ten times: moved apart, copies would differ from the data by that alone."""
    found = [moving.probability("c4", *(t.repeat_interleave(10, 0) for t in patterns(30, seed)), True) for seed in range(8)]
    assert sorted(found)[3] > 0.05


def test_counts_and_labels_of_any_type_are_taken():
    x, y = patterns(60, 0, told=True)
    assert moving.probability("c4", x, torch.stack([y, 5 - y], 1), False) <= 1  # counts, in two columns
    assert moving.probability("c4", x, y, True) == moving.probability("c4", x, 7.0 * y.double()[:, None] - 100, True)
    assert moving.probability("c4", (10 * x).to(torch.int16), y > 2, True) <= 1


def test_some_samples_are_of_all_classes_and_not_too_many(monkeypatch):
    monkeypatch.setattr(moving, "SAMPLES", 100)
    x, y = torch.arange(1000.0)[:, None], torch.arange(1000) // 100  # sorted by class
    kept, labels = moving.some((x, y), 1000)
    assert torch.equal(kept[:, 0], torch.arange(0.0, 1000, 10))
    assert torch.equal(kept[:, 0].long() // 100, labels)
    single = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=1)
    assert torch.equal(moving.some(single, 1000)[0], kept)
    assert len(moving.some((x[:99], y[:99]), 99)[0]) == 99


def test_data_that_change_are_never_a_yes_and_a_no_only_if_breaking_gains_something():
    tie, gains, none = Margin(-30.0, 40.0, 4), Margin(38.0, 74.0, 4), Margin(5.0, 74.0, 4)
    large, alike = Margin(300.0, 20.0, 4), Margin(1.0, 3.0, 3)
    assert judge([gains], tie) == "undecided"
    assert judge([gains], tie, moved=RARE) == "no"
    assert judge([none], tie, moved=RARE) == "undecided"
    for arguments in (([gains], large, alike), ([none], large)):  # within its error, and pairs are alike; or nothing
        assert judge(*arguments) == judge(*arguments, moved=2 * RARE) == "yes"
        assert judge(*arguments, moved=RARE) == "undecided"


def test_a_network_that_explains_little_does_not_vouch_for_a_symmetry():
    strong = [Margin(0.0, 56.0, 4)], Margin(194.0, 43.0, 4)
    assert judge(*strong) == "yes"
    assert judge(*strong, weak=True) == "undecided"
    assert judge([Margin(500.0, 20.0, 4)], strong[1], weak=True) == "no"
