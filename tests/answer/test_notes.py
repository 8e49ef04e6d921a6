"""What an answer says beside its verdicts."""

import pytest
import torch

from autosym.answer import notes
from autosym.answer.inputs import looked_at


def test_only_what_is_worth_saying_is_said():
    assert notes.late(64.0, 1.0) == notes.late(1e9, None) == notes.few(200) == notes.idle(0, 30) == notes.unpriced([]) == []
    assert notes.late(295.0, 3.0) == ["it took 5 min, longer than the 3 min that were given"]
    assert notes.few(20)[0].startswith("20 samples are few")
    assert "c4 and c2" in notes.unpriced(["c4", "c2"])[0]


@pytest.mark.parametrize("targets", [torch.zeros(9, dtype=torch.long), torch.full((9, 2), 1.5)])
def test_targets_that_are_all_the_same_are_refused(targets):
    x = torch.randn(9, 1, 4, 4)
    with pytest.raises(ValueError, match=r"all 9 targets are (0|1\.5, 1\.5)"):
        looked_at((x, targets), 4)
    targets[8] += 1  # in the last batch
    assert looked_at((x, targets), 4)[1] == 9
