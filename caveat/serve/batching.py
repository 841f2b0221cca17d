"""Requests that wait are predicted together: a pass over eight rows costs little more than a pass over one.

While one batch is predicted in a thread, requests queue; the next batch is all of them, up to a number of rows. Nobody
waits for a batch to fill, so that a lone request takes no longer than its own prediction. How many may wait has a
limit, beyond which requests are refused at once. Where a batch cannot be predicted, its requests are, one by one: rows
that the network does not take are one client's fault, and no other's.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Batcher", "TooManyRequests"]

Answers = dict[str, Tensor]


class TooManyRequests(RuntimeError):  # noqa: N818 - the name says what it is
    """As many requests wait as may."""


class _Waiting(NamedTuple):
    inputs: Tensor
    answer: "asyncio.Future[Answers]"


class Batcher:
    """Predicts the rows of several requests at once; for one event loop.

    Args:
        predict: from inputs [B, ...] to answers [B, ...].
        most_rows: of a batch; a request alone may have more.
        most_waiting: requests that may wait.
    """

    def __init__(self, predict: Callable[[Tensor], Answers], most_rows: int = 256, most_waiting: int = 512) -> None:
        self._predict, self._most_rows, self._most_waiting = predict, most_rows, most_waiting
        self._waiting: list[_Waiting] = []
        self._working: asyncio.Task[None] | None = None
        self.batches, self.requests = 0, 0

    async def answer(self, inputs: Tensor) -> Answers:
        """The answers for the rows of one request."""
        if len(self._waiting) >= self._most_waiting:
            raise TooManyRequests(f"{self._most_waiting} requests wait already: try again in a moment")
        waiting = _Waiting(inputs, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await waiting.answer

    async def _work(self) -> None:
        """Batch after batch, until nobody waits."""
        while self._waiting:
            batch = self._next_batch()
            self.batches, self.requests = self.batches + 1, self.requests + len(batch)
            try:
                await self._answer(batch)
            except Exception:
                for waiting in batch:
                    try:
                        await self._answer([waiting])
                    except Exception as error:
                        if not waiting.answer.done():
                            waiting.answer.set_exception(error)

    async def _answer(self, batch: list[_Waiting]) -> None:
        """Predict the requests of a batch together; raises what the prediction raises."""
        answers = await asyncio.to_thread(self._predict, torch.cat([w.inputs for w in batch]))
        first = 0
        for waiting in batch:
            rows = slice(first, first + len(waiting.inputs))
            first = rows.stop
            if not waiting.answer.done():  # else the client has gone
                waiting.answer.set_result({name: values[rows] for name, values in answers.items()})

    def _next_batch(self) -> list[_Waiting]:
        rows, count = 0, 0
        for waiting in self._waiting:
            rows += len(waiting.inputs)
            if count and rows > self._most_rows:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch
