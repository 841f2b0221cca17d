"""What torch must be set to while derivatives are made, put back afterwards.

    with plain_attention():                 operations that have derivatives
    with full_precision(device):            derivatives that can be compared
    compiled(function)                      `torch.compile`, which keeps what it says of itself to itself

Some of torch's settings belong to the whole process. Threads that need one hold a `process_lock` or a `HeldSetting`.
`refuse_inference_mode` is for what no setting mends.
"""

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["HeldSetting", "compiled", "differentiable_attention", "full_precision", "hide_own_warnings", "jvp",
           "plain_attention", "process_lock", "refuse_inference_mode", "slope_along"]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])
# What torch warns of in work of its own, which nobody who fits a network can mend: how messages begin, and who says it.
_OWN_WARNINGS = (
    (r"Synchronization debug mode is a prototype", r"torch\.cuda"),
    (r"The CUDA Graph is empty", r"torch\.cuda"),  # the first of a compiled step, which takes memory for the others
    (r"\s*Online softmax is disabled on the fly", r"torch\._inductor"),
    (r"The \.grad attribute of a Tensor that is not a leaf", r"torch\._(dynamo|subclasses|functorch)"),
    (r"<class 'torch\.autograd\.function\.Function'> should not be instantiated", r"torch\._dynamo"),
)


def hide_own_warnings() -> None:
    """Have no warning shown, or raised where warnings are errors, that torch gives of its own work.

    The filters stay: torch compiles in threads of its own, and again whenever shapes are new.
    """
    for message, module in _OWN_WARNINGS:
        warnings.filterwarnings("ignore", message, Warning, module)


def compiled(function: Function, *, mode: str | None = None, dynamic: bool | None = None) -> Function:
    """`torch.compile` of a function, without a word about how it compiles."""
    hide_own_warnings()
    return cast(Function, torch.compile(function, mode=mode, dynamic=dynamic))


def refuse_inference_mode() -> None:
    """Raise a ValueError where gradients are needed and torch.inference_mode() makes none."""
    if torch.is_inference_mode_enabled():
        raise ValueError("gradients are needed, and torch.inference_mode() makes none: use torch.no_grad() instead")


def process_lock() -> Any:
    """A lock for something that torch has once in the whole process; a forked child starts with it free."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):  # the thread that holds it is not in the child
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


_FORWARD_MODE = process_lock()  # torch has one level of forward differentiation for the whole process


def jvp(function: Callable[..., Any], at: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """`torch.func.jvp`, the value and its derivative along tangents, for one thread at a time."""
    with _FORWARD_MODE:
        both: Any = torch.func.jvp(function, at, tangents)
    value, derivative = both
    return value, derivative


def slope_along(function: Callable[[Any], Tensor], at: dict[str, Tensor], tangents: dict[str, Tensor]) -> Tensor:
    """The derivative of a function of named tensors, by dual numbers: what a module does in place is no matter."""
    with _FORWARD_MODE, torch.no_grad(), forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(value, tangents[name].contiguous()) for name, value in at.items()}
        value, slope = forward_ad.unpack_dual(function(duals))
    return torch.zeros_like(value) if slope is None else slope


_PRECISION = process_lock()  # held while the settings are changed: they are the process's, not a thread's


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """For derivatives that are compared: float32 without the ten bits that a GPU's convolutions round to by default.

    Rounding alone would be harmless; but it turns some of the relus over, and the derivatives then differ by far more.
    Afterwards convolutions, recurrent layers and matrix products each hold the setting that they had: one that followed
    `torch.backends.fp32_precision` does so no longer. On another device than a GPU nothing is touched.
    """
    if device.type != "cuda":
        yield
        return
    backends: Any = torch.backends  # its parts are not typed
    cudnn, products = backends.cudnn, backends.cuda.matmul
    by_operation = hasattr(cudnn, "conv")  # from torch 2.9 on
    settings = [cudnn.conv, cudnn.rnn, products] if by_operation else [cudnn, products]
    name, exact = ("fp32_precision", "ieee") if by_operation else ("allow_tf32", False)
    with _PRECISION:
        before = [getattr(setting, name) for setting in settings]
        for setting in settings:
            setattr(setting, name, exact)
        try:
            yield
        finally:
            for setting, value in zip(settings, before, strict=True):
                setattr(setting, name, value)


class HeldSetting:
    """A setting of the whole process, changed while any thread needs it so and put back by the last one."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None], wanted: Any) -> None:
        self._read, self._write, self._wanted = read, write, wanted
        self._lock, self._holders, self._before = threading.Lock(), 0, None
        if hasattr(os, "register_at_fork"):  # the threads that hold it are not in the child
            os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        if self._holders:
            self._holders = 0
            self._write(self._before)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Keep the setting at the wanted value for the length of a block."""
        with self._lock:
            if not self._holders:
                self._before = self._read()
                self._write(self._wanted)
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if not self._holders:
                    self._write(self._before)


def _attention_kernels() -> tuple[bool, bool, bool, bool]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _use_attention_kernels(flash_efficient_math_cudnn: tuple[bool, bool, bool, bool]) -> None:
    cuda: Any = torch.backends.cuda
    setters = cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_math_sdp, cuda.enable_cudnn_sdp
    for setter, value in zip(setters, flash_efficient_math_cudnn, strict=True):
        setter(value)


# Attention by its ordinary operations: torch's fused inference path cannot be differentiated.
plain_attention = HeldSetting(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False)
_math_attention = HeldSetting(_attention_kernels, _use_attention_kernels, (False, False, True, False))


@contextlib.contextmanager
def differentiable_attention() -> Iterator[None]:
    """Attention that has forward derivatives, which fused kernels have not."""
    with plain_attention(), _math_attention():
        yield
