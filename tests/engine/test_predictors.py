"""A replica is lent to one caller at a time, comes back whatever happens, and is made only when none is free."""

import itertools
import threading

import pytest

from caveat.engine.predictors import Replicas


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
