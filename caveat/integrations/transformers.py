"""A callback of Hugging Face's `Trainer`: the model that it has trained becomes a posterior when it is done.

callback = PosteriorCallback(caveat.LastLayerLaplace(), folder="posteriors/mine")
Trainer(model=model, train_dataset=rows, callbacks=[callback]).train()
callback.posterior
"""

from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from caveat.integrations.collected import Collector
from caveat.likelihoods import Categorical, Likelihood
from caveat.methods import Method
from caveat.network import ParameterFilter
from caveat.posterior import Posterior
from caveat.priors import Prior
from caveat.rows import Data
from caveat.task import Task

__all__ = ["PosteriorCallback"]


class PosteriorCallback(TrainerCallback):
    """Makes a posterior of what a Hugging Face trainer trains.

    An ensemble is complete after as many calls of `train` with this callback as it has members, each of a new model.
    Until there is one, `posterior` is None. Weights that the trainer does not train are frozen here as well.

    Args:
        method: which posterior: `MAP`, `SWAG`, `DeepEnsemble`, or any that starts from a trained network.
        likelihood: what the logits say about the labels; `caveat.Categorical()` unless given.
        folder: where to write the posterior; it is not written without one.
        prior: over the weights; `caveat.GaussianPrior(1.0)` unless given.
        data: the training rows; those of the trainer unless given.
        validation: rows for what the method tunes, or a share of the training rows.
        parameters: which parameters inference is about.
        from_epoch: the first epoch, counted from 0, whose weights SWAG takes: when training has all but arrived.
        seed: of what is random in the fit.
    """

    def __init__(
        self,
        method: Method,
        likelihood: Likelihood | None = None,
        folder: str | Path | None = None,
        *,
        prior: Prior | None = None,
        data: Data | None = None,
        validation: float | Data | None = None,
        parameters: ParameterFilter = "*",
        from_epoch: int = 0,
        seed: int = 0,
    ) -> None:
        self.posterior: Posterior | None = None
        self._collector = Collector(method, from_epoch, seed)
        self._likelihood = Categorical() if likelihood is None else likelihood
        self._folder, self._prior, self._data = folder, prior, data
        self._validation, self._parameters = validation, parameters

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to collect."""
        self._collector.training_began()

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the weights where the method wants them."""
        self._collector.epoch_ended(round(state.epoch) - 1, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Fit what is left to fit, and write the posterior."""
        model: nn.Module = kwargs["model"]
        data = _plain(kwargs["train_dataloader"]) if self._data is None else self._data
        task = Task(
            model, data, self._likelihood, self._prior, validation=self._validation, parameters=self._parameters
        )
        self.posterior = self._collector.training_ended(task)
        if self.posterior is not None and self._folder is not None and state.is_world_process_zero:
            self.posterior.save(self._folder)


def _plain(loader: DataLoader) -> DataLoader:
    """The trainer's rows, read as it reads them; its own loader moves batches and shares them among processes."""
    return DataLoader(loader.dataset, batch_size=loader.batch_size or 8, collate_fn=loader.collate_fn)
