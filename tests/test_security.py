"""Nothing in the package can run what a file holds, and nothing talks to the network unless data are asked for."""

import ast
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import autosym
from autosym.cli import exported, pictures
from autosym.papers import datasets
from autosym.training import checkpoint
from files import Bait
from models import images, small

ROOT = Path(__file__).parent.parent / "src" / "autosym"
FILES = sorted(ROOT.rglob("*.py"))

# Modules that run code from data, or shells, or talk to others; and where one of them has a reason to be imported.
FORBIDDEN = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "code", "codeop", "runpy", "pty",
    "socket", "socketserver", "ssl", "http", "urllib", "ftplib", "smtplib", "telnetlib", "xmlrpc", "requests", "aiohttp", "httpx", "pooch",
    "subprocess", "ctypes", "cffi",
}  # fmt: skip
REASONS = {
    ("papers/datasets.py", "pooch"): "the download of MNIST and CIFAR-10",
    ("runtime/provenance.py", "subprocess"): "git's commit, a list of arguments",
    ("runtime/room.py", "ctypes"): "two numbers for the allocator of this process; nothing of a user's reaches it",
}
CALLS = {"eval", "exec", "compile", "__import__", "breakpoint", "input"}
METHODS = {
    "torch.load", "torch.jit.load", "torch.hub.load", "torch.package", "os.system", "os.popen", "os.startfile", "numpy.fromregex",
    "pickle.load", "pickle.loads", "yaml.load", "shutil.unpack_archive",
}  # fmt: skip


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def dangers(name: str, source: str) -> list[str]:
    """What a module does that it must not."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            tops = {module.split(".")[0] for module in modules}
            found += [f"imports {top}" for top in tops & FORBIDDEN if (name, top) not in REASONS]
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func).replace("np.", "numpy.")
        if called in CALLS or called in METHODS or called.startswith(("os.exec", "os.spawn")):
            found.append(f"calls {called}")
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        if called == "numpy.load" and getattr(options.get("allow_pickle"), "value", True) is not False:
            found.append("calls numpy.load without allow_pickle=False")
        if getattr(options.get("shell"), "value", False) is not False:
            found.append("starts a shell")
        if called.endswith("tar.extractall") or called.endswith("archive.extractall"):
            found.append("unpacks an archive to where it likes")
        if called.endswith("Environment") and getattr(options.get("autoescape"), "value", False) is not True:
            found.append("makes a page without autoescape")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_runs_what_a_file_holds(path):
    assert dangers(str(path.relative_to(ROOT)), path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "import subprocess",
        "run('ls', shell=True)",
        "import os\nos.system('ls')",
        "import numpy as np\nnp.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import urllib.request",
        "from jinja2 import Environment\nEnvironment()",
        "tar.extractall('/')",
        "import yaml",
    ],
)
def test_dangers_are_seen(source):
    assert dangers("module.py", source)


def test_every_exception_has_its_reason_still():
    for name, module in REASONS:
        assert f"import {module}" in (ROOT / name).read_text(), f"{name} no longer imports {module}: take it off the list"


def test_templates_mark_only_their_own_words_as_safe():
    for path in (ROOT / "templates").glob("*.jinja"):
        text = path.read_text()
        assert "autoescape" not in text
        assert "<script src" not in text
        assert len(re.findall(r"\|\s*safe", text)) == len(re.findall(r"'[^'{}]*'\s*\|\s*safe", text)), "of a literal string"


# ---- the network


class Talked(AssertionError):
    pass


@pytest.fixture
def silent(monkeypatch):
    """Any connection is an error that no handler of OSError swallows."""

    def refuse(*arguments, **options):
        raise Talked(f"a connection was opened: {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("silent")
def test_a_fit_and_its_report_talk_to_nobody(tmp_path):
    pytest.importorskip("jinja2")
    fit = autosym.fit(small(), images(), epochs=1, checkpoint=tmp_path / "c")
    fit.report(tmp_path / "report.html", images())
    autosym.harden(fit, images())


@pytest.mark.usefixtures("silent")
def test_data_are_downloaded_only_if_asked_for(tmp_path):
    for read in (datasets.mnist, datasets.cifar10):
        with pytest.raises(FileNotFoundError, match="download=False"):
            read(tmp_path, download=False)
    pytest.importorskip("pooch")
    with pytest.raises(Talked):  # the control
        datasets.mnist(tmp_path)


def test_importing_the_package_opens_no_connection_and_starts_nothing():
    code = (
        "import socket, subprocess, sys\n"
        "def refuse(*a, **k): raise SystemExit('talked')\n"
        "socket.socket.connect = socket.create_connection = subprocess.Popen.__init__ = refuse\n"
        "import autosym\n"
        "assert not {'pooch', 'requests', 'jinja2', 'matplotlib', 'rich', 'tyro'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- pickles


@pytest.mark.fault(23)
def test_no_reader_unpickles(tmp_path):
    bait = Bait(tmp_path / "ran")
    torch.save(bait, tmp_path / "m.pt2")
    torch.save(bait, tmp_path / "c.safetensors")
    np.savez(tmp_path / "a.npz", images=np.array([bait, bait], dtype=object), labels=np.arange(2))
    for read, name in ((checkpoint.read, "c.safetensors"), (exported.load, "m.pt2"), (pictures.read, "a.npz")):
        with pytest.raises(ValueError, match=f"{name}.*pickle"):
            read(tmp_path / name)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "m.pt2", weights_only=False)  # the control
    assert (tmp_path / "ran").exists()
