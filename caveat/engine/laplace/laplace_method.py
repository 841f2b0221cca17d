"""What every Laplace method shares: the knobs, the way from a point to a Gaussian, and predictions from it.

At the MAP w* the posterior is approximated by N(w*, P^-1), P = GGN + prior precision, and the network by its
linearisation f(x, w) ~ f(x, w*) + J(x) (w - w*), so that outputs are Gaussian: N(f(x, w*), J P^-1 J^T).
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from caveat.batches import Inputs, count_rows, map_tensors, move, slices
from caveat.engine.cost import refuse_if_too_large
from caveat.engine.laplace.gaussians import DOUBLE_UP_TO, Curvature, Full, Gaussian, Rows
from caveat.engine.laplace.layer_gaussians import Kronecker, Layered, restored
from caveat.engine.laplace.memory import Structure, full_bytes, structure_bytes, what_fits
from caveat.engine.laplace.prior_precision import Precision, Tuned, Tuner
from caveat.engine.laplace.sweep import Fisher, Sweep, exact_columns, places
from caveat.engine.row_gradients import Jacobian, evenly
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.torch_settings import plain_attention
from caveat.engine.weight_draws import push_draws
from caveat.knobs import Count, Positive, Share, check_knobs
from caveat.likelihoods import Categorical, Hyper, Likelihood
from caveat.likelihoods import Gaussian as GaussianLikelihood
from caveat.network import Layer, Network, Params
from caveat.priors import GaussianPrior
from caveat.rows import Rows as DataRows
from caveat.storage import State
from caveat.task import Task

__all__ = ["Arithmetic", "LaplaceMethod", "Prediction", "Structure", "flat_prior", "with_gradients"]

Prediction = Literal["auto", "samples", "weights", "closed", "bridge"]
Arithmetic = Literal["full", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class LaplaceMethod(ABC):
    """The knobs that all have, and everything but which weights and which structure."""

    # The prior's: auto takes validation or, without validation rows, evidence; given is the task's own; scaled, that
    # times the share of weights chosen; layers finds one a layer by evidence; or a number.
    precision: Precision | Positive = "auto"
    # By linearised draws, weight draws, in closed form (exact for Gaussian noise, probit for classes), by the Laplace
    # bridge; auto is closed for Gaussian noise of one level and samples otherwise.
    prediction: Prediction = "auto"
    fisher: Fisher = "exact"  # mc: one random cotangent a row, cheaper by the number of outputs
    arithmetic: Arithmetic = "full"  # of the curvature; bfloat16: passes in bfloat16, sums in float32
    skip: Share = 1e-4  # share of the data's information that may be left out, in rows that say least
    n_draws: Count = 100  # of a prediction
    structured: ClassVar[str] = "Laplace"  # the method that has other structures for its weights
    starts_from: ClassVar[StartsFrom] = "trained"
    likelihoods: ClassVar = ("Categorical", "Bernoulli", "Gaussian", "HeteroscedasticGaussian", "Poisson")

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def default_draws(self) -> int:
        """As the knob says."""
        return self.n_draws

    def closed_form(self, likelihood: Likelihood) -> bool:
        """Where it is asked for, or exact: a mixture of draws would be lumpy where the noise is small."""
        return self.prediction == "closed" or (self.prediction == "auto" and isinstance(likelihood, GaussianLikelihood))

    @abstractmethod
    def about(self, task: Task, network: Network) -> tuple[Network, int, Structure]:
        """The network restricted to the parameters concerned, how many of its weights are chosen, their structure."""

    def check(self, task: Task, device: torch.device) -> None:
        """Refuse what can be refused before a start is trained; memory as if no row were left out."""
        network = task.network
        own, n, structure = self.about(task, network)
        flat_prior(own, network.params())
        first, targets = task.outputs(network, network.params(), task.train.part(torch.arange(1)))
        self._check_knobs(task, network, first)
        rank = 1 if self.fisher == "mc" else exact_columns(network, first, targets, task.hyper)
        self._refuse_if_too_large(task, own, n, structure, task.n * rank, device)

    @abstractmethod
    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Choose weights and structure, then `_laplace`."""

    def _laplace(
        self,
        task: Task,
        start: State,
        run: Run,
        network: Network,
        index: Tensor | None,
        structure: Structure,
        treatment: str | Callable[[Layer], str] | None = None,
        diagnostics: dict[str, Any] | None = None,
    ) -> tuple[State, Info]:
        """The Gaussian over chosen weights of a (restricted) network on the run's device."""
        params, hyper = dict(start["params"]), dict(start["hyper"])
        if hyper.pop("temperature", None) is not None:
            run.warnings.append("the start's temperature was left out: the posterior's own width takes its place")
        network.found.pop("inverse", None)  # of an earlier posterior
        prior, weights = _chosen(flat_prior(network, params), index), _chosen(_flat(network, params), index)
        rows, skipped = self._informative(task, network, params, hyper, run)
        sweep = Sweep(network, params, hyper, rows, run, self.fisher, self.arithmetic == "bfloat16")
        curvature = self._curvature(task, sweep, index, structure)
        log_likelihood = sweep.log_likelihood
        if skipped["rows"] or sweep.bfloat16:  # not of all rows, or too coarse
            log_likelihood = float(task.log_likelihood(network, params, hyper)) * task.n
        tuner = Tuner(curvature, prior, weights, log_likelihood, run)
        tuned = self._tuned(tuner, task, sweep, index)
        state: State = {"params": params, "hyper": tuned.hyper or hyper, "gaussian": tuned.gaussian.tensors()}
        if index is not None or network.names != task.network.names:
            state["subnetwork"] = _subnetwork(network, index)
        report = (
            (diagnostics or {}) | tuned.report | {"rows_skipped": skipped, "form": type(curvature).__name__.lower()}
        )
        general = sweep.jacobian(index).plan.general
        if general:
            report["general_gradients"] = list(general)
        if treatment is None:
            treatment = _treatment(curvature, structure, network)
        return state, run.info(task.network, treatment, report)

    def _check_knobs(self, task: Task, network: Network, outputs: Tensor) -> None:
        kind = type(network.likelihood).__name__
        if network.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"a Laplace approximation needs weights in float32 or float64, and these are {network.dtype}: use "
                "module.float(), and arithmetic='bfloat16' for speed"
            )
        if self.prediction == "bridge" and not isinstance(network.likelihood, Categorical):
            raise ValueError(f"prediction='bridge' is for classes, and this is {kind}: use 'samples' or 'closed'")
        if self.prediction == "bridge" and outputs.ndim != 2:
            raise ValueError("prediction='bridge' is for one target a row: use 'samples' or 'closed'")
        if self.prediction == "closed" and kind == "Poisson":
            raise ValueError("a Poisson prediction has no closed form: use prediction='samples'")
        if self.precision == "validation" and task.validation is None:
            raise ValueError(
                "precision='validation' needs validation rows: give the task validation=0.1, or a loader; "
                "or use precision='evidence'"
            )

    def _informative(
        self, task: Task, network: Network, params: Params, hyper: Hyper, run: Run
    ) -> tuple[DataRows, dict[str, float]]:
        """Training rows without those whose Fisher information is negligible, and how much they had."""
        if not self.skip:
            return task.train, {"rows": 0, "share_of_information": 0.0}
        traces = Sweep(network, params, hyper, task.train, run).traces().double().cpu()
        order = traces.argsort()
        below = (traces[order].cumsum(0) <= self.skip * traces.sum()) & (traces[order] < 0.01 * traces.mean())
        count = int(below.sum())
        kept = order[count:].sort().values
        share = float(traces[order[:count]].sum() / traces.sum().clamp_min(1e-300))
        return task.train.part(kept), {"rows": count, "share_of_information": share}

    def _curvature(self, task: Task, sweep: Sweep, index: Tensor | None, structure: Structure) -> Curvature:
        if structure in ("kronecker", "diagonal"):
            return sweep.layered(structure == "kronecker")
        if structure == "low_rank":
            return sweep.low_rank(self._rank)
        n = sweep.network.n_parameters if index is None else len(index)
        m = len(sweep.rows) * sweep.rank()
        self._refuse_if_too_large(task, sweep.network, n, structure, m, sweep.network.device)
        return sweep.stacked(index) if m < n else sweep.full(index)

    def _refuse_if_too_large(
        self, task: Task, network: Network, n: int, structure: Structure, m: int, device: torch.device
    ) -> None:
        """For n weights of a (restricted) network and m rows of gradients."""
        tuned = isinstance(self.precision, str) and self.precision not in ("given", "scaled")
        needed = structure_bytes(network, structure, self._rank)
        what = f"a {structure} structure over {n:,} weights"
        if structure == "full":
            needed = max(needed, full_bytes(n, m, network.dtype.itemsize, tuned))
            what += f" ({m:,} rows of gradients)" if m < n else " (the precision matrix)"
        own = network if self.structured == "LastLayerLaplace" else task.network
        refuse_if_too_large(
            what, needed, device, lambda free: what_fits(task.network, own, self.structured, m, tuned, free)
        )

    def _tuned(self, tuner: Tuner, task: Task, sweep: Sweep, index: Tensor | None) -> Tuned:
        how = self.precision
        if how == "auto":
            how = "evidence" if task.validation is None else "validation"
        if isinstance(how, float | int):
            tuner = replace(tuner, prior=torch.full_like(tuner.prior, float(how)))
            tuned = tuner.given()
        elif how == "given":
            tuned = tuner.given()
        elif how == "scaled":
            tuned = tuner.given(len(tuner.prior) / task.network.n_parameters)
        elif how == "evidence":
            tuned = tuner.evidence()
        elif how == "layers":
            tuned = tuner.layers(_by_layer(sweep.network, index))
        else:
            assert task.validation is not None  # `check` has seen to it
            if self.prediction == "weights":
                tuned = tuner.validation_by_draws(
                    lambda gaussian, x, rng: self._weight_outputs(gaussian, sweep, index, x, rng),
                    sweep.network.likelihood,
                    task.validation,
                    sweep.hyper,
                )
            else:
                exact = replace(sweep, bfloat16=False)  # half precision is for sums over rows, not for predictions
                jacobian = exact.jacobian(index)
                if "log_noise" in sweep.hyper and getattr(sweep.network.likelihood, "noise", None) is None:
                    tuned = tuner.validation_with_noise(
                        jacobian,
                        task.validation,
                        sweep.hyper,
                        lambda hyper: float(task.log_likelihood(sweep.network, sweep.params, hyper)) * task.n,
                    )
                else:
                    tuned = tuner.validation(jacobian, task.validation, sweep.hyper)
        return replace(tuned, report=tuned.report | {"precision_from": how if isinstance(how, str) else "a number"})

    def _weight_outputs(
        self, gaussian: Gaussian, sweep: Sweep, index: Tensor | None, x: Inputs, rng: torch.Generator
    ) -> Tensor:
        found = []
        for _ in range(min(self.n_draws, 30)):
            delta = gaussian.weights(gaussian.deltas(1, rng))[0]
            with torch.no_grad():
                found.append(sweep.network(_moved(sweep.network, sweep.params, index, delta), x))
        return torch.stack(found)

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Weights: the point plus draws of the Gaussian."""
        own, index, gaussian = _restored(state, network)
        for _ in range(n):
            delta = gaussian.weights(gaussian.deltas(1, rng))[0]
            yield _moved(own, state["params"], index, delta)

    @torch.inference_mode(False)
    def outputs(self, state: State, network: Network, x: Inputs, n: int, rng: torch.Generator) -> tuple[Tensor, Hyper]:
        """Outputs of n functions: the same draws for all inputs, so that they are joint over classes and inputs."""
        x = map_tensors(with_gradients, x)
        if self.prediction == "weights":
            return push_draws(self, state, network, x, n, rng)
        if self.prediction == "bridge":
            mean, covariance = self.moments(state, network, x)
            return bridge(mean, covariance, n, rng), state["hyper"]
        own, index, gaussian = _restored(state, network)
        if not count_rows(x):
            with torch.no_grad():
                outputs = own(state["params"], move(x, network.device))
            return outputs.expand(n, *outputs.shape), state["hyper"]
        jacobian = self._jacobian(state, own, index, x)
        if jacobian.plan.outputs > 2 * n:
            with contextlib.suppress(NotImplementedError):  # a layer without forward derivatives, such as an LSTM
                return self._by_tangents(state, own, index, gaussian, x, n, rng), state["hyper"]
        numbers = n * len(gaussian.prior)
        advice = "take fewer draws with predict(x, draws=...), or prediction='closed'"
        refuse_if_too_large(f"{n} draws of {len(gaussian.prior):,} weights", 8 * numbers, network.device, advice)
        deltas = gaussian.deltas(n, rng)
        found = []
        for piece in slices(x, evenly(count_rows(x), gaussian.rows_at_once(jacobian))):
            here = jacobian.at(move(piece, network.device))
            shifts = gaussian.shifts(here, deltas)
            found.append(here.outputs + shifts.reshape(n, *here.outputs.shape).to(here.outputs.dtype))
            del here  # before the next pass is made: two would be held at once
        return torch.cat(found, 1), state["hyper"]

    def _by_tangents(
        self, state: State, network: Network, index: Tensor | None, gaussian: Gaussian, x: Inputs, n: int, rng: Any
    ) -> Tensor:
        """Outputs and J delta by forward differentiation: for more outputs than draws, such as pixels."""
        params = state["params"]
        found = []
        for _ in range(n):
            delta = gaussian.weights(gaussian.deltas(1, rng))[0]
            moved = _moved(network, params, index, delta)
            point = {name: params[name] for name in network.names}
            tangent = {name: moved[name] - params[name] for name in network.names}
            pieces = []
            for piece in slices(x, 128):
                rows = move(piece, network.device)
                with plain_attention(), sdpa_kernel(SDPBackend.MATH):  # the others have no forward derivatives
                    both: Any = torch.func.jvp(lambda own, at=rows: network(params | own, at), (point,), (tangent,))
                pieces.append(both[0] + both[1])
            found.append(torch.cat(pieces).detach())
        return torch.stack(found)

    @torch.inference_mode(False)
    def moments(self, state: State, network: Network, x: Inputs, joint: bool = False) -> tuple[Tensor, Tensor]:
        """f(x, w*) and J P^-1 J^T."""
        x = map_tensors(with_gradients, x)
        own, index, gaussian = _restored(state, network)
        if not count_rows(x):
            with torch.no_grad():
                outputs = own(state["params"], move(x, network.device))
            d = outputs.shape[1:].numel()
            return outputs, outputs.new_zeros((0, 0) if joint else (0, d, d))
        jacobian = self._jacobian(state, own, index, x)
        rows = count_rows(x)
        size = rows if joint else evenly(rows, gaussian.rows_at_once(jacobian))
        means, covariances = [], []
        for piece in slices(x, size):
            here = jacobian.at(move(piece, network.device))
            means.append(here.outputs)
            covariances.append(gaussian.covariance(here, joint))
            del here
        return torch.cat(means), torch.cat(covariances)

    def _jacobian(self, state: State, network: Network, index: Tensor | None, x: Inputs) -> Jacobian:
        first = move(next(iter(slices(x, 3))), network.device)
        return Jacobian(network, state["params"], first, index)

    def update(self, state: State, network: Network, rows: DataRows, run: Run) -> State:
        """Add the curvature of more rows at the same point; the point and the prior stay."""
        own, index, gaussian = _restored(state, network)
        sweep = Sweep(own, state["params"], state["hyper"], rows, run, self.fisher, self.arithmetic == "bfloat16")
        before = gaussian.curvature()
        if isinstance(before, Layered):
            kronecker = any(isinstance(part, Kronecker) for part in before.parts.values())
            summed: Curvature = before.plus(sweep.layered(kronecker))
        elif isinstance(before, Full):
            summed = Full(before.ggn + sweep.full(index).ggn)
        else:
            assert isinstance(before, Rows)
            summed = self._more_rows(before, sweep, index)
        return state | {"gaussian": summed.gaussian(gaussian.prior).tensors()}

    @property
    @abstractmethod
    def _rank(self) -> int:
        """How many directions of the curvature are kept; 0 for all."""

    def _more_rows(self, before: Rows, sweep: Sweep, index: Tensor | None) -> Curvature:
        """Rows put under each other; as a matrix where they have become more than the weights."""
        if self._rank:
            together = torch.cat([before.rows, sweep.low_rank(self._rank).rows])
            _, singular, basis = torch.linalg.svd(together, full_matrices=False)
            return Rows((singular.unsqueeze(1) * basis)[: self._rank])
        together = torch.cat([before.rows, sweep.stacked(index).rows])
        if len(together) < together.shape[1]:
            return Rows(together)
        wide = together.double() if together.shape[1] <= DOUBLE_UP_TO else together
        return Full(wide.T @ wide)


def flat_prior(network: Network, params: Params) -> Tensor:
    """The prior precision of every selected weight, [n]."""
    prior = network.prior
    if not isinstance(prior, GaussianPrior):
        raise ValueError(
            f"a Laplace approximation needs a Gaussian prior with independent weights, and this is a "
            f"{type(prior).__name__}: give the task prior=caveat.GaussianPrior(...)"
        )
    values = [prior.of(name, params[name]).expand(params[name].shape).flatten() for name in network.names]
    return torch.cat(values)


def bridge(mean: Tensor, covariance: Tensor, n: int, rng: torch.Generator) -> Tensor:
    """Draws of log probabilities from the Dirichlet that the Laplace bridge gives (Hobbhahn et al. 2022).

    alpha_k = (1 - 2/C + e^mu_k / C^2 sum_l e^-mu_l) / Sigma_kk, with mu and Sigma conditioned on logits that sum to 0.
    """
    if mean.ndim != 2:
        raise ValueError(f"prediction='bridge' is for one target a row, and outputs are {tuple(mean.shape)}")
    dtype, mean, covariance = mean.dtype, mean.double(), covariance.double()
    classes = mean.shape[1]
    marginal = covariance.diagonal(dim1=-2, dim2=-1)
    total, towards = covariance.sum((-1, -2)), covariance.sum(-1)  # 1^T Sigma 1 and Sigma 1
    # Logits whose sum does not vary need no conditioning, and rounding is all that total then holds.
    share = torch.where(total > 1e-5 * classes * marginal.sum(-1), 1 / total, torch.zeros_like(total)).unsqueeze(-1)
    mu = mean - towards * mean.sum(-1, keepdim=True) * share
    variance = marginal - towards.square() * share
    tail = (mu + torch.logsumexp(-mu, -1, keepdim=True)).exp()
    alpha = ((1 - 2 / classes + tail / classes**2) / variance.clamp_min(1e-12)).clamp(1e-6, 1e12)
    drawn = torch._standard_gamma(alpha.cpu().expand(n, *alpha.shape), generator=rng).clamp_min(1e-300)
    return (drawn.log() - drawn.sum(-1, keepdim=True).log()).to(mean.device, dtype)


def with_gradients(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one that was made in inference mode, through which nothing is differentiated."""
    return tensor.clone() if tensor.is_inference() else tensor


def _subnetwork(network: Network, index: Tensor | None) -> Params:
    """Which weights: for each parameter the entries chosen, none standing for all."""
    found: Params = {}
    for name, place in places(network).items():
        own = torch.zeros(0, dtype=torch.int32)
        if index is not None:
            own = (index[(index >= place.start) & (index < place.stop)] - place.start).to(torch.int32)
            if not len(own):
                continue
        found[name] = own.cpu()
    return found


def _restored(state: State, network: Network) -> tuple[Network, Tensor | None, Gaussian]:
    """The network restricted to what the posterior is about, the chosen weights of it, and the Gaussian."""
    chosen = state.get("subnetwork")
    if chosen is None:
        return network, None, restored(state["gaussian"], places(network))
    own = network.restricted(chosen)
    where = places(own)
    whole = all(not len(entries) for entries in chosen.values())
    index = None if whole else torch.cat([chosen[n].long().to(network.device) + where[n].start for n in own.names])
    return own, index, restored(state["gaussian"], where)


def _moved(network: Network, params: Params, index: Tensor | None, delta: Tensor) -> Params:
    """The point with chosen weights moved."""
    flat = _flat(network, params)
    if index is None:
        flat = flat + delta.to(flat)
    else:
        flat = flat.index_add(0, index.to(flat.device), delta.to(flat))
    pieces = {name: flat[place].reshape(params[name].shape) for name, place in places(network).items()}
    return params | pieces


def _flat(network: Network, params: Params) -> Tensor:
    return torch.cat([params[name].flatten() for name in network.names])


def _chosen(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values[index.to(values.device)]


def _by_layer(network: Network, index: Tensor | None) -> list[tuple[str, Tensor]]:
    """Positions of each layer's weights among the chosen ones."""
    groups: dict[str, list[Tensor]] = {}
    for name, place in places(network).items():
        if index is None:
            own = torch.arange(place.start, place.stop)
        else:
            own = ((index >= place.start) & (index < place.stop)).nonzero().squeeze(1).cpu()
        if len(own):
            groups.setdefault(name.rpartition(".")[0], []).append(own)
    return [(layer or "(module)", torch.cat(own).to(network.device)) for layer, own in groups.items()]


def _treatment(curvature: Curvature, structure: Structure, network: Network) -> str | Callable[[Layer], str]:
    if not isinstance(curvature, Layered) or structure == "diagonal":
        return {
            "full": "Gaussian, full covariance",
            "low_rank": "Gaussian, low-rank precision",
            "diagonal": "diagonal Gaussian",
        }.get(structure, structure)
    products = {
        name.rpartition(".")[0]
        for names in curvature.parts
        if len(curvature.parts[names].tensors()) > 1
        for name in names
    }
    kept = {name.rpartition(".")[0] for name in network.names}

    def of(layer: Layer) -> str:
        if layer.name not in kept:
            return "fixed at the MAP"
        if layer.name in products:
            return "Gaussian, Kronecker-factored"
        return f"diagonal Gaussian (a {layer.kind} has no Kronecker factors)"

    return of
