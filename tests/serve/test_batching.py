"""Requests that wait go through together, and each gets its own rows."""

import asyncio
import threading

import pytest
import torch
from torch import Tensor

from caveat.serve import Batcher, TooManyRequests


def test_requests_that_wait_are_one_batch() -> None:
    sizes: list[int] = []
    begin = threading.Event()

    def double(inputs: Tensor) -> dict[str, Tensor]:
        begin.wait(10)
        sizes.append(len(inputs))
        return {"twice": 2 * inputs}

    async def run() -> list[dict[str, Tensor]]:
        batcher = Batcher(double, most_rows=4)
        tasks = []
        for n in range(6):
            tasks.append(asyncio.create_task(batcher.answer(torch.full((n % 2 + 1,), float(n)))))
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        begin.set()
        answers = await asyncio.gather(*tasks)
        assert (batcher.requests, batcher.batches) == (6, len(sizes))
        return answers

    answers = asyncio.run(run())
    for n, answer in enumerate(answers):
        assert torch.equal(answer["twice"], torch.full((n % 2 + 1,), 2.0 * n))
    assert sum(sizes) == 9
    assert len(sizes) < 6
    assert max(sizes) <= 4


def test_a_fault_is_that_of_the_request_that_has_it() -> None:
    def refuse(inputs: Tensor) -> dict[str, Tensor]:
        if bool((inputs < 0).any()):
            raise ValueError("below zero")
        return {"same": inputs}

    async def run() -> None:
        batcher = Batcher(refuse)
        with pytest.raises(ValueError, match="below zero"):
            await batcher.answer(-torch.ones(1))
        assert (await batcher.answer(torch.ones(2)))["same"].tolist() == [1, 1]
        wanted = [torch.ones(1), -torch.ones(1), torch.full((2,), 3.0)]
        outcomes = await asyncio.gather(*map(batcher.answer, wanted), return_exceptions=True)
        assert isinstance(outcomes[1], ValueError)
        for outcome, inputs in ((outcomes[0], wanted[0]), (outcomes[2], wanted[2])):
            assert isinstance(outcome, dict)
            assert torch.equal(outcome["same"], inputs)

    asyncio.run(run())


def test_no_more_wait_than_may() -> None:
    begin = threading.Event()

    def slow(inputs: Tensor) -> dict[str, Tensor]:
        begin.wait(10)
        return {"same": inputs}

    async def run() -> None:
        batcher = Batcher(slow, most_rows=1, most_waiting=2)
        tasks = [asyncio.create_task(batcher.answer(torch.ones(1))) for _ in range(4)]
        await asyncio.sleep(0.05)
        begin.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(outcome, TooManyRequests) for outcome in outcomes) >= 1
        assert sum(isinstance(outcome, dict) for outcome in outcomes) >= 2

    asyncio.run(run())
