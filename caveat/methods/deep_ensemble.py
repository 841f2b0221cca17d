"""Deep ensemble: several networks trained from different starts, averaged (Lakshminarayanan et al. 2017).

    p(y | x) = 1/M sum_m p(y | x, theta_m),   theta_m trained from its own initial weights and in its own order

Members find different modes of the posterior, which a single Gaussian around one mode cannot do. Each member is a MAP
under the prior. `Ensemble` makes such a mixture of the posteriors of any method. On a GPU members are trained side by
side. The ranks of a distributed run divide the members among them, and a member that is finished is never trained again
when a run is resumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from caveat.engine.members import check_points, draws_of_points, fresh_points
from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.training import ADAM, Training
from caveat.knobs import Count, check_knobs
from caveat.network import Network, Params
from caveat.storage import State
from caveat.task import Task

__all__ = ["DeepEnsemble"]


@dataclass(frozen=True)
class DeepEnsemble(Method):
    """Networks trained from different initial weights, averaged."""

    members: Count = 5
    training: Training = ADAM
    starts_from: ClassVar[StartsFrom] = "fresh"
    quick: ClassVar["DeepEnsemble"]

    def __post_init__(self) -> None:
        check_knobs(self)
        object.__setattr__(self, "training", self.training.filled(ADAM))

    @property
    def default_draws(self) -> int:
        """As many as there are: every member is used once."""
        return self.members

    def memory(self, network: Network) -> int:
        """Bytes of the weights of all members."""
        return self.members * network.n_parameters * network.dtype.itemsize

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Train every member from fresh weights."""
        parts = {m: run.child(f"member-{m + 1}", alone=True) for m in run.ranks.mine(range(self.members))}
        points, notes = fresh_points(task, parts, self.training)
        for part in parts.values():
            run.absorb(part)
        run.warnings.extend(notes)
        run.add_costs_of_ranks()
        state = {"params": run.ranks.gather(points, self.members), "hyper": task.hyper}
        return state, run.info(task.network.to(run.device), f"{self.members} point estimates")

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not as many points of the network as there are members."""
        check_points(state, network, self.members)

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """N members: each equally often, the remainder at random."""
        return draws_of_points(state, self.members, n, rng)


DeepEnsemble.quick = DeepEnsemble(members=4, training=Training(epochs=40))
