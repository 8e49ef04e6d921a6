"""A wheel builds, installs where nothing of the checkout is seen, and runs."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import autosym

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of what git tracks or would, so that no build folder is left in the checkout."""
    pytest.importorskip("build")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = [
        "git",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "src",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    ]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory):
    """autosym in an environment of its own; of this one it sees torch and the other dependencies, but no autosym."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    site = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, capture_output=True, check=True)
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def run(*arguments):
        code = ["-c", "import sys; from autosym.__main__ import main; sys.exit(main())"]
        line = [str(home / "bin" / "python"), *code, *map(str, arguments)]
        done = subprocess.run(line, capture_output=True, text=True, cwd=home, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.home = home
    run.python = lambda code: (
        subprocess.run(
            [str(home / "bin" / "python"), "-c", code], capture_output=True, text=True, cwd=home, env=environment, check=True
        ).stdout
    )
    return run


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if name.startswith("autosym/")}
    here = {f"autosym/{p.relative_to(ROOT / 'src/autosym')}" for p in (ROOT / "src/autosym").rglob("*") if p.is_file()}
    assert packed == {name for name in here if "__pycache__" not in name}
    assert all(name.startswith(("autosym/", f"autosym-{autosym.__version__}.dist-info/")) for name in names)


@pytest.mark.slow
def test_the_installed_package_is_the_one_that_runs(command):
    assert str(command.home) in command.python("import autosym; print(autosym.__file__)")
    assert command("--version") == f"autosym {autosym.__version__}\n"


@pytest.mark.slow
def test_the_demo_of_the_installed_package(command, tmp_path):
    pytest.importorskip("matplotlib")
    summary = json.loads(command("demo", "--fits", "--epochs", "1", "--jobs", "1", "--out", tmp_path, "--json"))
    assert len(summary["rows"]) == 8
    assert summary["provenance"]["commit"] is None, "no checkout is in sight"
    assert (tmp_path / "demo.png").exists()
