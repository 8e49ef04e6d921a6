"""A source archive and the wheel that is built from it install where nothing of the checkout is seen, and run."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

import autosym
from commands import bars

ROOT = Path(__file__).parent.parent
PACKED = ("src", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Both archives by name. Built from a copy of what git tracks or would, so that no build folder is left in the checkout."""
    pytest.importorskip("build")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("archives")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *PACKED]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,), (archive,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": archive}


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def command(built, request, tmp_path_factory):
    """autosym in an environment of its own; of this one it sees torch and the other dependencies, but no autosym."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    how = ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(site)]
    install = [sys.executable, "-m", "pip", "install", "-q", *how, str(built[request.param])]
    subprocess.run(install, capture_output=True, check=True)
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def python(*words):
        line = [str(home / "bin" / "python"), *map(str, words)]
        done = subprocess.run(line, capture_output=True, text=True, cwd=home, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def run(*arguments):
        return python("-c", "import sys; from autosym.__main__ import main; sys.exit(main())", *arguments)

    run.home, run.python = home, lambda code: python("-c", code)
    return run


@pytest.mark.slow
def test_the_archives_hold_the_package_and_nothing_else(built):
    here = {f"autosym/{p.relative_to(ROOT / 'src/autosym')}" for p in (ROOT / "src/autosym").rglob("*") if p.is_file()}
    here = {name for name in here if "__pycache__" not in name}
    names = zipfile.ZipFile(built["wheel"]).namelist()
    assert {name for name in names if name.startswith("autosym/")} == here
    assert all(name.startswith(("autosym/", f"autosym-{autosym.__version__}.dist-info/")) for name in names)
    with tarfile.open(built["sdist"]) as archive:
        files = {one.name.partition("/")[2] for one in archive.getmembers() if one.isfile()}
    assert {name.removeprefix("src/") for name in files if name.startswith("src/autosym/")} == here
    rest = {name for name in files if not name.startswith(("src/autosym/", "src/autosym.egg-info/"))}
    assert rest == {*PACKED[1:], "PKG-INFO", "setup.cfg"}


@pytest.mark.slow
def test_the_installed_package_is_the_one_that_runs(command):
    assert str(command.home) in command.python("import autosym; print(autosym.__file__)")
    assert command("--version") == f"autosym {autosym.__version__}\n"


@pytest.mark.slow
def test_the_installed_package_is_sound(command):
    checks = json.loads(command("doctor", "--json"))
    assert {check["name"]: check["found"] for check in checks}["autosym"] == autosym.__version__, "no checkout is in sight"
    assert not [check for check in checks if check["sound"] is False]


@pytest.mark.slow
def test_a_fit_of_the_installed_package(command, tmp_path):
    pytest.importorskip("jinja2")
    images, labels = bars()
    np.savez(tmp_path / "bars.npz", images=images, labels=labels)
    result = json.loads(command("fit", tmp_path / "bars.npz", "--epochs", "2", "--out", tmp_path / "r", "--json"))
    assert result["provenance"]["autosym"] == autosym.__version__
    assert result["provenance"]["commit"] is None
    assert (tmp_path / "r" / "report.html").exists(), "its templates are installed"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["wheel"], indirect=True)
def test_the_demo_of_the_installed_package(command, tmp_path):
    pytest.importorskip("matplotlib")
    summary = json.loads(command("demo", "--fits", "--epochs", "1", "--jobs", "1", "--out", tmp_path, "--json"))
    assert len(summary["rows"]) == 8
    assert summary["provenance"]["commit"] is None, "no checkout is in sight"
    assert (tmp_path / "demo.png").exists()
