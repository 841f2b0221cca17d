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

from caveat.engine.laplace import LaplaceMethod, Score, Structure, Sweep, flat_prior, places, select, structure_bytes
from caveat.engine.linearised import copies_of_the_weights
from caveat.engine.run import Info, Run
from caveat.network import Layer, Network
from caveat.storage import State, describe
from caveat.task import Task

__all__ = ["SubnetworkLaplace"]


@dataclass(frozen=True, eq=False)
class SubnetworkLaplace(LaplaceMethod):
    """A Gaussian with full covariance over a chosen subnetwork; the other weights stay at their MAP values."""

    weights: int | float | str = 0.01  # how many, a share of the network, or a layer or pattern of names to take whole
    score: Score | Tensor = "energy"  # by which weights are chosen; or one number a weight, the highest taken
    keep_dead: bool = False  # whether weights without curvature may be chosen
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

    @property
    def _rank(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SubnetworkLaplace) and describe(self) == describe(other)  # a score may be a tensor

    def __hash__(self) -> int:
        return hash(describe(self))

    def memory(self, network: Network) -> int:
        """Scores of all weights; `check` knows how many rows there are, and so the precision matrix."""
        sampled = isinstance(self.score, str) and self.score.startswith("sampled")
        samples = copies_of_the_weights(64, 16, 64) * network.n_parameters * network.dtype.itemsize if sampled else 0
        return structure_bytes(network, "full") + samples

    def about(self, task: Task, network: Network) -> tuple[Network, int, Structure]:
        """The parameters that a pattern names, or all, of which some weights will be chosen."""
        if isinstance(self.weights, str):
            layer = f"{self.weights}."
            names = [n for n in network.names if fnmatchcase(n, self.weights) or n.startswith(layer)]
            if not names:
                raise ValueError(
                    f"weights={self.weights!r} matches no parameter that inference is about: {list(network.names)[:8]}"
                )
            whole = network.restricted(names)
            return whole, whole.n_parameters, "full"
        n = network.n_parameters
        if isinstance(self.score, Tensor) and self.score.numel() != n:
            given = self.score.numel()
            raise ValueError(f"score has {given:,} numbers, but the network has {n:,} weights: give one to each")
        if isinstance(self.weights, float):
            return network, max(1, round(self.weights * n)), "full"
        if self.weights > n:
            raise ValueError(f"weights={self.weights:_} is more than the network has ({n:,})")
        return network, self.weights, "full"

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Choose weights; one pass over the data for their covariance; the prior precision."""
        network, count, _ = self.about(task, task.network.to(run.device))
        if isinstance(self.weights, str):
            return self._over(task, start, run, network, None, {"subnetwork": {"weights": count}})
        prior = flat_prior(network, start["params"])
        sweep = Sweep(network, dict(start["params"]), start["hyper"], task.train, run, "exact", self._bfloat16)
        part = run.child("choice")
        kept_choice = part.appended("choice")  # of a killed run: its curvature belongs to these weights
        if kept_choice is None:
            selection = select(task, sweep, count, self.score, prior, part, self.keep_dead)
            index, report = selection.index, selection.report
            if run.ranks.first:
                part.append("choice", {"choice": {"index": index}}, report)
        else:
            index, report = kept_choice[0]["choice"]["index"], kept_choice[1]
        run.absorb(part)
        kept = [n for n, p in places(network).items() if bool(((index >= p.start) & (index < p.stop)).any())]
        own = network.restricted(kept)
        before, after = places(network), places(own)
        moved = [index[(index >= before[n].start) & (index < before[n].stop)] for n in kept]
        shifted = [piece - before[n].start + after[n].start for n, piece in zip(kept, moved, strict=True)]
        local = torch.cat(shifted).to(run.device)
        return self._over(task, start, run, own, local, {"subnetwork": report})

    @property
    def _bfloat16(self) -> bool:
        return self.arithmetic == "bfloat16"

    def _over(
        self, task: Task, start: State, run: Run, network: Network, index: Tensor | None, report: dict[str, Any]
    ) -> tuple[State, Info]:
        counts: dict[str, int] = {}
        for name, place in places(network).items():
            whole = place.stop - place.start
            chosen = whole if index is None else int(((index >= place.start) & (index < place.stop)).sum())
            layer = name.rpartition(".")[0]
            counts[layer] = counts.get(layer, 0) + chosen

        def treatment(layer: Layer) -> str:
            chosen = counts.get(layer.name, 0)
            if not chosen:
                return "fixed at the MAP"
            return f"Gaussian, full covariance over {chosen:,} of {layer.selected:,} weights"

        return self._laplace(task, start, run, network, index, "full", treatment=treatment, diagnostics=report)


SubnetworkLaplace.quick = SubnetworkLaplace(weights=0.2)
