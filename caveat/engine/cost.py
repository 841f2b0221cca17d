"""What a fit costs and what the machine has: peak memory measured, free memory asked for, too much refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from caveat.batches import Inputs
from caveat.engine.torch_settings import plain_attention
from caveat.network import Network, Params
from caveat.rows import free_of_gpu

__all__ = [
    "FlopCounter",
    "forward_flops",
    "free_bytes",
    "peak_bytes",
    "refuse_if_too_large",
    "reset_peak",
    "words",
    "working_numbers",
]


def reset_peak(device: torch.device) -> None:
    """Start measuring peak memory anew, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_bytes(device: torch.device) -> int:
    """The most bytes in use since `reset_peak`: by torch's allocator on a GPU, by this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = _kilobytes("/proc/self/status", "VmHWM:")
    if peak is not None:
        return peak
    if sys.platform == "win32":
        return 0  # Windows does not say
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def free_bytes(device: torch.device) -> int | None:
    """How many bytes can still be allocated, or None where the system does not say."""
    if device.type == "cuda":
        return free_of_gpu(device)
    return _kilobytes("/proc/meminfo", "MemAvailable:")


def _kilobytes(file: str, key: str) -> int | None:
    """A value that Linux reports in kilobytes, converted to bytes; None where it reports none."""
    try:
        lines = [line.split() for line in Path(file).read_text().splitlines()]
    except OSError:
        return None
    return next((int(words[1]) * 1024 for words in lines if words[:1] == [key]), None)


def refuse_if_too_large(what: str, needed: int, device: torch.device, advice: str | Callable[[int], str]) -> None:
    """Raise a MemoryError before the work starts, with advice, which may depend on how many bytes are free."""
    free = free_bytes(device)
    if free is not None and needed > free:
        advice = advice if isinstance(advice, str) else advice(free)
        raise MemoryError(f"{what} needs {words(needed)}, {words(free)} are free on {device}: {advice}")


def words(count: int) -> str:
    """A number of bytes as people write it."""
    if count < 1000:
        return f"{count} bytes"
    units = ("kB", "MB", "GB", "TB")
    power = next((p for p in (1, 2, 3) if count / 1000**p < 999.95), 4)
    return f"{count / 1000**power:.1f} {units[power - 1]}"


def forward_flops(network: Network, params: Params, x: Inputs) -> float:
    """Floating-point operations of one forward pass over these inputs, by torch's own formulas.

    There is none for the fused layers of transformers that torch has for inference: ordinary operations are counted.
    """
    with torch.no_grad(), plain_attention(), FlopCounter() as counter:
        network(params, x)
    return float(counter.total)


class FlopCounter(TorchDispatchMode):
    """Counts as torch's FlopCounterMode does, which imports torch's compiler: seconds for a few numbers."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import the compiler to tell it so

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return NotImplemented
        formula = flop_registry.get(func._overloadpacket)
        if formula is None and func is not torch.ops.prim.device.default:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        outputs = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=outputs)
        return outputs


# Of one temporary tensor: 8 MB of float32, which caches hold, and 1 GB.
WORKING_NUMBERS = {"cpu": 2**21, "cuda": 2**28}


def working_numbers(like: Tensor) -> int:
    """How many numbers a temporary tensor may hold: work goes in pieces of so many, whatever the network or batch."""
    return WORKING_NUMBERS[like.device.type]
