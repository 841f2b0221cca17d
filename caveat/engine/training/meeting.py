"""Fits that train at the same time on one GPU: each begins inside the one before it, when that is about to train.

    fit 1 .. to its training
        fit 2 .. to its training
            fit 3 .. to its training, the training of all three, .. fit 3 to its end
        .. fit 2 to its end
    .. fit 1 to its end

Nested like calls, fits leave torch's settings and random numbers as they found them, whoever comes after.
"""

import time
from collections.abc import Callable, Sequence

from caveat.engine.run import Run
from caveat.engine.training.loop import Loop
from caveat.engine.training.side_by_side import run_loops_together

__all__ = ["Meeting"]


class Meeting:
    """Where the loops of several fits come together. A fit that never trains loops ends like any other."""

    def __init__(self, begin_another: Callable[[], bool]) -> None:
        """`begin_another` makes another fit of this meeting from its beginning to its end; False if none is left."""
        self._begin_another = begin_another
        self._loops: list[Loop] = []
        self._runs: list[Run] = []  # of the fits that have begun and not ended
        self._fits = 0  # whose loops there are
        self._seconds = 0.0  # that all loops took together
        self._over = False
        self.error: Exception | None = None  # what ended the training of all

    def enter(self, run: Run) -> None:
        """A fit begins."""
        self._runs.append(run)

    def leave(self) -> None:
        """The fit that began last ends."""
        self._runs.pop()

    def train(self, loops: Sequence[Loop]) -> bool:
        """Run these loops with those of the fits that are still to begin; False if that is over, with nothing trained.

        Raises CaptureError, with nothing trained, if they cannot be recorded; and in every fit what ended the training
        of one.
        """
        if self._over:
            return False
        run, arrived = self._runs[-1], time.monotonic()
        self._loops += loops
        self._fits += 1
        while not self._over and self._begin_another():
            pass
        if not self._over:
            self._over, started = True, time.monotonic()
            try:
                run_loops_together(self._loops)
            except Exception as error:
                self.error = error
            self._seconds = time.monotonic() - started
        elsewhere = time.monotonic() - arrived - self._seconds / self._fits
        for clock in {id(each): each for each in (run, *(loop.run for loop in loops))}.values():
            clock.leave_out(elsewhere)
        if self.error is not None:
            raise self.error
        return True
