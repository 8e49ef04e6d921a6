"""The truth suite at real size: its planted answers are true of how images are made, and its table counts what it should."""

import json

import pytest
import torch
from safetensors.torch import save_file

import truth_real
import truth_table
from autosym.answer.answers import Answer, Candidate, Verdict, network_of
from autosym.answer.margins import Margin
from autosym.evidence.shares import Symmetry
from autosym.linear.groups import GROUPS, sources
from files import mnist_parts, write_mnist
from truth_real import CASES, Case
from truth_real_tasks import TASKS, _rolled, _turned, tensors

COPIES = 60


def made(name):
    """What a task makes of many copies of ten images, of which the last is the seventh upside down."""
    draw = torch.Generator().manual_seed(0)
    side, channels = (32, 3) if TASKS[name].source == "cifar10" else (28, 1)
    images = torch.rand(10, channels, side, side, generator=draw)
    images[9] = images[6].rot90(2, (1, 2))
    return TASKS[name].make(images.repeat(COPIES, 1, 1, 1), torch.arange(10).repeat(COPIES), draw)


def moves(symmetry):
    if symmetry == "translations":
        return [lambda x: x.roll(16, 2), lambda x: x.roll(16, 3)]
    return [
        lambda x, m=m: x.flatten(2)[..., sources(m, 32, 32)[0][0]].unflatten(2, (32, 32)) for m in GROUPS[symmetry].matrices
    ]


def labels_by_image(x, y):
    found = {}
    for image, label in zip(x, y, strict=True):
        found.setdefault((100 * image).round().to(torch.int16).numpy().tobytes(), set()).add(round(float(label), 2))
    return found


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if None not in task.answers.values()])
def test_the_right_answer_is_true_of_how_images_are_made(name):
    """Where the symmetry is there, moved images that occur have the same label; where it is not, some have another."""
    x, y = made(name)
    known = labels_by_image(x, y)
    for symmetry, there in TASKS[name].answers.items():
        pairs = [pair for move in moves(symmetry) for pair in labels_by_image(move(x), y).items()]
        occurring = [(labels, known[image]) for image, labels in pairs if image in known]
        assert len(occurring) > 5, "or nothing was tested"
        assert all(labels & others for labels, others in occurring) is there, symmetry
        if there and symmetry != "translations":
            assert len(occurring) > 0.8 * len(pairs), "moved images are as likely"


def test_images_are_moved_as_torch_moves_them():
    x = torch.rand(4, 2, 6, 6)
    found = _rolled(x, torch.tensor([0, 1, 5, 3]), torch.tensor([0, 2, 4, 3]))
    for image, one, down, right in zip(found, x, (0, 1, 5, 3), (0, 2, 4, 3), strict=True):
        assert torch.equal(image, one.roll((down, right), (1, 2)))
    for image, one, turns in zip(_turned(x, torch.arange(4)), x, range(4), strict=True):
        assert torch.equal(image, one.rot90(turns, (1, 2)))


def test_names_are_file_names_and_differ():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) == 3 * len(TASKS) + len(TASKS) + 3
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for name in names)


def verdict(symmetry, judgement, sure=True):
    return Verdict(
        symmetry, judgement, Margin(50.0 if judgement == "no" else 0.0, 1.0 if sure else 20.0, 4), Margin(90.0, 1.0, 4)
    )


@pytest.fixture
def data(tmp_path):
    write_mnist(tmp_path, mnist_parts(80, 20))
    return tmp_path


def test_a_run_asks_for_the_symmetries_of_its_task_once(data, tmp_path, monkeypatch, capsys):
    asked = []

    class Fitted:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1024, 10))

        def symmetry(self):
            return Symmetry(())

    def discover(model, pair, symmetries, likelihood, **options):
        asked.append((pair[0].shape, symmetries, likelihood))
        candidate = Candidate("conv", 1.0, 0, -10.0, 1.0, 3, "conv~1~0~long")
        recipe = {"name": "f-fc+conv", "symmetries": ["c4"], "in_shape": [1, 32, 32], "dtype": "float32", "classes": 10}
        recipe |= {"samples": 60, "form": {}, "network": "conv", "width": 1.0, "seed": 0, "left": []}
        end = options["resume"] / candidate.key / "end.safetensors"
        end.parent.mkdir(parents=True)
        save_file(network_of(recipe).state_dict(), end)
        return Answer((verdict("c4", "yes"),), (candidate,), len(pair[0]), 5.0, 1.0, recipe=recipe, found=Fitted())

    monkeypatch.setattr(truth_real.autosym, "discover", discover)
    folders = tmp_path / "results", tmp_path / "work"
    for _ in range(2):
        assert truth_real.run_all([Case("turned", 60, 3)], data, *folders, 1e9, epochs=2) == 0
    assert asked == [((60, 1, 32, 32), ("c4",), "categorical")]
    (result,) = truth_real.stored(tmp_path / "results")
    assert result["right"] == {"c4": True}
    assert 0 <= result["test"]["accuracy"] <= 100
    assert 0 <= result["candidates"]["conv"]["accuracy"] <= 100
    assert truth_table.ahead(result) == result["test"]["accuracy"] - result["candidates"]["conv"]["accuracy"]
    assert "right" in capsys.readouterr().out
    monkeypatch.setattr(truth_real.autosym, "discover", lambda *_, **__: 1 / 0)
    assert truth_real.run_all([Case("turned", 60, 4)], data, *folders, 1e9) == 1
    assert "FAILED turned-60-4" in capsys.readouterr().err


def test_another_seed_has_other_images(data):
    (x, _), _ = tensors("turned", 60, 0, data)
    (other, _), _ = tensors("turned", 60, 1, data)
    assert x.shape == other.shape
    assert not torch.equal(x, other)


def result(task, seed, *verdicts):
    answer = Answer(verdicts, (Candidate("conv", 1.0, 0, -1.0, 0.0, 1),), 60, 1.0, 1.0)
    config = {"task": task, "images": 2000, "seed": seed}
    right = dict(TASKS[task].answers)
    return json.loads(
        json.dumps({"config": config, "right": right, "answer": answer.as_dict(), "seconds": 1.0, "provenance": {}})
    )


def test_the_table_counts_false_answers_by_kind_and_agreement_of_seeds(capsys):
    found = [
        result("turned", 0, verdict("c4", "yes")),
        result("turned", 1, verdict("c4", "no")),
        result("turned-side", 0, verdict("c4", "yes")),
        result("turned-side", 1, verdict("c4", "yes")),
        result("digit", 0, verdict("translations", "undecided", sure=False)),
        result("mnist", 0, verdict("translations", "no"), verdict("c4", "no")),
    ]
    total = truth_table.summary(found)
    assert total["verdicts"] == 5, "those without a right answer are not scored"
    assert {name: count for name, (count, *_) in total["counts"].items()} == {
        "right": 1,
        "undecided": 1,
        "false yes": 2,
        "false no": 1,
    }
    assert total["agreeing pairs"] == (1, 2)
    assert sum(count for _, count in total["calibration"].values()) == 4
    truth_table.print_table(found, list(TASKS))
    said = capsys.readouterr().out
    assert "false yes: 2" in said
    assert "1 of 2 pairs" in said
