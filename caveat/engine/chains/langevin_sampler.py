"""SG-MCMC's loop: step through the rows of every epoch, find the step size in the burn-in, write draws, checkpoint.

Each chain sees the rows of an epoch in batches and an order of its own; where a batch has all rows, chains that share
a log posterior are moved together. On a GPU steps are recorded and replayed, those of several chains side by side.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from caveat.engine.captured_steps import CapturedSteps, CaptureError, Lane, are_resident
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

    @property
    def augment(self) -> bool:
        """Whether rows are augmented as the task says."""


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
        self.augment = task.augment if knobs.augment else None
        self.epoch, self.taken = 0, 0
        self._captures = are_resident(self.rows) and chains.ranks.size == 1 and plan.steps > 1
        self._captured: CapturedSteps | None = None
        device = chains.network.device
        self._streams = {what: [torch.Generator(device) for _ in chains.mine] for what in ("noise", "augment")}

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
                if not (self._captures and self._captured_epoch()):
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
        self.run.warnings.extend(fresh_weights.notes())
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
        self._seed_streams(which)
        for place, gradient in enumerate(self._gradients(log_posterior, which)):
            step = self.epoch * self.plan.steps + place
            if self.search.due(step):
                self._measure(log_posterior, which, step)
            root_step_size = self._root_step_sizes(range(place, place + 1))[which]
            self._step(gradient(self.position[which]), which, root_step_size)

    def _captured_epoch(self) -> bool:
        """Step all chains of a GPU through all rows once; False, with nothing moved, if steps cannot be recorded."""
        if self._captured is None or (self.epoch == self.plan.burn_in and self.knobs.preconditioner == "rmsprop"):
            lanes = [self._lane(log_posterior, which) for which, log_posterior in self.chains.log_posteriors]
            self._captured = CapturedSteps(lanes, self.plan.steps)
        self._seed_streams(slice(0, len(self.chains.mine)))
        batches = torch.stack([self._order(chain) for chain in self.chains.mine]).split(self.plan.batch, 1)
        begun, steps = self.epoch * self.plan.steps, self.plan.steps
        starts = [place for place in range(steps) if place == 0 or self.search.due(begun + place)]
        try:
            for first, end in zip(starts, [*starts[1:], steps], strict=True):
                if self.search.due(begun + first):
                    self.chains.each(partial(self._measure, step=begun + first))
                self._captured.run(batches[first:end], self._root_step_sizes(range(first, end)))
        except CaptureError as error:
            self.run.warnings.append(f"{error}: chains step one after the other, operation by operation")
            self._captures = False
            return False
        return True

    def _lane(self, log_posterior: LogPosterior, which: slice) -> Lane:
        """The step of one chain as one that can be recorded."""

        def step(batch: Batch, root_step_size: Tensor) -> None:
            with torch.no_grad():
                gradient = self._gradient_of_batch(
                    log_posterior, self.position[which], batch=batch, rows=len(batch[1]), which=which
                )
                self._step(gradient, which, root_step_size)

        changed = [self.position[which], self.momentum[which], self.square[which]]
        return Lane(
            self.rows, step, changed, [stream for streams in self._streams.values() for stream in streams[which]]
        )

    def _seed_streams(self, which: slice) -> None:
        """Have the random numbers of this epoch: they depend on seed, chain and epoch alone."""
        for what, streams in self._streams.items():
            for stream, chain in zip(streams[which], self.chains.mine[which], strict=True):
                stream.manual_seed(random_stream(self.run.seed, self.epoch, chain, what).initial_seed())

    def _order(self, chain: int) -> Tensor:
        """The rows of this epoch in the order in which a chain sees them."""
        return torch.randperm(self.task.n, generator=random_stream(self.run.seed, self.epoch, chain))

    def _root_step_sizes(self, places: range) -> Tensor:
        """The square roots of the step sizes of each chain at steps of this epoch, [chains, steps] in float64."""
        shares = [self.plan.share_of_step(self.epoch, (place + 1) / self.plan.steps) for place in places]
        size = self.search.step_size
        return (size[:, None] * size.new_tensor(shares)).sqrt()

    def _step(self, gradient: Tensor, which: slice, root_step_size: Tensor) -> None:
        """Move some chains by a gradient [chains, P], and by as much noise; sqrt(eta) is [chains, 1] or []."""
        noise = torch.stack([_normal_like(gradient[0], rng) for rng in self._streams["noise"][which]])
        mass = None
        if self.knobs.preconditioner == "rmsprop":
            if self.epoch < self.plan.burn_in:
                self._adapt_mass(which, gradient)
            mass = _mass(self.square[which])
        root_step_size = root_step_size.to(gradient.dtype)
        self.dynamics.step(self.position[which], self.momentum[which], gradient, root_step_size, noise, mass)

    def _adapt_mass(self, which: slice, gradient: Tensor) -> None:
        """Let the running mean of squares of the mean loss's gradient follow; it is nan before the first one."""
        square, now = self.square[which], (gradient / self.task.n).square()
        square.copy_(torch.where(square.isnan(), now, 0.99 * square + 0.01 * now))

    def _gradients(self, log_posterior: LogPosterior, which: slice) -> Iterator[Callable[[Tensor], Tensor]]:
        """For each step of an epoch, the gradient as a function of positions [chains, P]."""
        if self.plan.steps == 1:
            yield partial(self._gradient_of_all, log_posterior)
            return
        order = self._order(self.chains.mine[which][0]).split(self.plan.batch)
        mine = [self.chains.ranks.part(rows) for rows in order]
        for rows, batch in zip(order, self.rows.batches(mine, self.position.device), strict=True):
            yield partial(self._gradient_of_batch, log_posterior, batch=batch, rows=len(rows), which=which)

    def _gradient_of_all(self, log_posterior: LogPosterior, position: Tensor) -> Tensor:
        return self.chains.gradient(log_posterior, position)[1]

    def _gradient_of_batch(
        self, log_posterior: LogPosterior, position: Tensor, batch: Batch, rows: int, which: slice | None = None
    ) -> Tensor:
        """The gradient from this rank's part of a batch, which has so many rows over all ranks.

        For a step of `which` chain the rows are augmented first, where that is asked for.
        """
        if self.augment is not None and which is not None and len(batch[1]):
            batch = self.augment(batch[0], self._streams["augment"][which][0]), batch[1]
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
        found = {"epochs": self.plan.epochs, "learning_rate": rates, "share_of_stable_step": largest}
        return found if self._captured is None else found | {"chains_at_a_time": self._captured.side_by_side}


def _normal_like(like: Tensor, rng: torch.Generator) -> Tensor:
    """Standard normal numbers shaped as a tensor, of its type and where it is."""
    return torch.randn(like.shape, generator=rng, dtype=like.dtype, device=like.device)


def _mass(square: Tensor) -> Tensor:
    """The diagonal of M from running means of squares."""
    return 1e-7 + square.sqrt()
