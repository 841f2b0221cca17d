"""Deep ensemble: several networks trained from different starts, averaged (Lakshminarayanan et al. 2017).

    p(y | x) = 1/M sum_m p(y | x, theta_m),   theta_m trained from its own initial weights and in its own order

Members find different modes of the posterior, which a single Gaussian around one mode cannot do. Each member is a MAP
under the prior. On a GPU members are trained side by side. The ranks of a distributed run divide the members among
them, and a member that is finished is never trained again when a run is resumed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from caveat.engine.fresh_weights import FreshWeights
from caveat.engine.method import Method
from caveat.engine.predictors import pick
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.state_checks import check_hyper, check_names, check_point
from caveat.engine.training import ADAM, Training, train_points
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
        network = task.network.to(run.device)
        fresh_weights, mine = FreshWeights(network), dict[int, Params]()
        parts = {m: run.child(f"member-{m + 1}", alone=True) for m in run.ranks.mine(range(self.members))}
        for m, part in parts.items():
            if (finished := part.appended("member")) is not None:
                mine[m] = finished[0]["member"]
        missing = [m for m in parts if m not in mine]
        starts: list[State] = [{"params": fresh_weights(parts[m].rng), "hyper": task.hyper} for m in missing]
        points = train_points(task, network, starts, self.training, [parts[m] for m in missing])
        for m, point in zip(missing, points, strict=True):
            mine[m] = point.draw()
            parts[m].append("member", {"member": mine[m]})
        for part in parts.values():
            run.absorb(part)
        mine = {m: {name: value.to(run.device) for name, value in mine[m].items()} for m in parts}
        run.warnings.extend(fresh_weights.notes())
        run.add_costs_of_ranks()
        state = {"params": run.ranks.gather(mine, self.members), "hyper": task.hyper}
        return state, run.info(network, f"{self.members} point estimates")

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not as many points of the network as there are members."""
        check_names("state", state, ["params", "hyper"])
        check_hyper(state["hyper"], network)
        noise = {name: value for name, value in state["hyper"].items() if name == "log_noise"}
        check_point("params", state["params"], network, (self.members,), noise)

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """N members: each equally often, the remainder at random."""
        for m in pick(self.members, n, rng):
            yield {name: stack[m] for name, stack in state["params"].items()}


DeepEnsemble.quick = DeepEnsemble(members=4, training=Training(epochs=40))
