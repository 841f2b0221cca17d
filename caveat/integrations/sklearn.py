"""Estimators of scikit-learn: arrays in, a posterior inside, probabilities, intervals and standard deviations out.

    CaveatClassifier(method=caveat.DeepEnsemble()).fit(X, y).predict_proba(X)
    CaveatRegressor(calibration=0.2).fit(X, y).predict_interval(X, 0.9)

Inputs are standardised with the statistics of the rows given to `fit`, targets of a regression as well. The network
computes in float64, unless it comes from a `module` of one's own, and is fitted and asked on the CPU or a `device`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.preprocessing import LabelEncoder, StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from caveat.fitting import fit
from caveat.likelihoods import Categorical, Gaussian, Likelihood
from caveat.methods import Method
from caveat.methods.last_layer_laplace import LastLayerLaplace
from caveat.methods.map import MAP
from caveat.models import mlp
from caveat.predictive import Predictive
from caveat.priors import Prior
from caveat.randomness import seeded
from caveat.task import Task

__all__ = ["CaveatClassifier", "CaveatRegressor"]

Array = NDArray[Any]
ModuleFactory = Callable[[int, int], nn.Module]


class _CaveatEstimator(BaseEstimator):
    """What both estimators share: from arrays to `posterior_`, and from inputs to its prediction."""

    def __init__(
        self,
        method: Method | None = None,
        *,
        hidden: int | Sequence[int] = (50,),
        module: ModuleFactory | None = None,
        prior: Prior | None = None,
        start: Method | None = None,
        validation: float = 0.1,
        calibration: float = 0.0,
        draws: int | None = None,
        device: str = "cpu",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.method = method
        self.hidden = hidden
        self.module = module
        self.prior = prior
        self.start = start
        self.validation = validation
        self.calibration = calibration
        self.draws = draws
        self.device = device
        self.random_state = random_state

    def _fit(self, x: Array, targets: Array, likelihood: Likelihood, outputs: int) -> None:
        """Fit the posterior to checked arrays."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with seeded(seed):
            if self.module is None:
                widths = (self.hidden,) if isinstance(self.hidden, int) else self.hidden
                module: nn.Module = mlp(x.shape[1], outputs, widths).double()
            else:
                module = self.module(x.shape[1], outputs)
        dtype = next(module.parameters()).dtype
        self.scaler_ = StandardScaler().fit(x)
        inputs = torch.from_numpy(self.scaler_.transform(x)).to(dtype)
        y = torch.from_numpy(targets)
        y = y.to(dtype) if y.is_floating_point() else y
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        shares = self.calibration, self.validation
        counts = [round(share * len(x)) for share in shares]
        if min(shares) < 0 or sum(counts) >= len(x):
            raise ValueError(
                f"calibration={self.calibration} and validation={self.validation} leave none of {len(x)} rows to fit "
                "to: both are shares, and their sum must be below 1"
            )
        calibrating, validating, fitting = (
            TensorDataset(inputs[rows], y[rows]) for rows in order.split([*counts, len(x) - sum(counts)])
        )
        for name, given in (("method", self.method), ("start", self.start)):
            if isinstance(given, type | str):
                raise TypeError(f"{name}={given!r}: must be an instance of a method, such as caveat.LastLayerLaplace()")
        method = LastLayerLaplace() if self.method is None else self.method
        start = (self.start or MAP()) if method.starts_from == "trained" else None
        task = Task(module, fitting, likelihood, self.prior, validation=validating if len(validating) else None)
        posterior = fit(task, method, start=start, seed=seed, device=self.device, progress=False)
        self.posterior_ = posterior.calibrate(calibrating) if self.calibration else posterior

    def _inputs(self, X: ArrayLike) -> Tensor:
        """Checked inputs as the network takes them."""
        check_is_fitted(self)
        x = validate_data(self, X, dtype=np.float64, reset=False)
        network = self.posterior_.network
        return torch.from_numpy(self.scaler_.transform(x)).to(network.device, network.input_dtype)

    def _predict(self, X: ArrayLike) -> Predictive:
        x = self._inputs(X)
        return self.posterior_.predict(x, draws=self.draws)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: the posterior without what it predicts with, which is made again."""
        state = super().__getstate__()
        if "posterior_" in state:
            state = state | {"posterior_": dataclasses.replace(state["posterior_"])}
        return state


class CaveatClassifier(ClassifierMixin, _CaveatEstimator):
    """A classifier with a posterior over its network's weights; after `fit` there are `posterior_` and `classes_`.

    Args:
        method: which posterior, such as `caveat.SWAG()`; a last-layer Laplace approximation unless given.
        hidden: widths of the hidden layers of a perceptron.
        module: in its place, a function of the numbers of features and of outputs that makes a module.
        prior: over the weights; `caveat.GaussianPrior(1.0)` unless given.
        start: what a method that improves on a trained network starts from; `caveat.MAP()` unless given.
        validation: the share of rows held out for what methods tune; where that is less than one row, none is.
        calibration: the share of rows held out for intervals or sets that hold as often as they say; 0 for none.
        draws: posterior draws a prediction; the method's own number unless given.
        device: where to fit and predict.
        random_state: of first weights, splits and draws.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> "CaveatClassifier":
        """Fit to inputs [rows, features] and labels [rows] of any type."""
        x, labels = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(labels)
        encoder = LabelEncoder().fit(labels)
        self.classes_ = encoder.classes_
        if len(self.classes_) < 2:
            only = self.classes_.tolist()[0]
            raise ValueError(f"the labels have one class, {only!r}, and a classifier needs two or more")
        self._fit(x, encoder.transform(labels).astype(np.int64), Categorical(), len(self.classes_))
        return self

    def predict_proba(self, X: ArrayLike) -> Array:
        """Probabilities of `classes_`, [rows, classes], averaged over the posterior."""
        probs: Tensor = self._predict(X).probs  # type: ignore[attr-defined]
        return probs.double().cpu().numpy()

    def predict(self, X: ArrayLike) -> Array:
        """The most probable label of each row."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(1)]

    def predict_set(self, X: ArrayLike, level: float = 0.9) -> Array:
        """Which of `classes_` are in the set that holds the label with probability `level`, [rows, classes]."""
        prediction: Any = self._predict(X)
        return prediction.label_set(level).cpu().numpy()


class CaveatRegressor(RegressorMixin, _CaveatEstimator):
    """A regression with a posterior over its network's weights and noise that it learns; after `fit` `posterior_`.

    The arguments are those of `CaveatClassifier`.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> "CaveatRegressor":
        """Fit to inputs [rows, features] and targets [rows]."""
        x, targets = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        self._fit(x, targets.astype(np.float64).reshape(-1, 1), Gaussian(standardise=True), 1)
        return self

    def predict(self, X: ArrayLike, return_std: bool = False) -> Any:
        """The mean of each row's target, [rows]; with `return_std` also its standard deviation, noise included."""
        prediction: Any = self._predict(X)
        mean, std = (tensor.double().cpu().numpy()[:, 0] for tensor in (prediction.mean, prediction.variance.sqrt()))
        return (mean, std) if return_std else mean

    def predict_interval(self, X: ArrayLike, level: float = 0.9) -> Array:
        """The ends of the interval that holds the target with probability `level`, [rows, 2]."""
        prediction: Any = self._predict(X)
        return torch.cat(prediction.interval(level), 1).double().cpu().numpy()
