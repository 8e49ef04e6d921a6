"""How much memory is free: of a GPU, or of the machine and of the container that this process runs in."""

from pathlib import Path

import torch

MEMINFO, GROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


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
