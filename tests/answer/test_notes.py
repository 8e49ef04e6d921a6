"""What an answer says beside its verdicts."""

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from autosym.answer import notes
from autosym.answer.inputs import looked_at


def test_only_what_is_worth_saying_is_said():
    assert notes.late(64.0, 1.0) == notes.late(1e9, None) == notes.few(200) == notes.idle(0, 30) == notes.unpriced([]) == []
    assert notes.late(295.0, 3.0) == ["it took 4.9 min, longer than the 3 that were given"]
    assert notes.few(20)[0].startswith("20 samples are few")
    assert "c4 and c2" in notes.unpriced(["c4", "c2"])[0]
    assert notes.shortened(100, 100, False) == []
    (said,) = notes.shortened(55.0, 400, True)
    assert said == "long runs had 14% of 400 epochs, to stay within the minutes: more minutes allow more"
    assert notes.shortened(55.0, 400, False)[0].endswith("within the budget: a larger budget allows more")


@pytest.mark.parametrize("targets", [torch.zeros(9, dtype=torch.long), torch.full((9, 2), 1.5)])
def test_targets_that_are_all_the_same_are_refused(targets):
    x = torch.randn(9, 1, 4, 4)
    with pytest.raises(ValueError, match=r"all 9 targets are (0|1\.5, 1\.5)"):
        looked_at((x, targets), 4)
    targets[8] += 1  # in the last batch
    assert looked_at((x, targets), 4)[1] == 9


def test_a_shard_with_one_class_is_not_all_data():
    data = TensorDataset(torch.randn(8, 1, 4, 4), torch.arange(8) % 2)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0, shuffle=False))
    assert {int(y) for _, batch in loader for y in batch} == {0}
    assert looked_at(loader, 4)[2] == 2
