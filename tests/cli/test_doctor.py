"""autosym doctor: a sound installation passes, and what is wrong is named."""

import json

import pytest

from autosym.cli import commands, doctor


def test_this_installation_is_sound(capsys):
    assert commands.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "WRONG" not in said
    for name in ("torch", "threads", "evidence", "equivariance", "relax, fit, harden"):
        assert f"  {name}  " in said


def test_numbers_that_are_off_are_named_and_the_call_fails(monkeypatch, capsys):
    right = doctor.exact.at
    monkeypatch.setattr(doctor.exact, "at", lambda *a: right(*a[:2], 3.0, a[3]))
    assert commands.main(["doctor", "--json"]) == 1
    said = capsys.readouterr()
    wrong = [check for check in json.loads(said.out) if check["sound"] is False]
    assert [check["name"] for check in wrong] == ["evidence"]
    assert "is not" in wrong[0]["found"]
    assert "wrong: evidence" in said.err


def test_what_is_missing_is_said_with_what_brings_it(monkeypatch):
    monkeypatch.setattr(doctor, "EXTRAS", {"rich": ("rich", "tables"), "no_such_module": ("no-such-package", "a test")})
    (check,) = doctor._extras()
    assert check.sound is None
    assert "no-such-package (a test)" in check.found
    assert "pip install" in check.found


@pytest.mark.parametrize(("threads", "sound"), [(1, True), (10_000, False)])
def test_more_threads_than_cores_are_wrong(monkeypatch, threads, sound):
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: threads)
    assert doctor._hardware()[0].sound is sound


def test_the_numbers_are_tested_in_one_thread_and_few_epochs(monkeypatch):
    """On a busy machine the fit alone took five seconds: small steps in several threads wait for each other."""
    seen, before, made = [], doctor.torch.get_num_threads(), doctor.fitted

    def fitted(*arguments, **options):
        seen.append((doctor.torch.get_num_threads(), options["epochs"]))
        return made(*arguments, **options)

    monkeypatch.setattr(doctor, "fitted", fitted)
    doctor.torch.set_num_threads(2)
    try:
        assert all(check.sound for check in doctor._numbers())
        assert doctor.torch.get_num_threads() == 2
    finally:
        doctor.torch.set_num_threads(before)
    assert seen == [(1, 10)]


def test_a_folder_that_cannot_be_written_is_named(monkeypatch):
    def refused(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refused)
    assert all(check.sound is None and "cannot be written (Permission denied)" in check.found for check in doctor._folders())
