"""Where a result comes from: versions, commit and hardware, written beside every number."""

import os
import platform
import subprocess
from pathlib import Path

import torch

import autosym


def commit() -> str | None:
    """AUTOSYM_COMMIT where it is set, else the commit of the source checkout, else None (an installed package)."""
    if "AUTOSYM_COMMIT" in os.environ:
        return os.environ["AUTOSYM_COMMIT"]
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance() -> dict:
    """What a reader needs to repeat a number."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return {
        "autosym": autosym.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "commit": commit(),
    }
