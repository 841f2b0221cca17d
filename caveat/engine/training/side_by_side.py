"""Several loops trained at the same time on one GPU: their steps are recorded as branches of one graph and replayed.

A network that is small for a GPU leaves most of it empty, so that five of them take little longer than one. Every loop
has the batches, the learning rates and the random numbers that it has alone, so what it arrives at is the same up to
rounding. A loop whose validation says stop leaves the others to go on.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from caveat.engine.captured_steps import CapturedSteps, CaptureError, Lane, are_resident
from caveat.engine.training.loop import BatchPart, Loop
from caveat.rows import Batch

__all__ = ["run_loops_together"]


def run_loops_together(loops: Sequence[Loop]) -> None:
    """Run what is left of loops on one GPU, over the same rows or as many.

    Raises CaptureError, with nothing trained, if their steps cannot be recorded.
    """
    first = loops[0]
    if not all(are_resident(loop.rows) for loop in loops):
        raise CaptureError("the training rows are not tensors that fit onto the GPU, so steps are not recorded")
    if len({(loop.task.n, loop.steps) for loop in loops}) > 1:
        raise CaptureError("the networks have other numbers of training rows")
    with first.run.bar(first.epochs, "epoch of all") as bar:
        bar.update(min(loop.epoch for loop in loops))
        active: list[Loop] = []
        while remaining := [loop for loop in loops if not loop.finished]:
            if len(remaining) != len(active):
                active, together = remaining, _Together(remaining)
            together.run_epoch()
            for loop in active:
                loop.end_epoch()
            bar.update()
    for loop in loops:
        loop.finish()


class _Together:
    """Loops that step at the same time, epoch by epoch."""

    def __init__(self, loops: Sequence[Loop]) -> None:
        self.loops, device = loops, loops[0].run.device
        self.totals = torch.zeros(len(loops), dtype=torch.float64, device=device)  # sums of an epoch's losses
        self.generators = [torch.Generator(device) for _ in loops]
        for loop in loops:
            x, y = loop.rows.resident(torch.arange(min(8, loop.task.n), device=device))
            loop.measure_flops(x, len(y))
        lanes = [_lane(*parts) for parts in zip(loops, self.generators, self.totals, strict=True)]
        self.steps = CapturedSteps(lanes, loops[0].steps)

    def run_epoch(self) -> None:
        """Make one pass over the training rows in every loop."""
        started, orders, rates = time.monotonic(), [], []
        self.totals.zero_()
        before = [loop.run.rng.get_state() for loop in self.loops]
        for loop, generator in zip(self.loops, self.generators, strict=True):
            seed = int(torch.randint(2**62, (), generator=loop.run.rng))
            orders.append(torch.randperm(loop.task.n, generator=torch.Generator().manual_seed(seed)))
            generator.manual_seed(seed + 1)  # what the loop alone has for its augmentation
            rates.append([loop.rate_of(step) for step in range(loop.steps)])
        try:
            self.steps.run(torch.stack(orders).tensor_split(self.loops[0].steps, 1), torch.tensor(rates))
        except CaptureError:
            for loop, state in zip(self.loops, before, strict=True):
                loop.run.rng.set_state(state)
            raise
        for loop, total in zip(self.loops, self.totals.tolist(), strict=True):
            loop.count_epoch(total, time.monotonic() - started)


def _lane(loop: Loop, rng: torch.Generator, total: Tensor) -> Lane:
    """A loop's step as one that can be recorded."""
    moments = _capturable(loop)
    trained = loop.variables.trained()
    augment = loop.task.augment

    def step(batch: Batch, rate: Tensor) -> None:
        x, y = batch
        x = x if augment is None else augment(x, rng)
        value, _ = loop.loss_of((x, y), BatchPart(0, len(y), 1.0), rng)
        gradients = torch.autograd.grad(value, trained, allow_unused=True)
        for tensor, gradient in zip(trained, gradients, strict=True):
            tensor.grad = gradient
        if loop.clip:
            clip_grad_norm_(trained, loop.clip)
        for optimizer in loop.optimizers:
            for group in optimizer.param_groups:
                group["lr"].copy_(group["highest"] * rate)
            optimizer.step()
        for tensor in trained:
            tensor.grad = None
        total.add_(value.detach())

    values = [tensor for group in loop.variables.groups().values() for tensor in group.values()]
    return Lane(loop.rows, step, [*values, *moments, total], [rng])


def _capturable(loop: Loop) -> list[Tensor]:
    """Give a loop's optimisers rates and moments that live on the GPU; returns the moments."""
    moments = []
    for optimizer in loop.optimizers:
        adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=loop.run.device)
            if adam:
                group["capturable"] = True
            for tensor in group["params"]:
                state = optimizer.state[tensor]
                names = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",) if group["momentum"] else ()
                for name in names:  # zero moments are those of an optimiser that has not moved yet
                    state[name] = torch.zeros_like(tensor) if state.get(name) is None else state[name]
                if adam:
                    state["step"] = torch.as_tensor(state.get("step", 0.0)).to(loop.run.device, torch.float32)
                moments += state.values()
    return moments
