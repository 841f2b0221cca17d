"""Laplace: a Gaussian around a trained point, as wide as the curvature there and the prior say (MacKay 1992).

    w ~ N(w*, (GGN + prior precision)^-1),   GGN = sum_n J_n^T F_n J_n,   F_n = Fisher information of row n's outputs

over all weights, in one of four structures: "diagonal"; "kronecker", a Kronecker product for each linear layer or
convolution (Ritter et al. 2018); "low_rank", the GGN's dominant directions; "full". Predictions come from the
linearised network (Immer et al. 2021).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from caveat.engine.laplace import (
    ChosenWeights,
    FactorDirections,
    LaplaceKnobs,
    LaplaceState,
    Structure,
    add_rows,
    check_laplace,
    point_of,
    structure_treatment,
    sweep_at,
    tuned_gaussian,
    what_was_done,
)
from caveat.engine.run import Info, Run
from caveat.knobs import Count
from caveat.network import Network
from caveat.rows import Rows
from caveat.storage import State
from caveat.task import Task

__all__ = ["Laplace"]


@dataclass(frozen=True)
class Laplace(LaplaceKnobs):
    """A Gaussian over all weights from the curvature at a trained point."""

    structure: Structure = "kronecker"
    rank: Count = 50  # of the low-rank structure
    # Directions that are kept of a Kronecker factor, beside the mean of the rest: whole keeps all, a number so many of
    # every factor over twice as wide; auto keeps 64 where a layer is over 512 wide on one side and over 16 times as
    # wide as on the other, as an adapter is.
    factors: FactorDirections = "auto"
    quick: ClassVar["Laplace"]

    def check(self, task: Task, device: torch.device) -> None:
        """Refuse what can be refused before a start is trained; memory as if no row were left out."""
        check_laplace(
            self,
            task,
            ChosenWeights(task.network),
            self.structure,
            device,
            "Laplace",
            rank=self.rank,
            factors=self.factors,
        )

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Sum the curvature of all weights, then find the prior precision."""
        chosen, point = ChosenWeights(task.network.to(run.device)), point_of(start, run)
        sweep, skipped = sweep_at(self, task, chosen, point, run).informative(self.skip)
        curvature, log_likelihood = sweep.curvature(self.structure, rank=self.rank, factors=self.factors)
        tuned = tuned_gaussian(self, task, sweep, chosen, curvature, log_likelihood)
        state = LaplaceState(point.params, tuned.hyper or point.hyper, tuned.gaussian.tensors())
        report = what_was_done(tuned, curvature, sweep, chosen, skipped)
        treatment = structure_treatment(curvature, self.structure, chosen.network)
        return state.tensors(), run.info(task.network, treatment, report)

    def update(self, state: State, network: Network, rows: Rows, run: Run) -> State:
        """Add the curvature of more rows at the same point; the point and the prior stay."""
        rank = self.rank if self.structure == "low_rank" else 0
        return add_rows(self, state, network, rows, run, rank=rank, factors=self.factors)


Laplace.quick = Laplace()
