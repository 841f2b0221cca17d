"""Steps of training, watched from inside the loop: their seconds and the peaks of their memory."""

import statistics
from typing import Any

import torch

from caveat.engine.cost import peak_bytes, reset_peak

from .job import Job
from .timing import Clock


class Watch:
    """Told before and after each step; where a GPU is waited for, only at the ends of a run of plain steps."""

    def __init__(self, job: Job, held: int) -> None:
        self.job, self.held = job, held  # bytes that are there before training, and not the peaks'
        self.step = 0
        self.began, self.ended = [0.0] * job.steps, [0.0] * job.steps
        self.peaks: dict[str, int] = {}
        self.sizes: dict[str, int] = {}  # of tensors, which the loop's side adds
        self.clock = Clock(job.device, job.processor_time)

    def before(self) -> None:
        """A step."""
        place = self.step % self.job.interval
        if place in (0, self.job.interval - 1):
            self.clock.wait()
            reset_peak(torch.device(self.job.device))
        self.began[self.step] = self.clock.now()

    def after(self) -> None:
        """A step."""
        place = self.step % self.job.interval
        if place >= self.job.interval - 2:
            self.clock.wait()
        self.ended[self.step] = self.clock.now()
        # A process keeps what it freed, so on a CPU only the steps before the first exchange say what plain ones take.
        telling = (self.step < self.job.interval) == (self.job.device == "cpu")
        if place >= self.job.interval - 2 and telling and self.step < self.job.steps - 1:  # the last exchanges nothing
            name = "update_peak_bytes" if place == self.job.interval - 1 else "peak_bytes"
            self.peaks[name] = peak_bytes(torch.device(self.job.device)) - self.held
        self.step += 1

    def found(self, exchanges: bool) -> dict[str, Any]:
        """Seconds of plain steps and of those that exchange weights, and the bytes."""
        assert self.step == self.job.steps
        plain, update = [], []
        for first in range(self.job.interval, self.job.steps, self.job.interval):
            last = first + self.job.interval - 1
            if self.job.device == "cpu":
                plain += [self.ended[s] - self.began[s] for s in range(first, last)]
            else:
                plain.append((self.ended[last - 1] - self.began[first]) / (last - first))
            if last < self.job.steps - 1:  # nothing is exchanged at the end of training
                update.append(self.ended[last] - self.began[last])
        took = statistics.median(update) if exchanges and update else None
        return {"plain_s": statistics.median(plain), "update_s": took} | self.peaks | self.sizes
