"""The scripts of ``benchmarks/`` that answer questions of docs/findings.md and docs/free-paths.md, at the smallest size that runs."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ablation
import approximations
import bf16
import costs
import draws
import ends
import gpu
import learned
import normalisation
import other_groups
import pool
import priors
import quantities
import range_curve
import rhythm
import same_numbers
import scaling
import schedule
import speed
import truth
import whole_large
from autosym.bayes import likelihoods
from autosym.bayes.priors import Prior
from autosym.curvature.owners import sites
from autosym.evidence.shares import Symmetry
from autosym.linear.groups import GROUPS
from autosym.nn import nets

# ---- truth


@pytest.mark.parametrize(
    ("symmetric", "strength", "parts"), [(True, 1.0, ["conv"]), (False, 1.0, ["fc"]), (False, 0.5, ["conv", "fc"])]
)
def test_teachers_are_symmetric_where_they_say_so(symmetric, strength, parts):
    case = truth.Case("teacher", symmetric, 36, 5, strength)
    x, y = truth.teacher_data(case)
    classes = 3 if len(parts) == 1 else 4
    assert x.shape == (36, 1, 8, 8)
    assert y.bincount().tolist() == [36 // classes] * classes
    with torch.no_grad():
        for name, teacher in zip(parts, truth.teachers(case), strict=True):
            assert torch.allclose(teacher(x), teacher(x.roll(3, -1)), atol=1e-5) == (name == "conv")


@pytest.mark.parametrize("question", ["quadrant", "turned", "flipped"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_planted_digits_have_labels_of_the_question(question, symmetric):
    x, y = truth.digit_data(truth.Case(question, symmetric, 200, 3))
    classes = {"quadrant": 40, "turned": 10, "flipped": 20}[question] if not symmetric else 10
    assert len(x) == len(y) == 200
    assert y.max() < classes
    assert y.max() >= classes - 10


@pytest.mark.parametrize(("symmetric", "strength"), truth.PLANTS)
def test_numbers_are_given_by_the_teachers_and_noise(symmetric, strength):
    case = truth.Case("regression", symmetric, 400, 5, strength)
    x, y = truth.regression_data(case)
    networks = truth.teachers(case)
    with torch.no_grad():
        given = [(a - a.mean()) / a.std() for a in (net(x) for net in networks)]
        noise = y - sum(given) / len(given)
    assert noise.std() == pytest.approx(0.1, rel=0.15)
    shifted = [net(x.roll(2, -1)) for net in networks]
    moved = [not torch.allclose(a, b, atol=1e-4) for a, b in zip(shifted, (net(x) for net in networks), strict=True)]
    assert any(moved) is not symmetric


@pytest.mark.parametrize(("plain", "said"), [(4.9, True), (5.1, False)])
def test_the_answer_of_one_network_is_yes_below_a_twentieth(monkeypatch, plain, said):
    rows = (("conv", plain), ("gconv:c4", 100 - plain))
    found = Symmetry(tuple(learned.path(name, "0", value / 100, effective=value) for name, value in rows))
    model = SimpleNamespace(simplification=SimpleNamespace(paths=()))
    fit = SimpleNamespace(evidence=SimpleNamespace(log_evidence=torch.tensor(-10.0)), symmetry=lambda: found, model=model)
    whole = SimpleNamespace(symmetry=lambda: SimpleNamespace(network_share=lambda group: 0.5))
    monkeypatch.setattr(truth.autosym, "fit", lambda net, pair, **options: whole)
    monkeypatch.setattr(truth.autosym, "simplify", lambda fitted, pair: fit)
    answer = truth.answer(truth.Case("turned", True, 20, 3))
    assert answer["fitted"] == 0.5
    assert answer["said"] is answer["right"] is said
    assert answer["broken"] == pytest.approx(plain / 100)
    assert answer["learned"]
    assert truth.answer(truth.Case("turned", False, 20, 3))["right"] is not said
    assert truth.answer(truth.Case("quadrant", False, 20, 3))["said"], "of translations nothing is broken"


@pytest.mark.parametrize(("evidence", "said"), [((-10.0, -9.0), True), ((-9.0, -10.0), False)])
def test_the_answer_of_two_networks_is_that_of_the_one_with_more_evidence(monkeypatch, evidence, said):
    values = iter(evidence)

    def fit(net, pair, **options):
        return SimpleNamespace(evidence=SimpleNamespace(log_evidence=torch.tensor(next(values))))

    monkeypatch.setattr(truth.autosym, "fit", fit)
    assert truth.answer(truth.Case("flipped", True, 20, 3, compared=True))["said"] is said


def test_counts_and_intervals_of_the_truth():
    line = {"question": "turned", "samples": 5, "strength": 1.0, "learned": True, "compared": False}
    cases = [line | {"symmetric": s, "said": a, "right": s == a} for s, a in ((True, True), (True, False), (False, True))]
    cases[1]["learned"] = False
    found = truth.summary([*cases, cases[2] | {"compared": True}])
    assert found["learned"]["cases"] == 2
    assert found["compared"]["wrongly_found"] == 1
    assert [found[name] for name in ("cases", "right", "wrongly_found", "wrongly_missed")] == [3, 1, 1, 1]
    low, high = truth.interval(95, 100)
    assert (round(low, 3), round(high, 3)) == (0.888, 0.978)  # Wilson's, as tables give it


def test_a_stopped_run_goes_on_with_the_cases_that_are_left(tmp_path):
    case, origin = {"question": "teacher", "seed": 3}, {"commit": "a", "epochs": 1}
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"said": True, "case": case, "origin": origin}) + "\n" + '{"question": "tea')
    assert pool.done_before(lines, origin) == {json.dumps(case): {"said": True}}
    assert pool.done_before(lines, origin | {"commit": "b"}) == {}
    assert pool.done_before(None, origin) == {}


# ---- approximations


def test_annealed_importance_sampling_knows_the_evidence_of_linear_regression():
    few = approximations.linear_check(60)[0]
    assert abs(few["ais"] - few["exact"]) < few["ais_uncertainty"] + 3 * few["forwards_error"]
    assert few["forwards"] < few["exact"] < few["backwards"], "below from the prior, above from the posterior"


def test_every_estimator_is_judged_by_what_it_would_choose():
    values = {"conv": -10.0, "f-fc": -20.0}
    wrong = dict.fromkeys(approximations.ESTIMATORS, 0.0) | {"diagonal": 1.0}
    cells = [{"model": m, "ais": v, "estimates": dict.fromkeys(approximations.ESTIMATORS, v - 1)} for m, v in values.items()]
    cells[1]["estimates"] = wrong
    found = approximations.judged(cells)
    assert found["ais_chooses"] == "conv"
    assert found["estimators"]["diagonal"]["error"] == {"conv": -1.0, "f-fc": 21.0}
    assert not any(line["same_symmetry"] for line in found["estimators"].values())


def test_full_and_kernel_laplace_are_one_number():
    task = approximations.Task("categorical", True, 0)
    model, pair = approximations.Tiny("f-fc+conv", 2), approximations.task_data(task)
    prior, likelihood = Prior([site.name for site in sites(model)], 2.0), likelihoods.of("categorical")
    found = approximations.estimates(model, prior, likelihood, pair, steps=2)
    assert found["full"] == pytest.approx(found["kernel"], abs=1e-6)
    assert found["diagonal"] < found["full"] > found["blocks"] > found["diagonal"], "Fischer's inequality"


# ---- priors, other groups, ablation, costs


def test_priors_are_fitted_and_averaged_over_seeds():
    case = priors.Case("digit", "Student-t, nu = 2", 1)
    entry = asdict(case) | priors.fitted(case, epochs=1, width=1) | {"seconds": 1.0}
    assert entry["bound_of"] == "the Laplace evidence under a Student-t prior"
    assert len(entry["free_share"]) == 4
    (line,) = priors.table([entry, entry | {"seed": 2, "accuracy": entry["accuracy"] + 2}], ("task", "prior"))
    assert line["seeds"] == 2
    assert line["accuracy"] == pytest.approx(entry["accuracy"] + 1)
    assert line["accuracy_spread"] == pytest.approx(2**0.5)


@pytest.mark.parametrize("group", other_groups.WIDTHS)
def test_digits_are_moved_by_elements_of_the_group(group):
    x = torch.rand(40, 1, 8, 8)
    moved = other_groups.moved(x, group, 3)
    orbits = [[GROUPS[group].act(g, image) for g in range(len(GROUPS[group]))] for image in x]
    assert all(any(torch.equal(image, other) for other in orbit) for image, orbit in zip(moved, orbits, strict=True))
    assert not torch.equal(moved, x)


def test_shares_of_a_group_are_compared_by_seed():
    def entry(moved, seed, share):
        return {"group": "c4", "moved": moved, "seed": seed, "shares": {"gconv:c4": [share, share]}, "accuracy": 50.0}

    (line,) = other_groups.compared([entry(True, 1, 0.7), entry(False, 1, 0.4), entry(True, 2, 0.3), entry(False, 2, 0.5)])
    assert line["moved"] == pytest.approx([0.7, 0.3])
    assert line["larger_on_moved"] == 1


def test_free_paths_are_in_the_first_blocks_only():
    net = ablation.build(ablation.Case("digit", "s-fc", 2, 1), 1)
    assert [block.free for block in net.blocks] == [("s-fc",), ("s-fc",), (), ()]
    assert ablation.build(ablation.Case("digit", "none", 0, 1), 1)(torch.randn(2, 1, 16, 16)).shape == (2, 10)
    assert len(ablation.cases(1)) == 20


def test_costs_of_layers_count_what_autograd_keeps():
    modules = costs.contenders((2, 8, 8), (4, 4, 4), dense=True)
    found = costs.costs(modules, torch.randn(3, 2, 8, 8), 1)
    assert found["fc"]["parameters"] == 64 * (128 + 1)
    assert found["torch"]["train_ms_ratio"] == 1
    assert costs.kept(torch.nn.Linear(5, 2), torch.randn(3, 5)) == 0, "the input and the weights are there anyway"
    assert costs.kept(torch.nn.Sequential(torch.nn.Linear(5, 2), torch.nn.Tanh()), torch.randn(3, 5)) == 3 * 2 * 4


# ---- schedule


def test_paths_without_the_gain_of_their_mean():
    net = nets.build("f-fc+conv", (1, 8, 8), 3, 2, channels=(1, 2), strides=(2, 2), hidden=2).double()
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        before = {path: module(x) for path, module in net.blocks[0].items()}
        schedule._scale(net, 0.5)
        after = {path: module(x) for path, module in net.blocks[0].items()}
    for path in before:
        assert torch.allclose(after[path], 0.5 * before[path])


# ---- same_numbers


def test_the_last_bit_of_a_number_is_seen_and_words_and_times_are_not():
    one = {"weights": torch.ones(3), "loss": [0.5, None], "headline": "yes", "seconds": 3.0}
    same = {"seconds": 4.0, "headline": "no", "loss": (0.5, float("nan")), "weights": torch.ones(3)}
    found = same_numbers.summary(one)
    assert found == same_numbers.summary(same)
    assert found["numbers"] == 5
    assert found["value"] == "0.5"
    for other in ({"weights": torch.ones(3).nextafter(torch.zeros(3))}, {"loss": [0.5]}, {"loss": [0.5 + 1e-16, 0.0]}):
        assert same_numbers.summary(one | other)["hash"] != found["hash"]
    net = torch.nn.Linear(2, 1)
    assert quantities.exact_bytes(net) == quantities.exact_bytes([net.bias, net.weight])
    with pytest.raises(TypeError, match="SimpleNamespace"):
        same_numbers.summary([SimpleNamespace()])


def test_of_a_printed_table_the_numbers_in_its_rows_count():
    text = "Table 1 of 3\n┃ a ┃ 2 ┃\n│ cifar-10, c4 │ 97.63 ± 0.5 │ -1.1e-3 │ - │\n│ 1,234 (60) │ +3% │\nin 7 words"
    assert same_numbers.printed(text) == [97.63, 0.5, -1.1e-3, 1234, 60, 3]


def test_what_differs_is_lacking_or_failed_is_not_the_same():
    then = {name: {"value": "1", "hash": name} for name in ("a", "b", "c")} | {"d": {"value": "-", "hash": same_numbers.ERROR}}
    now = {"a": then["a"], "b": {"value": "2", "hash": "x"}, "d": then["d"], "e": {"value": "3", "hash": "e"}}
    found = same_numbers.side_by_side(then, now)
    assert [row[3] for row in found] == ["same", *["DIFFERS"] * 4]
    assert found[2][:3] == ("c", "1", "-")
    assert found[4][:3] == ("e", "-", "3")


def test_an_error_ends_its_group_and_no_other(monkeypatch, tmp_path, capsys):
    def broken():
        yield "one", 1.0
        raise ValueError("so it is")

    monkeypatch.setattr(same_numbers, "QUANTITIES", {"broken": broken, "whole": lambda: iter([("two", 2.0)])})
    found = same_numbers.measure(["broken", "whole"], tmp_path, tmp_path)
    assert list(found) == ["one", "the rest of broken", "two"]
    assert found["the rest of broken"]["hash"] == same_numbers.ERROR
    assert "so it is" in capsys.readouterr().err


def test_parts_of_the_library_are_found_by_the_names_of_their_files():
    assert quantities.find("build", "no_such_file", "nets") is nets.build
    with pytest.raises(LookupError, match="no_such_file has build"):
        quantities.find("build", "no_such_file")


@pytest.mark.slow
def test_the_source_is_compared_with_its_last_commit_and_resumes_its_checkpoints():
    script = Path(same_numbers.__file__)
    if not (script.parents[1] / ".git").exists():
        pytest.skip("not a checkout")
    command = [sys.executable, str(script), "--against", "HEAD", "--only", "ranges", "checkpoints"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == ("DIFFERS" in done.stdout), done.stderr  # numbers may change on purpose before they are committed
    assert "of 18 quantities are the same" in done.stdout, done.stdout + done.stderr
    assert "checkpoint student-t, handed on" in done.stdout
    assert "the rest of" not in done.stdout, "a group that failed"


# ---- normalisation


def test_normalisation(monkeypatch):
    """Rescaling keeps the function; at learned precisions it keeps the evidence, if normalisation is folded at any."""
    monkeypatch.setattr(normalisation, "STEPS", 200)
    torch.manual_seed(0)
    net, (train, _) = normalisation.small_resnet(2).eval(), normalisation.digits(0, 20)
    torch.testing.assert_close(normalisation.rescaled(net, slice(None))(train[0]), net(train[0]), rtol=1e-3, atol=1e-3)
    rows = normalisation.of_plain(net, *train)
    assert [(row["normalisation"], row["precisions"]) for row in rows][::2] == [(n, "learned") for n in normalisation.CHOICES]
    same = [row["all layers"] == pytest.approx(row["as it is"], abs=1) for row in rows]
    assert same == [True, False, True, True, True, False]
    fits = normalisation.of_fits(0, 40, 1)
    assert [row["normalisation"] for row in fits] == list(normalisation.CHOICES)
    assert "accuracy" in normalisation.shown(fits)


# ---- whole evidence at real size


@pytest.mark.slow
def test_the_rows_of_a_gpu_run_small_on_any_device(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *gpu.ROWS, "--small", "--out", str(tmp_path / "out.json")])
    gpu.main()
    found = capsys.readouterr().out
    assert all(f"{row} (" in found for row in gpu.ROWS)
    assert not (tmp_path / "out.json").exists(), "small figures are not results"
    for goal in gpu.GOALS:
        row, key = goal.split("/", 1)
        assert key.startswith("60 epochs") or f"  {key} " in found[found.index(f"{row} (") :], "a goal has its figure"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "nothing"])
    with pytest.raises(SystemExit):
        gpu.main()


@pytest.mark.parametrize("row", ["resnet", pytest.param("simplify", marks=pytest.mark.slow), "symmetrise"])
def test_the_rows_of_a_cpu_run_small(row, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(speed, "OUT", tmp_path / "speed.json")
    monkeypatch.setattr(sys, "argv", ["speed.py", row, "--quick"])
    speed.main()
    found = capsys.readouterr().out
    assert found.startswith(row)
    assert " / " in found, "a ratio"
    assert not (tmp_path / "speed.json").exists()


@pytest.mark.slow
def test_an_import_is_timed_beside_torch():
    found = speed.imports(True)
    assert found["beyond torch"] == found["autosym"] - found["torch"]


def test_growth_is_the_slope_of_the_last_doubling(monkeypatch, capsys, tmp_path):
    assert scaling.exponent((1, 2, 4), [100.0, 3.0, 24.0]) == pytest.approx(3.0)
    monkeypatch.setattr(scaling, "OUT", tmp_path / "scaling.json")
    monkeypatch.setattr(scaling, "QUICK", {"samples": (4, 8)})
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--quick"])
    scaling.main()
    assert "samples 4 to 8" in capsys.readouterr().out
    assert not (tmp_path / "scaling.json").exists()


@pytest.mark.slow
def test_the_study_of_bfloat16_runs_small(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bf16.py", "--quick"])
    bf16.main()
    found = capsys.readouterr().out
    assert all(way in found for way in bf16.WAYS)


def test_the_study_of_draws_runs_small(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["draws.py", "--quick"])
    monkeypatch.setattr(draws, "VARIANTS", {"half": 90.0})
    draws.main()
    assert "half" in capsys.readouterr().out


def test_the_curves_of_ranges_run_small(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(range_curve, "OUT", tmp_path / "range_curve.json")
    monkeypatch.setattr(sys, "argv", ["range_curve.py", "--small"])
    range_curve.main()
    found = capsys.readouterr().out
    assert all(kind in found for kind in range_curve.KINDS.values())
    assert not list(tmp_path.iterdir()), "small figures are not results"


@pytest.mark.parametrize("grid", [(0, 10, 20, 30), (0, 10, 25, 30)])
def test_the_highest_point_of_a_curve_is_between_the_points_of_its_grid(grid):
    curve = [{"degrees": x, "evidence": -((x - 13.0) ** 2)} for x in grid]
    assert range_curve.peak(curve) == pytest.approx(13.0)
    assert range_curve.peak(curve, sign=-1) == 30.0, "an end is itself"


def test_a_range_stops_where_the_slope_is_a_tenth_of_its_largest():
    slopes = (1.0, 2.0, 1.0, 0.0, 1.0)
    curve = [{"degrees": 10 * i, "slope": slope} for i, slope in enumerate(slopes)]
    assert range_curve.stop(curve) == pytest.approx(28.0)
    assert range_curve.stop(curve[:3]) == 20.0, "an end is itself"


def test_a_slanted_stroke_is_deskewed_and_stays_where_it_was():
    x = torch.zeros(1, 1, 21, 21)
    for row in range(4, 15):
        x[0, 0, row, 3 + row // 2] = 1.0
    upright = range_curve.deskewed(x)[0, 0]
    columns = (upright * torch.arange(21.0)).sum(1)[4:15] / upright.sum(1)[4:15]
    assert columns.std() < 0.5
    assert columns.mean() == pytest.approx(7.2, abs=0.5)
    assert torch.allclose(range_curve.deskewed(upright[None, None])[0, 0], upright, atol=0.2)


def test_whole_evidence_at_real_size_runs_small(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["whole_large.py", "--small", "--seconds", "0.5", "--out", str(tmp_path / "out.json")])
    whole_large.main()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("product, ") for line in lines) == 4
    assert any(line.startswith("whole, TF32: ") and "by truncation" in line for line in lines)
    assert not list(tmp_path.iterdir()), "a check writes nothing"


def test_the_ends_of_a_fit_are_compared_by_both_kinds_of_evidence(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["ends.py", "--quick"])
    monkeypatch.setattr(ends, "OUT", tmp_path / "ends.json")
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    ends.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("dense 0: whole above Kronecker by ")
    assert "by kronecker" in line
    assert "by whole" in line
    assert not list(tmp_path.iterdir()), "a check writes nothing"


# ---- rhythm


def test_rhythms_are_compared_with_the_floor():
    row = {"log_evidence": -3.0, "accuracy": 90.0, "steps": 4, "evidence_part": 0.2, "factors_kept": 0.9}
    row |= {"forecast_seconds": 3.0, "wall_seconds": 2.0}
    times = {"default": 4.0, "sparing": 3.0, "floor": 2.0}
    found = [
        row | {"task": task, "rhythm": name, "cpu_seconds": seconds + seed}
        for task in rhythm.quadrant_digits.TASKS
        for name, seconds in times.items()
        for seed in (-1, 1)
    ]
    lines = rhythm.table(found)
    assert [(line["task"], line["rhythm"]) for line in lines[:3]] == [("digit", name) for name in times]
    assert [line["of_floor"] for line in lines] == [2.0, 1.5, 1.0] * 2
    assert lines[0]["forecast"] == pytest.approx(1.5)
    assert "4.0 steps" in rhythm.show(lines[0])


@pytest.mark.slow
def test_a_rhythm_is_measured():
    pytest.importorskip("sklearn")
    found = rhythm.fitted(rhythm.Case("digit", "default", 1), epochs=2, double=False)
    assert found["steps"] == 2
    assert 0 < found["evidence_part"] < 1
