"""Masked Bayesian neural network: draws of the weights and of which nodes there are (Kong et al. 2023).

    p(theta, m | D) ~ p(D | theta, m) p(theta) P(m),   P(m) ~ prod over layers exp(-(lambda log n)^5 s^2) / C(width, s)

with s nodes on. Stochastic gradient MCMC moves the weights; every few steps nodes die or are born by a
Metropolis-Hastings move that looks at gradients. Each draw is a narrower network, and is stored and run as one.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from caveat.engine.chains import LangevinChain
from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.sparse import plain_layers, weight_name
from caveat.engine.sparse_chains import DrawsPredictor, DrawsState, MaskedNetwork, check_draws, mean_account
from caveat.engine.state_checks import check_names
from caveat.knobs import Count, NonNegative, NonNegativeInt, Positive, Range, check_knobs
from caveat.network import Layer, Network
from caveat.storage import State
from caveat.task import Task

__all__ = ["MaskedBNN"]


@dataclass(frozen=True)
class MaskedBNN(Method):
    """SG-MCMC over weights, with nodes that are born and die by Metropolis-Hastings."""

    sparsity: NonNegative = 0.1  # lambda: how much the prior is against many nodes
    interval: Count = 5  # steps from one birth or death to the next
    most: Annotated[int, Range(1, 5)] = 3  # nodes that are born or die at once
    burn_in: NonNegativeInt | None = None  # epochs before the first draw; None: 100, or 2,000 steps if that is more
    length: Count = 20  # draws
    thin: Count | None = None  # epochs from one draw to the next; None: 2, or 50 steps if that is more
    learning_rate: Positive | None = None  # eta times the number of rows; None finds it in the burn-in
    momentum: Annotated[float, Range(0, 1, open_high=True)] = 0.9  # 0 is SGLD, above it SGHMC
    temperature: Positive = 1.0  # of the weights; below 1: a cold posterior
    batch_size: Count | None = None  # rows of a batch; the loader's unless given
    starts_from: ClassVar[StartsFrom] = "scratch"
    quick: ClassVar["MaskedBNN"]

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def default_draws(self) -> int:
        """Every draw once."""
        return self.length

    def memory(self, network: Network) -> int:
        """Values, gradients, velocities, noise, a narrow copy, and draws that are as wide as can be."""
        return (6 + self.length) * network.n_parameters * network.dtype.itemsize

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Weights and nodes together, from all nodes on."""
        network = task.network.to(run.device)
        target = MaskedNetwork(task, start, run, self)
        chain = LangevinChain(task, run, self, target)
        indices = torch.zeros(0, dtype=torch.int32, device=run.device)
        counts = torch.zeros(len(plain_layers(network)), dtype=torch.int64)
        state = DrawsState.of_chain(chain.run_all(), indices, counts, target.noise.fixed)
        return state.tensors(), self._info(state, target, chain, run)

    def _info(self, state: DrawsState, target: MaskedNetwork, chain: LangevinChain, run: Run) -> Info:
        network, layers = target.network, plain_layers(target.network)
        account = mean_account([target.narrow_account(draw.network(network)) for draw in state.draws])

        def nodes(layer: str) -> str:
            """How many outputs a layer has over the draws, in words."""
            width, key = layers[layer].shape[0], f"{weight_name(layer)}/0"
            counts = {len(draw.slices[key]) if key in draw.slices else width for draw in state.draws}
            range_ = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
            return f"{range_} of {width} nodes"

        def treatment(layer: Layer) -> str:
            what = f"{self.length} draws by SG-MCMC"
            return f"{what}, {nodes(layer.name)}" if layer.name in layers else what

        diagnostics: dict[str, Any] = {
            "history": chain.history, "density": account.density, "account": account.as_json(), "draws": self.length,
            "nodes": {name: nodes(name) for name in layers},
            "accepted": target.accepted / max(target.tried, 1),
            "whole": {} if target.channels is None else target.channels.whole,
        }  # fmt: skip
        diagnostics |= chain.check() | check_draws(state, target.task, run)
        return run.info(network, treatment, diagnostics)

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not as many draws of the network as the knobs say."""
        check_names("state", state, ["active", "rest", "hyper"], ["slices"])
        DrawsState.of(state).check(network, self.length)

    def predictor(self, state: State, network: Network) -> DrawsPredictor:
        """What predicts by sending inputs through each draw's own network."""
        return DrawsPredictor(DrawsState.of(state), network)


MaskedBNN.quick = MaskedBNN(interval=2, burn_in=50, length=10, thin=1)
