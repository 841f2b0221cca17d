"""A replica is lent to one caller at a time and made only when none is free; draws of a seed are made once."""

import itertools
import threading

import pytest
import torch
from torch import Tensor

from caveat.engine.predictors import PreparedDraws, Replicas


def numbered() -> Replicas[int]:
    return Replicas(itertools.count().__next__)


def test_one_caller_gets_the_same_replica_again() -> None:
    replicas = numbered()
    for _ in range(3):
        with replicas.lent() as replica:
            assert replica == 0


def test_callers_at_the_same_time_get_different_ones() -> None:
    replicas = numbered()
    with replicas.lent() as outer, replicas.lent() as inner:
        assert {outer, inner} == {0, 1}
    with replicas.lent() as outer, replicas.lent() as inner:
        assert {outer, inner} == {0, 1}, "both were free again"


def test_two_threads_get_different_replicas() -> None:
    replicas, both_hold_one, seen = numbered(), threading.Barrier(2, timeout=10), []

    def use() -> None:
        with replicas.lent() as replica:
            both_hold_one.wait()
            seen.append(replica)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [0, 1]


def test_a_replica_returns_after_an_exception() -> None:
    replicas = numbered()
    with pytest.raises(RuntimeError, match="in the block"), replicas.lent():
        raise RuntimeError("in the block")
    with replicas.lent() as replica:
        assert replica == 0


def test_nothing_is_made_before_it_is_asked_for_and_a_failure_to_make_is_the_callers() -> None:
    made: list[int] = []

    def fail() -> int:
        made.append(1)
        raise MemoryError("no room for a copy")

    replicas = Replicas(fail)
    assert not made
    with pytest.raises(MemoryError, match="no room"), replicas.lent():
        pass
    assert made == [1]


def test_prepared_draws_are_made_once_for_a_seed() -> None:
    made: list[int] = []

    def drawn(n: int, rng: torch.Generator, prepared: PreparedDraws[Tensor], nbytes: int = 8) -> Tensor:
        def make() -> Tensor:
            made.append(n)
            return torch.randn(n, generator=rng)

        return prepared.of(n, rng, nbytes, make)

    prepared: PreparedDraws[Tensor] = PreparedDraws(most_bytes=100)
    first, second = (torch.Generator().manual_seed(5) for _ in range(2))
    assert torch.equal(drawn(3, first, prepared), drawn(3, second, prepared))
    assert made == [3]
    assert torch.equal(first.get_state(), second.get_state())  # the generator has moved on
    assert not torch.equal(drawn(3, first, prepared), drawn(3, torch.Generator().manual_seed(5), prepared))
    assert drawn(2, torch.Generator().manual_seed(5), prepared).shape == (2,)
    made.clear()
    for _ in range(2):
        drawn(3, torch.Generator().manual_seed(5), prepared, nbytes=101)
    assert made == [3, 3]  # too large to keep
