"""AEB: draws of a network that is pruned under an adaptive spike-and-slab prior (Deng et al. 2019).

    beta ~ slab N(0, sigma^2 v1) with probability delta of its layer, else spike Laplace(0, sigma v0)

Stochastic gradient MCMC moves the weights. After every step, stochastic approximation moves the inclusion
probabilities, delta and sigma (`SpikeSlab`), and the smallest weights of each layer are set to zero, more of them as
the burn-in goes on. The weights that are left at its end are those of all draws, which share their places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.chains import LangevinChain, LearnedNoise
from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.sparse import (
    Account,
    LayerGeometry,
    Scheme,
    Substitute,
    WeightLayout,
    active_counts,
    dense_layers,
    inferred_weights,
    parameter_name,
    stored_counts,
    training_account,
)
from caveat.engine.sparse_chains import DrawsPredictor, DrawsState, SpikeSlab, check_draws
from caveat.engine.state_checks import check_names
from caveat.engine.training import BatchPart
from caveat.engine.variational import held_by, smaller_layout
from caveat.knobs import Count, NonNegativeInt, Positive, Range, check_knobs
from caveat.network import Layer, Network
from caveat.priors import EmpCovPrior
from caveat.storage import State
from caveat.task import Task

__all__ = ["AEB"]


@dataclass(frozen=True)
class AEB(Method):
    """SG-MCMC under a spike-and-slab prior that adapts, with weights pruned along the way."""

    density: Annotated[float, Range(0, 1, open_low=True)] = 0.1  # share of the weights that are left
    dense: tuple[str, ...] | Literal["first"] = "first"  # layers that keep all weights; "first" is a first convolution
    spike: Positive = 0.02  # v0: the scale of excluded weights, in units of sigma
    slab: Positive = 1.0  # v1: the variance of included weights, in units of sigma^2
    burn_in: NonNegativeInt | None = None  # epochs in which weights are removed; None: 100, or 2,000 steps if more
    length: Count = 20  # draws
    thin: Count | None = None  # epochs from one draw to the next; None: 2, or 50 steps if that is more
    learning_rate: Positive | None = None  # eta times the number of rows; None finds it in the burn-in
    momentum: Annotated[float, Range(0, 1, open_high=True)] = 0.9  # 0 is SGLD, above it SGHMC
    temperature: Positive = 0.03  # 1 is the posterior; below 1 it is cold, and pruning finds better weights
    batch_size: Count | None = None  # rows of a batch; the loader's unless given
    starts_from: ClassVar[StartsFrom] = "trained"
    quick: ClassVar["AEB"]

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def default_draws(self) -> int:
        """Every draw once."""
        return self.length

    def pruned(self, network: Network) -> tuple[dict[str, LayerGeometry], dict[str, int]]:
        """The layers that are pruned, and how many weights each of them ends with."""
        layers = inferred_weights(network)
        dense = dense_layers(layers, self.dense)
        left = active_counts(layers, self.density, "uniform", dense)
        chosen = {name: geometry for name, geometry in layers.items() if name not in dense}
        if not chosen:
            raise ValueError(f"dense={self.dense!r} keeps every layer whole: leave one to prune")
        return chosen, {name: left[name] for name in chosen}

    def memory(self, network: Network) -> int:
        """Values, gradients, velocities, noise and inclusion probabilities of all weights, and the draws."""
        _, left = self.pruned(network)
        return network.dtype.itemsize * (6 * network.n_parameters + self.length * sum(left.values()))

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Prune along the burn-in, then draw."""
        network = task.network.to(run.device)
        layers, left = self.pruned(network)
        target = _Pruned(self, task, network, start, run, layers, left)
        chain = LangevinChain(task, run, self, target)
        drawn, layout = chain.run_all(), target.substitute.layout
        counts = stored_counts(network, layout.counts)
        state = DrawsState.of_chain(drawn, layout.indices, counts, target.noise.fixed)
        return state.tensors(), self._info(state, task, target, chain, run)

    def _info(self, state: DrawsState, task: Task, target: "_Pruned", chain: LangevinChain, run: Run) -> Info:
        latent, layout = target.latent, target.substitute.layout
        included = [float((part > 0.5).double().mean()) for part in latent.inclusion.split(latent.counts)]
        diagnostics: dict[str, Any] = {
            "draws": self.length,
            "sigma": float(latent.variance.sqrt()),
            "delta": dict(zip(layout.counts, latent.share.tolist(), strict=True)),
            "included": dict(zip(layout.counts, included, strict=True)),
            "ran_sparse": target.substitute.ran_sparse(),
        }
        account, what = target.accounts[1], f"{self.length} draws by SG-MCMC"
        diagnostics |= chain.check() | check_draws(state, task, run)
        diagnostics |= {"history": chain.history, "density": account.density, "account": account.as_json()}

        def treatment(layer: Layer) -> str:
            held = held_by(layer, layout)
            return f"{what}, {held[0]:,} of {held[1]:,} weights" if held is not None else what

        return run.info(task.network.to(run.device), treatment, diagnostics)

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not as many draws of the network as the knobs say."""
        check_names("state", state, ["active", "rest", "hyper"], ["slices"])
        DrawsState.of(state).check(network, self.length)

    def predictor(self, state: State, network: Network) -> DrawsPredictor:
        """What predicts by sending inputs through each draw's own network."""
        return DrawsPredictor(DrawsState.of(state), network)


class _Pruned:
    """The target of the chain: the weights of a network that is being pruned, and then of the one that is left."""

    def __init__(
        self,
        method: AEB,
        task: Task,
        network: Network,
        start: State,
        run: Run,
        layers: dict[str, LayerGeometry],
        left: dict[str, int],
    ) -> None:
        self.method, self.task, self.run, self.left = method, task, run, left
        _check_prior(network, layers)
        nowhere = torch.zeros(0, dtype=torch.int32, device=run.device)
        layout = WeightLayout(layers, {name: geometry.size for name, geometry in layers.items()}, nowhere)
        self.substitute = Substitute(network, layout, start["params"])
        values = layout.gathered({name: start["params"][own] for name, own in layout.parameter_names().items()})
        self.latent = SpikeSlab([*layout.counts.values()], method.spike, method.slab, values)
        self.noise = LearnedNoise(network, task.hyper, start["hyper"])
        parameters = dict(self.substitute.network.module.named_parameters())
        rest = {name: parameters[name].requires_grad_() for name in self.substitute.network.names}
        self.moved = {"active": values.clone().requires_grad_()} | rest | self.noise.moved
        self.nothing = values.new_empty(0)
        self.places: Tensor | None = None  # of the weights that are left, among all; once the burn-in is over
        scheme = Scheme(gaussian=False, optimizer="sgd")
        few = WeightLayout(layers, left, nowhere)
        self.accounts: tuple[Account, Account] = (
            training_account(task, layout, run, scheme),
            training_account(task, few, run, scheme),
        )

    @property
    def values(self) -> Tensor:
        """The flat weights that there are, [size]."""
        return self.moved["active"]

    def log_joint(self, x: Inputs, y: Tensor, part: BatchPart) -> Tensor:
        """The log joint density of a batch; the weights have the spike-and-slab prior, everything else the task's."""
        return self.log_smooth(x, y, part) + part.prior_share * self.latent.log_prior(self.values)

    def log_smooth(self, x: Inputs, y: Tensor, part: BatchPart) -> Tensor:
        """The same without the spike-and-slab prior: its kink at zero moves weights, but lets no step run away."""
        # The layers' graph of the last step goes first: where that was not recorded and this one is, weights would
        # go on taking gradients on that one's stream, which CUDA does not record.
        self.substitute.forget(self.nothing)
        self.substitute.use(self.values)
        outputs = self.substitute.network.training_pass(x)
        likelihood = self.task.log_joint(outputs, y, {}, self.noise.hyper, batch_rows=part.batch_rows, share=0.0)
        rest = {name: self.moved[name] for name in self.substitute.network.names}
        prior = self.noise.log_prior() + (self.task.network.prior.log_prob(rest) if rest else 0.0)
        return likelihood + part.prior_share * prior

    @property
    def arrangement(self) -> object:
        """Which weights there are."""
        return self.substitute.layout

    def written(self) -> list[Tensor]:
        """The latent quantities, and statistics of the module."""
        return [*self.latent.tensors().values(), *self.substitute.network.module.buffers()]

    def numbers(self, chain: LangevinChain, step: int) -> list[float]:
        """The share of the weights that are to go which are zero after a step, and the share of the latents' way."""
        gone = 1 - torch.tensor(-10 * chain.burnt_in(step + 1)).exp().item()
        return [gone, self.latent.share_of_way(step)]

    def follow(self, numbers: Sequence[float] | Tensor) -> None:
        """Set the smallest weights to zero, then let the latent quantities follow."""
        with torch.no_grad():
            if self.places is None:
                self._truncate(numbers[0])
            self.latent.update(self.values, numbers[1])

    def _truncate(self, share: float | Tensor) -> None:
        """Set to zero, in each layer, a share of the weights that are to go: the smallest, which may grow again."""
        for name, part in self.substitute.layout.split(self.values):
            size, to_go = part.abs(), len(part) - self.left[name]
            if isinstance(share, Tensor):  # of a recorded step, in which how many go must not be looked at
                count = (share * to_go).long()
                largest = size.sort().values.index_select(0, (count - 1).clamp_min(0).view(1))
                part.masked_fill_((size <= largest) & (count > 0), 0)
            elif gone := int(share * to_go):
                part.masked_fill_(size <= size.kthvalue(gone).values, 0)

    def decides_after(self, step: int) -> bool:
        """Never: what is removed for good is so at the end of an epoch."""
        return False

    def decide(self, chain: LangevinChain, batch: tuple[Inputs, Tensor] | None, part: BatchPart) -> None:
        """Not called."""

    def after_epoch(self, chain: LangevinChain) -> None:
        """At the end of the burn-in, go on with the largest weights of each layer alone."""
        self.run.ranks.average(self.substitute.network.module.buffers())
        if chain.epoch >= chain.burn_in and self.places is None:
            parts, before = [], 0
            for name, part in self.substitute.layout.split(self.values.detach()):
                parts.append(before + part.abs().topk(self.left[name]).indices.sort().values)
                before += len(part)
            self._settle(torch.cat(parts))
            chain.velocity["active"] = chain.velocity["active"][self.places]

    def _settle(self, places: Tensor) -> None:
        keep = torch.zeros(len(self.values), dtype=torch.bool, device=places.device).index_fill(0, places, True)
        self.substitute.arrange(smaller_layout(self.substitute.layout, keep))
        self.moved["active"] = self.values.detach()[places].clone().requires_grad_()
        self.latent.select(places, [*self.left.values()])
        self.places = places

    def flops(self) -> float:
        """Operations of a row: as long as weights may come back, those with all of them."""
        return self.accounts[self.places is not None].total.training_flops

    def draw(self) -> State:
        """A draw: the weights that are left, and everything else."""
        learned = {name: t.detach().clone() for name, t in self.noise.moved.items()}
        return {"active": {"mean": self.values.detach().clone()}, "rest": self.substitute.rest() | learned}

    def carry(self) -> State:
        """What a checkpoint keeps: the latent quantities, which weights are left, and statistics."""
        places = {} if self.places is None else {"places": self.places}
        buffers = dict(self.substitute.network.module.named_buffers())
        return {"latent": self.latent.tensors(), "places": places, "buffers": buffers}

    def restore(self, carry: State) -> None:
        """Go on from a checkpoint."""
        if carry["places"]:
            self._settle(carry["places"]["places"].to(self.run.device))
        self.latent.restore(carry["latent"])
        for name, buffer in self.substitute.network.module.named_buffers():
            buffer.copy_(carry["buffers"][name])


def _check_prior(network: Network, layers: dict[str, LayerGeometry]) -> None:
    prior = network.prior
    pruned = {parameter_name(name, geometry) for name, geometry in layers.items()}
    if isinstance(prior, EmpCovPrior) and prior.layer in pruned:
        raise ValueError(
            f"AEB gives weights that it prunes a prior of its own, and {prior.layer}, which this task's EmpCovPrior is "
            "about, is among them: keep that layer whole with dense=, or use another prior"
        )


AEB.quick = AEB(density=0.3, burn_in=20, length=10, thin=1)
