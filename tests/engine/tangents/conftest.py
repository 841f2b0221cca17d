"""What the tests of tangents share."""

from collections.abc import Iterator

import pytest
import torch

from caveat.engine.tangents import lazy_sums


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, on a CPU, without compiling."""
    monkeypatch.setattr(lazy_sums, "FUSING", ("cpu",))
    monkeypatch.setattr(lazy_sums, "_fused", lambda *_: lazy_sums._sum)
