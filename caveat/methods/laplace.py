"""Laplace: a Gaussian around a trained point, as wide as the curvature there and the prior say (MacKay 1992).

    w ~ N(w*, (GGN + prior precision)^-1),   GGN = sum_n J_n^T F_n J_n,   F_n = Fisher information of row n's outputs

over all weights, in one of four structures: "diagonal"; "kronecker", a Kronecker product for each linear layer or
convolution (Ritter et al. 2018); "low_rank", the GGN's dominant directions; "full". Predictions come from the
linearised network (Immer et al. 2021).
"""

from dataclasses import dataclass
from typing import ClassVar

from caveat.engine.laplace import LaplaceMethod, Structure, structure_bytes
from caveat.engine.run import Info, Run
from caveat.knobs import Count
from caveat.network import Network
from caveat.storage import State
from caveat.task import Task

__all__ = ["Laplace"]


@dataclass(frozen=True)
class Laplace(LaplaceMethod):
    """A Gaussian over all weights from the curvature at a trained point."""

    structure: Structure = "kronecker"
    rank: Count = 50  # of the low-rank structure
    quick: ClassVar["Laplace"]

    @property
    def _rank(self) -> int:
        return self.rank if self.structure == "low_rank" else 0

    def memory(self, network: Network) -> int:
        """The curvature; of a full one, `check` knows how many rows there are."""
        return structure_bytes(network, self.structure, self._rank)

    def about(self, task: Task, network: Network) -> tuple[Network, int, Structure]:
        """All weights."""
        return network, network.n_parameters, self.structure

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """One pass over the data, then the prior precision."""
        network = task.network.to(run.device)
        return self._laplace(task, start, run, network, None, self.structure)


Laplace.quick = Laplace()
