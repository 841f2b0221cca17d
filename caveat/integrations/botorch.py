"""A posterior as a model of BoTorch: acquisition functions go through its draws, with gradients to the inputs.

model = PosteriorModel(posterior, draws=64)
acquisition = qLogExpectedImprovement(model, best_f=y.max())
optimize_acqf(acquisition, bounds, q=1, num_restarts=5, raw_samples=32)
"""

import torch
from botorch.models.ensemble import EnsembleModel
from torch import Tensor

from caveat.posterior import Posterior

__all__ = ["PosteriorModel"]


class PosteriorModel(EnsembleModel):
    """The functions that draws of the weights stand for, as the members of an ensemble.

    The mean of each draw, in the units of the targets; observation noise is not part of it, since BoTorch asks for the
    function. The draws are made once, so a model is a fixed set of functions that an optimiser can climb.

    Args:
        posterior: of a regression, and of a method that draws weights.
        draws: how many; the method's own number unless given.
        seed: of the draws.
    """

    def __init__(self, posterior: Posterior, draws: int | None = None, seed: int = 0) -> None:
        super().__init__()
        if "target_mean" not in posterior.state["hyper"]:
            name = type(posterior.network.likelihood).__name__
            raise ValueError(
                f"BoTorch models real numbers, and this is a posterior of {name}: fit Gaussian or "
                "HeteroscedasticGaussian targets"
            )
        count = posterior.method.default_draws if draws is None else draws
        self._draws = list(posterior.sample(count, seed=seed))
        self._hyper = posterior.state["hyper"]
        self._network = posterior.network.replica()
        self._likelihood = posterior.network.likelihood
        self._num_outputs = self._hyper["target_mean"].numel()

    def forward(self, X: Tensor) -> Tensor:
        """Values of all draws at inputs [..., n, d]: [..., draws, n, outputs], with gradients to the inputs."""
        rows = X.reshape(-1, X.shape[-1]).to(self._network.input_dtype)
        outputs = torch.stack([self._network(params, rows) for params in self._draws])  # [S, rows, outputs]
        values = self._likelihood.predictive(outputs, self._hyper).samples.to(X)
        return values.reshape(len(values), *X.shape[:-1], -1).movedim(0, -3)
