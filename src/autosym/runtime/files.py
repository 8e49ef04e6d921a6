"""Files that are written whole or not at all, and what is wrong with those that are read."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write(path: Path, content: str | bytes) -> None:
    """Replace the file at ``path`` by text or bytes, whole or not at all; its folder is made where there is none.

    It is written under a temporary name, synced, and renamed: a process killed at any moment leaves the old file or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(f"{path} could not be written ({error}); what was there before, if anything, is untouched") from error
    finally:
        temporary.unlink(missing_ok=True)
    if os.name != "nt":  # Windows does not open folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the renaming itself
        finally:
            os.close(folder)


@contextmanager
def of_this_version(file: Path) -> Iterator[None]:
    """Any error in the contents of a file becomes a ValueError that names the file."""
    try:
        yield
    except (ImportError, OSError):
        raise
    except Exception as error:
        raise ValueError(f"{file} is of another version or broken ({type(error).__name__}: {error}): run it again") from error


def read(file: Path) -> Any:
    """The contents of a JSON file; if it is not JSON, a ValueError names the file."""
    try:
        return json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}): it may have been cut off; run it again") from error
