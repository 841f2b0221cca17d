"""What a fit costs and what the machine has: peak memory measured, free memory asked for, too much refused."""

import resource
import sys
from pathlib import Path

import torch

__all__ = ["free_bytes", "peak_bytes", "refuse_if_too_large", "reset_peak", "words"]


def reset_peak(device: torch.device) -> None:
    """Start measuring anew, where the system allows."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_bytes(device: torch.device) -> int:
    """The most memory since `reset_peak`: of torch's allocator on a GPU, of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_bytes(device: torch.device) -> int | None:
    """Memory that can still be had, or None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


def refuse_if_too_large(what: str, needed: int, device: torch.device, advice: str) -> None:
    """Raise a MemoryError before the work starts."""
    free = free_bytes(device)
    if free is not None and needed > free:
        raise MemoryError(f"{what} needs {words(needed)}, {words(free)} are free on {device}: {advice}")


def words(count: int) -> str:
    """A number of bytes as people write it."""
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000  # type: ignore[assignment]
    raise AssertionError
