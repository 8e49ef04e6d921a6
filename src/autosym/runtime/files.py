"""Files that are whole or not there."""

import os
from pathlib import Path


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
