"""The prior precision of a Laplace posterior: as given, from the evidence, or from validation rows.

    log p(D) ~ log p(D | w*) - (sum_i d_i w*_i^2 - log|d| + log|P|) / 2,   P = curvature + diag(d)

is the Laplace approximation of the log marginal likelihood for weights w* of prior precision d. Its maximum over a
multiple of d needs the curvature's eigenvalues only. For a precision of each layer's own, MacKay's update

    d_l <- g_l / ||w*_l||^2,   g_l = n_l - d_l tr (P^-1)_ll   (how many of the layer's weights the data determine)

is repeated with a new factor each time. On validation rows the best multiple is the one whose linearised prediction has
the lowest negative log likelihood. Noise that is learned is found there with it: the noise that is best for the point
alone counts all that the point does not know, and beside it no posterior would have anything left to explain. "auto"
takes the evidence's choice, of noise too, unless validation rows can tell another from it (`evidence_choice`). Methods
that choose weights leave the noise as validation rows have shown it: to the evidence of few weights the others are
known, what they have learned by heart included, and its noise is that of the training rows.

This evidence takes the trained weights w*. That of the linearised network as a linear model, as `SampledLaplace` has
it, takes the linear model's own mean in their place.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.golden_section import golden_section
from caveat.engine.laplace.chosen_weights import ChosenWeights
from caveat.engine.laplace.evidence_choice import nearest_to
from caveat.engine.laplace.gaussians import Curvature, PrecisionPath, WeightGaussian
from caveat.engine.laplace.output_draws import covariances, drawn_outputs, output_groups, rows_at_once
from caveat.engine.laplace.sweep import Sweep
from caveat.engine.row_gradients import Jacobian
from caveat.engine.run import Run
from caveat.likelihoods import Hyper, Likelihood, learned_noise
from caveat.network import Params
from caveat.rows import Rows
from caveat.task import Task

__all__ = ["Precision", "TunedGaussian", "Tuner", "log_evidence", "tuned_gaussian"]

Precision = Literal["auto", "given", "scaled", "evidence", "layers", "validation"]

SCALES = tuple(10.0 ** (exponent / 2) for exponent in range(-16, 13))  # of the given prior: 1e-8 to 1e6
ROWS = 2000  # validation rows looked at
NOISES = tuple(2.0 ** (exponent / 4) for exponent in range(-16, 25))  # of the noise at the start: 1/16 to 64
DRAWS = 64  # of the logits a validation row, the same for every scale


@dataclass(frozen=True)
class TunedGaussian:
    """A Gaussian with its prior precision decided, and how."""

    gaussian: WeightGaussian
    report: dict[str, Any] = field(default_factory=dict)
    hyper: Hyper | None = None  # where the noise was decided too


@dataclass
class Tuner:
    """A curvature and a point, and the ways to decide the prior precision there."""

    curvature: Curvature
    prior: Tensor  # [n], as given
    weights: Tensor  # [n], w*
    log_likelihood: float  # of all training rows at w*
    run: Run

    def given(self, scale: float = 1.0) -> TunedGaussian:
        """The prior as given, or a multiple of it."""
        gaussian = self.curvature.gaussian(scale * self.prior)
        return TunedGaussian(gaussian, self._report(gaussian, scale))

    def evidence(self) -> TunedGaussian:
        """The multiple of the prior that maximises the log marginal likelihood."""
        return self._given_or_above(self._evidence_scale())

    def _evidence_scale(self) -> float:
        path = self.curvature.path(self.prior)

        def value(log_scale: float) -> float:
            scale = math.exp(log_scale)
            return log_evidence(self.log_likelihood, self.weights, scale * self.prior, path.log_det(scale))

        grid = [math.log(scale) for scale in _usable(path)]
        best = max(grid, key=value)
        step = grid[1] - grid[0]
        low = max(best - step, math.log(path.lowest) if path.lowest else best - step)
        self._warn_at_an_end(grid.index(best), _usable(path), "evidence")
        return math.exp(golden_section(lambda log_scale: -value(log_scale), low, best + step))

    def layers(self, groups: Sequence[tuple[str, Tensor]], steps: int = 100) -> TunedGaussian:
        """A precision for each group of weights (positions among the chosen), by MacKay's update."""
        prior = self.prior.clone()
        squares = [float(self.weights[index].double().square().sum()) for _, index in groups]
        gaussian = self.curvature.gaussian(prior)
        for _ in range(steps):
            variances, moved = gaussian.variances().double(), 0.0
            for (_, index), square in zip(groups, squares, strict=True):
                before = float(prior[index].double().mean())
                determined = len(index) - float((prior[index].double() * variances[index].to(prior.device)).sum())
                now = min(max(max(determined, 1e-6) / max(square, 1e-12), 1e-6), 1e8)
                prior[index] = now
                moved = max(moved, abs(math.log(now / before)))
            gaussian = self.curvature.gaussian(prior)
            if moved < 1e-3:
                break
        else:
            self.run.warnings.append(f"the layers' precisions were still moving after {steps} updates")
        report = self._report(gaussian, None)
        report["prior_precision"] = {name: float(prior[index].mean()) for name, index in groups}
        return TunedGaussian(gaussian, report)

    def validation(self, jacobian: Jacobian, rows: Rows, hyper: Hyper, by_evidence: bool = False) -> TunedGaussian:
        """The multiple of the prior with the best linearised predictions on validation rows.

        With `by_evidence` it is the one nearest to the evidence's that these rows cannot tell from the best.
        """
        path = self.curvature.path(self.prior)
        network = jacobian.network

        scales = _usable(path)
        some = rows.some(ROWS)
        losses: list[list[Tensor]] = [[] for _ in scales]
        rng = torch.Generator().manual_seed(self.run.seed)
        x, y = next(iter(some.ordered(1, network.device)))
        groups = output_groups(network.likelihood, jacobian.at(x).outputs, y, hyper)
        with self.run.bar(len(some), "validation row") as bar:
            for x, y in some.ordered(rows_at_once(path, jacobian, groups, len(scales), DRAWS), network.device):
                row_pass = jacobian.at(x)
                groups = output_groups(network.likelihood, row_pass.outputs, y, hyper)  # longer sequences have more
                noise = torch.randn(DRAWS, len(y), *groups.shape, generator=rng, dtype=torch.float64)
                for k, covariance in enumerate(covariances(path, row_pass, scales, groups)):
                    outputs = drawn_outputs(row_pass.outputs, covariance, noise.to(row_pass.outputs), groups)
                    losses[k].append(_row_nll(network.likelihood, outputs, y, hyper))
                bar.update(len(y))
        return self._chosen(scales, torch.stack([torch.cat(parts) for parts in losses]), by_evidence)

    def validation_with_noise(
        self,
        jacobian: Jacobian,
        rows: Rows,
        hyper: Hyper,
        log_likelihood: Callable[[Hyper], float],
        by_evidence: bool = False,
    ) -> TunedGaussian:
        """The same for Gaussian noise that is learned: the best pair of noise and multiple of the prior.

        With noise c times as large P = (GGN + c^2 d) / c^2, so one path serves every pair. `log_likelihood` is that of
        all training rows with another noise.
        """
        path = self.curvature.path(self.prior)
        likelihood = jacobian.network.likelihood
        scales = _usable(path)  # c^2 times the prior's
        hypers = [hyper | {"log_noise": hyper["log_noise"] + math.log(noise)} for noise in NOISES]
        some = rows.some(ROWS)
        losses = torch.zeros(len(NOISES), len(scales), len(some), dtype=torch.float64)
        seen = 0
        alone = torch.arange(jacobian.plan.outputs).unsqueeze(1)
        with self.run.bar(len(some), "validation row") as bar:
            for x, y in some.ordered(rows_at_once(path, jacobian, alone, len(scales)), jacobian.network.device):
                row_pass = jacobian.at(x)
                alone = torch.arange(row_pass.outputs[0].numel()).unsqueeze(1)
                variances = covariances(path, row_pass, scales, alone).flatten(2)  # [K, B, D]
                for i, (noise, hyper_of_noise) in enumerate(zip(NOISES, hypers, strict=True)):
                    for k, variance in enumerate(variances):
                        shaped = noise**2 * variance.reshape(row_pass.outputs.shape)
                        prediction = likelihood.closed_predictive(row_pass.outputs, shaped, hyper_of_noise)
                        losses[i, k, seen : seen + len(y)] = -prediction.log_prob(y).double().cpu()
                seen += len(y)
                bar.update(len(y))
        nll = _finite(losses.mean(-1))
        i, k = divmod(int(nll.argmin()), len(scales))
        about: dict[str, Any] = {}
        if by_evidence:
            evidence = self._evidence_of_pairs(path, scales, hypers, log_likelihood)
            multiples = (
                torch.tensor(scales, dtype=torch.float64) / torch.tensor(NOISES, dtype=torch.float64)[:, None] ** 2
            )
            places = torch.stack(
                [multiples.log(), torch.tensor(NOISES).double().log()[:, None].expand_as(multiples)], -1
            )
            choice = nearest_to(int(evidence.argmax()), places.flatten(0, 1), losses.flatten(0, 1))
            i, k = divmod(choice.place, len(scales))
            about = choice.report(multiples.flatten())
        self._warn_at_an_end(k, scales, "validation likelihood")
        if i in (0, len(NOISES) - 1):
            self.run.warnings.append(
                f"the validation rows want noise of {NOISES[i]:.2g} times the fitted one, the end of the range: the "
                "network fits its training rows much better than others; stop its training earlier"
            )
        noise, scale = NOISES[i], scales[k] / NOISES[i] ** 2
        other = replace(self, curvature=self.curvature.times(noise**-2), log_likelihood=log_likelihood(hypers[i]))
        tuned = other._given_or_above(scale)
        report = tuned.report | {"validation_nll": float(nll[i, k]), "noise_multiple": noise}
        return TunedGaussian(tuned.gaussian, report | about, hypers[i])

    def _evidence_of_pairs(
        self,
        path: PrecisionPath,
        scales: Sequence[float],
        hypers: Sequence[Hyper],
        log_likelihood: Callable[[Hyper], float],
    ) -> Tensor:
        """The log evidence of every noise and scale, [I, K]; the scales are c^2 times the prior's for noise c.

        The log likelihood is a - b log c - e / c^2, which three values decide.
        """
        noises = torch.tensor(NOISES, dtype=torch.float64)
        some = [0, len(NOISES) // 2, len(NOISES) - 1]
        known = torch.tensor([log_likelihood(hypers[i]) for i in some], dtype=torch.float64)
        terms = torch.stack([torch.ones_like(noises), noises.log(), noises**-2], 1)  # [I, 3]
        likelihoods = terms @ torch.linalg.solve(terms[some], known)  # [I]
        multiples = torch.tensor(scales, dtype=torch.float64) / noises[:, None] ** 2  # [I, K], of the prior
        prior = self.prior.double().cpu()
        fit = float((prior * self.weights.double().cpu().square()).sum())
        log_dets = torch.tensor([path.log_det(scale) for scale in scales], dtype=torch.float64)
        count = len(prior)
        log_prior = count * multiples.log() + float(prior.log().sum())
        log_det = log_dets - 2 * count * noises.log()[:, None]
        return likelihoods[:, None] - 0.5 * (multiples * fit - log_prior + log_det)

    def validation_by_draws(
        self,
        outputs: Callable[[WeightGaussian, Any, torch.Generator], Tensor],
        likelihood: Likelihood,
        rows: Rows,
        hyper: Hyper,
        by_evidence: bool = False,
    ) -> TunedGaussian:
        """The same for predictions that are made by `outputs(gaussian, x, rng)`: weights drawn for each scale."""
        scales = SCALES[::3]
        some = rows.some(ROWS)
        losses = torch.full((len(scales), len(some)), torch.inf, dtype=torch.float64)
        for k, scale in enumerate(scales):
            try:
                gaussian = self.curvature.gaussian(scale * self.prior)
            except ValueError:  # not positive definite: too little prior for the rounding of the curvature
                continue
            parts = []
            for x, y in some.ordered(1024, self.run.device):
                rng = torch.Generator().manual_seed(self.run.seed)  # the same draws for every batch and scale
                parts.append(_row_nll(likelihood, outputs(gaussian, x, rng), y, hyper))
            losses[k] = torch.cat(parts)
        return self._chosen(scales, losses, by_evidence)

    def _chosen(self, scales: Sequence[float], losses: Tensor, by_evidence: bool) -> TunedGaussian:
        """The scale of the lowest mean of losses [K, rows], or the one nearest to the evidence's that is as good."""
        nll = _finite(losses.mean(1))
        best = int(nll.argmin())
        if not by_evidence:
            self._warn_at_an_end(best, scales, "validation likelihood")
            tuned = self._given_or_above(scales[best])
            return TunedGaussian(tuned.gaussian, tuned.report | {"validation_nll": float(nll[best])})
        evidence = self._evidence_scale()
        logs = torch.tensor(scales, dtype=torch.float64).log()
        anchor = int((logs - math.log(evidence)).abs().argmin())
        choice = nearest_to(anchor, logs.unsqueeze(1), losses)
        scale = evidence if choice.place == anchor else scales[choice.place]
        tuned = self._given_or_above(scale)
        about = choice.report(logs.exp()) | {"evidence_multiple": evidence, "validation_nll": float(nll[choice.place])}
        return TunedGaussian(tuned.gaussian, tuned.report | about)

    def _given_or_above(self, scale: float) -> TunedGaussian:
        """A multiple of the prior, or the next above it where rounding leaves the precision positive definite."""
        for _ in range(6):
            try:
                return self.given(scale)
            except ValueError:
                scale *= 10**0.5
        return self.given(scale)

    def _warn_at_an_end(self, best: int, scales: Sequence[float], what: str) -> None:
        if 0 < best < len(scales) - 1:
            return
        advice = "the posterior then hardly differs from its point: these rows ask for no more doubt than that has"
        if what == "validation likelihood":
            advice += "; precision='evidence' asks the training rows instead, and is wider far from the data"
        if best == 0:
            advice = "give the task another prior, or set precision= yourself"
        self.run.warnings.append(
            f"the {what} is best at the end of the range of prior precisions looked at ({scales[best]:.2g} times the "
            f"given one): {advice}"
        )

    def _report(self, gaussian: WeightGaussian, scale: float | None) -> dict[str, Any]:
        evidence = log_evidence(self.log_likelihood, self.weights, gaussian.prior, gaussian.log_det())
        report: dict[str, Any] = {"log_marginal_likelihood": evidence}
        if scale is not None:
            report["prior_precision_multiple"] = scale
            lowest, highest = float(gaussian.prior.min()), float(gaussian.prior.max())
            report["prior_precision"] = lowest if lowest == highest else [lowest, highest]
        return report


def tuned_gaussian(
    knobs: "PrecisionKnobs",
    task: Task,
    sweep: Sweep,
    chosen: ChosenWeights,
    curvature: Curvature,
    log_likelihood: float,
) -> TunedGaussian:
    """The Gaussian of a curvature, with the prior precision that the knobs ask for.

    `log_likelihood` is that of all training rows at the sweep's point.
    """
    how, network, hyper = knobs.precision, chosen.network, sweep.hyper
    by_evidence = how == "auto" and task.validation is not None
    if how == "auto":
        how = "evidence" if task.validation is None else "validation"
    prior, weights = chosen.prior(sweep.params), chosen.weights(sweep.params)
    tuner = Tuner(curvature, prior, weights, log_likelihood, sweep.run)
    if isinstance(how, float | int):
        tuned = replace(tuner, prior=torch.full_like(prior, float(how))).given()
    elif how == "given":
        tuned = tuner.given()
    elif how == "scaled":
        tuned = tuner.given(len(prior) / task.network.n_parameters)
    elif how == "evidence":
        tuned = tuner.evidence()
    elif how == "layers":
        tuned = tuner.layers(chosen.by_layer())
    else:
        assert task.validation is not None  # `check_against` has seen to it
        if knobs.prediction == "weights":
            outputs = partial(_weight_outputs, chosen, sweep.params, min(knobs.default_draws, 30))
            tuned = tuner.validation_by_draws(outputs, network.likelihood, task.validation, hyper, by_evidence)
        else:
            # Half precision is for sums over rows, not for predictions.
            jacobian = replace(sweep, bfloat16=False).jacobian(chosen.index)
            if (by_evidence and knobs.chooses_weights) or learned_noise(network.likelihood, hyper) is None:
                tuned = tuner.validation(jacobian, task.validation, hyper, by_evidence)
            else:
                tuned = tuner.validation_with_noise(
                    jacobian,
                    task.validation,
                    hyper,
                    lambda other: float(task.log_likelihood(network, sweep.params, other)) * task.n,
                    by_evidence,
                )
    decided = how if isinstance(how, str) else "a number"
    return replace(tuned, report={"precision_from": decided} | tuned.report)


class PrecisionKnobs(Protocol):
    """The knobs that a search for the prior precision goes by."""

    @property
    def precision(self) -> Precision | float:
        """How the precision is found, or the precision itself."""

    @property
    def prediction(self) -> str:
        """How predictions are made, which validation rows are to be predicted best by."""

    @property
    def default_draws(self) -> int:
        """How many draws a prediction takes."""

    @property
    def chooses_weights(self) -> bool:
        """Whether the method is about weights that were chosen, and takes the others as known."""


def _weight_outputs(
    chosen: ChosenWeights, params: Params, draws: int, gaussian: WeightGaussian, x: Inputs, rng: torch.Generator
) -> Tensor:
    """Outputs of weight draws, [S, B, ...]."""
    outputs = []
    for _ in range(draws):
        delta = gaussian.weights(gaussian.deltas(1, rng))[0]
        with torch.no_grad():
            outputs.append(chosen.network(chosen.moved(params, delta), x))
    return torch.stack(outputs)


def _usable(path: PrecisionPath) -> list[float]:
    """The scales at which the precision is positive definite beyond rounding."""
    scales = [scale for scale in SCALES if scale > path.lowest]
    if len(scales) < 2:
        raise ValueError(
            f"the curvature is so much larger than the prior that rounding hides the prior (a prior {path.lowest:.2g} "
            "times as precise would be needed): raise the prior's precision, or compute in float64"
        )
    return scales


def log_evidence(log_likelihood: float, weights: Tensor, prior: Tensor, log_det: float) -> float:
    """The Laplace approximation of the log marginal likelihood."""
    prior = prior.double()
    fit = float((prior * weights.double().to(prior.device).square()).sum())
    return log_likelihood - 0.5 * (fit - float(prior.log().sum()) + log_det)


def _row_nll(likelihood: Likelihood, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
    """The negative log likelihood of each row, [B]."""
    log_prob = likelihood.predictive(outputs, hyper).log_prob(targets).double().cpu()
    return -log_prob.reshape(len(log_prob), -1).sum(1)


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, torch.inf)
