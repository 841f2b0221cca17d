"""Stochastic gradient MCMC: SGLD and SGHMC, with cyclical step sizes and a preconditioner.

    m <- beta m + sqrt(eta) g + sqrt(2 (1 - beta) T) M^(1/2) xi;   theta <- theta + sqrt(eta) M^(-1) m,   xi ~ N(0, I)

g is the gradient of the log posterior, its likelihood estimated from a batch. beta = 0 is SGLD (Welling and Teh 2011),
beta > 0 is SGHMC (Chen et al. 2014). M is 1, or the root of a running mean of g^2 (Li et al. 2016), which no longer
changes once draws are stored, since adapting it further would bias them. Cyclical step sizes (Zhang et al. 2020) fall
from eta to 0 along half a cosine, and draws are taken where they are small. There is no accept step, so a bias of the
order of eta remains; the noise is what the temperature asks for, no more and no less.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from caveat.engine.chains import (
    ChainState,
    Coordinates,
    DrawStore,
    LangevinDynamics,
    LogPosterior,
    ParallelChains,
    random_stream,
    warn_of_what_chains_ignore,
)
from caveat.engine.fresh_weights import FreshWeights
from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.knobs import Count, NonNegativeInt, Positive, Range, check_knobs
from caveat.network import Network, Params
from caveat.rows import Batch
from caveat.storage import State
from caveat.task import Task

__all__ = ["SGMCMC"]


@dataclass(frozen=True)
class SGMCMC(Method):
    """Langevin or Hamiltonian dynamics with gradients from batches: cheap draws, slightly off."""

    chains: Count = 4
    length: Count = 100  # draws of each chain
    thin: Count = 1  # epochs from one draw to the next
    burn_in: NonNegativeInt = 100  # epochs before the first draw
    learning_rate: Positive = 0.03  # eta times the number of rows: the step on the mean loss
    momentum: Annotated[float, Range(0, 1, open_high=True)] = 0.9  # beta; 0 is SGLD
    preconditioner: Literal["identity", "rmsprop"] = "identity"
    cycle: NonNegativeInt = 0  # epochs in which the step falls to 0; 0 keeps it as it is
    draws_a_cycle: Count = 1  # taken at the cycle's end
    temperature: Positive = 1.0  # below 1: a cold posterior
    batch_size: Count | None = None  # rows of a batch; the loader's unless given
    starts_from: ClassVar[StartsFrom] = "fresh"
    quick: ClassVar["SGMCMC"]

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.preconditioner == "rmsprop" and not self.burn_in:
            raise ValueError("SGMCMC(burn_in=0) leaves no epochs in which preconditioner='rmsprop' could be found")
        if not self.cycle and self.draws_a_cycle > 1:
            raise ValueError(f"SGMCMC(draws_a_cycle={self.draws_a_cycle}) has no cycle to take them from: give cycle=")
        if self.cycle and (self.draws_a_cycle - 1) * self.thin >= self.cycle:
            raise ValueError(
                f"SGMCMC takes {self.draws_a_cycle} draws, {self.thin} epochs apart, from a cycle of {self.cycle} "
                "epochs: lengthen the cycle or take fewer"
            )

    @property
    def default_draws(self) -> int:
        """As many as there are: every draw is used once."""
        return self.chains * self.length

    @property
    def epochs(self) -> int:
        """How many passes over the data each chain makes."""
        return self._epoch_of(self.length - 1) + 1

    def _epoch_of(self, draw: int) -> int:
        """The epoch, from 0, at whose end a draw is taken."""
        if not self.cycle:
            return self.burn_in + (draw + 1) * self.thin - 1
        cycle, place = divmod(draw, self.draws_a_cycle)
        return self.burn_in + (cycle + 1) * self.cycle - 1 - (self.draws_a_cycle - 1 - place) * self.thin

    def step_size(self, epoch: int, progress: float, rows: int) -> float:
        """The step size eta after a share of an epoch, for so many training rows."""
        eta = self.learning_rate / rows
        if not self.cycle or epoch < self.burn_in:
            return eta
        passed = ((epoch - self.burn_in) % self.cycle + progress) / self.cycle
        return eta / 2 * (1 + math.cos(math.pi * passed))

    def memory(self, network: Network) -> int:
        """Bytes of what moves the chains and of their copies of the network.

        Whether there is room for the draws is checked when the fit begins.
        """
        return self.chains * 8 * network.n_parameters * network.dtype.itemsize

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Run every chain from fresh weights, one epoch after the other."""
        network = task.network.to(run.device)
        warn_of_what_chains_ignore(task, run)
        coordinates = Coordinates.of(network, task.hyper, whitened=False)
        kinds = {"lp": torch.float64, "step_size": torch.float64}
        store = DrawStore(run, network.dtype, coordinates, (self.chains, self.length), kinds)
        with ParallelChains(task, run, self.chains, coordinates, batched=False) as chains:
            _Sampler(self, task, chains, store, run).run_all()
            run.ranks.wait()  # the first rank writes the last draw
        state = store.state(task.hyper)
        diagnostics = {"epochs": self.epochs, "lp": float(state.stats["lp"].mean())}
        return state.tensors(), run.info(network, f"{self.chains} x {self.length} draws by SG-MCMC", diagnostics)

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """N stored draws: each as often as the others, in order."""
        return ChainState.of(state).draws(network, n, rng)


class _Sampler:
    """Moves the chains of this process: their positions, momenta and preconditioners, [chains, P]."""

    def __init__(self, method: SGMCMC, task: Task, chains: ParallelChains, store: DrawStore, run: Run) -> None:
        self.method, self.task, self.chains, self.store, self.run = method, task, chains, store, run
        self.rows = task.train.on(chains.network.device)
        self.batch = min(method.batch_size or task.train.batch_size, task.n)
        self.dynamics = LangevinDynamics(method.momentum, method.temperature)
        self.epoch, self.taken = 0, 0

    def run_all(self) -> None:
        """Run every epoch that has not been run yet."""
        resumed = self.run.resume()
        if resumed is None:
            self._begin()
        else:
            self._resume(*resumed)
        with self.run.bar(self.method.epochs, "epoch") as bar:
            bar.update(self.epoch)
            while self.epoch < self.method.epochs:
                self.chains.each(self._one_epoch)
                self.chains.count_cost(self.chains.count)
                self._check()
                if self.method._epoch_of(self.taken) == self.epoch:
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

    def _one_epoch(self, log_posterior: LogPosterior, which: slice) -> None:
        """Step one chain through all rows once, in an order of its own."""
        chain = self.chains.mine[which][0]
        rng = random_stream(self.run.seed, self.epoch, chain)
        order = torch.randperm(self.task.n, generator=rng).split(self.batch)
        device = self.position.device
        noise = random_stream(self.run.seed, self.epoch, chain, "noise", device=device)
        mine = [self.chains.ranks.part(rows) for rows in order]
        for step, (rows, batch) in enumerate(zip(order, self.rows.batches(mine, device), strict=True)):
            eta = self.method.step_size(self.epoch, (step + 1) / len(order), self.task.n)
            self._step(log_posterior, which, batch, len(rows), eta, noise)

    def _step(
        self, log_posterior: LogPosterior, which: slice, batch: Batch, rows: int, eta: float, rng: torch.Generator
    ) -> None:
        """Move one chain by this rank's part of a batch, which has so many rows over all ranks."""
        batches = [batch] if len(batch[1]) else []
        _, gradient = log_posterior.gradient(
            self.position[which],
            batches,
            likelihood_weight=self.task.n / rows,
            prior_weight=1 / self.chains.ranks.size,
        )
        self.chains.ranks.add([gradient])
        mass = self._mass(which, gradient) if self.method.preconditioner == "rmsprop" else None
        self.dynamics.step(self.position[which], self.momentum[which], gradient, eta, rng, mass)

    def _mass(self, which: slice, gradient: Tensor) -> Tensor:
        """The diagonal of M, shaped as the gradient of the log density; it adapts during the burn-in only."""
        square = self.square[which]
        if self.epoch < self.method.burn_in:
            now = (gradient / self.task.n).square()
            square.copy_(torch.where(square.isnan(), now, 0.99 * square + 0.01 * now))
        return 1e-7 + square.sqrt()

    def _check(self) -> None:
        sound = torch.isfinite(self.position).all(1).double()
        bad = (self.chains.everyones(sound) == 0).nonzero()
        if len(bad):
            raise ValueError(
                f"chain {int(bad[0])} ran away to infinity in epoch {self.epoch + 1}: lower learning_rate (now "
                f"{self.method.learning_rate:g})"
            )

    def _take(self) -> None:
        """Store where the chains are, with their log density over all rows."""

        def density(log_posterior: LogPosterior, which: slice) -> Tensor:
            likelihood, prior = self.chains.densities(log_posterior, self.position[which])
            return likelihood + prior

        lp = self.chains.everyones(torch.cat(self.chains.each(density)))
        eta = self.method.step_size(self.epoch, 1.0, self.task.n)
        weights = self.chains.everyones(self.store.coordinates.weights(self.position))
        self.store.write(self.taken, weights, {"lp": lp, "step_size": torch.full_like(lp, eta)})
        self.taken += 1

    def _checkpoint(self) -> None:
        names = ("position", "momentum", "square")
        carry: State = {"chains": {name: self.chains.everyones(getattr(self, name)) for name in names}}
        self.run.checkpoint(carry, {"epoch": self.epoch, "taken": self.taken, "pieces": self.store.flush()})

    def _resume(self, carry: State, note: dict[str, Any]) -> None:
        self.store.take_up(note.get("pieces"))
        self.epoch, self.taken = note["epoch"], note["taken"]
        for name, value in carry["chains"].items():
            setattr(self, name, value[self.chains.mine].to(self.chains.network.device))


SGMCMC.quick = SGMCMC(chains=2, length=40, burn_in=40, learning_rate=0.1)
