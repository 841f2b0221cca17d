"""SubnetworkLaplace: full-covariance inference over a few well chosen weights (Daxberger et al. 2021).

    w_S ~ N(w*_S, (sum_n J_nS^T F_n J_nS + prior precision)^-1),   all other weights fixed at w*

A full covariance over all weights of a deep network cannot be stored; over a thousandth of them it can, and it sees
what a diagonal over all of them cannot. Which thousandth is a score's choice (`engine/laplace/selection.py`).
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor

from caveat.engine.laplace import (
    ChosenWeights,
    LaplaceKnobs,
    LaplaceState,
    SubnetworkScore,
    Sweep,
    add_rows,
    check_laplace,
    flat_prior,
    point_of,
    select_weights,
    sweep_at,
    tuned_gaussian,
    what_was_done,
)
from caveat.engine.run import Info, Run
from caveat.network import Layer, Network
from caveat.rows import Rows
from caveat.storage import State, settings_digest
from caveat.task import Task

__all__ = ["SubnetworkLaplace"]

SHARE, FEWEST = 0.01, 1000  # of the weights, or so many where that is more: a small network's hundredth knows nothing


@dataclass(frozen=True, eq=False)
class SubnetworkLaplace(LaplaceKnobs):
    """A Gaussian with full covariance over a chosen subnetwork; the other weights stay at their MAP values."""

    weights: int | float | str | None = None  # a count, a share, or a layer or pattern of names; see SHARE unless given
    score: SubnetworkScore | Tensor = "energy"  # by which weights are chosen; or one number a weight, the highest taken
    keep_dead: bool = False  # whether weights without curvature may be chosen
    exact_scores: bool = False  # from all rows and outputs; else of 5,000 rows, and by one draw each in large networks
    chooses_weights: ClassVar[bool] = True
    quick: ClassVar["SubnetworkLaplace"]

    def __post_init__(self) -> None:
        amount = self.weights
        if isinstance(amount, int | float) and not 0 < amount <= (1 if isinstance(amount, float) else amount):
            raise ValueError(f"SubnetworkLaplace(weights={amount!r}): must be a count, a share in (0, 1], or a pattern")
        if not isinstance(self.score, str | Tensor):
            kind = type(self.score).__name__
            raise ValueError(f"SubnetworkLaplace(score=a {kind}): must be a name, or a tensor (torch.as_tensor(score))")
        super().__post_init__()
        if isinstance(amount, str) and (isinstance(self.score, Tensor) or self.score != "energy"):
            raise ValueError(f"weights={amount!r} takes whole parameters, so there is nothing for score= to choose")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SubnetworkLaplace) and settings_digest(self) == settings_digest(
            other
        )  # a score may be a tensor

    def __hash__(self) -> int:
        return hash(settings_digest(self))

    @property
    def _samples_all_weights(self) -> bool:
        return isinstance(self.score, str) and self.score.startswith("sampled")

    def memory(self, network: Network) -> int:
        """Scores of all weights, and their samples where the score takes them; `check` looks at the curvature."""
        needed = super().memory(network)
        if self._samples_all_weights:
            from caveat.engine.linearised import copies_of_the_weights  # solvers of linear models, for this score only

            needed *= copies_of_the_weights(64, 16, 64)
        return needed

    def check(self, task: Task, device: torch.device) -> None:
        """Refuse what can be refused before a start is trained; memory as if no row were left out."""
        network = self._about(task.network)
        chosen = ChosenWeights(network, torch.arange(self._count(network)))  # so many, whichever they will be
        check_laplace(self, task, chosen, "full", device, "Laplace")

    def _about(self, network: Network) -> Network:
        """The network restricted to the parameters that a pattern names, or with all of them."""
        if not isinstance(self.weights, str):
            return network
        layer = f"{self.weights}."
        names = [n for n in network.names if fnmatchcase(n, self.weights) or n.startswith(layer)]
        if not names:
            raise ValueError(
                f"weights={self.weights!r} matches no parameter that inference is about: {list(network.names)[:8]}"
            )
        return network.restricted(names)

    def _count(self, network: Network) -> int:
        """How many weights of this network will be chosen."""
        n = network.n_parameters
        if isinstance(self.weights, str):
            return n
        if isinstance(self.score, Tensor) and self.score.numel() != n:
            given = self.score.numel()
            raise ValueError(f"score has {given:,} numbers, but the network has {n:,} weights: give one to each")
        if self.weights is None:
            return min(n, max(FEWEST, round(SHARE * n)))
        if isinstance(self.weights, float):
            return max(1, round(self.weights * n))
        if self.weights > n:
            raise ValueError(f"weights={self.weights:_} is more than the network has ({n:,})")
        return self.weights

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Choose weights, sum their curvature, then find the prior precision."""
        network, point = self._about(task.network.to(run.device)), point_of(start, run)
        every = sweep_at(self, task, ChosenWeights(network), point, run)
        chosen, choice = self._chosen(task, every, run)
        sweep, skipped = every.over(chosen.network).informative(self.skip)
        curvature, log_likelihood = sweep.curvature("full", chosen.index)
        tuned = tuned_gaussian(self, task, sweep, chosen, curvature, log_likelihood)
        entries = chosen.stored_entries(task.network)
        state = LaplaceState(point.params, tuned.hyper or point.hyper, tuned.gaussian.tensors(), entries)
        report = {"subnetwork": choice} | what_was_done(tuned, curvature, sweep, chosen, skipped)
        counts = chosen.layer_counts()

        def treatment(layer: Layer) -> str:
            count = counts.get(layer.name, 0)
            if not count:
                return "fixed at the MAP"
            return f"Gaussian, full covariance over {count:,} of {layer.selected:,} weights"

        return state.tensors(), run.info(task.network, treatment, report)

    def _chosen(self, task: Task, sweep: Sweep, run: Run) -> tuple[ChosenWeights, dict[str, Any]]:
        """The weights of the highest score, and what there is to say of the choice."""
        network, count = sweep.network, self._count(sweep.network)
        if isinstance(self.weights, str):
            return ChosenWeights(network), {"weights": count}
        part = run.child("choice")
        kept_choice = part.appended("choice")  # of a killed run: its curvature belongs to these weights
        if kept_choice is None:
            variances = _variances_by_samples if self._samples_all_weights else None
            prior = flat_prior(network, sweep.params)
            selection = select_weights(
                task, sweep, count, self.score, prior, part, self.keep_dead, variances, self.exact_scores
            )
            index, report = selection.index, selection.report
            if run.ranks.first:
                part.append("choice", {"choice": {"index": index}}, report)
        else:
            index, report = kept_choice[0]["choice"]["index"], kept_choice[1]
        run.absorb(part)
        return ChosenWeights.at(network, index), report

    def update(self, state: State, network: Network, rows: Rows, run: Run) -> State:
        """Add the curvature of more rows at the same point; the point and the prior stay."""
        return add_rows(self, state, network, rows, run)


def _variances_by_samples(task: Task, sweep: Sweep, prior: Tensor, run: Run) -> Tensor:
    """The variance of every weight under the posterior of all of them, [n]."""
    from caveat.engine.linearised import marginal_variances  # solvers of linear models, for this score only

    return marginal_variances(task, sweep.network, sweep.params, sweep.hyper, prior, run)


SubnetworkLaplace.quick = SubnetworkLaplace(weights=0.2)
