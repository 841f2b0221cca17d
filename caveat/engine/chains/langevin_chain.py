"""One chain of steps by gradients from batches (`langevin`), whose target may change as the chain goes on.

The target says what is moved and what happens to it between steps: weights are removed, nodes come and go. The step
size is the learning rate over the number of rows, or is found in the burn-in (`step_search`). Every random number comes
from a stream named by seed and epoch, so a chain that was killed continues bit for bit.

On a GPU steps are recorded and replayed (`captured_steps`) while the target stays arranged as it is.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.captured_steps import CapturedSteps, CaptureError, Lane, are_resident
from caveat.engine.chains.coordinates import log_noise_centre
from caveat.engine.chains.langevin import LangevinDynamics
from caveat.engine.chains.parallel_chains import random_stream
from caveat.engine.chains.step_search import (
    BURN_IN_STEPS,
    STEPS_A_DRAW,
    StepSearch,
    share_of_stable_step,
    warnings_of_steps,
)
from caveat.engine.run import Run
from caveat.engine.training import BatchPart, steps_per_epoch
from caveat.likelihoods import Hyper, learned_noise
from caveat.network import Network, Params
from caveat.randomness import seeded
from caveat.rows import Batch
from caveat.storage import State
from caveat.task import Task

__all__ = ["LangevinChain", "LearnedNoise", "Sampling", "Target"]

STOOD = 20  # steps that a target has stood as it is before they are recorded, which takes as long as some ten of them


class Sampling(Protocol):
    """The knobs of a chain, as a method has them."""

    @property
    def length(self) -> int:
        """How many draws are taken."""

    @property
    def thin(self) -> int | None:
        """Epochs from one draw to the next; None: 2, or as many as make 20 steps."""

    @property
    def burn_in(self) -> int | None:
        """Epochs before the first draw; None: 100, or as many as make 2,000 steps."""

    @property
    def learning_rate(self) -> float | None:
        """The step size eta, times the number of rows; None finds it in the burn-in."""

    @property
    def momentum(self) -> float:
        """Beta, the share of the momentum that a step keeps."""

    @property
    def temperature(self) -> float:
        """T, by which the log density is divided."""

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch; None takes the loader's."""


class Target(Protocol):
    """What a chain draws from."""

    moved: Params  # every step changes these in place

    @property
    def arrangement(self) -> object:
        """What a step computes with: as long as it is the same object, so are the shapes of all tensors."""

    def written(self) -> list[Tensor]:
        """The tensors beside `moved` that `log_joint` and `follow` change in place."""

    def numbers(self, chain: "LangevinChain", step: int) -> list[float]:
        """What `follow` is to know of a step, counted from 0; always as many."""

    def log_joint(self, x: Inputs, y: Tensor, part: BatchPart) -> Tensor:
        """An estimate of the log density, [], from a rank's part of a batch; the ranks' estimates are summed."""

    def log_smooth(self, x: Inputs, y: Tensor, part: BatchPart) -> Tensor:
        """The part of `log_joint` whose curvature limits the step size: all of it, but for kinks such as |w|'s."""

    def follow(self, numbers: Sequence[float] | Tensor) -> None:
        """Called after every step is made; where it is recorded with a tensor [K] in float64, not to be looked at."""

    def decides_after(self, step: int) -> bool:
        """Whether `decide` is called after a step, counted from 0."""

    def decide(self, chain: "LangevinChain", batch: Batch | None, part: BatchPart) -> None:
        """Called where it was asked for; the step's batch is None on a rank that has no rows of it."""

    def after_epoch(self, chain: "LangevinChain") -> None:
        """Called after every epoch, before a draw is taken."""

    def flops(self) -> float:
        """The FLOPs of one row, forward and backward."""

    def draw(self) -> State:
        """Copies of the tensors that make up a draw."""

    def carry(self) -> State:
        """What the next steps depend on, beside `moved` and the chain's velocities."""

    def restore(self, carry: State) -> None:
        """Return to where `carry` was taken; this gives `moved` its shapes, and the chain then its values."""


class LangevinChain:
    """The position of a chain, its draws so far, and how it goes on."""

    def __init__(self, task: Task, run: Run, sampling: Sampling, target: Target) -> None:
        self.task, self.run, self.sampling, self.target = task, run, sampling, target
        self.rows = task.train.on(run.device)
        self.steps = steps_per_epoch(task.n, min(sampling.batch_size or task.train.batch_size, task.n))
        self.velocity = {name: torch.zeros_like(tensor) for name, tensor in target.moved.items()}
        self.burn_in = max(100, math.ceil(BURN_IN_STEPS / self.steps)) if sampling.burn_in is None else sampling.burn_in
        self.thin = sampling.thin or max(2, math.ceil(STEPS_A_DRAW / self.steps))
        self.dynamics = LangevinDynamics(sampling.momentum, sampling.temperature)
        given = None if sampling.learning_rate is None else sampling.learning_rate / task.n
        batch = math.ceil(task.n / self.steps)
        self.search = StepSearch(given, sampling.momentum, task.n, batch, self.burn_in * self.steps)
        self.epoch = self.step = self.taken = 0
        self.history: list[dict[str, float]] = []
        self.draws: State = {}  # tensors named "draw/name"
        self._noise, self._augment = torch.Generator(run.device), torch.Generator(run.device)
        self._total = torch.zeros((), dtype=torch.float64, device=run.device)  # of an epoch's log densities
        self._captures = are_resident(self.rows) and run.ranks.size == 1
        self._captured: CapturedSteps | None = None
        self._arrangement: object = None
        self._stands_since = 0
        self._last: dict[int, Batch] = {}  # the last batch of recorded steps, by its size

    @property
    def epochs(self) -> int:
        """How many passes over the data the chain makes."""
        return self.burn_in + self.sampling.length * self.thin

    def burnt_in(self, step: int) -> float:
        """The share of the burn-in that is over after so many steps."""
        steps = self.burn_in * self.steps
        return min(1.0, step / steps) if steps else 1.0

    def run_all(self) -> State:
        """Run the chain to its end; returns the draws, tensors named "draw/name"."""
        resumed = self.run.resume()
        if resumed is not None:
            self._resume(*resumed)
        else:
            self.target.after_epoch(self)  # a burn-in of no epochs is over now
            self.search.begin(self._random_direction())
        with self.run.bar(self.epochs, "epoch") as bar:
            bar.update(self.epoch)
            while self.epoch < self.epochs:
                self._one_epoch()
                self.target.after_epoch(self)
                drawn = self.epoch - self.burn_in
                if drawn > 0 and drawn % self.thin == 0:
                    self._take()
                bar.update()
                bar.set_postfix_str(f"loss {self.history[-1]['loss']:.3f}", refresh=False)
                if self.run.checkpoint_due():
                    self._checkpoint()
        return self.draws

    def _one_epoch(self) -> None:
        """Step through all rows once, in an order of the epoch's own."""
        run, started = self.run, time.monotonic()
        order = torch.randperm(self.task.n, generator=self._stream("order")).tensor_split(self.steps)
        shares = [positions.tensor_split(run.ranks.size) for positions in order]
        # Rows in memory are read piece by piece, as some pieces are recorded; others are read ahead, through the epoch.
        epoch = None if self._captures else self._batches(shares)
        self._noise.manual_seed(self._stream("noise").initial_seed())
        self._augment.manual_seed(self._stream("augment", run.ranks.rank).initial_seed())
        self.choices = self._stream("choices")  # the same on all ranks
        self._total.zero_()
        with seeded(self._stream("module").initial_seed() % 2**62 + run.ranks.rank, run.device):  # for dropout
            for piece in self._pieces():
                if self.search.due(self.step):
                    self._measure()
                root_step_size = self.search.step_size[0].sqrt()
                recorded, batch = self._recorded_steps(order[piece], root_step_size), None
                batches = self._batches(shares[piece]) if epoch is None else epoch
                for parts in shares[piece] if recorded is None else ():
                    batch = self._augmented(next(batches)) if len(parts[run.ranks.rank]) else None
                    part = BatchPart.of_rank(parts, run.ranks.rank)
                    numbers = self.target.numbers(self, self.step)
                    self._total += self._one_step(batch, part, root_step_size, numbers)
                    self.step += 1
                if self.target.decides_after(self.step - 1):
                    self.target.decide(self, recorded or batch, BatchPart.of_rank(shares[piece][-1], run.ranks.rank))
        total = self._total.clone()
        run.ranks.add([total])
        self.epoch += 1
        passes = 1 + self.search.cost(range(self.step - self.steps, self.step))
        run.gradient_evaluations += passes
        run.flops += passes * self.task.n * self.target.flops()
        loss = -float(total) / self.steps / self.task.n
        self._check_finite(loss)
        self.history.append({"epoch": self.epoch, "loss": loss, "seconds": time.monotonic() - started})

    def _stream(self, *what: object) -> torch.Generator:
        """The random numbers of this epoch for a purpose."""
        return random_stream(self.run.seed, "chain", self.epoch, *what)

    def _batches(self, shares: Sequence[tuple[Tensor, ...]]) -> Iterator[Batch]:
        """This rank's batches, where it has rows of them."""
        mine = [share[self.run.ranks.rank] for share in shares]
        return self.rows.batches([share for share in mine if len(share)], self.run.device)

    def _augmented(self, batch: Batch) -> Batch:
        augment = self.task.augment
        return batch if augment is None else (augment(batch[0], self._augment), batch[1])

    def _pieces(self) -> Iterator[slice]:
        """The steps of an epoch, cut where the curvature is measured and where the target decides."""
        begun, first = self.step, 0
        for end in range(1, self.steps + 1):
            step = begun + end
            if end == self.steps or self.search.due(step) or self.target.decides_after(step - 1):
                yield slice(first, end)
                first = end

    def _one_step(
        self, batch: Batch | None, part: BatchPart, root_step_size: Tensor, numbers: Sequence[float] | Tensor
    ) -> Tensor:
        """Move by the gradient of a batch; returns this rank's part of the log density, []."""
        moved = self.target.moved
        value, gradients = self._gradients(self.target.log_joint, batch, part)
        with torch.no_grad():
            for (name, tensor), gradient in zip(moved.items(), gradients, strict=True):
                noise = torch.randn(tensor.shape, generator=self._noise, dtype=tensor.dtype, device=tensor.device)
                root = root_step_size.to(tensor.dtype)
                self.dynamics.step(tensor, self.velocity[name], gradient, root, noise)
        self.target.follow(numbers)
        return value

    def _recorded_steps(self, order: Sequence[Tensor], root_step_size: Tensor) -> Batch | None:
        """Make steps that were recorded; returns the batch of the last, or None, with nothing moved, where none are."""
        captured = self._recording()
        if captured is None:
            return None
        steps = range(self.step, self.step + len(order))
        numbers = torch.tensor([self.target.numbers(self, step) for step in steps], dtype=torch.float64)
        numbers = torch.cat([root_step_size.expand(len(order), 1), numbers.to(root_step_size)], 1)
        try:
            captured.run([positions[None] for positions in order], numbers[None])
        except CaptureError as error:
            self.run.warnings.append(f"{error}: the chain steps operation by operation")
            self._captures, self._captured = False, None
            return None
        self.step = steps.stop
        return self._last[len(order[-1])]

    def _recording(self) -> CapturedSteps | None:
        """Recorded steps of the target as it is arranged, once it has stood like that for a while."""
        if self._arrangement is not self.target.arrangement:
            self._arrangement, self._stands_since, self._captured = self.target.arrangement, self.step, None
            self._last.clear()
        if self._captures and self._captured is None and self.step - self._stands_since >= STOOD:
            self._captured = CapturedSteps([self._lane()], self.steps)
        return self._captured

    def _lane(self) -> Lane:
        """A step as one that can be recorded."""

        def step(batch: Batch, numbers: Tensor) -> None:
            batch = self._last[len(batch[1])] = self._augmented(batch)
            part = BatchPart(0, len(batch[1]), 1.0)
            self._total.add_(self._one_step(batch, part, numbers[0], numbers[1:]))

        changed = [*self.target.moved.values(), *self.velocity.values(), *self.target.written(), self._total]
        return Lane(self.rows, step, changed, [self._noise, self._augment])

    def _gradients(
        self,
        log_density: Callable[[Inputs, Tensor, BatchPart], Tensor],
        batch: tuple[Inputs, Tensor] | None,
        part: BatchPart,
    ) -> tuple[Tensor, list[Tensor]]:
        """This rank's part of a log density, [], and the gradient of all ranks' in what is moved."""
        moved = self.target.moved
        value = torch.zeros((), dtype=torch.float64, device=self.run.device)
        if batch is None:
            gradients = [torch.zeros_like(tensor) for tensor in moved.values()]
        else:
            density = log_density(*batch, part)
            gradients = list(torch.autograd.grad(density, [*moved.values()], materialize_grads=True))
            value = density.detach().double()
        self.run.ranks.add(gradients)
        return value, gradients

    def _random_direction(self) -> Tensor:
        """A direction in what is moved, [1, P], the same on all ranks."""
        like, rng = _flat(self.target.moved), random_stream(self.run.seed, "chain", "direction")
        return torch.randn(like.shape, generator=rng, dtype=like.dtype).to(like.device)[None]

    def _measure(self) -> None:
        """Look at the curvature here, for the step size."""
        moved = self.target.moved
        here = _flat(moved)
        if self.search.direction.shape[1] != len(here):  # weights were removed
            self.search.turn(self._random_direction())
        self.search.measure(self._flat_gradient(), here[None], slice(0, 1), self.step, mass=None)
        _put(here, moved)

    def _flat_gradient(self) -> Callable[[Tensor], Tensor]:
        """The gradient from some rows as a function of flat positions [1, P], which moves what is moved there."""
        run, moved = self.run, self.target.moved
        rng = random_stream(run.seed, "chain", "curvature", self.step)
        shares = torch.randperm(self.task.n, generator=rng)[: self.search.rows].tensor_split(run.ranks.size)
        part = BatchPart.of_rank(shares, run.ranks.rank)
        mine = shares[run.ranks.rank]
        batch = next(iter(self.rows.batches([mine], run.device))) if len(mine) else None

        def gradient(position: Tensor) -> Tensor:
            _put(position[0], moved)
            with seeded(self.step, run.device), torch.enable_grad():  # dropout inside the module is always the same
                _, gradients = self._gradients(self.target.log_smooth, batch, part)
            return torch.cat([g.flatten() for g in gradients])[None]

        return gradient

    def _check_finite(self, loss: float) -> None:
        sound = math.isfinite(loss) and all(bool(torch.isfinite(t).all()) for t in self.target.moved.values())
        if not sound:
            rate = self.sampling.learning_rate
            found = "standardise inputs and targets, or give a small learning_rate"
            raise ValueError(
                f"the chain ran away to infinity in epoch {self.epoch}: "
                + (found if rate is None else f"lower learning_rate (now {rate:g})")
            )

    def check(self) -> dict[str, Any]:
        """What is known of the steps, as json; adds a warning to the run where they are too large."""
        here, eta, beta = _flat(self.target.moved), self.search.step_size, self.sampling.momentum
        share = float(
            share_of_stable_step(self._flat_gradient(), here[None], self._random_direction(), eta, beta, None)
        )
        _put(here, self.target.moved)
        rate = float(eta) * self.task.n
        self.run.warnings.extend(warnings_of_steps(share, rate, given=self.search.given is not None))
        return {"learning_rate": rate, "share_of_stable_step": share, "epochs": self.epochs}

    def _take(self) -> None:
        for group, tensors in self.target.draw().items():
            self.draws.setdefault(group, {}).update({f"{self.taken}/{name}": t for name, t in tensors.items()})
        self.taken += 1

    def _checkpoint(self) -> None:
        carry: State = {"moved": self.target.moved, "velocity": self.velocity, "search": self.search.tensors()}
        carry |= {f"target.{group}": tensors for group, tensors in self.target.carry().items()}
        carry |= {f"kept.{group}": tensors for group, tensors in self.draws.items()}
        place = {"epoch": self.epoch, "step": self.step, "taken": self.taken, "history": self.history}
        self.run.checkpoint(carry, place)

    def _resume(self, carry: State, note: dict[str, Any]) -> None:
        self.epoch, self.step, self.taken, self.history = (note[n] for n in ("epoch", "step", "taken", "history"))
        device = self.run.device
        self.target.restore(_groups_under("target.", carry))
        with torch.no_grad():
            for name, tensor in self.target.moved.items():
                tensor.copy_(carry["moved"][name])
        self.velocity = {name: t.to(device, copy=True) for name, t in carry["velocity"].items()}
        self.search.restore({name: t.to(device) for name, t in carry["search"].items()})
        draws = _groups_under("kept.", carry)
        self.draws = {group: {n: t.to(device, copy=True) for n, t in ts.items()} for group, ts in draws.items()}


def _flat(moved: Params) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in moved.values()])


def _put(flat: Tensor, moved: Params) -> None:
    """Put flat values [P] into what is moved."""
    with torch.no_grad():
        for tensor, part in zip(moved.values(), flat.split([t.numel() for t in moved.values()]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _groups_under(prefix: str, carry: State) -> State:
    return {group.removeprefix(prefix): tensors for group, tensors in carry.items() if group.startswith(prefix)}


class LearnedNoise:
    """The logarithm of a likelihood's noise where it is to be learned: drawn with the weights, under HMC's prior."""

    def __init__(self, network: Network, initial: Hyper, start: Hyper) -> None:
        """`initial` is the task's hyper, and `start` has the value to begin with."""
        learned = learned_noise(network.likelihood, initial) is not None
        device = network.device
        self.fixed: Hyper = {name: t.to(device) for name, t in initial.items()}
        self.moved: Params = {}
        if learned:
            self.centre = log_noise_centre(self.fixed["log_noise"])
            self.moved["hyper/log_noise"] = start["log_noise"].detach().to(device, copy=True).requires_grad_()

    @property
    def hyper(self) -> Hyper:
        """What the likelihood takes beside the outputs, with the noise as it is now."""
        return self.fixed | {name.removeprefix("hyper/"): t for name, t in self.moved.items()}

    def log_prior(self) -> Tensor | float:
        """The log prior density of the noise, [], up to a constant; 0 where none is learned."""
        return sum((-0.5 * (tensor - self.centre).square().sum() for tensor in self.moved.values()), start=0.0)
