"""How autosym fit comes to its network: what it leaves out, when it tries again, how long all of it took, and the way into Python."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import autosym

pytest.importorskip("tyro")
pytest.importorskip("rich")

from autosym.cli import own_images, tries
from autosym.papers.measuring import fit_in
from autosym.training.fitted import Fit
from autosym.training.guarding import NothingLearned
from commands import bars, shown


@pytest.fixture
def noise(tmp_path):
    """Images that say nothing of their labels."""
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "noise.npz", x=draw.normal(size=(30, 8, 8)), y=draw.integers(0, 3, 30))
    return tmp_path / "noise.npz"


def of(capsys, *arguments):
    return json.loads(shown(capsys, "fit", *arguments, "--json").out)


def page(folder):
    return " ".join((folder / "report.html").read_text().split())


# ---- what the data do not support


def test_what_the_data_do_not_support_is_left_out(capsys, tmp_path, npz):
    out = shown(capsys, "fit", npz, "--out", tmp_path / "r", "--epochs", "40").out
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    priced = result["simplification"]
    gone = {path["layer"]: path for path in priced["paths"] if path["left_out"]}
    assert gone, "bars may be anywhere"
    shares = {path["layer"]: path["share"] for path in result["symmetry"] if path["path"] == "f-fc"}
    assert all(shares[layer] < 1e-3 for layer in gone)
    assert result["row"]["log_evidence"] == pytest.approx(priced["log_evidence_after"])
    assert priced["log_evidence_before"] - priced["log_evidence_after"] < 10 * len(gone)
    network, _ = own_images._read_run(tmp_path / "r")
    assert all(not network.get_submodule(layer)["f-fc"].theta_1.weight.any() for layer in gone), "also what audit measures"
    for layer, path in gone.items():
        said = f"f-fc of {layer} ({'about ' * path['estimated']}"
        assert said in " ".join(out.split())
        assert said in page(tmp_path / "r")
    assert "Priced in" in out
    (tmp_path / "r" / "report.html").unlink()
    shown(capsys, "report", tmp_path / "r")
    assert "were left out, which" in page(tmp_path / "r"), "from files alone"


def test_nothing_is_left_out_without_asking_for_it(capsys, tmp_path, npz):
    options = (npz, "--epochs", "40", "--out")
    all_of_it, simple = of(capsys, *options, tmp_path / "all", "--no-simplify"), of(capsys, *options, tmp_path / "simple")
    assert all_of_it["simplification"] is None
    assert all_of_it["config"]["simplify"] is False
    assert "--no-simplify" in json.loads((tmp_path / "all" / "report.json").read_text())["command"]
    before = {p["layer"]: p["share"] for p in all_of_it["symmetry"] if p["path"] == "f-fc"}
    assert {p["layer"]: p["share"] for p in simple["simplification"]["paths"]} == pytest.approx(before)
    assert "left out" not in page(tmp_path / "all")


def test_a_network_without_a_choice_is_not_simplified(capsys, tmp_path, npz):
    result = of(capsys, npz, "--epochs", "40", "--out", tmp_path / "r", "--model", "conv")
    assert result["simplification"] is None
    assert result["headline"].startswith("No layer had a choice")


# ---- if nothing is learned


def test_if_nothing_is_learned_it_tries_again(capsys, tmp_path, noise):
    options = (noise, "--epochs", "4", "--out", tmp_path / "r")
    result = of(capsys, *options)
    made = result["tries"]
    assert [one["seed"] for one in made] == [0, 1000, 2000]
    assert made[1]["lr"] == made[2]["lr"] == pytest.approx(made[0]["lr"] / tries.SLOWER)
    assert all(one["why"] for one in made)
    (kept,) = (one for one in made if one["kept"])
    assert kept["log_evidence"] == max(one["log_evidence"] for one in made) == result["row"]["log_evidence"]
    assert result["notes"][-2].startswith(
        "nothing was learned with seeds 0 at rate 0.05, 1000 at rate 0.025, 2000 at rate 0.025; "
    )
    assert result["notes"][-1] == "no path was left out, as nothing was learned"
    again = of(capsys, *options, "--resume")
    assert {**again, "row": 0} == {**result, "row": 0}
    files = {str(path.relative_to(tmp_path / "r")) for path in (tmp_path / "r").rglob("*") if path.is_file()}
    assert {"try-2/checkpoint.safetensors", "try-3/history.jsonl"} <= files
    of(capsys, *options, "--tries", "1", "--force")
    assert not list((tmp_path / "r").glob("try-*"))


def test_a_run_that_collapsed_is_followed_by_one_that_did_not(capsys, tmp_path, npz, monkeypatch):
    def collapses(out, net, data, schedule, seed, *rest, **options):
        if seed < tries.APART:
            raise NothingLearned("nothing was learned, as it was so planned")
        return fit_in(out, net, data, schedule, seed, *rest, **options)

    monkeypatch.setattr(tries, "fit_in", collapses)
    result = of(capsys, npz, "--epochs", "40", "--out", tmp_path / "r")
    assert [(one["log_evidence"] is None, one["kept"]) for one in result["tries"]] == [(True, False), (False, True)]
    assert result["notes"] == [
        "nothing was learned with seed 0 at rate 0.05; the network is of seed 1000, the first that is better than guessing"
    ]
    assert not result["headline"].startswith("Nothing")
    assert "as it was so planned" in shown(capsys, "fit", npz, "--out", tmp_path / "s", "--tries", "1", status=1).err
    assert "--tries must be at least 1" in shown(capsys, "fit", npz, "--out", tmp_path / "s", "--tries", "0", status=1).err


@pytest.mark.parametrize("affordable", [True, False])
def test_the_evidence_of_the_whole_network_is_asked_before_another_run_is_made(
    capsys, tmp_path, noise, monkeypatch, affordable
):
    def refined(self, data):
        zero = torch.zeros(())
        return replace(self, evidence=replace(self.evidence, log_likelihood=zero, log_prior=zero, complexity=zero + 15))

    monkeypatch.setattr(Fit, "affords_whole", lambda *_: affordable)
    monkeypatch.setattr(Fit, "refine", refined)
    result = of(capsys, noise, "--epochs", "4", "--out", tmp_path / "r")
    assert len(result["tries"]) == (1 if affordable else 3)
    assert result["headline"].startswith("Nothing is established") is not affordable


def test_the_rate_is_one_at_which_units_live(capsys, tmp_path, npz):
    for options, rate in (((), 0.05), (("--lr", "0.02"), 0.02)):
        result = of(capsys, npz, "--epochs", "2", "--out", tmp_path / "r", "--force", "--tries", "1", *options)
        assert result["schedule"]["lr"] == result["tries"][0]["lr"] == rate


@pytest.mark.slow
def test_four_hundred_digits_are_learned(capsys, tmp_path):
    """Of scikit-learn, somewhere in 12x12 pixels. At twice the rate all units of the last block die with this seed."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    draw = np.random.default_rng(1)
    images, chosen = np.zeros((400, 12, 12), np.uint8), np.random.default_rng(0).permutation(len(digits.images))[:400]
    for image, one in zip(images, chosen, strict=True):
        row, column = draw.integers(0, 5, 2)
        image[row : row + 8, column : column + 8] = digits.images[one] * 255 / 16
    np.savez(tmp_path / "digits.npz", x=images, y=digits.target[chosen])
    result = of(capsys, tmp_path / "digits.npz", "--out", tmp_path / "r", "--seed", "10")
    assert len(result["tries"]) == 1
    assert result["row"]["evidence"] > -1.9
    assert result["row"]["train_accuracy"] > 75


# ---- time, and Python


def test_seconds_are_those_of_all_calls(capsys, tmp_path, npz, monkeypatch):
    def resumed(*arguments, log, **options):
        fitted = fit_in(*arguments, **options)
        return replace(fitted, history=[line | {"seconds": 1000.0} for line in fitted.history])

    monkeypatch.setattr(tries, "fit_in", resumed)
    assert 1000 < of(capsys, npz, "--epochs", "2", "--out", tmp_path / "r", "--tries", "1")["row"]["seconds"] < 1100


def test_the_way_into_python(capsys, tmp_path, npz):
    out = shown(capsys, "fit", npz, "--out", tmp_path / "r", "--epochs", "30").out
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert f"In Python: fit = autosym.load({str(tmp_path / 'r')!r})" in out
    fit = autosym.load(tmp_path / "r")
    assert float(fit.evidence.log_evidence) == pytest.approx(result["row"]["log_evidence"])
    assert [path["share"] for path in fit.symmetry().as_dicts()] == [path["share"] for path in result["symmetry"]]
    images, labels = bars()
    how = result["preprocessing"]
    x = (torch.tensor(images)[:, None] / 255 - how["mean"][0]) / how["std"][0]
    accuracy = 100 * (fit.model(x).argmax(1).numpy() == labels).mean()
    assert accuracy == pytest.approx(result["row"]["train_accuracy"])
    (tmp_path / "r" / "result.json").unlink()
    with pytest.raises(ValueError, match="does not say how its network is built: pass it, as in"):
        autosym.load(tmp_path / "r")
