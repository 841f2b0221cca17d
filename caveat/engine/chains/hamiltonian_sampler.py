"""HMC's loop: propose by a trajectory, accept or reject, adapt in the warm-up, write draws, checkpoint.

z', p' = L leapfrog steps of size eps from (z, p),  p ~ N(0, I);   accepted with probability min(1, exp(H - H'))
H = -(log p(D | theta) + log p(theta)) / T + |p|^2 / 2
"""

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from caveat.batches import tensors
from caveat.engine.chains.diagnostics import e_bfmi
from caveat.engine.chains.draw_store import DrawStore
from caveat.engine.chains.hamiltonian import DualAveraging
from caveat.engine.chains.log_posterior import LogPosterior
from caveat.engine.chains.parallel_chains import ParallelChains, random_stream
from caveat.engine.fresh_weights import FreshWeights
from caveat.engine.run import Run
from caveat.engine.running_moments import RunningMoments
from caveat.network import Network, Params
from caveat.storage import State

__all__ = ["HAMILTONIAN_STATS", "HamiltonianKnobs", "HamiltonianSampler"]

DIVERGED = 1000.0  # an energy error above it is a divergence
LONGEST_IN_WARMUP = 200  # leapfrog steps
LONGEST = 10_000  # leapfrog steps of a trajectory whose step size the warm-up found: more would take for ever
HOPELESS = 20  # iterations in a row, after the warm-up, in which every proposal of every chain diverged

# What is stored of each draw, and its type.
HAMILTONIAN_STATS = {
    "lp": torch.float64,  # the log density, without the temperature
    "energy": torch.float64,  # H before the trajectory
    "acceptance_rate": torch.float64,
    "step_size": torch.float64,
    "diverging": torch.bool,
    "n_steps": torch.int64,
}


class HamiltonianKnobs(Protocol):
    """The knobs of the sampler, as the method has them."""

    @property
    def length(self) -> int:
        """Draws of each chain."""

    @property
    def warmup(self) -> int:
        """Iterations before the first draw."""

    @property
    def step_size(self) -> float | None:
        """The step size eps; None finds it in the warm-up."""

    @property
    def trajectory(self) -> float:
        """The length L eps of a trajectory at a temperature of 1."""

    @property
    def jitter(self) -> float:
        """The share by which that length varies."""

    @property
    def target_acceptance(self) -> float:
        """The acceptance probability that the warm-up aims at."""

    @property
    def temperature(self) -> float:
        """T, which divides the log density."""

    @property
    def mass(self) -> Literal["identity", "diagonal"]:
        """Whether the warm-up measures a mass."""

    @property
    def splits(self) -> int:
        """Parts of the rows that take turns within a step."""

    @property
    def begin(self) -> Literal["layers", "prior"]:
        """Where the first weights come from."""


@dataclass
class _Position:
    """Where the chains of this process are, and the density there."""

    position: Tensor  # [chains, P]
    gradient: Tensor  # that of the first part of the rows, [chains, P]
    likelihood: Tensor  # log likelihood of all rows, [chains], float64
    prior: Tensor  # log prior, [chains], float64

    def tensors(self) -> Params:
        """All four by name."""
        return vars(self)


@dataclass(frozen=True)
class _Proposal:
    """Where trajectories led, and whether they are accepted; [chains], and as `_Position` has it."""

    end: _Position
    accepted: Tensor
    acceptance_rate: Tensor
    diverging: Tensor
    energy: Tensor  # before the trajectory


class HamiltonianSampler:
    """Moves chains and writes their draws; knows their positions, their step size and how far the run is."""

    def __init__(self, knobs: HamiltonianKnobs, chains: ParallelChains, store: DrawStore, run: Run) -> None:
        self.knobs, self.chains, self.store, self.run = knobs, chains, store, run
        self.iteration, self.divergences, self.hopeless = 0, 0, 0
        self.adaptation = DualAveraging.around(knobs.step_size or 0.1, knobs.target_acceptance)
        self.moments: RunningMoments | None = None  # of positions in the warm-up, [chains, P], for the mass
        self.now: _Position  # set by `begin` or by a checkpoint

    def run_all(self) -> None:
        """Run every iteration that has not been run yet."""
        resumed, total = self.run.resume(), self.knobs.warmup + self.knobs.length
        if resumed is None:
            self.begin()
        else:
            self._resume(*resumed)
        with self.run.bar(total, "draw") as bar:
            bar.update(self.iteration)
            while self.iteration < total:
                acceptance = self.iterate()
                bar.set_postfix_str(f"acceptance {acceptance:.2f}, step {self.step_size:.3g} x {self.steps}", False)
                bar.update()
                if self.chains.agreed(self.run.checkpoint_due()):
                    self._checkpoint()

    def begin(self) -> None:
        """Put the chains at their first weights, and find a step size to begin with."""
        network, coordinates = self.chains.network, self.store.coordinates
        starts, fresh_weights = [], FreshWeights(network)
        for chain in self.chains.mine:
            rng = random_stream(self.run.seed, "start", chain)
            params = fresh_weights(rng) if self.knobs.begin == "layers" else _from_prior(network, rng)
            starts.append(coordinates.at(params))
        self.run.warnings.extend(fresh_weights.notes())
        self.place(torch.stack(starts).to(network.device))
        likelihood, prior = self.now.likelihood, self.now.prior
        bad = (~torch.isfinite(likelihood + prior)).nonzero()
        if len(bad):
            raise ValueError(
                f"the log density where chain {self.chains.mine[int(bad[0])]} starts is not finite: log likelihood "
                f"{float(likelihood[bad[0]]):g}, log prior {float(prior[bad[0]]):g}; look at the likelihood, "
                "the prior and the network, or try another begin="
            )
        if self.knobs.step_size is None:
            self.adaptation = DualAveraging.around(self._first_step_size(), self.knobs.target_acceptance)

    def place(self, position: Tensor) -> None:
        """Put the chains of this process at a position [chains, P], and compute the density there."""
        zeros = torch.zeros(len(position), dtype=torch.float64, device=position.device)
        self.now = _Position(position, torch.zeros_like(position), zeros, zeros.clone())

        def compute(log_posterior: LogPosterior, which: slice) -> None:
            now, place = self.now, position[which]
            now.gradient[which] = self.chains.gradient(log_posterior, place)[1]
            now.likelihood[which], now.prior[which] = self.chains.densities(log_posterior, place)

        self.chains.each(compute)

    def _first_step_size(self) -> float:
        """The step size at which a single step is accepted half of the time: doubled or halved until it is crossed."""
        step, direction = 0.1, 0
        for attempt in range(60):
            proposals = self.chains.each(partial(self._propose, iteration=f"first/{attempt}", step_size=step, steps=1))
            acceptance = torch.cat([proposal.acceptance_rate for proposal in proposals])
            mean = float(self.chains.everyones(acceptance).mean())
            wanted = 1 if mean > 0.5 else -1
            if direction and wanted != direction:
                break
            direction, step = wanted, step * 2.0**wanted
        return step

    def _propose(
        self, log_posterior: LogPosterior, which: slice, iteration: Any, step_size: float, steps: int
    ) -> _Proposal:
        """Follow a trajectory from where some chains are, and decide whether it is accepted."""
        now, parts, size = self.now, self.knobs.splits, self.store.coordinates.size
        device, dtype = now.position.device, now.position.dtype
        streams = [random_stream(self.run.seed, iteration, chain) for chain in self.chains.mine[which]]
        momentum = torch.stack([torch.randn(size, generator=s, dtype=dtype) for s in streams]).to(device)
        threshold = torch.stack([torch.rand((), generator=s, dtype=torch.float64) for s in streams]).log().to(device)
        position, end, likelihood, gradient = self.chains.trajectory(
            log_posterior, now.position[which], momentum, now.gradient[which], step_size, steps
        )
        prior = log_posterior.log_prior(position)
        if parts > 1:
            likelihood = self.chains.densities(log_posterior, position)[0]
        before = self._energy(now.likelihood[which], now.prior[which], momentum)
        error = self._energy(likelihood, prior, end) - before
        diverging = ~(error.abs() <= DIVERGED)
        return _Proposal(
            _Position(position, gradient, likelihood, prior),
            accepted=(threshold < error.neg()) & ~diverging,
            acceptance_rate=error.neg().clamp_max(0).exp().masked_fill(diverging, 0.0),
            diverging=diverging,
            energy=before,
        )

    def _energy(self, likelihood: Tensor, prior: Tensor, momentum: Tensor) -> Tensor:
        return -(likelihood + prior) / self.knobs.temperature + 0.5 * momentum.double().square().sum(1)

    def _move(
        self, log_posterior: LogPosterior, which: slice, iteration: int, step_size: float, steps: int
    ) -> _Proposal:
        """Move some chains where their proposals are accepted."""
        proposal = self._propose(log_posterior, which, iteration, step_size, steps)
        end, accepted = proposal.end.tensors(), proposal.accepted
        for name, tensor in self.now.tensors().items():
            condition = accepted if tensor.ndim == 1 else accepted[:, None]
            tensor[which] = torch.where(condition, end[name], tensor[which])
        return proposal

    @property
    def step_size(self) -> float:
        """The step size of this iteration: as given, or as the warm-up adapts it, and then the average of that."""
        if self.knobs.step_size is not None:
            return self.knobs.step_size
        return math.exp(self.adaptation.log_step) if self.iteration < self.knobs.warmup else self.adaptation.average

    @property
    def steps(self) -> int:
        """The leapfrog steps of this iteration."""
        share = 1.0
        if self.knobs.jitter:
            rng = random_stream(self.run.seed, "length", self.iteration)
            share += self.knobs.jitter * (2 * float(torch.rand((), generator=rng, dtype=torch.float64)) - 1)
        length = self.knobs.trajectory
        if self.store.coordinates.width is None:  # widths that were measured include the temperature already
            length *= math.sqrt(self.knobs.temperature)
        steps = max(1, math.ceil(share * length / self.step_size))
        return min(steps, LONGEST_IN_WARMUP) if self.iteration < self.knobs.warmup else steps

    def iterate(self) -> float:
        """Move every chain once; returns the mean acceptance probability."""
        if self.iteration == self.knobs.warmup and self.knobs.step_size is None:
            self._check_length()
        warming, step_size, steps = self.iteration < self.knobs.warmup, self.step_size, self.steps
        proposals = self.chains.each(partial(self._move, iteration=self.iteration, step_size=step_size, steps=steps))
        passes = (2 * self.knobs.splits - 1) / self.knobs.splits
        self.chains.count_cost(steps * passes * self.chains.count)
        stats = {
            name: self.chains.everyones(torch.cat([getattr(proposal, name) for proposal in proposals]))
            for name in ("acceptance_rate", "diverging", "energy")
        }
        acceptance, diverging = float(stats["acceptance_rate"].mean()), stats["diverging"]
        self._check(bool(diverging.all()), warming)
        if warming:
            self._adapt(acceptance)
        else:
            self.divergences += int(diverging.sum())
            stats["lp"] = self.chains.everyones(self.now.likelihood + self.now.prior)
            stats["step_size"] = torch.full_like(stats["lp"], step_size)
            stats["n_steps"] = torch.full_like(diverging, steps, dtype=torch.int64)
            weights = self.store.coordinates.weights(self.now.position)
            self.store.write(self.iteration - self.knobs.warmup, self.chains.everyones(weights), stats)
        self.iteration += 1
        return acceptance

    def _check_length(self) -> None:
        """Refuse trajectories of so many steps that the draws would not come back."""
        if self.steps <= LONGEST:
            return
        raise ValueError(
            f"the warm-up found a step size of {self.step_size:.2g}, at which every draw would take {self.steps:,} "
            "leapfrog steps: the posterior is far narrower than the prior in some direction, as it is where inputs or "
            f"targets are large{self._size_of_inputs()}. Standardise the inputs, and the targets by "
            "Gaussian(standardise=True); otherwise give a shorter trajectory, mass='diagonal', or a step_size to go on "
            "with nevertheless"
        )

    def _size_of_inputs(self) -> str:
        """How large the first inputs are, in brackets; nothing where they are no real numbers."""
        sizes = [t.abs().max() for t in tensors(next(iter(self.chains.pieces.part()))[0]) if t.is_floating_point()]
        return f" (inputs here are up to {float(max(sizes)):.3g})" if sizes else ""

    def _check(self, all_diverged: bool, warming: bool) -> None:
        """Refuse to go on where no proposal is ever accepted."""
        self.hopeless = self.hopeless + 1 if all_diverged else 0
        given = self.knobs.step_size is not None
        if self.hopeless >= HOPELESS and (given or not warming):
            raise ValueError(
                f"every proposal diverged for {HOPELESS} iterations, at a step size of {self.step_size:.3g}: give a "
                f"smaller step_size, or {'none, so that the warm-up finds one' if given else 'a longer warmup'}"
            )
        if self.step_size < 1e-9 and not given:
            raise ValueError(
                "the warm-up found no step size at which proposals are accepted, however small: the log density may "
                "jump or be NaN near the start, or inputs or targets may be so large that the posterior is too narrow "
                f"for the arithmetic{self._size_of_inputs()}: standardise them, look at the likelihood and the prior, "
                "or try begin='prior'"
            )

    def _adapt(self, acceptance: float) -> None:
        """Adapt to an iteration of the warm-up; half-way, forget what was learned far from the posterior."""
        knobs, now = self.knobs, self.iteration + 1
        self.adaptation.update(acceptance)
        if knobs.mass == "diagonal" and knobs.warmup // 4 <= now <= knobs.warmup // 2:
            positions = self.chains.everyones(self.now.position)
            self.moments = self.moments or RunningMoments.like(positions)
            self.moments.add(positions)
        if now == knobs.warmup // 2:
            if self.moments is not None:
                width = _posterior_width(self.moments)
                self._use_width(width)
                self.place(self.now.position / width)
            if knobs.step_size is None:
                self.adaptation = DualAveraging.around(self._first_step_size(), knobs.target_acceptance)

    def _use_width(self, width: Tensor) -> None:
        """Go on in coordinates in which the posterior has the same width in every direction, from widths [P]."""
        self.store.coordinates = self.store.coordinates.with_width(width)
        self.chains.use(self.store.coordinates)

    def _checkpoint(self) -> None:
        """Store what the next iteration depends on."""
        places = {name: self.chains.everyones(tensor) for name, tensor in self.now.tensors().items()}
        width, moments = self.store.coordinates.width, self.moments
        carry: State = {
            "chains": places,
            "spread": {} if moments is None else {"mean": moments.mean, "squares": moments.squares},
            "mass": {} if width is None else {"width": width},
        }
        numbers = {n: getattr(self, n) for n in ("iteration", "divergences", "hopeless")}
        numbers |= {"adaptation": asdict(self.adaptation), "count": 0 if moments is None else moments.count}
        self.run.checkpoint(carry, numbers | {"pieces": self.store.flush()})

    def _resume(self, carry: State, note: dict[str, Any]) -> None:
        device = self.chains.network.device
        self.store.take_up(note.get("pieces"))
        self.adaptation = DualAveraging(**note["adaptation"])
        self.iteration, self.divergences, self.hopeless = (note[n] for n in ("iteration", "divergences", "hopeless"))
        if carry["spread"]:
            mean, squares = (carry["spread"][name].to(device) for name in ("mean", "squares"))
            self.moments = RunningMoments(mean, squares, note["count"])
        if carry["mass"]:
            self._use_width(carry["mass"]["width"].to(device))
        self.now = _Position(**{name: t[self.chains.mine].to(device) for name, t in carry["chains"].items()})

    def diagnostics(self) -> dict[str, Any]:
        """What a person wants to know of the chains, as json; adds warnings to the run."""
        stats = self.store.stats
        if self.divergences:
            self.run.warnings.append(
                f"{self.divergences} of {self.chains.count * self.knobs.length} proposals diverged: the posterior has "
                "narrower places than the step size; raise target_acceptance"
            )
        if int(stats["n_steps"].max()) > LONGEST_IN_WARMUP:
            self.run.warnings.append(
                f"trajectories of the warm-up were cut at {LONGEST_IN_WARMUP} leapfrog steps; those of the draws had "
                f"up to {int(stats['n_steps'].max())}"
            )
        numbers = {"acceptance": stats["acceptance_rate"].mean(), "e_bfmi": e_bfmi(stats["energy"]).min()}
        diagnostics = {
            "step_size": float(stats["step_size"][0, -1]),
            "leapfrog_steps": int(stats["n_steps"].max()),
            "divergences": self.divergences,
        }
        return diagnostics | {n: float(v) if math.isfinite(v) else None for n, v in numbers.items()}


def _posterior_width(moments: RunningMoments) -> Tensor:
    """Standard deviations [P] of positions within chains, from moments [chains, P].

    They are drawn a little towards small ones, since few positions were seen.
    """
    chains, count = len(moments.mean), moments.count
    variance = moments.squares.sum(0) / (chains * (count - 1))
    seen = chains * count
    return ((seen * variance + 5 * 1e-3) / (seen + 5)).sqrt()


def _from_prior(network: Network, rng: torch.Generator) -> Params:
    try:
        return network.prior.sample(network.params(), rng)
    except (AttributeError, NotImplementedError) as error:
        raise ValueError(
            f"begin='prior' needs a prior that can be sampled, and {type(network.prior).__name__} cannot ({error}): "
            "give it sample(like, rng), or use begin='layers'"
        ) from error
