"""Sums that wait: one kernel for all terms and the slope, shared by numbers of vectors, and without a compiler."""

from typing import Any

import pytest
import torch
from torch import Tensor

from caveat.engine.tangents import lazy_sums


@pytest.mark.usefixtures("as_on_a_gpu")
def test_numbers_of_vectors_that_solvers_come_to_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[tuple[Any, ...]] = []
    monkeypatch.setattr(lazy_sums, "_fused", lambda *kind: (kinds.append(kind), lazy_sums._sum)[1])
    slope = torch.randn(2, 4, 4, 3).permute(0, 3, 1, 2)
    for k in (8, 7, 3, 16, 1):
        first, second, shift = (torch.randn(*shape, k, 3) for shape in ((2, 4, 4), (2, 4, 4), (1, 1, 1)))
        terms = [term.permute(3, 0, 4, 1, 2) for term in (first, second, shift)]
        torch.testing.assert_close(lazy_sums.Terms(*terms).times(slope), sum(terms) * slope)
    assert [kind[3:] for kind in kinds] == [(8, 3), (None, 3), (None, 3), (16, 3)]


def test_without_a_compiler_for_gpus_it_is_said_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(lazy_sums, "COMPILING", 0.0)

    def broken(terms: list[Tensor], slope: Tensor) -> Tensor:
        tried.append(1)
        raise RuntimeError("no compiler\nand so on")

    kernel, terms, slope = (
        lazy_sums._FusedSum(broken),
        [torch.ones(2, 1, 3), torch.ones(2, 1, 3)],
        torch.full((2, 1, 3), 2.0),
    )
    with pytest.warns(UserWarning, match=r"torch.compile failed \(no compiler\): install triton and a C compiler"):
        assert torch.equal(kernel(terms, slope), torch.full((2, 1, 3), 4.0))
    assert torch.equal(kernel(terms, slope), torch.full((2, 1, 3), 4.0))
    assert tried == [1]


@pytest.mark.parametrize("speed", [1e6, 1e9])
def test_a_kind_of_sum_is_compiled_when_waiting_for_memory_took_as_long_as_compiling(
    speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[int] = []
    monkeypatch.setattr(lazy_sums, "_bytes_a_second", lambda device: speed)
    kernel = lazy_sums._FusedSum(lambda terms, slope: (compiled.append(1), lazy_sums._sum(terms, slope))[1])
    terms, slope = [torch.randn(1000, 8, 5) for _ in range(3)], torch.randn(1000, 1, 5)
    extra = 4.5 * terms[0].nbytes / speed  # two more reads, two more writes, and a slope
    count = 5
    for _ in range(count):
        assert torch.equal(kernel(terms, slope), (terms[0] + terms[1] + terms[2]) * slope)
    before = next(i for i in range(10**6) if i * extra >= lazy_sums.COMPILING)  # sums that one pass would have beaten
    assert len(compiled) == max(0, count - before)
    assert bool(compiled) == (speed == 1e6)
    assert kernel.waited < lazy_sums.COMPILING + extra  # at most as long again as compiling takes


def test_sums_that_are_not_compiled_round_once() -> None:
    terms, slope = [torch.randn(50, 8, 5).half() for _ in range(6)], torch.randn(50, 1, 5).half()
    exact = sum(term.double() for term in terms) * slope.double()
    rounded = lazy_sums._FusedSum(lambda *_: pytest.fail("compiled"))(terms, slope)
    assert rounded.dtype == torch.float16
    assert float((rounded.double() - exact).norm() / exact.norm()) < 1.01 * float(
        (exact.half().double() - exact).norm() / exact.norm()
    )


def test_memory_is_timed() -> None:
    assert 1e8 < lazy_sums._bytes_a_second(torch.device("cpu")) < 1e13
