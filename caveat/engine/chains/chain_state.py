"""What a posterior of chains keeps: every draw of the weights, and what is known of each draw."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from caveat.engine.predictors import pick
from caveat.engine.state_checks import check_hyper, check_names, check_tensor, learned_hyper, network_tensors
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.storage import CorruptFile, State

__all__ = ["ChainState"]


@dataclass(frozen=True)
class ChainState:
    """The state of HMC and SGMCMC."""

    params: Params  # draws of the weights, [chains, draws, ...]; noise that is inferred is "hyper/log_noise"
    stats: Params  # of each draw, [chains, draws]: "lp", the log density, and what the sampler says of its step
    hyper: Hyper  # what all draws share

    def tensors(self) -> State:
        """As a posterior keeps it, by group and name."""
        return {"params": self.params, "stats": self.stats, "hyper": self.hyper}

    @classmethod
    def of(cls, state: State) -> "ChainState":
        """The state that `tensors` made groups of."""
        missing = {"params", "stats", "hyper"} - state.keys()
        if missing or not state["params"] or "lp" not in state["stats"]:
            lacking = f"no group {sorted(missing)[0]!r}" if missing else "no draws, or no log density of each"
            raise CorruptFile(f"this is not the state of chains: it has {lacking}")
        if state["stats"]["lp"].ndim != 2:
            raise CorruptFile(f"stats/lp has shape {list(state['stats']['lp'].shape)}, not [chains, draws]")
        chains, draws = state["stats"]["lp"].shape
        for name, stack in (state["params"] | state["stats"]).items():
            if stack.shape[:2] != (chains, draws):
                raise CorruptFile(
                    f"this is not the state of {chains} chains of {draws} draws: {name} is of shape {list(stack.shape)}"
                )
        return cls(state["params"], state["stats"], state["hyper"])

    def check(self, network: Network, size: tuple[int, int]) -> None:
        """Refuse what is not so many (chains, draws) of the network's weights."""
        check_hyper(self.hyper, network)
        weights, _ = network_tensors(network)
        learned = {f"hyper/{name}": value for name, value in learned_hyper(network, self.hyper).items()}
        check_names("params", self.params, weights.keys() | learned.keys())
        for name, stack in self.params.items():
            like = (weights | learned)[name]
            check_tensor(f"params/{name}", stack, (*size, *like.shape), (network.dtype,))
        for name, stack in self.stats.items():
            check_tensor(f"stats/{name}", stack, size, (torch.float64, torch.float32, torch.bool, torch.int64))

    def draws(self, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """N stored draws, one after the other: each as often as the others, in order."""
        chains, draws = self.stats["lp"].shape
        for i in pick(chains * draws, n, rng):
            yield {name: stack[i // draws, i % draws].to(network.device) for name, stack in self.params.items()}
