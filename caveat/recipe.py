"""A recipe: the names from which the command line builds a task, kept beside a posterior to use it again."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from caveat import models
from caveat.data import DataSet, load, prepare
from caveat.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson
from caveat.posterior import Posterior
from caveat.posterior import load as load_posterior
from caveat.priors import GaussianPrior
from caveat.randomness import seeded
from caveat.rows import Rows
from caveat.storage import read_json
from caveat.task import Augment, Task

__all__ = ["Recipe", "inputs_of", "read_posterior"]

_LIKELIHOODS: dict[str, Likelihood] = {
    "categorical": Categorical(),
    "bernoulli": Bernoulli(),
    "gaussian": Gaussian(standardise=True),
    "heteroscedastic": HeteroscedasticGaussian(standardise=True),
    "poisson": Poisson(),
}


@dataclass(frozen=True)
class Recipe:
    """Which data, which model, which likelihood."""

    data: str
    model: str
    likelihood: str
    input_shape: tuple[int, ...]
    n_outputs: int
    class_names: tuple[str, ...]
    preprocessing: dict[str, Any]

    @staticmethod
    def of(data: DataSet, source: str, model: str, likelihood: str) -> "Recipe":
        """The recipe for a data set that was read from a source."""
        name = data.likelihood if likelihood == "auto" else likelihood
        width = 2 * data.n_outputs if name == "heteroscedastic" else data.n_outputs
        shape = tuple(data.train.tensors[0].shape[1:])
        # Paths are kept whole, so that the posterior can be used from another folder.
        if ".py:" in model:
            path, function = model.rsplit(":", 1)
            model = f"{Path(path).resolve()}:{function}"
        source = str(Path(source).resolve()) if Path(source).exists() else source
        return Recipe(source, model, name, shape, width, data.class_names, data.preprocessing)

    def module(self, seed: int) -> nn.Module:
        """A fresh module, its initial weights drawn by a seed."""
        with seeded(seed):
            if ".py:" in self.model:
                return _from_file(self.model)
            return models.for_data(self.model, self.input_shape, self.n_outputs)

    def task(
        self,
        data: DataSet,
        *,
        seed: int,
        prior_precision: float,
        parameters: str,
        validation: float,
        augment: Augment | None = None,
    ) -> Task:
        """The task: this model on the training rows."""
        return Task(
            self.module(seed),
            data.train,
            _LIKELIHOODS[self.likelihood],
            GaussianPrior(prior_precision),
            validation=validation or None,
            parameters=parameters,
            augment=augment,
        )


def read_posterior(folder: Path, device: torch.device) -> tuple[Posterior, Recipe]:
    """A posterior that the command line wrote, and its recipe."""
    if not (folder / "posterior.json").exists():
        raise FileNotFoundError(f"{folder} is not a posterior: give a folder that `caveat fit` wrote")
    content = read_json(folder / "posterior.json")["note"].get("recipe")
    if content is None:
        raise ValueError(f"{folder} was not written by `caveat fit`, so its model is not known here: use caveat.load")
    lists = {key: tuple(content[key]) for key in ("input_shape", "class_names")}
    recipe = Recipe(**(content | lists))
    return load_posterior(folder, recipe.module(0), device=device), recipe


def inputs_of(recipe: Recipe, source: str | None, data_dir: Path | None) -> Rows:
    """Inputs to predict: the array x of an npz file, prepared as the training data were, or a data set's test rows."""
    path = Path(source or "")
    if path.suffix == ".npz" and path.is_file():
        with np.load(path, allow_pickle=False) as file:
            if "x" in file.files:
                x = prepare(file["x"], recipe.preprocessing)
                if tuple(x.shape[1:]) != recipe.input_shape:
                    shape, wanted = list(x.shape[1:]), list(recipe.input_shape)
                    raise ValueError(f"{path}: a row of x has shape {shape}, the posterior's data have {wanted}")
                return Rows(TensorDataset(x), needs_targets=False)
    rows = load(source or recipe.data, data_dir)
    return Rows(TensorDataset(rows.test.tensors[0]), needs_targets=False)


def _from_file(reference: str) -> nn.Module:
    path, name = reference.rsplit(":", 1)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise FileNotFoundError(f"--model {reference}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"--model {reference}: {path} has no function {name}")
    built = getattr(module, name)()
    if not isinstance(built, nn.Module):
        raise ValueError(f"--model {reference}: {name}() returned a {type(built).__name__}, not a torch module")
    return built
