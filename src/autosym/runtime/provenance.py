"""Where a result comes from: versions, commit and hardware, written beside every number."""

import os
import platform
import subprocess
from pathlib import Path

import torch

VERSION = "0.1.0"


def commit() -> str | None:
    """AUTOSYM_COMMIT where it is set, else the commit of the source checkout, else None (an installed package)."""
    if "AUTOSYM_COMMIT" in os.environ:
        return os.environ["AUTOSYM_COMMIT"]
    package = Path(__file__).resolve().parents[1]
    root = package.parents[1]
    if package != root / "src" / "autosym" or not (root / ".git").exists():  # the folder of a project may hold an installed one
        return None
    try:
        head, changes = (
            subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
        return f"{head}-dirty" if changes else head
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance(device: str = "cpu") -> dict:
    """What a reader needs to repeat a number, made on ``device``."""
    hardware = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU, {os.cpu_count()} cores"
    return {
        "autosym": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": hardware,
        "commit": commit(),
    }
