"""A callback of Lightning: the network that a trainer has trained becomes a posterior when it is done.

callback = PosteriorCallback(caveat.SWAG(), caveat.Categorical(), "posteriors/mine")
lightning.Trainer(callbacks=[callback]).fit(module, loader)
callback.posterior
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn

from caveat.integrations.collected import Collector
from caveat.likelihoods import Likelihood
from caveat.methods import Method
from caveat.network import ParameterFilter
from caveat.posterior import Posterior
from caveat.priors import Prior
from caveat.rows import Data
from caveat.task import Task

__all__ = ["PosteriorCallback"]


class PosteriorCallback(Callback):
    """Makes a posterior of what a trainer trains.

    An ensemble is complete after as many calls of `fit` with this callback as it has members, each of a new module.
    Until there is one, `posterior` is None.

    Args:
        method: which posterior: `MAP`, `SWAG`, `DeepEnsemble`, or any that starts from a trained network.
        likelihood: what the network's outputs say about the targets.
        folder: where to write the posterior; it is not written without one.
        network: the name of the Lightning module's attribute that is the network, from inputs to outputs; `""` for the
            Lightning module itself.
        prior: over the weights; `caveat.GaussianPrior(1.0)` unless given.
        data: the training rows; those of the trainer's own loader unless given.
        validation: rows for what the method tunes, or a share of the training rows.
        parameters: which parameters inference is about.
        from_epoch: the first epoch, counted from 0, whose weights SWAG takes: when training has all but arrived.
        seed: of what is random in the fit.
    """

    def __init__(
        self,
        method: Method,
        likelihood: Likelihood,
        folder: str | Path | None = None,
        *,
        network: str = "model",
        prior: Prior | None = None,
        data: Data | None = None,
        validation: float | Data | None = None,
        parameters: ParameterFilter = "*",
        from_epoch: int = 0,
        seed: int = 0,
    ) -> None:
        self.posterior: Posterior | None = None
        self._collector = Collector(method, from_epoch, seed)
        self._likelihood, self._folder, self._network = likelihood, folder, network
        self._prior, self._data, self._validation, self._parameters = prior, data, validation, parameters

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to collect; a module without the network is refused before it is trained."""
        self._of(pl_module)
        self._collector.training_began()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the weights where the method wants them."""
        self._collector.epoch_ended(trainer.current_epoch, self._of(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fit what is left to fit, and write the posterior."""
        data: Any = trainer.train_dataloader if self._data is None else self._data

        task = Task(
            self._of(pl_module),
            data,
            self._likelihood,
            self._prior,
            validation=self._validation,
            parameters=self._parameters,
        )
        self.posterior = self._collector.training_ended(task)
        if self.posterior is not None and self._folder is not None and trainer.is_global_zero:
            self.posterior.save(self._folder)

    def _of(self, pl_module: LightningModule) -> nn.Module:
        """The network inside a Lightning module."""
        network = getattr(pl_module, self._network, None) if self._network else pl_module
        if not isinstance(network, nn.Module):
            children = ", ".join(name for name, _ in pl_module.named_children())
            raise ValueError(
                f"network={self._network!r} is no module of {type(pl_module).__name__}: name the attribute that is the "
                f"network, one of {children}, or '' for the Lightning module itself"
            )
        return network
