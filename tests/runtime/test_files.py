"""One write: whole or not at all."""

import errno
import os
import stat

import pytest

from autosym.runtime import files


def test_text_and_bytes_are_written_in_a_new_folder(tmp_path):
    files.write(tmp_path / "a" / "b" / "text", "±1\n")
    files.write(tmp_path / "a" / "b" / "bytes", b"\x00\xff")
    assert (tmp_path / "a" / "b" / "text").read_bytes() == "±1\n".encode()
    assert (tmp_path / "a" / "b" / "bytes").read_bytes() == b"\x00\xff"
    assert sorted(file.name for file in (tmp_path / "a" / "b").iterdir()) == ["bytes", "text"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error, call):
    files.write(tmp_path / "a", "old")

    def fail(*_):
        raise error

    monkeypatch.setattr(os, call, fail)
    wanted = (
        (KeyboardInterrupt, None) if isinstance(error, KeyboardInterrupt) else (OSError, r"a could not be written .*No space")
    )
    with pytest.raises(wanted[0], match=wanted[1]):
        files.write(tmp_path / "a", "new")
    monkeypatch.undo()
    assert (tmp_path / "a").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_the_file_is_synced_before_the_renaming_and_its_folder_after(tmp_path, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace

    def kind(fd):
        return "folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"

    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(kind(fd)), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("renaming"), replace(a, b)))
    files.write(tmp_path / "a", "text")
    assert done == ["file", "renaming", "folder"]
