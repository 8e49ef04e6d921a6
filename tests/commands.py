"""Commands as a user gives them, what they print, and images to give them."""

import math

import numpy as np
import pytest

from autosym.cli import commands
from autosym.papers.quadrant_digits import MODELS, TASKS

ROW = {"task", "model", "method", "accuracy", "standard_error", "nll", "evidence", "parameters", "seconds"}


def shown(capsys, *arguments, status=0):
    """What a command prints, as (stdout, stderr)."""
    assert commands.main([str(a) for a in arguments]) == status
    return capsys.readouterr()


def check_row(row):
    assert set(row) >= ROW
    assert row["task"] in TASKS
    assert row["model"] in MODELS
    assert row["method"] in ("map", "evidence")
    assert 0 <= row["accuracy"] <= 100
    assert 0 <= row["standard_error"] <= 5
    assert all(math.isfinite(row[key]) for key in ("nll", "evidence", "seconds"))
    assert isinstance(row["parameters"], int)


def check_symmetry(symmetry):
    """The shares of the four layers of a learned network, each summing to one."""
    assert {path["path"] for path in symmetry} == {"conv", "f-fc"}
    assert len(symmetry) == 8
    for layer in {path["layer"] for path in symmetry}:
        assert sum(path["share"] for path in symmetry if path["layer"] == layer) == pytest.approx(1)


def bars(count=40, size=8):
    """Images of a horizontal (class 0) or a vertical bar somewhere, in bytes."""
    draw = np.random.default_rng(1)
    images, labels = draw.integers(0, 60, (count, size, size)).astype(np.uint8), np.arange(count) % 2
    for image, label in zip(images, labels, strict=True):
        place = draw.integers(size)
        image[(place, slice(None)) if label == 0 else (slice(None), place)] = 255
    return images, labels
