"""CNNs of torchvision and timm: relaxed, one evidence step, hardened, exported, each time the same function, or said why not."""

import json
from dataclasses import asdict

import pytest
import torch
from torch import nn

import zoo
from families import FAMILIES, LEFT_OUT, PLACE
from visiting import SAME, lived_in, visit

pytestmark = [
    pytest.mark.skipif(not PLACE.is_dir(), reason=f"torchvision and timm are not in {PLACE}: make test installs them"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]
NOT_ALL: dict[str, str] = {}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if f.slow else n for n, f in FAMILIES.items()])
def test_a_family_is_relaxed_hardened_and_exported_as_the_same_function(name):
    found = visit(FAMILIES[name])
    assert found.spread > 1e-3, "outputs that do not differ between samples tell nothing"
    assert found.why == NOT_ALL.get(name, "")
    if not found.why:
        assert found.relaxed > 0
        assert all(map(found.kept_function, ("relax", "harden", "export")))


def test_a_network_that_was_lived_in_notices_every_parameter():
    """What is dropped or mistaken changes the outputs by more than the tolerance: each parameter matters."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(144, 3))
    nn.init.zeros_(model[1].weight)  # as networks start whose blocks are to be the identity
    model, x = lived_in(model, (3, 8, 8)), torch.randn(4, 3, 8, 8)
    before = model(x)
    for part in [*model.parameters(), model[1].running_mean, model[1].running_var]:
        values = part.detach().clone()
        part.data.fill_(1.0)
        assert (model(x) - before).norm() > 1e-2 * (before - before.mean(0)).norm()
        part.data.copy_(values)
    assert torch.equal(model(x), before)


def test_the_page_holds_the_table_of_the_results():
    results = json.loads(zoo.OUT.read_text())
    assert list(results["families"]) == list(FAMILIES)
    assert zoo.table(results["families"]) in zoo.PAGE.read_text()
    assert f"{', '.join(LEFT_OUT)}." in " ".join(zoo.PAGE.read_text().split())
    relaxed = [entry for entry in results["families"].values() if entry["relaxed"]]
    assert len(relaxed) >= 57
    for entry in results["families"].values():  # nothing is wrong silently
        moved = [entry[f"{stage}_moved"] for stage in ("relax", "harden", "export")]
        assert entry["why"] or all(value <= SAME for value in moved)


def test_an_error_is_told_with_its_stage(monkeypatch):
    family = FAMILIES["ShuffleNet v2"]
    assert asdict(visit(family, "no path"))["why"].startswith(
        "relax: ValueError: conv1.0 (Conv2d) cannot have the paths 'no path'"
    )
    monkeypatch.setattr("visiting.kernel.at", lambda *_: 1 / 0)
    found = visit(family)
    assert found.why == "evidence: ZeroDivisionError: division by zero"
    assert found.relaxed > 0
    assert found.export_moved is None
