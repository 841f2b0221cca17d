"""A Laplace posterior: what it keeps, and its predictions through the network's linearisation at the point.

f(x, w) ~ f(x, w*) + J(x) (w - w*)   so that outputs are Gaussian:   N(f(x, w*), J P^-1 J^T)
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from caveat.batches import Inputs, count_rows, move, outside_inference_mode, slices
from caveat.engine.cost import refuse_if_too_large
from caveat.engine.flat_weights import flat_places
from caveat.engine.laplace.chosen_weights import ChosenWeights
from caveat.engine.laplace.gaussians import DenseGaussian, LowRankGaussian, WeightGaussian
from caveat.engine.laplace.layer_gaussians import check_gaussian, restored
from caveat.engine.predictors import FixedForm, LinearDraws, PreparedDraws, Replicas, WeightDraws, outputs_of_draws
from caveat.engine.row_gradients import Jacobian, LastLayer, Plans, RowPass, evenly
from caveat.engine.state_checks import check_hyper, check_indices, check_point, network_tensors
from caveat.engine.torch_settings import differentiable_attention, jvp
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.storage import CorruptFile, State

__all__ = ["LaplacePrediction", "LaplacePredictor", "LaplaceState", "bridge"]

LaplacePrediction = Literal["auto", "samples", "weights", "closed", "bridge"]


@dataclass(frozen=True)
class LaplaceState:
    """The state of Laplace, LastLayerLaplace and SubnetworkLaplace."""

    params: Params  # the point, with buffers
    hyper: Hyper
    gaussian: Params  # what `WeightGaussian.tensors` stores
    subnetwork: Params | None = None  # what `ChosenWeights.stored_entries` says

    def tensors(self) -> State:
        """As a posterior keeps it, by group and name."""
        state: State = {"params": self.params, "hyper": self.hyper, "gaussian": self.gaussian}
        return state if self.subnetwork is None else state | {"subnetwork": self.subnetwork}

    @classmethod
    def of(cls, state: State) -> "LaplaceState":
        """The state that `tensors` made groups of."""
        missing = {"params", "hyper", "gaussian"} - state.keys()
        if missing or "prior" not in state["gaussian"]:
            lacking = f"no group {sorted(missing)[0]!r}" if missing else "no prior precisions"
            raise CorruptFile(f"this is not the state of a Laplace posterior: it has {lacking}")
        return cls(state["params"], state["hyper"], state["gaussian"], state.get("subnetwork"))

    def check(self, network: Network) -> None:
        """Refuse what is not a Gaussian over weights of the network, around a point of it."""
        check_point("params", self.params, network)
        check_hyper(self.hyper, network)
        weights, _ = network_tensors(network)
        for name, entries in (self.subnetwork or {}).items():
            if name not in weights:
                raise CorruptFile(f"subnetwork/{name} does not belong there")
            check_indices(f"subnetwork/{name}", entries, weights[name].numel())
        if len({len(entries) > 0 for entries in (self.subnetwork or {}).values()}) > 1:
            raise CorruptFile("subnetwork has entries of some parameters, and all of others")
        chosen = ChosenWeights.stored(network, self.subnetwork)
        shapes = {name: weights[name].shape for name in chosen.network.names}
        check_gaussian(self.gaussian, shapes, len(chosen), network.dtype)

    def posterior(self, network: Network) -> tuple[ChosenWeights, WeightGaussian]:
        """The weights that the posterior is over, and their Gaussian."""
        chosen = ChosenWeights.stored(network, self.subnetwork)
        return chosen, restored(self.gaussian, flat_places(chosen.network))


class LaplacePredictor:
    """Predicts from a Gaussian over weights: the Gaussian is restored once, the way to row gradients is found once."""

    def __init__(self, state: LaplaceState, network: Network, prediction: LaplacePrediction) -> None:
        self._state, self._prediction = state, prediction
        chosen, self._gaussian = state.posterior(network)
        self._plans = Plans()
        self._prepared: PreparedDraws[Tensor] = PreparedDraws()
        self._replicas = Replicas(lambda: _Replica(replace(chosen, network=chosen.network.replica()), state.params))

    def draws(self, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Weight draws: the point plus draws of the Gaussian, n of them."""
        with self._replicas.lent() as replica:
            yield from self._weight_draws(replica.chosen, n, rng)

    def _weight_draws(self, chosen: ChosenWeights, n: int, rng: torch.Generator) -> Iterator[Params]:
        for _ in range(n):
            delta = self._gaussian.weights(self._gaussian.deltas(1, rng))[0]
            yield chosen.moved(self._state.params, delta)

    @torch.inference_mode(False)
    def outputs(self, x: Inputs, n: int, rng: torch.Generator) -> tuple[Tensor, Hyper]:
        """Outputs of n functions, [S, B, ...]: the same draws for all inputs, so joint over classes and inputs."""
        x = outside_inference_mode(x)
        hyper = self._state.hyper
        if self._prediction == "bridge":
            mean, covariance = self.moments(x)
            return bridge(mean, covariance, n, rng), hyper
        with self._replicas.lent() as replica:
            chosen = replica.chosen
            if self._prediction == "weights":
                return outputs_of_draws(self._weight_draws(chosen, n, rng), hyper, chosen.network, x)
            if not count_rows(x):
                outputs = self._at_the_point(chosen, x)
                return outputs.expand(n, *outputs.shape), hyper
            jacobian = replica.jacobian(x, self._plans)
            if jacobian.plan.outputs > 2 * n:
                with contextlib.suppress(NotImplementedError):  # a layer without forward derivatives, such as an LSTM
                    return self._by_tangents(chosen, x, n, rng), hyper
            return self._by_row_gradients(replica, jacobian, x, n, rng), hyper

    def _by_row_gradients(
        self, replica: "_Replica", jacobian: Jacobian, x: Inputs, n: int, rng: torch.Generator
    ) -> Tensor:
        """F + J delta from the gradients of every row."""
        gaussian, device = self._gaussian, jacobian.network.device
        numbers = n * len(gaussian.prior)

        def drawn() -> Tensor:
            advice = "take fewer draws with predict(x, draws=...), or prediction='closed'"
            refuse_if_too_large(f"{n} draws of {len(gaussian.prior):,} weights", 8 * numbers, device, advice)
            return gaussian.deltas(n, rng)

        deltas = self._prepared.of(n, rng, numbers * gaussian.prior.element_size(), drawn)
        outputs = []
        for piece in slices(x, evenly(count_rows(x), gaussian.rows_at_once(jacobian))):
            row_pass = replica.at(jacobian, move(piece, device), self._gaussian)
            shifts = gaussian.shifts(row_pass, deltas)
            outputs.append(row_pass.outputs + shifts.reshape(n, *row_pass.outputs.shape).to(row_pass.outputs.dtype))
            del row_pass  # before the next pass is made: two would be held at once
        return torch.cat(outputs, 1)

    def _by_tangents(self, chosen: ChosenWeights, x: Inputs, n: int, rng: torch.Generator) -> Tensor:
        """F + J delta by forward differentiation: for more outputs than draws, such as pixels."""
        network, params = chosen.network, self._state.params
        point = {name: params[name] for name in network.names}
        outputs = []
        for draw in self._weight_draws(chosen, n, rng):
            tangent = {name: draw[name] - params[name] for name in network.names}
            pieces = []
            for piece in slices(x, 128):
                rows = move(piece, network.device)
                with differentiable_attention():
                    both = jvp(lambda weights, at=rows: network(params | weights, at), (point,), (tangent,))
                pieces.append(both[0] + both[1])
            outputs.append(torch.cat(pieces).detach())
        return torch.stack(outputs)

    @torch.inference_mode(False)
    def moments(self, x: Inputs, joint: bool = False) -> tuple[Tensor, Tensor]:
        """f(x, w*) [B, ...] and J P^-1 J^T, [B, D, D] or joint [B D, B D]."""
        x = outside_inference_mode(x)
        with self._replicas.lent() as replica:
            chosen = replica.chosen
            if not count_rows(x):
                outputs = self._at_the_point(chosen, x)
                d = outputs.shape[1:].numel()
                return outputs, outputs.new_zeros((0, 0) if joint else (0, d, d))
            jacobian, rows = replica.jacobian(x, self._plans), count_rows(x)
            size = rows if joint else evenly(rows, self._gaussian.rows_at_once(jacobian))
            means, covariances = [], []
            for piece in slices(x, size):
                row_pass = replica.at(jacobian, move(piece, chosen.network.device), self._gaussian)
                means.append(row_pass.outputs)
                covariances.append(self._gaussian.covariance(row_pass, joint))
                del row_pass
            return torch.cat(means), torch.cat(covariances)

    def fixed_form(self, n: int | None, rng: torch.Generator, example: Inputs) -> FixedForm:
        """The draws that `outputs` makes, or for `moments` a root of the covariance."""
        state = self._state
        if self._prediction == "bridge":
            raise TypeError(
                "prediction='bridge' draws from a distribution of each row's own, so no module without randomness "
                "gives it: fit with prediction='closed', or 'samples'"
            )
        with self._replicas.lent() as replica:
            chosen = replica.chosen
            if self._prediction == "weights" and n is not None:
                draws = self._weight_draws(chosen, n, rng)
                return WeightDraws([(chosen.network, params) for params in draws], state.hyper)
            if n is None:
                size = len(self._gaussian.prior)
                advice = "take draws instead, module(draws=100)"
                what = f"a root of the covariance of {size:,} weights"
                refuse_if_too_large(what, 24 * size**2, chosen.network.device, advice)
                directions = self._gaussian.covariance_root()
            elif self._at_the_point(chosen, example)[0].numel() > 2 * n:  # as `outputs` goes by tangents
                directions = torch.cat([self._gaussian.weights(self._gaussian.deltas(1, rng)) for _ in range(n)])
            else:
                directions = self._gaussian.weights(self._gaussian.deltas(n, rng))
            return LinearDraws(chosen.network, state.params, directions, chosen.index, state.hyper, n is None)

    def _at_the_point(self, chosen: ChosenWeights, x: Inputs) -> Tensor:
        with torch.no_grad():
            return chosen.network(self._state.params, move(x, chosen.network.device))


class _Replica:
    """The chosen weights with a network of their own, and its Jacobian, which is made for the first prediction."""

    def __init__(self, chosen: ChosenWeights, params: Params) -> None:
        self.chosen, self._params = chosen, params
        self._jacobian: Jacobian | None = None
        self._last: LastLayer | None = None

    def jacobian(self, x: Inputs, plans: Plans) -> Jacobian:
        """Row gradients at the point."""
        if self._jacobian is None:
            network = self.chosen.network
            first = move(next(iter(slices(x, 3))), network.device)
            self._jacobian = Jacobian(network, self._params, first, self.chosen.index, plans=plans)
            self._last = LastLayer.of(self._jacobian)
        return self._jacobian

    def at(self, jacobian: Jacobian, x: Inputs, gaussian: WeightGaussian) -> RowPass:
        """One pass over these rows; an ordinary one where that tells all that the Gaussian asks."""
        if self._last is not None and isinstance(gaussian, DenseGaussian | LowRankGaussian):
            rows = self._last.at(x)
            if rows is not None:
                return cast(RowPass, rows)  # these Gaussians ask for outputs, features, rows and products with them
        return jacobian.at(x)


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
