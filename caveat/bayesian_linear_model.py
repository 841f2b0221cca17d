"""Bayesian linear regression with any number of features and rows: by samples, without a matrix over the parameters.

    y = phi(x) theta + noise,   theta ~ N(0, 1 / prior_precision),   theta | data ~ N(mean, H^-1)

Mean and samples are solutions of linear systems (`engine.linear_model`), the prior precision and the noise come from
MacKay's updates. Memory grows with samples x features, time with rows x features x samples.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from caveat.engine.linear_model import (
    ConjugateGradients,
    DenseFeatures,
    Features,
    Hyperparameters,
    LinearModel,
    PosteriorSolution,
    RowNoise,
    SampleRandomness,
    ScaledFeatures,
    Solver,
    SolveReport,
    Tuning,
    log_determinant,
    mean_beside_samples,
    misfit,
    regression_system,
    solve_posterior,
)
from caveat.engine.linear_model import g_prior as scaled_by_curvature
from caveat.engine.linear_model import tune as find_precisions
from caveat.predictive import GaussianPredictive

__all__ = ["BayesianLinearModel", "LinearPosterior"]

Array = Tensor | np.ndarray


@dataclass(frozen=True)
class LinearPosterior:
    """The posterior of a linear model, as its mean and samples."""

    mean: Tensor  # [d]
    deviations: Tensor  # samples less the mean, [K, d]
    noise: float | None  # standard deviation; None where each training row had its own
    prior_precision: Tensor  # of each group, [G]
    effective_dimension: float  # how many parameters the data determine
    products: float  # of the features with one vector, there and back, altogether
    report: SolveReport  # of the last solve
    history: list[dict[str, list[float]]] = field(default_factory=list)  # prior, noise and gamma at each update
    warnings: list[str] = field(default_factory=list)
    evidence: Callable[[], float] | None = field(default=None, repr=False)

    @property
    def samples(self) -> Tensor:
        """Parameters drawn from the posterior, [K, d]."""
        return self.mean + self.deviations

    def sample_functions(self, x: Array | Features) -> Tensor:
        """The values of the sampled functions at new rows, without noise: [K, B, m]."""
        return self._values(x, self.samples)

    def predict(self, x: Array | Features, noise: float | Array | None = None) -> GaussianPredictive:
        """Means and variances at new rows.

        The relative error of an epistemic variance is about sqrt(2 / K) with K samples.

        Args:
            x: features of new rows, as in training.
            noise: their standard deviation, one for all or [B]; that of the model unless given.
        """
        std = self.noise if noise is None else noise
        if std is None:
            raise ValueError("every training row had its own noise: give that of the new rows, predict(x, noise=...)")
        values = self._values(x, torch.cat([self.mean.unsqueeze(0), self.deviations]))
        mean, epistemic = values[0], values[1:].square().mean(0)  # deviations have mean zero: nothing is lost to it
        aleatoric = torch.as_tensor(std, dtype=mean.dtype, device=mean.device).square()
        aleatoric = aleatoric.reshape(-1, 1).expand_as(mean)
        return GaussianPredictive(mean.unsqueeze(0), (epistemic + aleatoric).unsqueeze(0), aleatoric)

    def log_evidence(self) -> float:
        """The exact log evidence, log p(targets).

        It is refused if neither the parameters nor the rows are few enough for a matrix over them.
        """
        assert self.evidence is not None
        return self.evidence()

    def _values(self, x: Array | Features, theta: Tensor) -> Tensor:
        features = as_features(x, theta.dtype, theta.device)
        if features.size != len(self.mean):
            raise ValueError(f"rows of {features.size:,} features were given to a model of {len(self.mean):,}")
        return torch.cat([block.forward(theta) for block in features.blocks()], 1)


class BayesianLinearModel:
    """Bayesian linear regression.

    Features are used as they are: add a column of ones for an intercept, and centre the targets or give the intercept a
    group of its own.

    Args:
        features: [rows, features] or, for several outputs a row, [rows, outputs, features]; or an object that gives
            products with them (`caveat.engine.linear_model.features.Features`).
        targets: [rows] or [rows, outputs].
        noise: standard deviation of the noise, one for all or [rows]; None learns one.
        prior_precision: of the parameters, one for all or one a group; where tuning starts from.
        groups: how many consecutive parameters each group has, which then has a prior precision of its own.
        g_prior: measure each parameter in units of its curvature, so that features' units do not matter.
        solver: how to solve; `ConjugateGradients` or `StochasticDescent`.
        tuning: knobs of the updates of prior and noise.
    """

    def __init__(
        self,
        features: Array | Features,
        targets: Array,
        *,
        noise: float | Array | None = None,
        prior_precision: float | Sequence[float] = 1.0,
        groups: Sequence[int] | None = None,
        g_prior: bool = False,
        solver: Solver | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self.features = as_features(features)
        self.targets = _targets(targets, self.features)
        self.learns_noise = noise is None
        self.groups = None if groups is None else tuple(groups)
        self.g_prior, self.solver, self.tuning = g_prior, solver or ConjugateGradients(), tuning or Tuning()
        self._one_noise = noise is None or torch.as_tensor(noise).ndim == 0
        self._factors, self._noise = _noise(noise, self.targets)
        self._prior = _prior(prior_precision, self.groups, self.features.size).to(self.features.device)

    def fit(self, samples: int = 64, seed: int = 0, tune: bool = True) -> LinearPosterior:
        """Compute the posterior's mean and samples.

        Args:
            samples: how many; predictions want 32 or more.
            seed: of the samples.
            tune: find the prior precision and, where none was given, the noise by the evidence.
        """
        if samples < 1:
            raise ValueError(f"samples={samples}: at least one is needed")
        if self.learns_noise and not tune:
            raise ValueError("noise=None is learned by tuning: give noise, or fit(tune=True)")
        unit = torch.ones(1, dtype=self.features.dtype, device=self.features.device)
        model = LinearModel(self.features, RowNoise(self._factors), unit)
        model = scaled_by_curvature(model) if self.g_prior else model
        solve = mean_beside_samples(regression_system(model, self.targets))
        prepared = self.solver.prepare(model, seed)
        hyper, tuned, start = Hyperparameters(self._prior, self._noise**-2, self.groups), None, None
        draws = SampleRandomness(model, samples, seed)
        if tune:
            few = SampleRandomness(model, min(samples, self.tuning.samples), seed)
            error = (lambda mean: misfit(model, self.targets, mean)) if self.learns_noise else None
            tuned = find_precisions(model, hyper, prepared, few, solve, self.tuning, error)
            hyper = tuned.hyper
            # The samples of the tuning are the first of all; the others start from the prior's draws.
            others = draws.system(hyper.model(model)).prior[len(tuned.samples) :]
            start = torch.cat([tuned.samples, others, tuned.mean.unsqueeze(0)])
        solution = solve_posterior(model, hyper, prepared, draws, solve, start)
        return self._result(model, solution, tuned, prepared.preparation)

    def _result(
        self, model: LinearModel, solution: PosteriorSolution, tuned: PosteriorSolution | None, preparation: float
    ) -> LinearPosterior:
        hyper, scale = solution.hyper, model.features.scale if isinstance(model.features, ScaledFeatures) else 1.0
        messages = list(dict.fromkeys([*solution.warnings, *([] if tuned is None else tuned.warnings)]))
        for warning in messages:
            warnings.warn(warning, stacklevel=3)
        return LinearPosterior(
            mean=solution.mean * scale,
            deviations=solution.samples * (scale * hyper.noise**-0.5),
            noise=hyper.noise**-0.5 if self._one_noise else None,
            prior_precision=hyper.prior,
            effective_dimension=float(solution.effective_dimension.sum()),
            products=preparation + solution.vectors + (0.0 if tuned is None else tuned.vectors),
            report=solution.report,
            history=[] if tuned is None else tuned.history,
            warnings=messages,
            evidence=lambda: self._log_evidence(hyper.model(model), hyper.noise, solution.mean),
        )

    def _log_evidence(self, model: LinearModel, noise_precision: float, mean: Tensor) -> float:
        count = self.targets.numel()
        energy = misfit(model, self.targets, mean) + float((model.precision * mean.square()).double().sum())
        log_det_noise = 2 * float(self._factors.double().log().sum()) + count * math.log(noise_precision)
        constant = count * math.log(2 * math.pi)
        return 0.5 * (log_det_noise - constant - noise_precision * energy - log_determinant(model))


def as_features(x: Array | Features, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Features:
    """Arrays as dense features; integers become float64. Objects that are features already are returned."""
    if not isinstance(x, Tensor | np.ndarray):
        return x
    phi = torch.as_tensor(x, device=device)
    return DenseFeatures(phi.to(dtype or (phi.dtype if phi.is_floating_point() else torch.float64)))


def _targets(targets: Array, features: Features) -> Tensor:
    y = torch.as_tensor(targets).to(features.device, features.dtype)
    wanted = (features.rows, features.outputs)
    if y.shape != wanted and not (y.shape == wanted[:1] and features.outputs == 1):
        raise ValueError(
            f"targets of shape {tuple(y.shape)} do not go with {features.rows:,} rows of {features.outputs} outputs: "
            "give [rows] or [rows, outputs]; several targets with the same features are one model each"
        )
    if features.rows < 2:
        raise ValueError("there is one row only: a posterior of noise and prior needs at least two")
    finite = y.isfinite().reshape(len(y), -1).all(1)
    if not finite.all():
        raise ValueError(f"the targets hold NaN or infinity, first in row {int(finite.long().argmin())}")
    return y.reshape(wanted)


def _noise(noise: float | Array | None, targets: Tensor) -> tuple[Tensor, float]:
    """Factors [n, m] of each row's precision, up to one number for all, and that number as a standard deviation."""
    std = torch.as_tensor(1.0 if noise is None else noise, dtype=targets.dtype, device=targets.device)
    if std.ndim > 1 or (std.ndim == 1 and len(std) != len(targets)) or not bool(((std > 0) & std.isfinite()).all()):
        raise ValueError(
            f"noise={noise!r}: give one positive standard deviation, or one for each of {len(targets):,} rows"
        )
    if std.ndim == 1:
        return (1 / std).unsqueeze(1).expand_as(targets), 1.0
    started = float(targets.double().std()) or 1.0  # where learning starts from
    return torch.ones_like(std).expand_as(targets), started if noise is None else float(std)


def _prior(precision: float | Sequence[float], groups: tuple[int, ...] | None, size: int) -> Tensor:
    if groups is not None and (sum(groups) != size or min(groups) < 1):
        raise ValueError(f"groups={groups} have {sum(groups):,} parameters together, and the features {size:,}")
    prior = torch.as_tensor(precision, dtype=torch.float64).reshape(-1)
    count = 1 if groups is None else len(groups)
    if len(prior) not in (1, count) or not bool(((prior > 0) & prior.isfinite()).all()):
        raise ValueError(
            f"prior_precision={precision!r}: give one positive number{'' if groups is None else ', or one a group'}"
        )
    return prior.expand(count).clone()
