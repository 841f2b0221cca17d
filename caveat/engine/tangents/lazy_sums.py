"""Tangents as sums that wait until a slope or an operation needs them: slope (a + b + ...) in one pass over memory.

A convolution's tangent is W * dx + dW * x + db, a residual adds another, and relu multiplies. On a GPU each of these
takes about as long as the convolution of a narrow layer, since all it does is to read and write; together, compiled,
they read and write once. On a CPU they are added one after the other.

Compiling a kind of sum takes seconds, and a network has dozens of kinds (54 for eight samples of a ResNet-18), so that
few rows are done long before. A kind is compiled once its sums have waited for memory, beyond what one pass takes, for
as long as compiling takes: whatever is still to come, both together take at most twice what the better of always and
never would have taken.
"""

import functools
import time
import types
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from caveat.engine.torch_settings import compiled

__all__ = ["FUSING", "Terms", "times_slope"]

FUSING = ("cuda",)  # devices where additions wait
COMPILING = 1.5  # seconds that a kind of sum takes to compile


class Terms:
    """A tangent [K, ...] as terms that are not added yet; the first has all its numbers, others may be broadcast."""

    def __init__(self, *terms: Tensor) -> None:
        self.terms = terms

    def __add__(self, other: "Terms") -> "Terms":
        return Terms(*self.terms, *other.terms)

    @property
    def whole(self) -> Tensor:
        """The sum [K, ...], added up once."""
        if len(self.terms) > 1:
            self.terms = (self.times(None),)
        return self.terms[0]

    def times(self, slope: Tensor | None) -> Tensor:
        """The sum times a slope, [...], that all K share."""
        first = self.terms[0]
        if first.device.type in FUSING and first.ndim == 5 and first.stride(2) == 1 < len(first):  # channels last
            return _of_images(self.terms, slope)
        return _one_after_the_other(self.terms, slope)


def times_slope(t: Tensor, slope: Tensor, out: Tensor | None = None) -> Tensor:
    """Tangents [K, ...] times a slope [...]; large ones one after the other, since kernels that broadcast are slow."""
    if slope.numel() < 2**16 or t.shape[1:] != slope.shape or t.device.type != "cpu":
        return torch.mul(t, slope, out=out)
    products = torch.empty_like(t) if out is None else out
    if slope.stride() != t.stride()[1:]:
        slope = torch.empty_like(t[0]).copy_(slope)  # the same layout, once
    for tangent, result in zip(t, products, strict=True):
        torch.mul(tangent, slope, out=result)
    return products


def _one_after_the_other(terms: Sequence[Tensor], slope: Tensor | None) -> Tensor:
    if len(terms) == 1:
        return terms[0] if slope is None else times_slope(terms[0], slope)
    total = terms[0] + terms[1]
    for term in terms[2:]:
        total.add_(term)
    return total if slope is None else times_slope(total, slope, out=total if slope.dtype == total.dtype else None)


def _of_images(terms: Sequence[Tensor], slope: Tensor | None) -> Tensor:
    """Of [K, B, C, H, W], seen as [B H W, K, C]: no copies where channels are last."""
    k, b, c, h, w = terms[0].shape
    parts = [term.permute(1, 3, 4, 0, 2).flatten(0, 2) for term in terms]
    slope_by_place = None if slope is None else slope.permute(0, 2, 3, 1).flatten(0, 2).unsqueeze(1)
    sum_of = _fused(len(terms), slope_by_place is not None, terms[0].dtype, k if k % 8 == 0 else None, c)
    return sum_of(parts, slope_by_place).view(b, h, w, k, c).permute(3, 0, 4, 1, 2)


def _sum(terms: Sequence[Tensor], slope: Tensor | None) -> Tensor:
    """The sum in single precision at least, and rounded once."""
    total = terms[0] if terms[0].itemsize >= 4 else terms[0].float()
    for term in terms[1:]:
        total = total + term
    return (total if slope is None else total * slope).to(terms[0].dtype)


@functools.cache
def _fused(count: int, with_slope: bool, dtype: torch.dtype, k: int | None, c: int) -> Callable[..., Tensor]:
    """One kernel for the sum of `count` terms, times a slope where there is one."""
    # Functions are compiled a limited number of times each: a copy for each kind of sum.
    name = f"sum_of_{count}_{with_slope}_{str(dtype)[6:]}_{k}_{c}"
    kind_of_sum = types.FunctionType(_sum.__code__.replace(co_name=name), globals())
    return _FusedSum(compiled(kind_of_sum, dynamic=False))


class _FusedSum:
    """A sum that is compiled when that pays; where it cannot be compiled, a warning says so."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.waited = 0.0  # seconds that sums took which were not compiled, beyond what they would take as one kernel

    def __call__(self, terms: Sequence[Tensor], slope: Tensor | None) -> Tensor:
        if self.waited < COMPILING:
            passes = 2.0 * (len(terms) - 1) + 0.5 * (slope is not None)  # a slope that all K share is read slowly
            self.waited += passes * terms[0].nbytes / _bytes_a_second(terms[0].device)
            return _sum(terms, slope)
        # One kernel for any number of places. C and the usual K are constants in it: dividing by unknown ones takes
        # longer than the sum. All other K, which solvers come to as vectors are done, share one.
        unknown = (0,) if terms[0].shape[1] % 8 == 0 else (0, 1)
        for part in terms if slope is None else [*terms, slope]:
            torch._dynamo.mark_dynamic(part, [axis for axis in unknown if part.shape[axis] > 1])
        try:
            return self.function(terms, slope)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of torch's compilers
            why, self.function = str(error).strip().partition("\n")[0], _sum
            warnings.warn(
                "products with a network's Jacobian on a GPU are slower than need be, since torch.compile failed "
                f"({why}): install triton and a C compiler",
                stacklevel=2,
            )
            return _sum(terms, slope)


@functools.cache
def _bytes_a_second(device: torch.device) -> float:
    """How fast memory is read or written, from doubling 64 MB of numbers a few times."""
    numbers, best = torch.ones(2**24, device=device), 0.0
    for _ in range(4):
        started = _now(device)
        numbers.mul_(2.0)
        best = max(best, 2 * numbers.nbytes / (_now(device) - started))
    return best


def _now(device: torch.device) -> float:
    """The time when all that was asked of a device is done, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
