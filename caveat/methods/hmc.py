"""HMC: full-batch Hamiltonian Monte Carlo, the reference that other posteriors are measured against.

    z' , p' = L leapfrog steps of size eps from (z, p),  p ~ N(0, I);   accepted with probability min(1, exp(H - H'))
    H = -(log p(D | theta) + log p(theta)) / T + |p|^2 / 2,   theta = the weights at whitened coordinates z

Trajectories are pi/2 sqrt(T) long in units of the prior's width, L = length / eps, as Izmailov et al. (2021) choose
them. The step size is found in a warm-up by dual averaging, from all chains together, and then kept. A rejected
proposal counts the old state again. Nothing is estimated from a part of the data: what is left of an error is the
chains' finite length, which `caveat.diagnose` looks at.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from caveat.engine.chains import (
    Chains,
    Coordinates,
    DrawStore,
    DualAveraging,
    Lane,
    convergence,
    e_bfmi,
    integrate,
    random_stream,
    say_what_is_left_out,
    stored_draws,
)
from caveat.engine.fresh_weights import FreshWeights
from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.knobs import Count, NonNegativeInt, Positive, Range, check_knobs
from caveat.network import Network, Params
from caveat.storage import State
from caveat.task import Task

__all__ = ["HMC"]

DIVERGED = 1000.0  # an energy error above it is a divergence
LONGEST_IN_WARMUP = 200  # leapfrog steps
HOPELESS = 20  # iterations in a row, after warm-up, in which no proposal of any chain was sound


@dataclass(frozen=True)
class HMC(Method):
    """Hamiltonian Monte Carlo over all data: slow, and the closest there is to the true posterior."""

    chains: Count = 4
    length: Count = 400  # draws of each chain, after the warm-up
    warmup: NonNegativeInt = 100  # iterations that find the step size and are thrown away
    step_size: Positive | None = None  # in units of the prior's width; None finds it in the warm-up
    trajectory: Positive = math.pi / 2  # its length in the same units; times sqrt(temperature)
    jitter: Annotated[float, Range(0, 1, open_high=True)] = 0.2  # share by which the length varies
    target_acceptance: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.8  # that warm-up aims at
    temperature: Positive = 1.0  # divides the log density: below 1 a cold posterior
    mass: Literal["identity", "diagonal"] = "identity"  # "diagonal" scales by the spread that the warm-up saw
    splits: Count = 1  # parts of the rows that take turns within a step
    begin: Literal["layers", "prior"] = "layers"  # first weights: as the layers draw theirs, or from the prior
    starts_from: ClassVar[StartsFrom] = "fresh"
    quick: ClassVar["HMC"]

    def __post_init__(self) -> None:
        check_knobs(self)
        least = 100 if self.mass == "diagonal" else 20 if self.step_size is None else 0
        if self.warmup < least:
            raise ValueError(
                f"HMC(warmup={self.warmup}) is too short to find a {'mass' if least == 100 else 'step size'}: "
                f"{least} iterations or more, or step_size=... and mass='identity'"
            )

    @property
    def default_draws(self) -> int:
        """Every draw once."""
        return self.chains * self.length

    def memory(self, network: Network) -> int:
        """What moves a chain, and its copy of the network; room for the draws is looked for when the fit begins."""
        return self.chains * 8 * network.n_parameters * network.dtype.itemsize

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Warm up, then draw."""
        network = task.network.to(run.device)
        say_what_is_left_out(task, run)
        coordinates = Coordinates.of(network, task.hyper)
        kinds = dict.fromkeys(("lp", "energy", "acceptance_rate", "step_size"), torch.float64)
        kinds |= {"diverging": torch.bool, "n_steps": torch.int64}
        store = DrawStore(run, network.dtype, coordinates, (self.chains, self.length), kinds)
        with Chains(task, run, self.chains, coordinates, temperature=self.temperature, parts=self.splits) as chains:
            sampler = _Sampler(self, chains, store, run)
            sampler.run_all()
            run.ranks.wait()  # the first rank writes the last draw
        state: State = store.state | {"hyper": {n: t.to(run.device) for n, t in task.hyper.items()}}
        return state, run.info(network, f"{self.chains} x {self.length} draws by HMC", sampler.diagnostics())

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Stored draws: each as often as the others, in order."""
        return stored_draws(state, network, n, rng)


class _Sampler:
    """The chains' positions, their step size, and where the run is."""

    def __init__(self, method: HMC, chains: Chains, store: DrawStore, run: Run) -> None:
        self.method, self.chains, self.store, self.run = method, chains, store, run
        self.iteration, self.divergences, self.hopeless = 0, 0, 0
        self.adaptation = DualAveraging.around(method.step_size or 0.1, method.target_acceptance)
        self.spread = _Spread()

    def run_all(self) -> None:
        """Every iteration that is not done yet."""
        kept, total = self.run.resume(), self.method.warmup + self.method.length
        if kept is None:
            self._begin()
        else:
            self._go_on(*kept)
        with self.run.bar(total, "draw") as bar:
            bar.update(self.iteration)
            while self.iteration < total:
                acceptance = self._iterate()
                bar.set_postfix_str(f"acceptance {acceptance:.2f}, step {self.step_size:.3g} x {self.steps}", False)
                bar.update()
                if self.chains.agreed(self.run.checkpoint_due()):
                    self._keep()

    def _begin(self) -> None:
        """Chains at their first weights, and a step size to begin with."""
        network, coordinates = self.chains.network, self.store.coordinates
        starts, fresh_weights = [], FreshWeights(network)
        for chain in self.chains.mine:
            rng = random_stream(self.run.seed, "start", chain)
            params = fresh_weights(rng) if self.method.begin == "layers" else _from_prior(network, rng)
            starts.append(coordinates.at(params))
        self._place(torch.stack(starts).to(network.device))
        bad = (~torch.isfinite(self.likelihood + self.prior)).nonzero()
        if len(bad):
            raise ValueError(
                f"the log density where chain {self.chains.mine[int(bad[0])]} starts is not finite: log likelihood "
                f"{float(self.likelihood[bad[0]]):g}, log prior {float(self.prior[bad[0]]):g}; look at the likelihood, "
                "the prior and the network, or try another begin="
            )
        if self.method.step_size is None:
            self.adaptation = DualAveraging.around(self._first_step_size(), self.method.target_acceptance)

    def _place(self, position: Tensor) -> None:
        """Put the chains of this process somewhere."""
        self.position, self.gradient = position, torch.zeros_like(position)
        self.likelihood = torch.zeros(len(position), dtype=torch.float64, device=position.device)
        self.prior = self.likelihood.clone()

        def look(lane: Lane, own: slice) -> None:
            self.gradient[own] = self.chains.gradient(lane, position[own])[1]
            self.likelihood[own], self.prior[own] = self.chains.density(lane, position[own])

        self.chains.each(look)

    def _first_step_size(self) -> float:
        """Where one step is accepted half of the time: doubled or halved until that is crossed."""
        step, direction = 0.1, 0
        for attempt in range(60):
            moved = self.chains.each(partial(self._propose, iteration=f"first/{attempt}", step_size=step, steps=1))
            acceptance = torch.cat([one["acceptance_rate"] for one in moved])
            mean = float(self.chains.everyones(acceptance).mean())
            wanted = 1 if mean > 0.5 else -1
            if direction and wanted != direction:
                break
            direction, step = wanted, step * 2.0**wanted
        return step

    def _propose(self, lane: Lane, own: slice, iteration: Any, step_size: float, steps: int) -> Params:
        """Where a trajectory leads, and how likely it is to be accepted."""
        parts, device, size = self.method.splits, self.position.device, self.store.coordinates.size
        streams = [random_stream(self.run.seed, iteration, chain) for chain in self.chains.mine[own]]
        momentum = torch.stack([torch.randn(size, generator=s, dtype=self.position.dtype) for s in streams]).to(device)
        threshold = torch.stack([torch.rand((), generator=s, dtype=torch.float64) for s in streams]).log().to(device)
        position, end, likelihood, gradient = integrate(
            partial(self.chains.gradient, lane),
            self.position[own],
            momentum,
            self.gradient[own],
            step_size,
            steps,
            parts,
        )
        prior = lane.log_prior(position)
        if parts > 1:
            likelihood = self.chains.density(lane, position)[0]
        before = self._energy(self.likelihood[own], self.prior[own], momentum)
        error = self._energy(likelihood, prior, end) - before
        diverging = ~(error.abs() <= DIVERGED)
        acceptance = error.neg().clamp_max(0).exp().masked_fill(diverging, 0.0)
        return {
            "position": position,
            "gradient": gradient,
            "likelihood": likelihood,
            "prior": prior,
            "accepted": (threshold < error.neg()) & ~diverging,
            "acceptance_rate": acceptance,
            "diverging": diverging,
            "energy": before,
        }

    def _energy(self, likelihood: Tensor, prior: Tensor, momentum: Tensor) -> Tensor:
        return -(likelihood + prior) / self.method.temperature + 0.5 * momentum.double().square().sum(1)

    def _move(self, lane: Lane, own: slice, iteration: int, step_size: float, steps: int) -> Params:
        found = self._propose(lane, own, iteration, step_size, steps)
        accepted = found["accepted"]
        for name in ("position", "gradient", "likelihood", "prior"):
            before = getattr(self, name)[own]
            getattr(self, name)[own] = torch.where(
                accepted if before.ndim == 1 else accepted[:, None], found[name], before
            )
        return {name: found[name] for name in ("acceptance_rate", "diverging", "energy")}

    @property
    def step_size(self) -> float:
        """The one to use now: found while warming up, its average afterwards, unless it was given."""
        if self.method.step_size is not None:
            return self.method.step_size
        return math.exp(self.adaptation.log_step) if self.iteration < self.method.warmup else self.adaptation.average

    @property
    def steps(self) -> int:
        """Leapfrog steps of this iteration."""
        share = 1.0
        if self.method.jitter:
            drawn = torch.rand(
                (), generator=random_stream(self.run.seed, "length", self.iteration), dtype=torch.float64
            )
            share += self.method.jitter * (2 * float(drawn) - 1)
        length = self.method.trajectory
        if self.store.coordinates.width is None:  # widths that were measured hold the temperature already
            length *= math.sqrt(self.method.temperature)
        steps = max(1, math.ceil(share * length / self.step_size))
        return min(steps, LONGEST_IN_WARMUP) if self.iteration < self.method.warmup else steps

    def _iterate(self) -> float:
        """Move every chain once; returns the mean acceptance probability."""
        warming, step_size, steps = self.iteration < self.method.warmup, self.step_size, self.steps
        moved = self.chains.each(partial(self._move, iteration=self.iteration, step_size=step_size, steps=steps))
        passes = (2 * self.method.splits - 1) / self.method.splits
        self.chains.count_cost(steps * passes * self.chains.count)
        stats = {name: self.chains.everyones(torch.cat([one[name] for one in moved])) for name in moved[0]}
        acceptance, diverging = float(stats["acceptance_rate"].mean()), stats["diverging"]
        self._check(bool(diverging.all()), warming)
        if warming:
            self._adapt(acceptance)
        else:
            self.divergences += int(diverging.sum())
            stats["lp"] = self.chains.everyones(self.likelihood + self.prior)
            stats["step_size"] = torch.full_like(stats["lp"], step_size)
            stats["n_steps"] = torch.full_like(diverging, steps, dtype=torch.int64)
            weights = self.store.coordinates.weights(self.position)
            self.store.write(self.iteration - self.method.warmup, self.chains.everyones(weights), stats)
        self.iteration += 1
        return acceptance

    def _check(self, all_diverged: bool, warming: bool) -> None:
        self.hopeless = self.hopeless + 1 if all_diverged else 0
        given = self.method.step_size is not None
        if self.hopeless >= HOPELESS and (given or not warming):
            raise ValueError(
                f"every proposal diverged for {HOPELESS} iterations, at a step size of {self.step_size:.3g}: give a "
                f"smaller step_size, or {'none, so that the warm-up finds one' if given else 'a longer warmup'}"
            )
        if self.step_size < 1e-9 and not given:
            raise ValueError(
                "the warm-up found no step size at which proposals are accepted, however small: the log density may "
                "jump or be NaN near the start; look at the likelihood and the prior, or try begin='prior'"
            )

    def _adapt(self, acceptance: float) -> None:
        """Take in an iteration of the warm-up; what was learned far from the posterior is forgotten half-way."""
        method, now = self.method, self.iteration + 1
        self.adaptation.update(acceptance)
        if method.mass == "diagonal" and method.warmup // 4 <= now <= method.warmup // 2:
            self.spread.add(self.chains.everyones(self.position))
        if now == method.warmup // 2:
            if method.mass == "diagonal":
                width = self.spread.width()
                self._use_width(width)
                self._place(self.position / width)
            if method.step_size is None:
                self.adaptation = DualAveraging.around(self._first_step_size(), method.target_acceptance)

    def _use_width(self, width: Tensor) -> None:
        """Go on in coordinates in which the posterior is as wide as the warm-up saw it, in every direction."""
        self.store.coordinates = self.store.coordinates.with_width(width)
        self.chains.use(self.store.coordinates)

    def _keep(self) -> None:
        """What is needed to go on from here."""
        tensors = {n: self.chains.everyones(getattr(self, n)) for n in ("position", "gradient", "likelihood", "prior")}
        width = self.store.coordinates.width
        mass = {} if width is None else {"width": width}
        carry: State = {"chains": tensors, "spread": self.spread.tensors, "mass": mass}
        numbers = {n: getattr(self, n) for n in ("iteration", "divergences", "hopeless")}
        self.store.flush()
        self.run.checkpoint(carry, numbers | {"adaptation": asdict(self.adaptation), "count": self.spread.count})

    def _go_on(self, carry: State, note: dict[str, Any]) -> None:
        device = self.chains.network.device
        self.adaptation = DualAveraging(**note.pop("adaptation"))
        self.spread = _Spread(note.pop("count"), {name: value.to(device) for name, value in carry["spread"].items()})
        for name, value in note.items():
            setattr(self, name, value)
        if carry["mass"]:
            self._use_width(carry["mass"]["width"].to(device))
        for name, value in carry["chains"].items():
            setattr(self, name, value[self.chains.mine].to(device))

    def diagnostics(self) -> dict[str, Any]:
        """What a person wants to know of the chains."""
        stats = self.store.state["stats"]
        if self.divergences:
            self.run.warnings.append(
                f"{self.divergences} of {self.chains.count * self.method.length} proposals diverged: the posterior has "
                "narrower places than the step size; raise target_acceptance"
            )
        if int(stats["n_steps"].max()) > LONGEST_IN_WARMUP:
            self.run.warnings.append(
                f"trajectories of the warm-up were cut at {LONGEST_IN_WARMUP} leapfrog steps; those of the draws had "
                f"up to {int(stats['n_steps'].max())}"
            )
        found = convergence(stats["lp"].unsqueeze(-1))
        numbers = {
            "acceptance": stats["acceptance_rate"].mean(),
            "rhat_lp": found.rhat,
            "ess_lp": found.ess_bulk,
            "e_bfmi": e_bfmi(stats["energy"]).min(),
        }
        diagnostics = {
            "step_size": float(stats["step_size"][0, -1]),
            "leapfrog_steps": int(stats["n_steps"].max()),
            "divergences": self.divergences,
        }
        return diagnostics | {n: float(v) if math.isfinite(v) else None for n, v in numbers.items()}


@dataclass
class _Spread:
    """The variance of positions within chains, one iteration after the other (Welford)."""

    count: int = 0
    tensors: Params = field(default_factory=dict)  # mean and sum of squares, [chains, P]

    def add(self, position: Tensor) -> None:
        if not self.tensors:
            self.tensors = {"mean": torch.zeros_like(position), "squares": torch.zeros_like(position)}
        self.count += 1
        mean, before = self.tensors["mean"], position - self.tensors["mean"]
        mean += before / self.count
        self.tensors["squares"] += before * (position - mean)

    def width(self) -> Tensor:
        """Standard deviations [P], drawn a little towards small ones, since few draws were seen."""
        chains, count = len(self.tensors["mean"]), self.count
        variance = self.tensors["squares"].sum(0) / (chains * (count - 1))
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


HMC.quick = HMC(chains=2, length=40, warmup=40)
