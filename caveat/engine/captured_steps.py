"""Steps on a GPU that are recorded once and then replayed, those of several chains or networks side by side.

A step of a small network is hundreds of operations of a few microseconds, and telling the GPU of each takes longer than
the operation. A CUDA graph holds them all: its replay is one call. The steps of several lanes (a chain, a member of an
ensemble) are parallel branches of one graph, so that they fill a GPU that one of them leaves half empty. How many lanes
a graph has is measured.

A lane's rows are resident on the GPU, and each epoch's order of them is sent there at once. A lane's random numbers
come from a generator of its own that the graph advances as the same step does without one, so a recorded step and one
that is not recorded are the same step.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from caveat.engine.torch_settings import hide_own_warnings
from caveat.rows import Batch, Rows

__all__ = ["CaptureError", "CapturedSteps", "Lane", "are_resident", "captured"]

WARM_UP = 3  # rounds before a recording, in which libraries choose their kernels and take their memory
TIMED, TIMES = 8, 3  # replays that are timed, the quickest of so many times
GAIN = 1.05  # by which more lanes must be faster
HOPELESS = 0.7  # of the best speed: still more lanes are not tried


@dataclass(frozen=True)
class Lane:
    """What is stepped through resident rows.

    `step(batch, number)` moves the tensors `changed` in place, with random numbers of `generators`.
    A step never waits for the GPU, and its tensors have the same shapes every time. The number, [] or [K] in float64,
    is what changes from step to step, such as the step size.
    """

    rows: Rows
    step: Callable[[Batch, Tensor], None]
    changed: Sequence[Tensor]
    generators: Sequence[torch.Generator]


class CaptureError(RuntimeError):
    """A step waits for the GPU, for a number that it looks at, say, and so cannot be recorded."""


def are_resident(rows: Rows) -> bool:
    """Whether the rows are tensors that lie on a GPU and were looked at: steps over them can be recorded."""
    return rows.in_memory and rows.known_finite and rows.indices.device.type == "cuda"


def captured(function: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """A function of a tensor on a GPU, recorded: it takes tensors shaped as `x` and returns new ones."""
    x = x.clone()
    outputs: list[Tensor] = []

    def once() -> None:
        outputs[:] = function(x)

    _warm_up(once, x.device)
    replay = _record(once, [])

    def replayed(now: Tensor) -> tuple[Tensor, ...]:
        x.copy_(now)
        replay()
        return tuple(output.clone() for output in outputs)

    return replayed


# What follows up to the lanes is all that is said to CUDA; tests of lanes on a CPU put plain calls in its place.


def _record(step: Callable[[], None], generators: Sequence[torch.Generator]) -> Callable[[], None]:
    """A graph of a step that is not made now; calling it makes the step, with the generators where they then are.

    Raises CaptureError if CUDA does not record some operation of it.
    """
    graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    for generator in generators:
        graph.register_generator_state(generator)
    try:
        with _no_collection(), torch.cuda.graph(graph):
            step()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.cuda.set_stream(here)  # a recording that fails may leave its own as the present one
        for generator in (*generators, torch.cuda.default_generators[here.device_index]):
            _forget_recording(generator)
        why = str(error).strip().partition("\n")[0]
        raise CaptureError(f"CUDA does not record a step of this network ({why})") from error
    return graph.replay


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """For a recording, which ends in failure if Python frees another fit's graphs meanwhile: they are freed before."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _forget_recording(generator: torch.Generator) -> None:
    """Have a generator draw again after a recording that failed, which it would take itself to be part of for ever."""
    other = torch.Generator(generator.device)
    other.set_state(generator.get_state())
    generator.graphsafe_set_state(other.graphsafe_get_state())


def _branches(steps: Sequence[Callable[[], None]], device: torch.device) -> Callable[[], None]:
    """A call that makes steps at the same time, each on a stream of its own."""
    streams = [torch.cuda.Stream(device) for _ in steps]

    def all_steps() -> None:
        here = torch.cuda.current_stream()
        for step, stream in zip(steps, streams, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                step()
        for stream in streams:
            here.wait_stream(stream)

    return all_steps


def _seconds(replay: Callable[[], None], times: int) -> float:
    """How long so many replays take."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        replay()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _drawn(device: torch.device) -> object:
    """Where torch's own generator is: it moves when a network draws random numbers itself."""
    return torch.cuda.default_generators[device.index or 0].get_offset()


def _warm_up(step: Callable[[], None], device: torch.device) -> None:
    """Call a step a few times on a stream of its own; raises CaptureError if it waits for the GPU."""
    torch.cuda.synchronize()
    hide_own_warnings()
    before = torch.cuda.get_sync_debug_mode()
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            step()  # compiles, which may wait
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(WARM_UP - 1):
                step()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise CaptureError("a step of this network waits for the GPU, so it cannot be recorded") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
        torch.cuda.synchronize()


class CapturedSteps:
    """The lanes of a run, stepping through batches out of their rows."""

    def __init__(self, lanes: Sequence[Lane], most: int) -> None:
        """`most` steps are made in one call of `run`."""
        self._lanes, self._most = lanes, most
        self._recordings: dict[int, _Recording] = {}  # by the size of a batch
        self.side_by_side = 0  # how many lanes step at the same time; 0 before the first step

    def run(self, batches: Sequence[Tensor], numbers: Tensor) -> None:
        """Step through batches, positions of rows of every lane [lanes, B], with a number each, [lanes, steps, ...].

        Raises CaptureError, with nothing moved, where a step cannot be recorded.
        """
        runs = [list(same) for _, same in groupby(batches, lambda batch: batch.shape[1])]
        for same in runs:
            self._record(same[0].shape[1], numbers)
        first = 0
        for same in runs:
            recording = self._recordings[same[0].shape[1]]
            recording.run(torch.stack(same, 1), numbers[:, first : first + len(same)])
            first += len(same)

    def _record(self, size: int, numbers: Tensor) -> None:
        """Have graphs for steps with batches of a size and such numbers."""
        if size in self._recordings:
            return
        recording = _Recording(self._lanes, size, numbers.new_zeros(self._most, *numbers.shape[2:]))
        self.side_by_side = self.side_by_side or recording.lanes_that_pay()
        recording.record(self.side_by_side)
        self._recordings[size] = recording


class _Recording:
    """Graphs of the steps of all lanes, for batches of one size."""

    def __init__(self, lanes: Sequence[Lane], batch_size: int, numbers: Tensor) -> None:
        """`numbers` are as those of all steps of a lane, [capacity, ...]."""
        device = lanes[0].rows.indices.device
        self._lanes, self._capacity = lanes, len(numbers)
        self._order = torch.zeros(len(lanes), len(numbers), batch_size, dtype=torch.long, device=device)
        self._numbers = torch.zeros(len(lanes), *numbers.shape, dtype=torch.float64, device=device)
        self._place = torch.zeros(len(lanes), 1, dtype=torch.long, device=device)  # the next step of each lane
        self._replays: list[Callable[[], None]] = []

    def record(self, side_by_side: int) -> None:
        """Record graphs of so many lanes each."""
        count = len(self._lanes)
        groups = [range(i, min(i + side_by_side, count)) for i in range(0, count, side_by_side)]
        self._replays = [self._recorded(group) for group in groups]

    def run(self, order: Tensor, numbers: Tensor) -> None:
        """Step every lane through its rows, [lanes, steps, B], with a number each, [lanes, steps, ...]."""
        steps = order.shape[1]
        self._order[:, :steps] = order.to(self._order.device)
        self._numbers[:, :steps] = numbers.to(self._numbers)
        self._place.zero_()
        for replay in self._replays:
            for _ in range(steps):
                replay()

    def lanes_that_pay(self) -> int:
        """How many lanes a graph should have: 1, 2, 4 and so on are tried, and more must make more steps a second."""
        count, best, paying, size = len(self._lanes), 0.0, 1, 1
        while count > 1:
            try:
                speed = self._speed(range(size))
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                break
            if speed >= GAIN * best:
                best, paying = speed, size
            if size == count or speed < HOPELESS * best:
                break
            size = min(2 * size, count)
        return paying

    def _speed(self, which: range) -> float:
        """Steps a second of a graph of these lanes, which are afterwards where they were."""
        replay = self._recorded(which)
        before = self._kept(which)
        replay()
        seconds = min(_seconds(replay, TIMED) for _ in range(TIMES))
        self._put_back(which, before)
        return len(which) * TIMED / seconds

    def _recorded(self, which: range) -> Callable[[], None]:
        """A graph of one step of each of these lanes, which stay where they are."""
        device = self._place.device
        before, drawn = self._kept(which), _drawn(device)
        step = _branches([partial(self._step, i) for i in which], device)
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                _warm_up(step, device)
                if _drawn(device) != drawn:
                    raise CaptureError("the network draws random numbers of its own (dropout): steps are not recorded")
            return _record(step, [generator for i in which for generator in self._lanes[i].generators])
        finally:
            self._put_back(which, before)

    def _step(self, lane: int) -> None:
        """One step of a lane."""
        rows = self._order[lane].index_select(0, self._place[lane])[0]
        number = self._numbers[lane].index_select(0, self._place[lane])[0]
        self._lanes[lane].step(self._lanes[lane].rows.resident(rows), number)
        self._place[lane].add_(1).remainder_(self._capacity)

    def _kept(self, which: range) -> tuple[list[Tensor], list[Tensor]]:
        """Copies of what these lanes change, and the states of their generators."""
        lanes = self._lanes[which.start : which.stop]
        values = [tensor.detach().clone() for lane in lanes for tensor in lane.changed]
        return values, [generator.get_state() for lane in lanes for generator in lane.generators]

    @torch.no_grad()
    def _put_back(self, which: range, kept: tuple[list[Tensor], list[Tensor]]) -> None:
        lanes = self._lanes[which.start : which.stop]
        changed = [tensor for lane in lanes for tensor in lane.changed]
        generators = [generator for lane in lanes for generator in lane.generators]
        for tensor, value in zip(changed, kept[0], strict=True):
            tensor.copy_(value)
        for generator, state in zip(generators, kept[1], strict=True):
            generator.set_state(state)
