"""Seconds of a call: a clock, and calls that take turns in one process."""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


class Clock:
    """Seconds that pass, or those in which this process computes."""

    def __init__(self, device: str, processor_time: bool) -> None:
        self.cuda = device != "cpu"
        self.now = time.process_time if processor_time else time.perf_counter

    def wait(self) -> None:
        """Until a GPU has done what it was asked for."""
        if self.cuda:
            torch.cuda.synchronize()

    def settled(self) -> float:
        """The time after that."""
        self.wait()
        return self.now()


def timed(
    about: dict[str, Any], calls: dict[str, Callable[[], Any]], rounds: int, clock: Clock
) -> list[dict[str, Any]]:
    """A row for each call, printed."""
    rows = []
    for name, found in in_turns(calls, rounds, clock).items():
        row = about | {"way": name.removesuffix(", compiled"), "compiled": name.endswith(", compiled")} | found
        rows.append(row)
        what = f"{row['part']}, batch {row['batch']}, {row['step_s']:.5f} s, load {os.getloadavg()[0]:.1f}"
        print(f"{row['case']:<18} {name:<34} {what}", flush=True)
    return rows


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int, clock: Clock) -> dict[str, dict[str, float]]:
    """Median, lowest and highest seconds of each call that works; nine rounds at most where one takes over a second."""
    working = {}
    for name, call in calls.items():
        try:
            call()
            working[name] = call
        except Exception as error:  # a compiler may fail in any way, and the others are to be timed
            if len(calls) == 1:
                raise
            print(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in working}
    done = 0
    while done <= rounds:  # the first is not timed
        for name, call in working.items():
            if rounds >= 10:
                call()  # short: its weights come back to the caches first, as when it runs alone
            started = clock.settled()
            call()
            seconds[name].append(clock.settled() - started)
        if sum(own[-1] for own in seconds.values()) > 1:
            rounds = min(9, rounds)
        done += 1
    return {
        name: {"step_s": statistics.median(own[1:]), "fastest_s": min(own[1:]), "slowest_s": max(own[1:])}
        for name, own in seconds.items()
    }
