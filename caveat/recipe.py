"""A recipe: the names from which the command line builds a task, kept beside a posterior to use it again."""

import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from caveat import models
from caveat.data import DataSet, load
from caveat.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson
from caveat.posterior import Posterior
from caveat.posterior import load as load_posterior
from caveat.priors import GaussianPrior
from caveat.randomness import seeded
from caveat.rows import Rows
from caveat.storage import FORMAT, read_json, write_json
from caveat.task import Task

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

    @staticmethod
    def of(data: DataSet, model: str, likelihood: str) -> "Recipe":
        """The recipe for a data set that was read."""
        name = data.likelihood if likelihood == "auto" else likelihood
        if ".py:" in model:  # so that the posterior can be used from another folder
            path, function = model.rsplit(":", 1)
            model = f"{Path(path).resolve()}:{function}"
        width = 2 * data.n_outputs if name == "heteroscedastic" else data.n_outputs
        return Recipe(data.name, model, name, tuple(data.train.tensors[0].shape[1:]), width, data.class_names)

    def module(self, seed: int) -> nn.Module:
        """A fresh module, its initial weights drawn by a seed."""
        with seeded(seed):
            if ".py:" in self.model:
                return _from_file(self.model)
            return models.for_data(self.model, self.input_shape, self.n_outputs)

    def task(
        self, data: DataSet, *, seed: int, prior_precision: float, parameters: str, validation: float, batch_size: int
    ) -> Task:
        """The task: this model on the training rows."""
        return Task(
            self.module(seed),
            DataLoader(data.train, batch_size),
            _LIKELIHOODS[self.likelihood],
            GaussianPrior(prior_precision),
            validation=validation or None,
            parameters=parameters,
        )

    def write(self, folder: Path) -> None:
        """Put the recipe beside a posterior."""
        write_json(folder / "recipe.json", {"format": FORMAT} | asdict(self))


def read_posterior(folder: Path, device: torch.device) -> tuple[Posterior, Recipe]:
    """A posterior that the command line wrote, and its recipe."""
    if not (folder / "recipe.json").exists():
        raise FileNotFoundError(
            f"{folder} has no recipe.json, so the model is not known: "
            "give a folder that `caveat fit` wrote, or use caveat.load"
        )
    content: dict[str, Any] = read_json(folder / "recipe.json")
    content.pop("format")
    lists = {key: tuple(content[key]) for key in ("input_shape", "class_names")}
    recipe = Recipe(**(content | lists))
    return load_posterior(folder, recipe.module(0), device=device), recipe


def inputs_of(name: str, data_dir: Path | None, seed: int) -> Rows:
    """Inputs to predict: the test rows of a data set, or the array x of an npz file."""
    path = Path(name)
    if path.suffix == ".npz" and path.is_file():
        with np.load(path, allow_pickle=False) as file:
            if "x" in file.files:
                return Rows(TensorDataset(torch.as_tensor(file["x"])), needs_targets=False)
    return Rows(TensorDataset(load(name, data_dir, seed=seed).test.tensors[0]), needs_targets=False)


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
