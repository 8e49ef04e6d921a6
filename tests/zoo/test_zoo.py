"""CNNs of torchvision and timm: relaxed, one evidence step, hardened, exported, each time the same function; lifted, or said why not."""

import json
from dataclasses import asdict

import pytest
import torch
from torch import nn

import zoo
from families import FAMILIES, LEFT_OUT, PLACE, WHERE
from visiting import SAME, lived_in, visit
from visiting_lifts import exact, visit_lifted

pytestmark = [
    pytest.mark.skipif(not PLACE.is_dir(), reason=f"torchvision and timm are not in {PLACE}: make test installs them"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]
NOT_ALL: dict[str, str] = {}
TESTED = [name for name, family in FAMILIES.items() if not family.long]
QUICKLY_LIFTED = ("pre-activation ResNet", "FasterNet", "NF-RegNet")


def marked(names, slow):
    return pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if slow(n) else n for n in names])


@marked(TESTED, lambda name: FAMILIES[name].slow)
def test_a_family_is_relaxed_hardened_and_exported_as_the_same_function(name):
    is_the_same_throughout(name, visit(FAMILIES[name]))


@marked(WHERE, lambda name: FAMILIES[name].slow)
def test_the_same_with_waves_of_position(name):
    found = visit(FAMILIES[name], "where")
    assert found.paths == "where"
    assert found.relaxed_parameters <= 5 * found.parameters
    is_the_same_throughout(name, found)


def is_the_same_throughout(name, found):
    assert found.spread > 1e-3, "outputs that do not differ between samples tell nothing"
    assert found.why == NOT_ALL.get(name, "")
    if not found.why:
        assert found.relaxed > 0
        assert all(map(found.kept_function, ("relax", "harden", "export")))


@pytest.mark.parametrize("group", ["c4", "translations"])
@marked(TESTED, lambda name: name not in QUICKLY_LIFTED)
def test_a_lifted_family_follows_its_group_or_is_refused_by_name(name, group):
    found = visit_lifted(FAMILIES[name], group)
    written = json.loads(zoo.OUT.read_text())["families"][name]["lift"][group]
    assert found.size == written["size"]
    if found.size is None:
        names = [part for part, _ in FAMILIES[name].build().named_modules() if part]
        assert "the output" in found.why or any(part in found.why for part in names)
    else:
        keeps_its_promise(asdict(found))


def keeps_its_promise(lifted):
    """docs/lift.md: exact by the group; by shifts too, with circular padding that keeps every size, and polyphase grids."""
    assert lifted["spread"] > 1e-3, "outputs that do not differ between samples tell nothing"
    assert lifted["rounding"] < 1e-6
    assert exact(lifted["moved"], lifted["rounding"])
    assert not lifted["promised"] or exact(lifted["shifted"], lifted["rounding"])


def test_a_network_that_was_not_lifted_moves(monkeypatch):
    """The negative control: plain networks do not keep the promise, and those over a group move by shifts with zero padding."""
    monkeypatch.setattr("visiting_lifts.autosym.lift", lambda model, *_, **__: model)
    for group in ("c4", "translations"):
        assert visit_lifted(FAMILIES["pre-activation ResNet"], group).moved > 1e-2


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
        for lifted in entry["lift"].values():
            assert lifted["why"] if lifted["size"] is None else keeps_its_promise(lifted) is None


def test_every_row_is_of_one_commit_and_waves_were_tried_on_twenty():
    families = json.loads(zoo.OUT.read_text())["families"]
    assert len({entry["commit"] for entry in families.values()}) == 1
    assert [name for name, entry in families.items() if entry["where"]] == [name for name in FAMILIES if name in WHERE]
    assert len(WHERE) >= 20


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
