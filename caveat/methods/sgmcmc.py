"""Stochastic gradient MCMC: SGLD and SGHMC, with cyclical step sizes and a preconditioner.

    m <- beta m + sqrt(eta) g + sqrt(2 (1 - beta) T) M^(1/2) xi;   theta <- theta + sqrt(eta) M^(-1) m,   xi ~ N(0, I)

g is the gradient of the log posterior, its likelihood estimated from a batch. beta = 0 is SGLD (Welling and Teh 2011),
theta + eta g + sqrt(2 eta T) xi; beta > 0 is SGHMC (Chen et al. 2014). M is 1, or the root of a running mean of g^2 (Li
et al. 2016), held still once draws are kept, since adapting it further would bias them. Cyclical steps (Zhang et al.
2020) fall from eta to 0 along half a cosine, and draws are taken where they are small. There is no accept step, so a
bias of the order of eta remains; the noise is what the temperature asks for, no more and no less.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from caveat.engine.chains import Chains, Coordinates, DrawStore, Lane, random_stream, say_what_is_left_out, stored_draws
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
        """Every draw once."""
        return self.chains * self.length

    @property
    def epochs(self) -> int:
        """Passes over the data, of each chain."""
        return self._epoch_of(self.length - 1) + 1

    def _epoch_of(self, draw: int) -> int:
        """The epoch, from 0, at whose end a draw is taken."""
        if not self.cycle:
            return self.burn_in + (draw + 1) * self.thin - 1
        cycle, place = divmod(draw, self.draws_a_cycle)
        return self.burn_in + (cycle + 1) * self.cycle - 1 - (self.draws_a_cycle - 1 - place) * self.thin

    def step_size(self, epoch: int, progress: float, rows: int) -> float:
        """Eta after a share of an epoch."""
        eta = self.learning_rate / rows
        if not self.cycle or epoch < self.burn_in:
            return eta
        passed = ((epoch - self.burn_in) % self.cycle + progress) / self.cycle
        return eta / 2 * (1 + math.cos(math.pi * passed))

    def memory(self, network: Network) -> int:
        """What moves a chain, and its copy of the network; room for the draws is looked for when the fit begins."""
        return self.chains * 8 * network.n_parameters * network.dtype.itemsize

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Every chain from fresh weights, an epoch after the other."""
        network = task.network.to(run.device)
        say_what_is_left_out(task, run)
        coordinates = Coordinates.of(network, task.hyper, whitened=False)
        kinds = {"lp": torch.float64, "step_size": torch.float64}
        store = DrawStore(run, network.dtype, coordinates, (self.chains, self.length), kinds)
        with Chains(task, run, self.chains, coordinates, batched=False) as chains:
            _Sampler(self, task, chains, store, run).run_all()
            run.ranks.wait()  # the first rank writes the last draw
        state: State = store.state | {"hyper": {n: t.to(run.device) for n, t in task.hyper.items()}}
        diagnostics = {"epochs": self.epochs, "lp": float(state["stats"]["lp"].mean())}
        return state, run.info(network, f"{self.chains} x {self.length} draws by SG-MCMC", diagnostics)

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Stored draws: each as often as the others, in order."""
        return stored_draws(state, network, n, rng)


class _Sampler:
    """The chains' positions, momenta and preconditioners, [chains, P]."""

    def __init__(self, method: SGMCMC, task: Task, chains: Chains, store: DrawStore, run: Run) -> None:
        self.method, self.task, self.chains, self.store, self.run = method, task, chains, store, run
        self.rows = task.train.on(chains.network.device)
        self.batch = min(method.batch_size or task.train.batch_size, task.n)
        self.epoch, self.taken = 0, 0

    def run_all(self) -> None:
        """Every epoch that is not done yet."""
        kept = self.run.resume()
        if kept is None:
            self._begin()
        else:
            self._go_on(*kept)
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
                    self._keep()

    def _begin(self) -> None:
        network, coordinates = self.chains.network, self.store.coordinates
        streams = [random_stream(self.run.seed, "start", chain) for chain in self.chains.mine]
        fresh_weights = FreshWeights(network)
        self.position = torch.stack([coordinates.at(fresh_weights(rng)) for rng in streams]).to(network.device)
        self.momentum = torch.zeros_like(self.position)
        self.square = torch.full_like(self.position, math.nan)  # of the mean gradient; none was seen yet

    def _one_epoch(self, lane: Lane, own: slice) -> None:
        """All rows once, in an order of the chain's own."""
        rng = random_stream(self.run.seed, self.epoch, self.chains.mine[own][0])
        order = torch.randperm(self.task.n, generator=rng).split(self.batch)
        device = self.position.device
        noise = random_stream(self.run.seed, self.epoch, self.chains.mine[own][0], "noise", device=device)
        mine = [self.chains.ranks.part(rows) for rows in order]
        for step, (rows, batch) in enumerate(zip(order, self.rows.batches(mine, device), strict=True)):
            eta = self.method.step_size(self.epoch, (step + 1) / len(order), self.task.n)
            self._step(lane, own, batch, len(rows), eta, noise)

    def _step(self, lane: Lane, own: slice, batch: Batch, rows: int, eta: float, rng: torch.Generator) -> None:
        position, momentum, beta = self.position[own], self.momentum[own], self.method.momentum
        share = 1 / self.chains.ranks.size
        batches = [batch] if len(batch[1]) else []
        _, gradient = lane.gradient(position, batches, times=self.task.n / rows, prior=share)
        self.chains.ranks.add([gradient])
        noise = torch.randn(position.shape, generator=rng, dtype=position.dtype, device=position.device)
        mass: Tensor | None = None
        if self.method.preconditioner == "rmsprop":
            mass = self._mass(own, gradient)
            noise *= mass.sqrt()
        momentum.mul_(beta).add_(gradient, alpha=math.sqrt(eta))
        momentum.add_(noise, alpha=math.sqrt(2 * (1 - beta) * self.method.temperature))
        position.add_(momentum if mass is None else momentum / mass, alpha=math.sqrt(eta))

    def _mass(self, own: slice, gradient: Tensor) -> Tensor:
        """M, from gradients of the mean loss; it moves until draws are kept."""
        square = self.square[own]
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
        """Keep where the chains are, with their log density over all rows."""

        def density(lane: Lane, own: slice) -> Tensor:
            likelihood, prior = self.chains.density(lane, self.position[own])
            return likelihood + prior

        lp = self.chains.everyones(torch.cat(self.chains.each(density)))
        eta = self.method.step_size(self.epoch, 1.0, self.task.n)
        weights = self.chains.everyones(self.store.coordinates.weights(self.position))
        self.store.write(self.taken, weights, {"lp": lp, "step_size": torch.full_like(lp, eta)})
        self.taken += 1

    def _keep(self) -> None:
        names = ("position", "momentum", "square")
        carry: State = {"chains": {name: self.chains.everyones(getattr(self, name)) for name in names}}
        self.store.flush()
        self.run.checkpoint(carry, {"epoch": self.epoch, "taken": self.taken})

    def _go_on(self, carry: State, note: dict[str, Any]) -> None:
        self.epoch, self.taken = note["epoch"], note["taken"]
        for name, value in carry["chains"].items():
            setattr(self, name, value[self.chains.mine].to(self.chains.network.device))


SGMCMC.quick = SGMCMC(chains=2, length=40, burn_in=40, learning_rate=0.1)
