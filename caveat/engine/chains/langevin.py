"""A chain of Langevin or Hamiltonian steps with gradients from batches, for targets that change as the chain goes on.

    m <- beta m + sqrt(eta) g + sqrt(2 (1 - beta) T) xi,   theta <- theta + sqrt(eta) m,   xi standard normal

g is an unbiased estimate of the gradient of the log density, eta the learning rate over the number of rows. beta = 0 is
SGLD, beta > 0 SGHMC. What theta is, and what happens to it between steps (weights that are removed, nodes that come and
go), is the target's affair. Every random number comes from a stream named by seed and epoch, so that a chain that was
killed goes on bit for bit.
"""

import math
import time
from typing import Any, Protocol

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.chains.parallel_chains import random_stream
from caveat.engine.run import Run
from caveat.engine.training import BatchPart, steps_per_epoch
from caveat.likelihoods import Hyper, learned_noise
from caveat.network import Network, Params
from caveat.randomness import seeded
from caveat.storage import State
from caveat.task import Task

__all__ = ["Chain", "LearnedNoise", "Sampling", "Target"]


class Sampling(Protocol):
    """The knobs of a chain, as a method has them."""

    @property
    def length(self) -> int:
        """Draws."""

    @property
    def thin(self) -> int:
        """Epochs from one draw to the next."""

    @property
    def burn_in(self) -> int:
        """Epochs before the first draw."""

    @property
    def learning_rate(self) -> float:
        """Eta times the number of rows."""

    @property
    def momentum(self) -> float:
        """Beta."""

    @property
    def temperature(self) -> float:
        """T."""

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch; the loader's where None."""


class Target(Protocol):
    """What a chain draws from."""

    moved: Params  # changed in place, by every step

    def log_joint(self, x: Inputs, y: Tensor, part: BatchPart) -> Tensor:
        """An estimate of the log density from a rank's part of a batch; those of all ranks are summed."""

    def after_step(self, chain: "Chain", batch: tuple[Inputs, Tensor] | None, part: BatchPart) -> None:
        """After every step; the batch is None on a rank that has no rows of it."""

    def after_epoch(self, chain: "Chain") -> None:
        """After every epoch, before a draw is taken."""

    def flops(self) -> float:
        """Of a row, forward and back."""

    def draw(self) -> State:
        """Copies of what a draw is."""

    def carry(self) -> State:
        """What goes on from here depends on, beside `moved` and the chain's velocities."""

    def restore(self, carry: State) -> None:
        """Take it up again; `moved` is shaped accordingly, its values come after."""


class Chain:
    """Where a chain is."""

    def __init__(self, task: Task, run: Run, sampling: Sampling, target: Target) -> None:
        self.task, self.run, self.sampling, self.target = task, run, sampling, target
        self.rows = task.train.on(run.device)
        self.steps = steps_per_epoch(task.n, min(sampling.batch_size or task.train.batch_size, task.n))  # an epoch
        self.velocity = {name: torch.zeros_like(tensor) for name, tensor in target.moved.items()}
        self.epoch = self.step = self.taken = 0
        self.history: list[dict[str, float]] = []
        self.kept: State = {}  # the draws: tensors named "draw/name"

    @property
    def epochs(self) -> int:
        """Passes over the data."""
        return self.sampling.burn_in + self.sampling.length * self.sampling.thin

    @property
    def burnt_in(self) -> float:
        """The share of the burn-in that is over."""
        steps = self.sampling.burn_in * self.steps
        return min(1.0, self.step / steps) if steps else 1.0

    def run_all(self) -> State:
        """To the end; returns the draws."""
        resumed = self.run.resume()
        if resumed is not None:
            self._go_on(*resumed)
        else:
            self.target.after_epoch(self)  # where there is no burn-in, it is over now
        with self.run.bar(self.epochs, "epoch") as bar:
            bar.update(self.epoch)
            while self.epoch < self.epochs:
                self._one_epoch()
                self.target.after_epoch(self)
                drawn = self.epoch - self.sampling.burn_in
                if drawn > 0 and drawn % self.sampling.thin == 0:
                    self._take()
                bar.update()
                bar.set_postfix_str(f"loss {self.history[-1]['loss']:.3f}", refresh=False)
                if self.run.checkpoint_due():
                    self._keep()
        return self.kept

    def _one_epoch(self) -> None:
        """All rows once, in an order of the epoch's own."""
        run, started, device = self.run, time.monotonic(), self.run.device
        streams = [random_stream(run.seed, "chain", self.epoch, what) for what in ("order", "module")]
        order = torch.randperm(self.task.n, generator=streams[0]).tensor_split(self.steps)
        shares = [positions.tensor_split(run.ranks.size) for positions in order]
        batches = self.rows.batches([own for s in shares if len(own := s[run.ranks.rank])], device)
        self.noise = random_stream(run.seed, "chain", self.epoch, "noise", device=device)
        self.choices = random_stream(run.seed, "chain", self.epoch, "choices")  # the same on all ranks
        augment = random_stream(run.seed, "chain", self.epoch, "augment", run.ranks.rank, device=device)
        total = torch.zeros((), dtype=torch.float64, device=device)
        with seeded(streams[1].initial_seed() % 2**62 + run.ranks.rank, device):  # for dropout inside the module
            for parts in shares:
                occupied = sum(len(own) > 0 for own in parts)
                rank = run.ranks.rank
                part = BatchPart(sum(map(len, parts[:rank])), sum(map(len, parts)), 1 / occupied)
                batch = next(batches) if len(parts[rank]) else None
                if batch is not None and self.task.augment is not None:
                    batch = self.task.augment(batch[0], augment), batch[1]
                total += self._one_step(batch, part)
                self.step += 1
                self.target.after_step(self, batch, part)
        run.ranks.add([total])
        self.epoch += 1
        run.gradient_evaluations += 1
        run.flops += self.task.n * self.target.flops()
        loss = -float(total) / self.steps / self.task.n
        self._check_finite(loss)
        self.history.append({"epoch": self.epoch, "loss": loss, "seconds": time.monotonic() - started})

    def _one_step(self, batch: tuple[Inputs, Tensor] | None, part: BatchPart) -> Tensor:
        """Returns this rank's part of the log density."""
        moved, sampling = self.target.moved, self.sampling
        value = torch.zeros((), dtype=torch.float64, device=self.run.device)
        if batch is None:
            gradients = [torch.zeros_like(tensor) for tensor in moved.values()]
        else:
            density = self.target.log_joint(*batch, part)
            gradients = list(torch.autograd.grad(density, [*moved.values()], materialize_grads=True))
            value = density.detach().double()
        self.run.ranks.add(gradients)
        step, spread = math.sqrt(sampling.learning_rate / self.task.n), 2 * (1 - sampling.momentum)
        with torch.no_grad():
            for (name, tensor), gradient in zip(moved.items(), gradients, strict=True):
                noise = torch.randn(tensor.shape, generator=self.noise, dtype=tensor.dtype, device=tensor.device)
                velocity = self.velocity[name]
                velocity.mul_(sampling.momentum).add_(gradient, alpha=step)
                velocity.add_(noise, alpha=math.sqrt(spread * sampling.temperature))
                tensor.add_(velocity, alpha=step)
        return value

    def _check_finite(self, loss: float) -> None:
        sound = math.isfinite(loss) and all(bool(torch.isfinite(t).all()) for t in self.target.moved.values())
        if not sound:
            raise ValueError(
                f"the chain ran away to infinity in epoch {self.epoch}: lower learning_rate (now "
                f"{self.sampling.learning_rate:g})"
            )

    def _take(self) -> None:
        for group, tensors in self.target.draw().items():
            self.kept.setdefault(group, {}).update({f"{self.taken}/{name}": t for name, t in tensors.items()})
        self.taken += 1

    def _keep(self) -> None:
        carry: State = {"moved": self.target.moved, "velocity": self.velocity}
        carry |= {f"target.{group}": tensors for group, tensors in self.target.carry().items()}
        carry |= {f"kept.{group}": tensors for group, tensors in self.kept.items()}
        place = {"epoch": self.epoch, "step": self.step, "taken": self.taken, "history": self.history}
        self.run.checkpoint(carry, place)

    def _go_on(self, carry: State, note: dict[str, Any]) -> None:
        self.epoch, self.step, self.taken, self.history = (note[n] for n in ("epoch", "step", "taken", "history"))
        device = self.run.device
        self.target.restore(_of("target.", carry))
        with torch.no_grad():
            for name, tensor in self.target.moved.items():
                tensor.copy_(carry["moved"][name])
        self.velocity = {name: t.to(device, copy=True) for name, t in carry["velocity"].items()}
        kept = _of("kept.", carry)
        self.kept = {group: {n: t.to(device, copy=True) for n, t in ts.items()} for group, ts in kept.items()}


def _of(prefix: str, carry: State) -> State:
    return {group.removeprefix(prefix): tensors for group, tensors in carry.items() if group.startswith(prefix)}


class LearnedNoise:
    """The logarithm of a likelihood's noise, where it is to be learned: drawn with the weights, under HMC's prior.

    That prior is N(log(spread of the targets) - 1, 1).
    """

    def __init__(self, network: Network, initial: Hyper, start: Hyper) -> None:
        """`initial` is the task's own hyper, `start` the value to begin with."""
        learned = learned_noise(network.likelihood, initial) is not None
        device = network.device
        self.fixed: Hyper = {name: t.to(device) for name, t in initial.items()}
        self.moved: Params = {}
        if learned:
            self.centre = self.fixed["log_noise"] - 1
            self.moved["hyper/log_noise"] = start["log_noise"].detach().to(device, copy=True).requires_grad_()

    @property
    def hyper(self) -> Hyper:
        """For the likelihood."""
        return self.fixed | {name.removeprefix("hyper/"): t for name, t in self.moved.items()}

    def log_prior(self) -> Tensor | float:
        """But for a constant."""
        return sum((-0.5 * (tensor - self.centre).square().sum() for tensor in self.moved.values()), start=0.0)
