"""What people expect of any command line: progress, --quiet, --json, --force, examples in the help, completion by the shell."""

import functools
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tyro")
pytest.importorskip("rich")

from autosym.answer import discovering
from autosym.cli import asked, commands, own_images, own_trajectories, published
from autosym.noether import systems
from commands import bars, shown

ROOT = Path(__file__).parents[2]
FUNCTIONS = [commands.discover, commands.fit, commands.audit, commands.report, own_trajectories.noether]
FUNCTIONS += [published.demo, published.run, published.table, commands.doctor, commands.completion]
COMMANDS = {function.__name__: function for function in FUNCTIONS}


def on_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# ---- what is printed, and where


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_progress_is_shown_on_a_terminal_without_asking(capsys, tmp_path, npz, monkeypatch, options):
    on_a_terminal(monkeypatch)
    out, err = shown(capsys, "fit", npz, "--out", tmp_path / "r", "--epochs", "2", *options)
    assert "2/2" in err
    assert "loss" in err
    assert "2/2" not in out
    assert not options or json.loads(out)["row"]


def test_quiet_leaves_the_result(capsys, tmp_path, monkeypatch):
    on_a_terminal(monkeypatch)
    images, labels = bars(size=11)
    np.savez(tmp_path / "odd.npz", x=images, y=labels)
    options = ("fit", tmp_path / "odd.npz", "--epochs", "2", "--tries", "1", "--no-simplify", "--out")
    loud = shown(capsys, *options, tmp_path / "loud").out
    out, err = shown(capsys, *options, tmp_path / "quiet", "--quiet")
    assert err == ""
    left = [line for line in loud.splitlines() if line and line not in out]
    assert [line.split()[0] for line in left if "nothing was learned" not in line] == ["Note:", "One", "Written", "In"]
    assert (tmp_path / "quiet" / "report.html").exists()


def test_quiet_of_commands_without_progress(capsys, tmp_path, npz):
    run, page = tmp_path / "r", tmp_path / "page.html"
    shown(capsys, "fit", npz, "--out", run, "--epochs", "1", "--json")
    assert "0 is exact" in shown(capsys, "audit", run, npz).out
    assert "0 is exact" not in shown(capsys, "audit", run, npz, "--quiet").out
    assert shown(capsys, "report", run, "--out", page, "--quiet").out == f"{page}\n"
    assert json.loads(shown(capsys, "report", run, "--out", page, "--json").out) == {"report": str(page)}


def test_a_real_terminal_and_a_pipe(tmp_path, npz):
    """Progress goes to the terminal, the result to the pipe."""
    screen, terminal = os.openpty()
    line = [sys.executable, "-m", "autosym", "fit", str(npz), "--epochs", "2", "--out", str(tmp_path / "r"), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    done = subprocess.run(line, stdout=subprocess.PIPE, stderr=terminal, env=environment, check=True)
    os.close(terminal)
    seen = b""
    while b"2/2" not in seen:  # a closed terminal raises OSError
        seen += os.read(screen, 4096)
    assert json.loads(done.stdout)["config"]["epochs"] == 2


# ---- folders of earlier runs


def oscillator(folder):
    system = systems.oscillators(1)
    x = system.trajectories(system.starts(8, torch.Generator().manual_seed(0)), 0.1, 12).numpy()
    np.savez(folder / "orbits.npz", trajectories=x, dt=0.1)
    return folder / "orbits.npz"


CALLS = {
    "fit": lambda folder: ("fit", folder / "bars.npz"),
    "discover": lambda folder: ("discover", folder / "bars.npz"),
    "noether": lambda folder: ("noether", oscillator(folder)),
    "run": lambda folder: ("run", "quadrant-digits"),
    "rotated": lambda folder: ("run", "rotated-digits"),
    "demo": lambda folder: ("demo",),
    "basis": lambda folder: ("demo", "--basis"),
}


@pytest.mark.usefixtures("npz")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("file", ["result.json", "checkpoint.safetensors"])
def test_a_run_is_not_overwritten(capsys, tmp_path, call, file):
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / file).write_text("hours of work")
    before = contents(folder)
    out, err = shown(capsys, *CALLS[call](tmp_path), "--out", folder, status=2)
    assert out == ""
    assert err.startswith(f"autosym: {folder} holds an earlier run: ")
    assert err.endswith("replace it by --force, or name another folder by --out\n")
    assert ("--resume" in err) is (call in ("fit", "run"))
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("call", "folder"), [(("run", "rotated-digits"), "full"), (("demo",), "digit"), (("demo", "--groups"), "")]
)
def test_runs_inside_of_the_folder_are_not_overwritten(capsys, tmp_path, call, folder):
    names = [folder] if folder else [name.replace("/", "-") for name in published.group_digits.RUNS]
    (tmp_path / names[-1]).mkdir()
    (tmp_path / names[-1] / "result.json").write_text("hours of work")
    assert "holds an earlier run" in shown(capsys, *call, "--out", tmp_path, status=2).err


def test_of_many_runs_none_begins_if_one_would_be_overwritten(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "_run", lambda *_: pytest.fail("it began"))
    taken = tmp_path / "table2/s-fc/u/map/seed0"
    taken.mkdir(parents=True)
    (taken / "history.jsonl").write_text("")
    assert f"{taken} holds an earlier run" in shown(capsys, "run", "table2", "--all", "--out", tmp_path, status=2).err


def test_several_starts_have_folders_of_their_own(tmp_path):
    several = next(run for run in published.noether.RUNS.values() if run.starts > 1)
    assert published._written(several, tmp_path)[1:] == [tmp_path / f"start{number}" for number in range(several.starts)]


def test_force_replaces_a_run_and_nothing_else(capsys, tmp_path, npz):
    folder = tmp_path / "r"
    options = ("fit", npz, "--out", folder, "--tries", "1", "--epochs", "1", "--json")
    shown(capsys, *options)
    for name in ("answer.json", "runs/settings.json", "try-2/history.jsonl", "try-2/checkpoint.safetensors", "mine.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    before = contents(folder)
    assert "give one of them" in shown(capsys, *options, "--resume", "--force", status=2).err
    shown(capsys, *options[:-3], "--epochs", "0", "--force", status=1)
    assert contents(folder) == before, "a call that is refused costs nothing"
    assert json.loads(shown(capsys, *options, "--seed", "1", "--force").out)["config"]["seed"] == 1
    left = {file.name for file in folder.iterdir()}
    written = {"checkpoint.safetensors", "history.jsonl", "result.json", "report.json", "report.html", "fit.safetensors"}
    assert left == {*written, "mine.txt"}


FOREIGN = ("mine.txt", "runs/table1/seed0/result.json", "runs/demo/checkpoint.safetensors", "runs/a~1~0~short/notes.txt")
FOREIGN += (".replaced/result.json", ".replaced-mine/result.json")
FITTED = ("result.json", "history.jsonl", "checkpoint.safetensors", "report.json", "report.html")
SEARCHED = ("runs/settings.json", "runs/epochs.json", "runs/a~1~0~short/outcome.json", "runs/a~1~0~long/end.safetensors")
SEARCHED += ("runs/a~1~0~long/end.json", "answer.json", "result.json", "fit.safetensors", "report.html")


def filled(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"old {name}")
    return contents(folder)


def stopped(folder, stop, *wrote):
    """A run by --force that stops when it has written these files."""
    with asked.replacing(folder, True):
        for name in wrote:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("new")
        raise stop


@pytest.mark.parametrize("run", [FITTED, SEARCHED, ("result.json",)], ids=["fit", "search", "result"])
def test_a_new_run_replaces_the_files_of_runs_alone(tmp_path, run):
    others = filled(tmp_path, *FOREIGN)
    filled(tmp_path, *run)
    with asked.replacing(tmp_path, True):
        assert not [name for name in run if (tmp_path / name).exists()]
        new = filled(tmp_path / "runs", "settings.json", "a~1~0~on/outcome.json")
    assert contents(tmp_path) == others | new
    assert not (tmp_path / "runs/a~1~0~long").exists()


@pytest.mark.parametrize("run", [FITTED, SEARCHED, ("result.json", "report.html")], ids=["fit", "search", "result"])
@pytest.mark.parametrize(
    "wrote", [(), ("runs/settings.json", "runs/epochs.json", "history.jsonl")], ids=["nothing", "settings"]
)
@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_new_run_that_has_not_begun_costs_nothing(tmp_path, monkeypatch, run, wrote, stop):
    monkeypatch.chdir(tmp_path)
    here = Path()
    before = filled(here, *FOREIGN, *run)
    with pytest.raises(stop):
        stopped(here, stop, *wrote)
    assert contents(here) == before
    assert sorted(path.name for path in here.glob(".replaced*")) == [".replaced", ".replaced-mine"]


@pytest.mark.parametrize("begun", ["checkpoint.safetensors", "runs/a~1~0~short/checkpoint.safetensors"])
def test_a_new_run_that_has_begun_is_kept_when_it_stops(tmp_path, begun):
    others = filled(tmp_path, *FOREIGN)
    filled(tmp_path, *FITTED, *SEARCHED)
    with pytest.raises(KeyboardInterrupt):
        stopped(tmp_path, KeyboardInterrupt, begun)
    assert contents(tmp_path) == others | {tmp_path / begun: b"new"}


@pytest.mark.parametrize("stop", [None, ValueError, KeyboardInterrupt])
def test_a_folder_without_a_run_is_left_as_it_is(tmp_path, stop):
    before = filled(tmp_path / "mine", *FOREIGN, "report.html", "report.json", "fit.safetensors")
    for folder in (tmp_path / "mine", tmp_path / "new"):
        try:
            with asked.replacing(folder, True):
                if stop:
                    raise stop
        except (ValueError, KeyboardInterrupt):
            pass
    assert contents(tmp_path) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("moved", [0, 1, 5])
def test_a_run_that_is_only_half_aside_is_put_back(tmp_path, monkeypatch, moved):
    before, replace, calls = filled(tmp_path, *FITTED, *SEARCHED), Path.replace, []

    def interrupted(path, target):
        calls.append(path)
        if len(calls) == moved + 1:
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), asked.replacing(tmp_path, True):
        pytest.fail("it began")
    assert contents(tmp_path) == before


def test_what_cannot_be_put_back_stays_aside(tmp_path, monkeypatch):
    before, replace = filled(tmp_path, *FITTED), Path.replace

    def only_aside(path, target):
        if target.parent == tmp_path:
            raise OSError("no space")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", only_aside)
    with pytest.raises(OSError, match="no space"):
        stopped(tmp_path, ValueError)
    (aside,) = tmp_path.glob(".replaced-*")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == {path.name: text for path, text in before.items()}


def test_force_on_data_that_are_not_there_costs_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = filled(tmp_path, "runs/demo/result.json", "result.json", "report.html")
    for command in ("fit", "discover"):
        shown(capsys, command, "nope.npz", "--out", ".", "--force", status=1)
        assert contents(tmp_path) == before
        shown(capsys, command, "nope.npz", "--out", "new", "--force", status=1)
        assert not Path("new").exists()


def test_what_has_no_checkpoint_is_not_resumed(capsys, tmp_path, npz):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "result.json").write_text("{}")
    err = shown(capsys, "fit", npz, "--out", tmp_path / "r", "--resume", status=2).err
    assert "without a checkpoint to resume" in err
    assert (tmp_path / "r" / "result.json").read_text() == "{}"


def test_a_search_goes_on_or_is_replaced(capsys, tmp_path, npz, monkeypatch):
    given = discovering.discover

    def small(*arguments, network, schedule, **options):
        form = network | {"width": 4, "channels": (1, 2), "strides": (2, 2), "hidden": 2}
        return given(*arguments, network=form, epochs=1, batch_size=16, **options)

    monkeypatch.setattr(discovering, "discover", small)
    options = ("discover", npz, "--symmetries", "translations", "--out", tmp_path / "r", "--json")
    first = json.loads(shown(capsys, *options, "--seeds", "2").out)
    before = contents(tmp_path / "r")
    err = shown(capsys, *options, "--seeds", "1", status=2).err
    assert "holds a search with other settings (seeds)" in err
    assert "--force replaces it" in err
    assert "seeds must be at least 2" in shown(capsys, *options, "--seeds", "1", "--force", status=1).err
    assert contents(tmp_path / "r") == before, "a call that is refused costs nothing"
    for refused in (("--seeds", "1"), ("--budget", "0.01", "--minutes", "1")):
        shown(capsys, *options[:5], tmp_path / "new", *refused, status=1)
    assert not (tmp_path / "new").exists(), "nor does it leave settings behind"
    again = json.loads(shown(capsys, *options, "--seeds", "3", "--force").out)
    assert again["command"] != first["command"]
    assert json.loads((tmp_path / "r" / "runs" / "settings.json").read_text())["seeds"] == 3


def test_what_is_gone_on_with_is_not_begun_anew(capsys, tmp_path, monkeypatch):
    """The command that an interruption names has no --force."""

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    for name in ("train", "discover"):
        monkeypatch.setattr(own_images, name, interrupt)
    assert shown(capsys, "fit", "x", "--force", status=130).err.endswith("go on by: autosym fit x --resume\n")
    assert shown(capsys, "discover", "x", "--force", status=130).err.endswith("the same command: autosym discover x\n")


# ---- help and completion


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_values_in_plain_words(capsys, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        commands.main([name, "--help"])
    text = capsys.readouterr().out
    assert "None" not in text
    usage = text.splitlines()[0].split()
    assert len(set(usage)) == len(usage), "two words of a call with one name"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_that_are_real(capsys, name, monkeypatch):
    with pytest.raises(SystemExit) as stop:
        commands.main([name, "--help"])
    assert stop.value.code == 0
    given = commands.examples(COMMANDS[name])
    assert capsys.readouterr().out.endswith(f"examples:\n{given}\n")
    lines = [line.strip() for line in given.splitlines()]
    assert 1 <= len(lines) <= 2
    called = []

    @functools.wraps(COMMANDS[name])
    def noted(*arguments, **options):
        called.append(inspect.signature(COMMANDS[name]).bind(*arguments, **options))

    for module in (commands, published, own_trajectories):
        if hasattr(module, name) and callable(getattr(module, name)):
            monkeypatch.setattr(module, name, noted)
    for line in lines:
        words = shlex.split(line.removeprefix('eval "$(').removesuffix(')"').partition(" > ")[0])
        assert words[:2] == ["autosym", name]
        assert commands.main(words[1:]) == 0
    assert len(called) == len(lines)


def test_every_command_is_in_these_tests_and_on_its_page(capsys):
    with pytest.raises(SystemExit):
        commands.main(["--help"])
    text = capsys.readouterr().out
    page = (ROOT / "docs" / "command-line.md").read_text()
    listed = re.findall(r"^. +• (\w+)", text, re.M)
    assert listed == list(COMMANDS)
    assert all(f"`autosym {name}" in page for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "among"),
    [("autosym dis", {"discover"}), ("autosym fit --fo", {"--force"}), ("autosym audit m d --sa", {"--samples"})],
)
def test_bash_completes(capsys, tmp_path, words, among):
    bash = shutil.which("bash") or pytest.skip("there is no bash")
    with pytest.raises(SystemExit) as stop:
        commands.main(["completion", "bash"])
    assert not stop.value.code
    script = capsys.readouterr().out
    (tmp_path / "completion.bash").write_text(script)
    asks = f"""source completion.bash
found=($(complete -p autosym)); COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
for word in "${{found[@]}}"; do [[ $word == _* ]] && $word; done; echo "${{COMPREPLY[@]}}" """
    done = subprocess.run([bash, "-c", asks], cwd=tmp_path, capture_output=True, text=True)
    assert set(done.stdout.split()) == among, done.stderr


def test_other_shells_are_refused_and_zsh_is_not(capsys):
    with pytest.raises(SystemExit) as stop:
        commands.main(["completion", "zsh"])
    assert not stop.value.code
    assert "#compdef autosym" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        commands.main(["completion", "spam"])
    assert stop.value.code == 2


def test_a_rate_is_taken_and_kept(capsys, tmp_path, npz):
    result = json.loads(
        shown(capsys, "fit", npz, "--out", tmp_path / "r", "--epochs", "1", "--lr", "0.02", "--tries", "1", "--json").out
    )
    assert result["schedule"]["lr"] == result["config"]["lr"] == 0.02
    assert "--lr=0.02" in json.loads((tmp_path / "r" / "report.json").read_text())["command"]
