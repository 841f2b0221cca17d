"""The knobs that all Laplace methods have, and what follows from the knobs alone."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from caveat.engine.laplace.laplace_predictor import LaplacePrediction, LaplacePredictor
from caveat.engine.laplace.laplace_state import LaplaceState
from caveat.engine.laplace.prior_precision import Precision
from caveat.engine.laplace.sweep import Fisher
from caveat.engine.method import Method
from caveat.engine.run import StartsFrom
from caveat.knobs import Count, Positive, Share, check_knobs
from caveat.likelihoods import Categorical, Gaussian, Likelihood
from caveat.network import Network
from caveat.storage import State
from caveat.task import Task

__all__ = ["Arithmetic", "LaplaceKnobs"]

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
    n_draws: Count = 100  # of a prediction
    starts_from: ClassVar[StartsFrom] = "trained"

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def default_draws(self) -> int:
        """The number of draws that the knob asks for."""
        return self.n_draws

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

    def check_against(self, task: Task, outputs: Tensor) -> None:
        """Refuse knobs that this task, whose network has such outputs, cannot be given."""
        network = task.network
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
