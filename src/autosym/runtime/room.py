"""How much memory is free: of a GPU, or of the machine and of the container that this process runs in. Memory that is used again."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

MEMINFO, GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
MMAP, TRIM = -3, -1  # settings of glibc, in bytes: what is larger is asked of the system; what is free beyond it is handed back
KEEPING = {MMAP: 2**27, TRIM: 2**30}
USUAL = {MMAP: 2**25, TRIM: 2**26}  # the most that glibc goes to by itself
COUNTING = threading.Lock()
_inside = 0


def free(device: torch.device) -> int | None:
    """Bytes that may still be taken on ``device``; None where the system does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
            device
        )  # kept by torch, for whoever asks next
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    known = [bytes_ for bytes_ in (_of_machine(), _of_container()) if bytes_ is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, LookupError, ValueError):
        return None


def _of_container() -> int | None:
    try:
        return int((GROUP / "memory.max").read_text()) - int((GROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return None


@contextmanager
def kept() -> Iterator[None]:
    """Keep freed memory for the tensors to come, and hand it back at the end: of a CPU, where the C library is glibc.

    glibc hands large pieces back at once, and the system clears every page of the next: two fifths of the time of a group network.
    """
    global _inside
    setting = _glibc()
    with COUNTING:
        _inside += 1
        if _inside == 1:
            setting(KEEPING)
    try:
        yield
    finally:
        with COUNTING:
            _inside -= 1
            if not _inside:
                setting(USUAL)


@cache
def _glibc() -> Callable[[dict[int, int]], None]:
    """Sets glibc's thresholds, and hands back what is free if they are the usual ones; does nothing with another C library."""
    try:
        library = ctypes.CDLL(None)
        mallopt, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError, TypeError):
        return lambda settings: None

    def to(settings: dict[int, int]) -> None:
        for name, size in settings.items():
            mallopt(name, ctypes.c_int(size))
        if settings is USUAL:
            trim(ctypes.c_size_t(0))

    return to
