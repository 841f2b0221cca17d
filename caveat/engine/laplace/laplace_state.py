"""What a Laplace posterior keeps: the point, what is known of the noise, the Gaussian, and which weights it is over."""

from dataclasses import dataclass

from caveat.engine.flat_weights import flat_places
from caveat.engine.laplace.chosen_weights import ChosenWeights
from caveat.engine.laplace.gaussians import WeightGaussian
from caveat.engine.laplace.layer_gaussians import restored
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.storage import CorruptFile, State

__all__ = ["LaplaceState"]


@dataclass(frozen=True)
class LaplaceState:
    """The state of Laplace, LastLayerLaplace and SubnetworkLaplace."""

    params: Params  # the point, with buffers
    hyper: Hyper
    gaussian: Params  # what `WeightGaussian.tensors` stores
    subnetwork: Params | None = None  # what `ChosenWeights.stored_entries` says

    def tensors(self) -> State:
        """As a posterior keeps it, by group and name."""
        state: State = {"params": self.params, "hyper": self.hyper, "gaussian": self.gaussian}
        return state if self.subnetwork is None else state | {"subnetwork": self.subnetwork}

    @classmethod
    def of(cls, state: State) -> "LaplaceState":
        """The state that `tensors` made groups of."""
        missing = {"params", "hyper", "gaussian"} - state.keys()
        if missing or "prior" not in state["gaussian"]:
            lacking = f"no group {sorted(missing)[0]!r}" if missing else "no prior precisions"
            raise CorruptFile(f"this is not the state of a Laplace posterior: it has {lacking}")
        return cls(state["params"], state["hyper"], state["gaussian"], state.get("subnetwork"))

    def posterior(self, network: Network) -> tuple[ChosenWeights, WeightGaussian]:
        """The weights that the posterior is over, and their Gaussian."""
        chosen = ChosenWeights.stored(network, self.subnetwork)
        return chosen, restored(self.gaussian, flat_places(chosen.network))
