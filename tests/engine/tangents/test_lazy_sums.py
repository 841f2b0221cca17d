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


def test_without_a_compiler_for_gpus_it_is_said_and_done_without() -> None:
    tried: list[int] = []

    def broken(terms: list[Tensor], slope: Tensor) -> Tensor:
        tried.append(1)
        raise RuntimeError("no compiler\nand so on")

    kernel, terms, slope = lazy_sums._FusedSum(broken), [torch.ones(2, 3), torch.ones(2, 3)], torch.full((3,), 2.0)
    with pytest.warns(UserWarning, match=r"torch.compile failed \(no compiler\): install triton and a C compiler"):
        assert torch.equal(kernel(terms, slope), torch.full((2, 3), 4.0))
    assert torch.equal(kernel(terms, slope), torch.full((2, 3), 4.0))
    assert tried == [1]
