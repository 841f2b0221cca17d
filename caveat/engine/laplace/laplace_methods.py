"""What all Laplace methods share: their knobs, and the steps of their fits in the order in which their files call them.

LaplaceKnobs     how the curvature is summed, the prior precision found, predictions made
check_laplace    before a start is trained: knobs, prior and memory
point_of         the trained point
sweep_at         passes over the training rows at that point
what_was_done    what there is to say of the fit
add_rows         more data, at the same point
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from caveat.engine.cost import refuse_if_too_large
from caveat.engine.laplace.chosen_weights import ChosenWeights, flat_prior
from caveat.engine.laplace.factor_sides import FactorDirections
from caveat.engine.laplace.gaussians import DOUBLE_UP_TO, Curvature, FullCurvature, StackedCurvature
from caveat.engine.laplace.laplace_posterior import LaplacePrediction, LaplacePredictor, LaplaceState
from caveat.engine.laplace.layer_gaussians import KroneckerPart, LayerCurvature
from caveat.engine.laplace.memory import Structure, curvature_bytes, what_fits
from caveat.engine.laplace.prior_precision import Precision, TunedGaussian
from caveat.engine.laplace.sweep import Fisher, Sweep
from caveat.engine.method import Method
from caveat.engine.run import Run, StartsFrom
from caveat.engine.state_checks import check_names
from caveat.knobs import Count, Positive, Share, check_knobs
from caveat.likelihoods import Categorical, Gaussian, Hyper, Likelihood
from caveat.likelihoods.protocol import fisher_rank
from caveat.network import Layer, Network, Params
from caveat.rows import Rows
from caveat.storage import State
from caveat.task import Task

__all__ = [
    "Arithmetic",
    "LaplaceKnobs",
    "add_rows",
    "check_laplace",
    "point_of",
    "structure_treatment",
    "sweep_at",
    "what_was_done",
]

Arithmetic = Literal["full", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class LaplaceKnobs(Method):
    """How the curvature is summed, how the prior precision is found, and how predictions are made."""

    # The prior's: auto takes evidence unless validation rows can tell; given is the task's own; scaled, that
    # times the share of weights chosen; layers finds one a layer by evidence; or a number.
    precision: Precision | Positive = "auto"
    # By linearised draws, weight draws, in closed form (exact for Gaussian noise, probit for classes), by the Laplace
    # bridge; auto is closed for Gaussian noise of one level and samples otherwise.
    prediction: LaplacePrediction = "auto"
    fisher: Fisher = "exact"  # mc: one random cotangent a row, cheaper by the number of outputs
    arithmetic: Arithmetic = "full"  # of the curvature; bfloat16: passes in bfloat16, sums in float32
    skip: Share = 1e-4  # share of the data's information that may be left out, in rows that say least
    default_draws: Count = 100  # of a prediction
    starts_from: ClassVar[StartsFrom] = "trained"
    chooses_weights: ClassVar[bool] = False  # and takes the others as known

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def tunes_precision(self) -> bool:
        """Whether the prior precision is looked for, which takes a decomposition of the curvature."""
        return isinstance(self.precision, str) and self.precision not in ("given", "scaled")

    def memory(self, network: Network) -> int:
        """A copy of the weights: what the curvature takes depends on the rows, and is looked at in `check`."""
        return network.n_parameters * network.dtype.itemsize

    def closed_form(self, likelihood: Likelihood) -> bool:
        """Yes where it is asked for, or exact: a mixture of draws would be lumpy where the noise is small."""
        return self.prediction == "closed" or (self.prediction == "auto" and isinstance(likelihood, Gaussian))

    def predictor(self, state: State, network: Network) -> LaplacePredictor:
        """Predictions of the linearised network."""
        return LaplacePredictor(LaplaceState.of(state), network, self.prediction)

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not a Gaussian around a point of the network."""
        check_names("state", state, ["params", "hyper", "gaussian"], ["subnetwork"])
        LaplaceState.of(state).check(network)

    def check_against(self, task: Task, outputs: Tensor) -> None:
        """Refuse knobs that this task, whose network has such outputs, cannot be given."""
        network = task.network
        kind = type(network.likelihood).__name__
        network.check_precision("a Laplace approximation", "use module.float(), and arithmetic='bfloat16' for speed")
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


def check_laplace(
    knobs: LaplaceKnobs,
    task: Task,
    chosen: ChosenWeights,
    structure: Structure,
    device: torch.device,
    structured: str,
    *,
    rank: int = 0,
    factors: FactorDirections = "whole",
) -> None:
    """Refuse a fit over the chosen weights whose knobs, prior or memory do not go with the task.

    Memory is looked at here alone, as if no row were left out. `structured` names the method that has other structures
    for the same weights, for the advice.
    """
    network = task.network
    flat_prior(chosen.network, network.params())
    first, targets = task.outputs(network, network.params(), task.train.part(torch.arange(1)))
    knobs.check_against(task, first)
    m = task.n * (1 if knobs.fisher == "mc" else fisher_rank(network.likelihood, first, targets, task.hyper))
    tuned, n = knobs.tunes_precision, len(chosen)
    what = f"a {structure} structure over {n:,} weights"
    if structure == "full":
        what += f" ({m:,} rows of gradients)" if m < n else " (the precision matrix)"
    needed = curvature_bytes(chosen.network, structure, n, m, tuned, rank, factors)
    concerned = chosen.network if structured == "LastLayerLaplace" else network
    refuse_if_too_large(what, needed, device, lambda free: what_fits(network, concerned, structured, m, tuned, free))


@dataclass(frozen=True)
class LaplacePoint:
    """Where the posterior is centred."""

    params: Params  # with buffers
    hyper: Hyper


def point_of(start: State, run: Run) -> LaplacePoint:
    """The start's weights and noise; its temperature is left out, since the posterior has a width of its own."""
    hyper = {name: value for name, value in start["hyper"].items() if name != "temperature"}
    if len(hyper) < len(start["hyper"]):
        run.warnings.append("the start's temperature was left out: the posterior's own width takes its place")
    return LaplacePoint(dict(start["params"]), hyper)


def sweep_at(knobs: LaplaceKnobs, task: Task, chosen: ChosenWeights, point: LaplacePoint, run: Run) -> Sweep:
    """Passes over the training rows at the point, in the arithmetic that the knobs ask for."""
    bfloat16 = knobs.arithmetic == "bfloat16"
    return Sweep(chosen.network, point.params, point.hyper, task.train, run, knobs.fisher, bfloat16)


def what_was_done(
    tuned: TunedGaussian, curvature: Curvature, sweep: Sweep, chosen: ChosenWeights, skipped: dict[str, float]
) -> dict[str, Any]:
    """The diagnostics of a fit: the precision, the rows left out, the form, and gradients made the general way."""
    report = tuned.report | {"rows_skipped": skipped, "form": curvature.form}
    general = sweep.jacobian(chosen.index).plan.general
    return report | ({"general_gradients": list(general)} if general else {})


def structure_treatment(curvature: Curvature, structure: Structure, network: Network) -> str | Callable[[Layer], str]:
    """How each layer is treated, in words."""
    if not isinstance(curvature, LayerCurvature) or structure == "diagonal":
        return {
            "full": "Gaussian, full covariance",
            "low_rank": "Gaussian, low-rank precision",
            "diagonal": "diagonal Gaussian",
        }.get(structure, structure)
    factored = {
        name.rpartition(".")[0]
        for names, part in curvature.parts.items()
        if isinstance(part, KroneckerPart)
        for name in names
    }
    concerned = {name.rpartition(".")[0] for name in network.names}

    def treatment(layer: Layer) -> str:
        if layer.name not in concerned:
            return "fixed at the MAP"
        if layer.name in factored:
            return "Gaussian, Kronecker-factored"
        return f"diagonal Gaussian (this {layer.kind} has no Kronecker factors)"

    return treatment


def add_rows(
    knobs: LaplaceKnobs,
    state: State,
    network: Network,
    rows: Rows,
    run: Run,
    rank: int = 0,
    factors: FactorDirections = "whole",
) -> State:
    """The state with the curvature of more rows added; the point and the prior stay."""
    before = LaplaceState.of(state)
    chosen, gaussian = before.posterior(network)
    bfloat16 = knobs.arithmetic == "bfloat16"
    sweep = Sweep(chosen.network, before.params, before.hyper, rows, run, knobs.fisher, bfloat16)
    curvature = gaussian.curvature()
    if isinstance(curvature, LayerCurvature):
        kronecker = any(isinstance(part, KroneckerPart) for part in curvature.parts.values())
        more, _ = sweep.kronecker(factors) if kronecker else sweep.diagonal()
        summed: Curvature = curvature.plus(more)
    elif isinstance(curvature, FullCurvature):
        summed = FullCurvature(curvature.ggn + sweep.full(chosen.index)[0].ggn)
    else:
        assert isinstance(curvature, StackedCurvature)
        summed = _with_more_rows(curvature, sweep, chosen, rank)
    return state | {"gaussian": summed.gaussian(gaussian.prior).tensors()}


def _with_more_rows(curvature: StackedCurvature, sweep: Sweep, chosen: ChosenWeights, rank: int) -> Curvature:
    """Rows put under each other; as a matrix where they have become more than the weights."""
    if rank:
        together = torch.cat([curvature.rows, sweep.low_rank(rank)[0].rows])
        _, singular, basis = torch.linalg.svd(together, full_matrices=False)
        return StackedCurvature((singular.unsqueeze(1) * basis)[:rank])
    together = torch.cat([curvature.rows, sweep.stacked(chosen.index)[0].rows])
    if len(together) < together.shape[1]:
        return StackedCurvature(together)
    wide = together.double() if together.shape[1] <= DOUBLE_UP_TO else together
    return FullCurvature(wide.T @ wide)
