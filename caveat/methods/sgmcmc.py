"""Stochastic gradient MCMC: SGLD and SGHMC, with cyclical step sizes and a preconditioner.

    m <- beta m + sqrt(eta) g + sqrt(2 (1 - beta) T) M^(1/2) xi;   theta <- theta + sqrt(eta) M^(-1) m,   xi ~ N(0, I)

g is the gradient of the log posterior, its likelihood estimated from a batch. beta = 0 is SGLD (Welling and Teh 2011),
beta > 0 is SGHMC (Chen et al. 2014). M is 1, or the root of a running mean of g^2 (Li et al. 2016), which no longer
changes once draws are stored, since adapting it further would bias them. Cyclical step sizes (Zhang et al. 2020) fall
from eta to 0 along half a cosine, and draws are taken where they are small. There is no accept step, so a bias of the
order of eta remains; the noise is what the temperature asks for, no more and no less. Unless it is given, eta is found
in the burn-in from the curvature that a chain meets (`engine/chains/step_search.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from caveat.engine.chains import (
    BURN_IN_STEPS,
    LANGEVIN_STATS,
    STEPS_A_DRAW,
    ChainState,
    Coordinates,
    DrawStore,
    EpochPlan,
    LangevinSampler,
    ParallelChains,
    PassSettings,
    check_chains,
    warn_of_what_chains_ignore,
)
from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.state_checks import check_names
from caveat.knobs import Count, NonNegativeInt, Positive, Range, check_knobs
from caveat.network import Network, Params
from caveat.storage import State
from caveat.task import Task

__all__ = ["SGMCMC"]

WHOLE = 1024  # rows up to which every step takes all of them, unless told otherwise


@dataclass(frozen=True)
class SGMCMC(Method):
    """Langevin or Hamiltonian dynamics with gradients from batches: cheap draws, slightly off."""

    chains: Count = 4
    length: Count = 100  # draws of each chain
    thin: Count | None = None  # epochs from one draw to the next; None: 1, or as many as make 50 steps
    burn_in: NonNegativeInt | None = None  # epochs before the first draw; None: 100, or as many as make 2,000 steps
    learning_rate: Positive | None = None  # eta times the number of rows; None finds it in the burn-in
    momentum: Annotated[float, Range(0, 1, open_high=True)] = 0.98  # beta; 0 is SGLD
    preconditioner: Literal["identity", "rmsprop"] = "identity"
    cycle: NonNegativeInt = 0  # epochs in which the step falls to 0; 0 keeps it as it is
    draws_a_cycle: Count = 1  # taken at the cycle's end
    temperature: Positive = 1.0  # below 1: a cold posterior
    batch_size: Count | None = None  # rows of a step; None: the loader's, or all where there are at most 1,024
    augment: bool = False  # as the task says; augmented rows are no data that a likelihood could be of
    precision: Literal["float32", "bfloat16"] = "float32"  # of the forward pass; weights stay as they are
    channels_last: bool = False  # memory format of images and filters, faster on a GPU
    compile: bool = False  # let torch.compile fuse the forward and backward pass
    starts_from: ClassVar[StartsFrom] = "fresh"
    quick: ClassVar["SGMCMC"]

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.augment and self.batch_size is None:
            raise ValueError("SGMCMC(augment=True) augments batches: give batch_size, below the number of rows")
        if self.preconditioner == "rmsprop" and self.burn_in == 0:
            raise ValueError("SGMCMC(burn_in=0) leaves no epochs in which preconditioner='rmsprop' could be found")
        if not self.cycle and self.draws_a_cycle > 1:
            raise ValueError(f"SGMCMC(draws_a_cycle={self.draws_a_cycle}) has no cycle to take them from: give cycle=")
        apart = self.thin or 1
        if self.cycle and (self.draws_a_cycle - 1) * apart >= self.cycle:
            raise ValueError(
                f"SGMCMC takes {self.draws_a_cycle} draws, {apart} epochs apart, from a cycle of {self.cycle} "
                "epochs: lengthen the cycle or take fewer"
            )

    @property
    def default_draws(self) -> int:
        """As many as there are: every draw is used once."""
        return self.chains * self.length

    def plan(self, rows: int, loader_batch: int) -> EpochPlan:
        """What every epoch does, for so many training rows that the task has in batches of a loader's size."""
        batch = min(rows, self.batch_size or max(loader_batch, WHOLE if rows <= WHOLE else 0))
        steps = math.ceil(rows / batch)
        burn_in = max(100, math.ceil(BURN_IN_STEPS / steps)) if self.burn_in is None else self.burn_in
        thin = self.thin or (1 if self.cycle else math.ceil(STEPS_A_DRAW / steps))
        return EpochPlan(self.length, batch, steps, burn_in, thin, self.cycle, self.draws_a_cycle)

    def memory(self, network: Network) -> int:
        """Bytes of what moves the chains and of their copies of the network.

        Whether there is room for the draws is checked when the fit begins.
        """
        return self.chains * 8 * network.n_parameters * network.dtype.itemsize

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Run every chain from fresh weights, one epoch after the other."""
        network = task.network.to(run.device)
        warn_of_what_chains_ignore(task, run, augments=self.augment)
        coordinates = Coordinates.of(network, task.hyper, whitened=False)
        store = DrawStore(run, network.dtype, coordinates, (self.chains, self.length), LANGEVIN_STATS)
        plan = self.plan(task.n, task.train.batch_size)
        settings = PassSettings(self.precision, self.channels_last, self.compile)
        with ParallelChains(
            task,
            run,
            self.chains,
            coordinates,
            batched=plan.steps == 1,
            settings=settings,
            rows_of_step=plan.batch if plan.steps > 1 else None,
        ) as chains:
            sampler = LangevinSampler(self, plan, task, chains, store, run)
            sampler.run_all()
            run.ranks.wait()  # the first rank writes the last draw
            diagnostics = sampler.diagnostics()
        state = store.state(task.hyper)
        diagnostics |= check_chains(state, task, run)
        return state.tensors(), run.info(network, f"{self.chains} x {self.length} draws by SG-MCMC", diagnostics)

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not as many draws of the network's weights as the knobs say."""
        check_names("state", state, ["params", "stats", "hyper"])
        ChainState.of(state).check(network, (self.chains, self.length))

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """N stored draws: each as often as the others, in order."""
        return ChainState.of(state).draws(network, n, rng)


SGMCMC.quick = SGMCMC(chains=2, length=40, burn_in=40, thin=1)
