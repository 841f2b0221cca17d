"""SG-MCMC's loop: step through the rows of every epoch, find the step size in the burn-in, write draws, checkpoint.

Each chain sees the rows of an epoch in batches and an order of its own; where a batch has all rows, chains that share
a log posterior are moved together.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from caveat.engine.chains.draw_store import DrawStore
from caveat.engine.chains.langevin import LangevinDynamics
from caveat.engine.chains.log_posterior import LogPosterior
from caveat.engine.chains.parallel_chains import ParallelChains, random_stream
from caveat.engine.chains.step_search import StepSearch, share_of_stable_step, warnings_of_steps
from caveat.engine.fresh_weights import FreshWeights
from caveat.engine.run import Run
from caveat.rows import Batch
from caveat.storage import State
from caveat.task import Task

__all__ = ["LANGEVIN_STATS", "EpochPlan", "LangevinKnobs", "LangevinSampler"]

LANGEVIN_STATS = {"lp": torch.float64, "step_size": torch.float64}  # what is stored of each draw, and its type


class LangevinKnobs(Protocol):
    """The knobs of the sampler, as the method has them."""

    @property
    def learning_rate(self) -> float | None:
        """The step size eta times the number of rows; None finds it in the burn-in."""

    @property
    def momentum(self) -> float:
        """Beta, the share of the momentum that a step keeps."""

    @property
    def temperature(self) -> float:
        """T, by which the log density is divided."""

    @property
    def preconditioner(self) -> Literal["identity", "rmsprop"]:
        """Whether the burn-in measures a mass."""


@dataclass(frozen=True)
class EpochPlan:
    """Which epoch does what; epochs and draws are counted from 0."""

    length: int  # draws
    batch: int  # rows of a step
    steps: int  # of an epoch
    burn_in: int  # epochs before the first draw, or before the first cycle
    thin: int  # epochs from one draw to the next
    cycle: int  # epochs in which the step falls to 0; 0 keeps it as it is
    draws_a_cycle: int

    @property
    def epochs(self) -> int:
        """How many passes over the data each chain makes."""
        return self.epoch_of(self.length - 1) + 1

    def epoch_of(self, draw: int) -> int:
        """The epoch at whose end a draw is taken."""
        if not self.cycle:
            return self.burn_in + (draw + 1) * self.thin - 1
        cycle, place = divmod(draw, self.draws_a_cycle)
        return self.burn_in + (cycle + 1) * self.cycle - 1 - (self.draws_a_cycle - 1 - place) * self.thin

    def share_of_step(self, epoch: int, progress: float) -> float:
        """The share of the step size eta that is taken after a share of an epoch."""
        if not self.cycle or epoch < self.burn_in:
            return 1.0
        passed = ((epoch - self.burn_in) % self.cycle + progress) / self.cycle
        return (1 + math.cos(math.pi * passed)) / 2


class LangevinSampler:
    """Moves the chains of this process: their positions, momenta and preconditioners, [chains, P]."""

    def __init__(
        self, knobs: LangevinKnobs, plan: EpochPlan, task: Task, chains: ParallelChains, store: DrawStore, run: Run
    ) -> None:
        self.knobs, self.plan, self.task = knobs, plan, task
        self.chains, self.store, self.run = chains, store, run
        self.rows = task.train.on(chains.network.device)
        self.dynamics = LangevinDynamics(knobs.momentum, knobs.temperature)
        given = None if knobs.learning_rate is None else knobs.learning_rate / task.n
        self.search = StepSearch(given, knobs.momentum, task.n, plan.batch, plan.burn_in * plan.steps)
        self.epoch, self.taken = 0, 0

    def run_all(self) -> None:
        """Run every epoch that has not been run yet."""
        resumed = self.run.resume()
        if resumed is None:
            self._begin()
        else:
            self._resume(*resumed)
        with self.run.bar(self.plan.epochs, "epoch") as bar:
            bar.update(self.epoch)
            while self.epoch < self.plan.epochs:
                self.chains.each(self._one_epoch)
                first = self.epoch * self.plan.steps
                search = self.search.cost(range(first, first + self.plan.steps))
                self.chains.count_cost((1 + search) * self.chains.count)
                drawn = self.plan.epoch_of(self.taken) == self.epoch
                if drawn or self.epoch % 10 == 0:
                    self._check()
                if drawn:
                    self._take()
                self.epoch += 1
                bar.update()
                if self.chains.agreed(self.run.checkpoint_due()):
                    self._checkpoint()

    def _begin(self) -> None:
        network, coordinates = self.chains.network, self.store.coordinates
        streams = [random_stream(self.run.seed, "start", chain) for chain in self.chains.mine]
        fresh_weights = FreshWeights(network)
        self.position = torch.stack([coordinates.at(fresh_weights(rng)) for rng in streams]).to(network.device)
        self.momentum = torch.zeros_like(self.position)
        self.square = torch.full_like(self.position, math.nan)  # of the mean gradient: none has been seen yet
        self.search.begin(self._directions())

    def _directions(self) -> Tensor:
        """Random directions of the chains, [chains, P]."""
        size, dtype = self.position.shape[1], self.position.dtype
        streams = [random_stream(self.run.seed, "direction", chain) for chain in self.chains.mine]
        drawn = [torch.randn(size, generator=stream, dtype=dtype) for stream in streams]
        return torch.stack(drawn).to(self.position.device)

    def _one_epoch(self, log_posterior: LogPosterior, which: slice) -> None:
        """Step some chains, that are served by one log posterior, through all rows once."""
        device, chains = self.position.device, self.chains.mine[which]
        streams = [random_stream(self.run.seed, self.epoch, chain, "noise", device=device) for chain in chains]
        for place, gradient in enumerate(self._gradients(log_posterior, chains)):
            step = self.epoch * self.plan.steps + place
            if self.search.due(step):
                self._measure(log_posterior, which, step)
            share = self.plan.share_of_step(self.epoch, (place + 1) / self.plan.steps)
            root_step_size = (share * self.search.step_size[which, None]).sqrt().to(self.position.dtype)
            like = self.position[which]
            noise = [torch.randn(like.shape[1], generator=s, dtype=like.dtype, device=device) for s in streams]
            self._step(gradient(like), which, root_step_size, torch.stack(noise))

    def _step(self, gradient: Tensor, which: slice, root_step_size: Tensor, noise: Tensor) -> None:
        """Move some chains by a gradient and by standard normal noise, [chains, P] each, and sqrt(eta) [chains, 1]."""
        mass = None
        if self.knobs.preconditioner == "rmsprop":
            if self.epoch < self.plan.burn_in:
                self._adapt_mass(which, gradient)
            mass = _mass(self.square[which])
        self.dynamics.step(self.position[which], self.momentum[which], gradient, root_step_size, noise, mass)

    def _adapt_mass(self, which: slice, gradient: Tensor) -> None:
        """Let the running mean of squares of the mean loss's gradient follow; it is nan before the first one."""
        square, now = self.square[which], (gradient / self.task.n).square()
        square.copy_(torch.where(square.isnan(), now, 0.99 * square + 0.01 * now))

    def _gradients(self, log_posterior: LogPosterior, chains: list[int]) -> Iterator[Callable[[Tensor], Tensor]]:
        """For each step of an epoch, the gradient as a function of positions [chains, P]."""
        if self.plan.steps == 1:
            yield partial(self._gradient_of_all, log_posterior)
            return
        rng = random_stream(self.run.seed, self.epoch, chains[0])
        order = torch.randperm(self.task.n, generator=rng).split(self.plan.batch)
        mine = [self.chains.ranks.part(rows) for rows in order]
        for rows, batch in zip(order, self.rows.batches(mine, self.position.device), strict=True):
            yield partial(self._gradient_of_batch, log_posterior, batch=batch, rows=len(rows))

    def _gradient_of_all(self, log_posterior: LogPosterior, position: Tensor) -> Tensor:
        return self.chains.gradient(log_posterior, position)[1]

    def _gradient_of_batch(self, log_posterior: LogPosterior, position: Tensor, batch: Batch, rows: int) -> Tensor:
        """The gradient from this rank's part of a batch, which has so many rows over all ranks."""
        _, gradient = log_posterior.gradient(
            position,
            [batch] if len(batch[1]) else [],
            likelihood_weight=self.task.n / rows,
            prior_weight=1 / self.chains.ranks.size,
        )
        self.chains.ranks.add([gradient])
        return gradient

    def _measured_gradient(self, log_posterior: LogPosterior, chain: int, at: object) -> Callable[[Tensor], Tensor]:
        """The gradient that curvature is measured by: of all rows, or of some that are the chain's own at this time."""
        if self.plan.steps == 1:
            return partial(self._gradient_of_all, log_posterior)
        rng = random_stream(self.run.seed, "curvature", at, chain)
        rows = torch.randperm(self.task.n, generator=rng)[: self.search.rows]
        batch = next(iter(self.rows.batches([self.chains.ranks.part(rows)], self.position.device)))
        return partial(self._gradient_of_batch, log_posterior, batch=batch, rows=len(rows))

    def _measure(self, log_posterior: LogPosterior, which: slice, step: int) -> None:
        """Let some chains look for their step sizes before a step."""
        gradient, position = self._measured_gradient(log_posterior, self.chains.mine[which][0], step), self.position
        mass = None
        if self.knobs.preconditioner == "rmsprop":
            if step == 0:
                self._adapt_mass(which, gradient(position[which]))
            mass = _mass(self.square[which])
        self.search.measure(gradient, position[which], which, step, mass)

    def _check(self) -> None:
        sound = torch.isfinite(self.position).all(1).double()
        bad = (self.chains.everyones(sound) == 0).nonzero()
        if len(bad):
            rate = self.knobs.learning_rate
            found = "standardise inputs and targets, or give a small learning_rate"
            raise ValueError(
                f"chain {int(bad[0])} ran away to infinity in epoch {self.epoch + 1}: "
                + (found if rate is None else f"lower learning_rate (now {rate:g})")
            )

    def _take(self) -> None:
        """Store where the chains are, with their log density over all rows."""

        def density(log_posterior: LogPosterior, which: slice) -> Tensor:
            likelihood, prior = self.chains.densities(log_posterior, self.position[which])
            return likelihood + prior

        lp = self.chains.everyones(torch.cat(self.chains.each(density)))
        eta = self.chains.everyones(self.plan.share_of_step(self.epoch, 1.0) * self.search.step_size)
        weights = self.chains.everyones(self.store.coordinates.weights(self.position))
        self.store.write(self.taken, weights, {"lp": lp, "step_size": eta})
        self.taken += 1

    def _checkpoint(self) -> None:
        places = {"position": self.position, "momentum": self.momentum, "square": self.square}
        carry: State = {
            "chains": {name: self.chains.everyones(value) for name, value in places.items()},
            "search": {name: self.chains.everyones(value) for name, value in self.search.tensors().items()},
        }
        self.run.checkpoint(carry, {"epoch": self.epoch, "taken": self.taken, "pieces": self.store.flush()})

    def _resume(self, carry: State, note: dict[str, Any]) -> None:
        self.store.take_up(note.get("pieces"))
        self.epoch, self.taken = note["epoch"], note["taken"]
        mine = {
            group: {name: value[self.chains.mine].to(self.chains.network.device) for name, value in tensors.items()}
            for group, tensors in carry.items()
        }
        self.position, self.momentum, self.square = (mine["chains"][n] for n in ("position", "momentum", "square"))
        self.search.restore(mine["search"])

    def diagnostics(self) -> dict[str, Any]:
        """What a person wants to know of the steps, as json; adds a warning to the run where they are too large."""
        directions, beta = self._directions(), self.knobs.momentum

        def share(log_posterior: LogPosterior, which: slice) -> Tensor:
            gradient = self._measured_gradient(log_posterior, self.chains.mine[which][0], "last")
            mass = _mass(self.square[which]) if self.knobs.preconditioner == "rmsprop" else None
            step_size = self.search.step_size[which]
            return share_of_stable_step(gradient, self.position[which], directions[which], step_size, beta, mass)

        largest = float(self.chains.everyones(torch.cat(self.chains.each(share))).max())
        rates = (self.chains.everyones(self.search.step_size) * self.task.n).tolist()
        self.run.warnings.extend(warnings_of_steps(largest, max(rates), given=self.search.given is not None))
        return {"epochs": self.plan.epochs, "learning_rate": rates, "share_of_stable_step": largest}


def _mass(square: Tensor) -> Tensor:
    """The diagonal of M from running means of squares."""
    return 1e-7 + square.sqrt()
