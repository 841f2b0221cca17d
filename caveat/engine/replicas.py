"""Replicas: copies of something that only one thread can use at a time.

A module holds the weights of a draw while it runs, so two threads cannot share one. A replica is made when none is
free and kept for the next caller, so there are as many as calls that ever ran side by side, and nobody waits.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

__all__ = ["Replicas"]

Thing = TypeVar("Thing")


class Replicas(Generic[Thing]):
    """Replicas of one thing, each lent to one caller at a time."""

    def __init__(self, make: Callable[[], Thing]) -> None:
        self._make = make
        self._free: deque[Thing] = deque()  # its append and pop are atomic: no lock that a fork could leave held

    @contextmanager
    def lent(self) -> Iterator[Thing]:
        """Lend a replica to the caller for the length of a block."""
        try:
            replica = self._free.pop()
        except IndexError:
            replica = self._make()
        try:
            yield replica
        finally:
            self._free.append(replica)
