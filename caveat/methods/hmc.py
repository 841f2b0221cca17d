"""HMC: full-batch Hamiltonian Monte Carlo, the reference that other posteriors are measured against.

    z', p' = L leapfrog steps of size eps from (z, p),  p ~ N(0, I);   accepted with probability min(1, exp(H - H'))
    H = -(log p(D | theta) + log p(theta)) / T + |p|^2 / 2,   theta = the weights at whitened coordinates z

Trajectories are pi/2 sqrt(T) long in units of the prior's width, L = length / eps, as Izmailov et al. (2021) choose
them. A warm-up finds the step size by dual averaging over all chains together; it is then fixed. A rejected proposal
counts the old state again. Nothing is estimated from a part of the data, so the only error is that of chains of finite
length, which `caveat.diagnose` looks at. The loop is in `engine/chains/hamiltonian_sampler.py`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from caveat.engine.chains import (
    HAMILTONIAN_STATS,
    ChainState,
    Coordinates,
    DrawStore,
    HamiltonianSampler,
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

__all__ = ["HMC"]


@dataclass(frozen=True)
class HMC(Method):
    """Hamiltonian Monte Carlo over all data: slow, and the closest there is to the true posterior."""

    chains: Count = 4
    length: Count = 400  # draws of each chain, after the warm-up
    warmup: NonNegativeInt = 100  # iterations that find the step size; they are not stored
    step_size: Positive | None = None  # in units of the prior's width; None finds it in the warm-up
    trajectory: Positive = math.pi / 2  # its length in the same units; times sqrt(temperature)
    jitter: Annotated[float, Range(0, 1, open_high=True)] = 0.2  # share by which the length varies
    target_acceptance: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.8  # that warm-up aims at
    temperature: Positive = 1.0  # divides the log density: below 1 a cold posterior
    mass: Literal["identity", "diagonal"] = "identity"  # "diagonal" scales by the spread seen in the warm-up
    splits: Count = 1  # parts of the rows that take turns within a step
    begin: Literal["layers", "prior"] = "layers"  # first weights: as the layers draw theirs, or from the prior
    precision: Literal["float32", "bfloat16"] = "float32"  # of the forward pass; weights stay as they are
    channels_last: bool = False  # memory format of images and filters, faster on a GPU
    compile: bool = False  # let torch.compile fuse the forward and backward pass
    starts_from: ClassVar[StartsFrom] = "fresh"
    quick: ClassVar["HMC"]

    def __post_init__(self) -> None:
        check_knobs(self)
        least = 100 if self.mass == "diagonal" else 20 if self.step_size is None else 0
        if self.warmup < least:
            raise ValueError(
                f"HMC(warmup={self.warmup}) is too short to find a {'mass' if least == 100 else 'step size'}: "
                f"{least} iterations or more, or step_size=... and mass='identity'"
            )

    @property
    def default_draws(self) -> int:
        """As many as there are: every draw is used once."""
        return self.chains * self.length

    def memory(self, network: Network) -> int:
        """Bytes of what moves the chains and of their copies of the network.

        Whether there is room for the draws is checked when the fit begins.
        """
        return self.chains * 8 * network.n_parameters * network.dtype.itemsize

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Warm up, then draw."""
        network = task.network.to(run.device)
        warn_of_what_chains_ignore(task, run)
        coordinates = Coordinates.of(network, task.hyper)
        store = DrawStore(run, network.dtype, coordinates, (self.chains, self.length), HAMILTONIAN_STATS)
        with ParallelChains(
            task,
            run,
            self.chains,
            coordinates,
            temperature=self.temperature,
            parts=self.splits,
            settings=PassSettings(self.precision, self.channels_last, self.compile),
        ) as chains:
            sampler = HamiltonianSampler(self, chains, store, run)
            sampler.run_all()
            run.ranks.wait()  # until the first rank has written the last draw
        state = store.state(task.hyper)
        diagnostics = sampler.diagnostics() | check_chains(state, task, run)
        return state.tensors(), run.info(network, f"{self.chains} x {self.length} draws by HMC", diagnostics)

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not as many draws of the network's weights as the knobs say."""
        check_names("state", state, ["params", "stats", "hyper"])
        ChainState.of(state).check(network, (self.chains, self.length))

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """N stored draws: each as often as the others, in order."""
        return ChainState.of(state).draws(network, n, rng)


HMC.quick = HMC(chains=2, length=40, warmup=40)
