"""The benchmark of trained networks, ``benchmarks/real.py``, at the smallest size that runs."""

import json

import pytest
import torch

import autosym
import real
import real_networks
import real_table
import real_tasks
import resumable
from autosym.bayes.priors import Prior
from autosym.evidence import laplace
from files import mnist_parts, write_cifar10, write_mnist
from real_table import STAGES
from real_tasks import TASKS, Cell

TINY = Cell("sequence", "shape", 80, width=2)


def all_of(tmp_path, cells=(TINY,), seconds=60.0):
    return real.run_all(cells, None, tmp_path / "results", tmp_path / "work", 2, seconds)


def stored(tmp_path):
    return json.loads((tmp_path / "results" / f"{TINY.name}.json").read_text())


# ---- runs


@pytest.mark.parametrize("subset", [real.SUBSET, 40])
def test_a_run_measures_every_stage_and_leaves_only_its_result(tmp_path, monkeypatch, subset):
    seen, simplify = [], autosym.simplify
    monkeypatch.setattr(autosym, "simplify", lambda *given, **options: seen.append(options) or simplify(*given, **options))
    monkeypatch.setattr(real, "SUBSET", subset)
    assert all_of(tmp_path) == 0
    found = stored(tmp_path)
    assert all(0 <= found[stage]["accuracy"] <= 100 and found[stage]["nll"] > 0 for stage in STAGES)
    assert all(found[stage]["log_evidence"] < 0 for stage in STAGES[:3])
    assert set(found["fit"]["free_share"]) == {"conv1", "conv2", "conv3"}
    assert found["config"]["epochs"] == 2
    assert seen == [{"refit": 0} | ({"subset": 40} if subset == 40 else {})]
    assert not (tmp_path / "work" / TINY.name).exists()
    (tmp_path / "results" / f"{TINY.name}.json").write_text("{}")
    assert all_of(tmp_path) == 0
    assert stored(tmp_path) == {}, "a result is not made again"


def test_a_killed_run_goes_on_from_its_plain_network_and_its_last_epoch(tmp_path, monkeypatch, capsys):
    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(autosym, "simplify", killed)
        with pytest.raises(KeyboardInterrupt):
            all_of(tmp_path)
    left = tmp_path / "work" / TINY.name
    before = json.loads((left / "plain.json").read_text())
    monkeypatch.setattr(real, "train_plainly", killed)
    assert "epoch 2" in capsys.readouterr().err
    assert all_of(tmp_path) == 0
    assert stored(tmp_path)["before"] == before
    assert "epoch" not in capsys.readouterr().err


def test_a_run_that_another_copy_is_at_or_that_is_too_late_is_left(tmp_path):
    with resumable.held(tmp_path / "work" / f"{TINY.name}.lock") as mine:
        assert mine
        assert all_of(tmp_path) == 0
    assert all_of(tmp_path, seconds=-1.0) == 0
    assert not (tmp_path / "results").exists()


def test_a_run_that_fails_is_counted_and_leaves_the_others_alone(tmp_path, capsys):
    broken = Cell("cnn", "digit", 80)  # without data
    assert all_of(tmp_path, (broken, TINY)) == 1
    assert f"FAILED {broken.name}" in capsys.readouterr().err
    assert stored(tmp_path)


def test_a_network_that_simplify_refuses_is_hardened_as_it_is(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("nothing to leave out")

    monkeypatch.setattr(autosym, "simplify", refuse)
    assert all_of(tmp_path) == 0
    found = stored(tmp_path)
    assert found["simplified"]["refused"] == "nothing to leave out"
    assert found["hardened"]["accuracy"] >= 0
    assert "? " in real_table.row([found])[2]


def test_the_evidence_before_is_of_the_relaxed_network_without_its_free_paths():
    torch.manual_seed(0)
    net = real_networks.build("cnn", 1, 3, 2).eval().double()
    for norm in net.norm:
        norm.requires_grad_(False)
    data = torch.randn(20, 1, 16, 16, dtype=torch.float64), torch.randint(3, (20,))
    relaxed = autosym.relax(net, data[0][:4])
    for name, parameter in relaxed.named_parameters():
        if "f-fc" in name:
            parameter.data.zero_()
    at = laplace.at(relaxed, data)
    start = {True: 1e12, False: 0.25}  # a convolution has twice its weights in the mean of two paths
    prior = Prior(at.names, {name: start["f-fc" in name] if name.startswith("conv") else 1.0 for name in at.names})
    assert real.log_evidence(net, data) == pytest.approx(real.log_evidence(relaxed, data, prior), rel=1e-6)


# ---- networks and tasks


@pytest.mark.parametrize("name", real_networks.NETWORKS)
def test_networks_are_of_the_size_they_say(name):
    net = real_networks.build(name, 1, 10)
    x = torch.randn(2, 1, 64) if name == "sequence" else torch.randn(2, 1, 32, 32)
    assert net(x).shape == (2, 10)
    sizes = {"cnn": 288_170, "resnet20": 272_186, "depthwise": 85_386, "sequence": 6_218}
    assert sum(p.numel() for p in net.parameters()) == sizes[name]


def test_every_cell_is_of_a_network_and_task_with_an_answer():
    assert len({cell.name for cell in real.CELLS}) == len(real.CELLS) == 23 + 18
    for cell in (*real.CELLS, *real.SMALL):
        assert cell.network in real_networks.NETWORKS
        assert TASKS[cell.task].symmetric is ("place" not in cell.task)


@pytest.mark.parametrize("task", [task for task in TASKS if "shape" not in task])
def test_images_are_standardised_and_have_the_labels_of_their_task(tmp_path, task):
    write_mnist(tmp_path, mnist_parts(train=60, test=30))
    write_cifar10(tmp_path, (10, 10, 10, 10, 10, 7))
    (x, y), (x_test, y_test) = real_tasks.tensors(Cell("cnn", task, 40), tmp_path)
    assert len(x) == len(y) == 40
    assert len(x_test) == len(y_test) > 0
    assert x.shape[1] == TASKS[task].channels
    assert x.mean((0, 2, 3)).abs().max() < 1e-4
    assert x.std((0, 2, 3)).sub(1).abs().max() < 1e-2
    assert TASKS[task].classes - 12 < y.max() < TASKS[task].classes


def test_places_are_seen_in_the_labels():
    x, y = real_tasks.images("place", torch.full((40, 28, 28), 255, dtype=torch.uint8), torch.arange(40) % 10, 3)
    quarters = x.unflatten(2, (2, 16)).unflatten(4, (2, 16)).sum((1, 3, 5)).flatten(1)
    assert torch.equal(quarters.argmax(1), y // 10)
    x, y = real_tasks.sequences("shape-place", 200, 1)
    bumps = x[y % 3 == 0, 0].unflatten(1, (2, 32)).square().sum(2)
    assert (bumps.argmax(1) == y[y % 3 == 0] // 3).double().mean() > 0.9


# ---- the table


def result(seed=0, accuracy=(99.0, 99.0, 99.0, 99.0), evidence=(-900.0, -800.0, -805.0), share=0.02, task="digit", **fit):
    stages = {name: {"accuracy": value, "seconds": 10.0} for name, value in zip(STAGES, accuracy, strict=True)}
    for name, value in zip(STAGES, evidence, strict=False):
        stages[name]["log_evidence"] = value
    stages["fit"] |= {"network_share": 0.2, "cautions": ["Rising"], "recoveries": 1} | fit
    stages["simplified"]["network_share"] = share
    config = {"network": "cnn", "task": task, "images": 1000, "seed": seed}
    return {"config": config, **stages, "provenance": {"commit": "0123456789abcdef"}}


def shown(results, tmp_path, monkeypatch, capsys):
    """The rows and the last line that ``--table`` prints."""
    tmp_path.mkdir(exist_ok=True)
    for number, one in enumerate(results):
        (tmp_path / f"{number}.json").write_text(json.dumps(one))
    monkeypatch.setattr("sys.argv", ["real.py", "--table", "--results", str(tmp_path)])
    assert real.main() == 0
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("cnn ")], lines[-1]


def test_the_table_has_means_over_seeds(tmp_path, monkeypatch, capsys):
    rows, last = shown([result(), result(1, (98.0, 99.0, 99.0, 99.0))], tmp_path, monkeypatch, capsys)
    assert len(rows) == 1
    for part in ("98.50 -> 99.00 -> 99.00 -> 99.00", "-0.9000 -> -0.8000 -> -0.8050", "2 Rising", "20.0 -> 2.0", "yes -> yes"):
        assert part in rows[0]
    assert rows[0].endswith("10 10 10")
    assert last.startswith("2 runs of 1 cells: 0 runs collapsed; 0 cells")
    assert last.endswith("0 cells have another answer than the expert. Commits: 012345678.")


@pytest.mark.parametrize(
    ("changed", "faults"),
    [
        ({"accuracy": (99.0, 11.4, 11.4, 11.4)}, {"collapse": 1, "worse": 1}),
        ({"accuracy": (15.0, 15.0, 15.0, 15.0)}, {"collapse": 1}),
        ({"accuracy": (99.0, 99.0, 99.0, 98.6)}, {"worse": 1}),
        ({"accuracy": (99.0, 98.8, 90.0, 98.8)}, {}),
        ({"accuracy": (90.0, 89.1, 89.1, 89.1), "task": "cifar10-augmented"}, {}),
        ({"evidence": (-900.0, -902.0, -800.0)}, {"less evidence": 1}),
        ({"evidence": (-900.0, -900.5, -950.0)}, {}),
        ({"share": 0.06}, {"answer": 1}),
        ({"share": None}, {"answer": 1}),
        ({"share": 0.06, "task": "place"}, {}),
        ({"recoveries": None}, {}),
    ],
)
def test_what_went_wrong_is_counted(changed, faults):
    found = real_table.faults([result(**changed)])
    assert +found == faults


def test_a_folder_without_results_is_said_to_be_that(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no result"):
        real.stored(tmp_path)
