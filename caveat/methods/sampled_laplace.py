"""SampledLaplace: the linearised Laplace posterior over all weights, by samples (Antoran, Padhy et al. 2023).

    z_k = H^-1 (A theta_0 + J^T R e) ~ N(0, H^-1),   H = J^T B J + A,   f(x) + J(x) z_k a draw of the function

A covariance over millions of weights cannot be stored, but a sample of it can, and each is the solution of a linear
system that takes products with the Jacobian only (`engine/linear_model`). The prior precision comes from MacKay's
updates with a few samples, at the mean of the linear model; predictions stay centred on the trained network.
"""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch

from caveat.engine.cost import refuse_if_too_large
from caveat.engine.flat_weights import flat_places
from caveat.engine.laplace import flat_prior
from caveat.engine.linear_model import (
    ConjugateGradients,
    Exact,
    Hyperparameters,
    PosteriorSolution,
    StochasticDescent,
    Tuning,
)
from caveat.engine.linearised import (
    NEGLIGIBLE,
    LikelihoodNoise,
    SamplePredictor,
    Sampler,
    SampleState,
    best_temperature,
    copies_of_the_weights,
    linearise,
    normalisations,
    solver_for,
)
from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.state_checks import check_names
from caveat.knobs import Count, Positive, Range, check_knobs
from caveat.likelihoods import Gaussian, Likelihood
from caveat.network import Layer, Network
from caveat.storage import State
from caveat.task import Task

__all__ = ["SampledLaplace"]


@dataclass(frozen=True)
class SampledLaplace(Method):
    """Samples of the linearised network's posterior over all weights, without a matrix over them."""

    samples: Count = 64  # that predictions are made of: the relative error of a variance is sqrt(2 / samples)
    at_once: Count = 16  # of them solved for together; memory grows with it
    # The prior's: evidence finds one for all weights, layers one a layer; given is the task's own; or a number.
    precision: Literal["evidence", "layers", "given"] | Positive = "evidence"
    first_precision: Positive | None = None  # where the search starts; None: the task's prior, or 1000 with a g-prior
    # Measure each weight in units of its curvature, so that the scale of normalised weights does not matter; auto does
    # where the network has normalisation layers.
    g_prior: bool | Literal["auto"] = "auto"
    normalisation_weights: bool = True  # whether scales and shifts of normalisation layers are part of the linear model
    # By linearised draws, weight draws, or from their variance (exact for Gaussian noise, probit for classes); auto is
    # closed for Gaussian noise of one level and samples otherwise.
    prediction: Literal["auto", "samples", "weights", "closed"] = "auto"
    # Multiplies the covariance. The posterior of a network that is sure of its training rows is often far too wide for
    # single predictions: validation finds the multiple under which the task's validation rows are most likely.
    temperature: Literal["validation"] | Positive = 1.0
    # Rows of a classifier (or of counts) that hold this share of the information between them are left out of the
    # curvature: variances grow by about twice the share.
    negligible: Annotated[float, Range(0, 1, open_high=True)] = NEGLIGIBLE
    tuning: Tuning = field(default_factory=Tuning)  # of the updates of the precision
    # Of the linear systems; auto is exact where rows x outputs are few enough, and conjugate gradients otherwise.
    solver: Literal["auto"] | Exact | ConjugateGradients | StochasticDescent = "auto"
    # Of the products. On a GPU full is TF32 for convolutions; float16 rounds as much, at twice the rate.
    arithmetic: Literal["full", "float16"] = "full"
    block_rows: Count | None = None  # rows of a block of a pass; None: as memory allows
    starts_from: ClassVar[StartsFrom] = "trained"
    quick: ClassVar["SampledLaplace"]

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.first_precision is not None and self.precision not in ("evidence", "layers"):
            raise ValueError(
                f"first_precision={self.first_precision!r} is where a search starts, and precision={self.precision!r} "
                "searches for nothing: use precision='evidence' or 'layers'"
            )
        if self.temperature == "validation" and self.prediction == "weights":
            raise ValueError(
                "temperature='validation' looks at linearised predictions, and prediction='weights' makes others: use "
                "a number"
            )
        if self.g_prior is True and self.precision == "given":
            raise ValueError(
                "precision='given' is the task's prior on the weights as they are, and g_prior=True measures them in "
                "other units: use precision='evidence', or a number"
            )

    @property
    def default_draws(self) -> int:
        """As many draws as there are samples."""
        return self.samples

    def closed_form(self, likelihood: Likelihood) -> bool:
        """Yes where it is asked for, or where it is exact but for the error of a variance from samples."""
        return self.prediction == "closed" or (self.prediction == "auto" and isinstance(likelihood, Gaussian))

    def memory(self, network: Network) -> int:
        """Samples, and what solving for them takes; the number of rows does not matter."""
        solved = max(min(self.at_once, self.samples), self.tuning.samples + 1)
        gradients = ConjugateGradients() if self.solver == "auto" else self.solver
        rank = gradients.rank if isinstance(gradients, ConjugateGradients) else 0
        return copies_of_the_weights(self.samples, solved, rank) * network.n_parameters * network.dtype.itemsize

    def check(self, task: Task, device: torch.device) -> None:
        """Refuse what can be refused before a start is trained."""
        network = self._restricted(task.network)
        network.check_precision("SampledLaplace", "use module.float(), and arithmetic='float16' for speed")
        if self.prediction == "closed" and type(network.likelihood).__name__ == "Poisson":
            raise ValueError("a Poisson prediction has no closed form: use prediction='samples'")
        if self.temperature == "validation" and task.validation is None:
            raise ValueError(
                "temperature='validation' needs validation rows: give the task validation=0.1, or a loader"
            )
        outputs, targets = task.outputs(task.network, task.network.params(), task.train.part(torch.arange(1)))
        noise = LikelihoodNoise(network.likelihood, task.hyper, outputs, targets)
        rows = self.solver.batch_rows if isinstance(self.solver, StochasticDescent) else self.block_rows or 1
        refuse_if_too_large(
            f"the Fisher information of {rows:,} row{'s' * (rows > 1)} with {outputs[0].numel():,} outputs",
            2 * rows * noise.row_numbers * network.dtype.itemsize,
            device,
            "take fewer rows at a time (block_rows=1, or the solver's batch_rows), or "
            "LastLayerLaplace(structure='diagonal'), or Laplace(structure='diagonal', fisher='mc')",
        )

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Linearise, find the prior precision, solve for the samples, and find their temperature."""
        network = self._restricted(task.network.to(run.device))
        params, hyper = dict(start["params"]), dict(start["hyper"])
        if hyper.pop("temperature", None) is not None:
            run.warnings.append("the start's temperature was left out: the posterior's own width takes its place")
        scaled = self._g_prior(network)
        prior = flat_prior(network, params)
        unit = float(prior.double().log().mean().exp())  # where weights have precisions of their own, about their mean
        shape = None if scaled or bool((prior == prior[0]).all()) else prior / unit
        names, groups = self._groups(network)
        linear, flops = linearise(
            task,
            network,
            params,
            hyper,
            run,
            g_prior=scaled,
            prior=shape,
            negligible=self.negligible,
            exact=self.solver == "auto" or isinstance(self.solver, Exact),
            precisions=len(names),
            coarse=self.precision == "evidence",
            block_rows=self.block_rows,
            float16=self.arithmetic == "float16",
        )
        solver = solver_for(linear, len(names)) if isinstance(self.solver, str) else self.solver
        sampler = Sampler.of(linear, solver, run, flops)
        first = self.first_precision or (1000.0 if scaled else unit)  # a strong prior is quick to solve for
        value = first if isinstance(self.precision, str) else self.precision
        alpha = torch.full((len(names),), float(value), dtype=torch.float64, device=run.device)
        precisions = Hyperparameters(alpha, 1.0, groups, None if groups is None else tuple(names))
        tuned = sampler.tuned(precisions, self.tuning) if self.precision in ("evidence", "layers") else None
        precisions = precisions if tuned is None else tuned.hyper
        known = None if tuned is None else tuned.samples
        groups_of_samples = list(sampler.groups(precisions, self.samples, self.at_once, known))
        notes = [note for _, note in groups_of_samples]
        if "log_noise" in hyper and precisions.noise != 1:
            hyper["log_noise"] = hyper["log_noise"] - 0.5 * torch.tensor(precisions.noise).log().to(hyper["log_noise"])
        said = [*([] if tuned is None else tuned.warnings), *(text for note in notes for text in note["warnings"])]
        run.warnings.extend(text for text in dict.fromkeys(said) if text not in run.warnings)
        report = _report(precisions, tuned, notes, names) | {"g_prior": scaled, "rows": linear.model.features.rows}
        report |= linear.way() | {"solver": type(solver).__name__}
        if linear.scale is not None and scaled:
            report["without_curvature"] = int((linear.scale == 0).sum())
        state = SampleState(params, hyper, tuple(samples for samples, _ in groups_of_samples))
        temperature, validation = self._temperature(task, network, state, run)
        state = replace(state, temperature=temperature)
        report |= validation | {"temperature": temperature}
        return state.tensors(), run.info(task.network, self._treatment(network), report)

    def _temperature(
        self, task: Task, network: Network, state: SampleState, run: Run
    ) -> tuple[float, dict[str, float]]:
        """The temperature, and the NLL of the validation rows where they decided it."""
        if not isinstance(self.temperature, str):
            return self.temperature, {}
        assert task.validation is not None  # `check` has seen to it
        part = run.child("temperature")
        temperature, nll = best_temperature(
            network,
            state,
            task.validation,
            part,
            closed=self.closed_form(network.likelihood),
            at_once=self.at_once,
        )
        run.absorb(part)
        return temperature, {"validation_nll": nll}

    def _g_prior(self, network: Network) -> bool:
        if self.g_prior != "auto":
            return self.g_prior
        return self.precision != "given" and bool(normalisations(network))

    def _restricted(self, network: Network) -> Network:
        """The network restricted to the weights of the linear model."""
        if self.normalisation_weights:
            return network
        layers = normalisations(network)
        names = [name for name in network.names if name.rpartition(".")[0] not in layers]
        if not names:
            raise ValueError("normalisation_weights=False leaves no weights: all that are selected are of such layers")
        return network.restricted(names)

    def _groups(self, network: Network) -> tuple[list[str], tuple[int, ...] | None]:
        """The layers and how many weights each has, which lie one after the other; or one group of all."""
        if self.precision != "layers":
            return ["all"], None
        counts: dict[str, int] = {}
        for name, place in flat_places(network).items():
            layer = name.rpartition(".")[0] or "(module)"
            counts[layer] = counts.get(layer, 0) + place.stop - place.start
        return list(counts), tuple(counts.values())

    def _treatment(self, network: Network) -> Any:
        layers = {name.rpartition(".")[0] for name in network.names}

        def of(layer: Layer) -> str:
            return "samples of the linearised posterior" if layer.name in layers else "fixed at the MAP"

        return of

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not as many samples of the network's weights as the knobs say."""
        check_names("state", state, ["params", "hyper", "samples", "posterior"])
        SampleState.of(state).check(self._restricted(network), network, self.samples)

    def predictor(self, state: State, network: Network) -> SamplePredictor:
        """The linearised network at the samples, or the network itself."""
        by_weights = self.prediction == "weights"
        return SamplePredictor(
            SampleState.of(state), self._restricted(network), by_weights=by_weights, at_once=self.at_once
        )


def _report(
    hyper: Hyperparameters, tuned: PosteriorSolution | None, notes: list[dict[str, Any]], names: list[str]
) -> Any:
    energies = [energy for note in notes for energy in note["energies"]]
    precisions = dict(zip(names, hyper.prior.tolist(), strict=True))
    return {
        "prior_precision": precisions if hyper.groups else precisions["all"],
        "effective_dimension": sum(energies) / len(energies),
        "residual": max(note["residual"] for note in notes),
        "passes": sum(note["passes"] for note in notes),
        "history": [] if tuned is None else tuned.history,
        "groups": names if hyper.groups else [],
    }


SampledLaplace.quick = SampledLaplace(samples=32, tuning=Tuning(samples=4))
