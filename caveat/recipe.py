"""A recipe: the names from which the command line builds a task, kept beside a posterior to use it again."""

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from caveat import models
from caveat.data import DataSet, load, prepare
from caveat.data.dataset import listed, unprepare
from caveat.data.own import read_own, read_own_inputs
from caveat.data.own_tables import Known, is_table, known_of
from caveat.data.sets import names as data_names
from caveat.data.sets import own_path
from caveat.data.tables import Encoding, whole_number
from caveat.files import named_function, names_function, was_run_before
from caveat.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson
from caveat.posterior import Posterior
from caveat.posterior import load as load_posterior
from caveat.priors import Prior
from caveat.randomness import seeded
from caveat.rows import Rows
from caveat.storage import CorruptFile, read_json
from caveat.task import Augment, Task
from caveat.typed_json import as_kind

__all__ = [
    "PreparedInputs",
    "Recipe",
    "data_of",
    "example_of",
    "inputs_of",
    "prepared",
    "read_posterior",
    "read_served",
]

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
    choices: dict[str, Any] = field(default_factory=dict)  # with which the data were loaded: split, gap, seed

    @staticmethod
    def of(data: DataSet, source: str, model: str, likelihood: str, choices: dict[str, Any] | None = None) -> "Recipe":
        """The recipe for a data set that was read from a source, with choices that `caveat.data.load` offers."""
        name = data.likelihood if likelihood == "auto" else likelihood
        width = 2 * data.n_outputs if name == "heteroscedastic" else data.n_outputs
        shape = tuple(data.train.tensors[0].shape[1:])
        path = own_path(source)
        source = _whole_path(source) if path is None else str(path.resolve())
        model, names = _whole_path(model), data.class_names
        return Recipe(source, model, name, shape, width, names, data.preprocessing, choices or {})

    def module(self, seed: int) -> nn.Module:
        """A fresh module, its initial weights drawn by a seed."""
        with seeded(seed):
            if names_function(self.model):
                return _from_file(self.model)
            return models.for_data(self.model, self.input_shape, self.n_outputs)

    def task(
        self,
        data: DataSet,
        *,
        seed: int,
        prior: Prior,
        parameters: str,
        validation: float,
        augment: Augment | None = None,
        class_weights: Literal["balanced"] | tuple[float, ...] | None = None,
    ) -> Task:
        """The task: this model on the training rows; `validation` is a share of them where the data have none.

        Classes with weights count so much in the likelihood; balanced ones N / (C N_c), so that all count alike.
        """
        likelihood = _LIKELIHOODS[self.likelihood]
        if class_weights is not None:
            if not isinstance(likelihood, Categorical):
                raise ValueError(f"class weights are for the likelihood categorical, and this is {self.likelihood}")
            weights = _balanced(data) if class_weights == "balanced" else class_weights
            likelihood = replace(likelihood, class_weights=weights)
        return Task(
            self.module(seed),
            data.train,
            likelihood,
            prior,
            validation=(validation or None) if data.validation is None else data.validation,
            parameters=parameters,
            augment=augment,
        )


def _balanced(data: DataSet) -> tuple[float, ...]:
    """Weights with which every class counts alike, one on average over the training rows."""
    counts = torch.bincount(data.train.tensors[1].long(), minlength=data.n_outputs)
    if not counts.all():
        missing = data.class_names[int((counts == 0).nonzero()[0])]
        raise ValueError(f"class weights cannot be balanced: no training row is of the class {missing}")
    return tuple((counts.sum() / (len(counts) * counts)).tolist())


def read_posterior(folder: Path, device: torch.device, model: str | None = None) -> tuple[Posterior, Recipe]:
    """A posterior that the command line wrote, and its recipe; `model` takes the place of the one that is stored."""
    if not (folder / "posterior.json").exists():
        raise FileNotFoundError(f"{folder} is not a posterior: give a folder that `caveat fit` wrote")
    recipe = _stored_recipe(folder)
    if model is not None:
        recipe = replace(recipe, model=model)
    elif names_function(recipe.model):  # those of the package are where they were
        recipe = replace(recipe, model=_known_model(folder, recipe.model))
    return load_posterior(folder, recipe.module(0), device=device), recipe


def read_served(folder: Path, device: torch.device, model: str | None = None) -> tuple[Posterior, Recipe | None]:
    """As `read_posterior`; one that Python code saved has no recipe, and is read with the model that is named."""
    if model is None or not names_function(model) or not (folder / "posterior.json").exists() or _note(folder):
        return read_posterior(folder, device, model)
    return load_posterior(folder, _from_file(model), device=device), None


def _note(folder: Path) -> Any:
    """What a posterior's note has of a recipe, None where `caveat fit` did not write it."""
    note = read_json(folder / "posterior.json").get("note")
    return note.get("recipe") if isinstance(note, dict) else None


def _stored_recipe(folder: Path) -> Recipe:
    """The recipe in a posterior's note; a CorruptFile says what is amiss in it."""
    content = _note(folder)
    if content is None:
        raise ValueError(
            f"{folder} was not written by `caveat fit`, so its model and data are not known here: `export` and `serve` "
            "take --model file.py:function, which makes the module; for all else use caveat.load(folder, model) in "
            "Python"
        )
    where = f"{folder / 'posterior.json'}: the recipe"
    recipe = as_kind(content, Recipe, where)
    if recipe.likelihood not in _LIKELIHOODS or not (names_function(recipe.model) or recipe.model in models.MODELS):
        raise CorruptFile(f"{where} names the likelihood {recipe.likelihood!r} and the model {recipe.model!r}")
    if not 0 < math.prod((recipe.n_outputs, *recipe.input_shape)) < 2**31 or min(recipe.input_shape, default=0) < 1:
        raise CorruptFile(f"{where} is of inputs {list(recipe.input_shape)} and {recipe.n_outputs} outputs")
    read = {key: value for key, value in recipe.preprocessing.items() if key in _PREPARED}
    try:
        as_kind(read, _Preprocessing, f"{where}, preprocessing")
    except ValueError as error:
        raise CorruptFile(f"{where}, preprocessing: {error}") from error
    _check_units(recipe, f"{where}, preprocessing")
    return recipe


def _check_units(recipe: Recipe, where: str) -> None:
    """Refuse a recipe that lacks what its inputs were scaled by: without it they would silently be other numbers."""
    read, images = recipe.preprocessing, len(recipe.input_shape) == 3
    own = recipe.data not in data_names() and not names_function(recipe.data)
    needed = {"pixel_range": 2} if images else {}
    if images or own or "mean" in read or "std" in read:
        needed |= {"mean": recipe.input_shape[0], "std": recipe.input_shape[0]}
    for key, length in needed.items():
        if key not in read:
            raise CorruptFile(f"{where}: {key} is missing, by which inputs are scaled")
        one_for_all = not (images or own) and np.size(read[key]) == 1  # mnist1d's signals
        if np.size(read[key]) != length and not one_for_all:
            raise CorruptFile(f"{where}: {key} has {np.size(read[key])} entries, and inputs have {length}")


@dataclass(frozen=True)
class _Preprocessing:
    """What is read of a recipe's preprocessing; there may be more in it."""

    mean: list[float] | float = 0.0
    std: list[float] | float = 1.0
    pixel_range: tuple[float, ...] = (0.0, 1.0)
    columns: list[str] = field(default_factory=list)
    target: str | None = None
    target_unit: str | None = None
    id: str | None = None
    encoding: Encoding | None = None
    black: list[float] | float | None = None


_PREPARED = {entry.name for entry in fields(_Preprocessing)}


def data_of(recipe: Recipe, source: str | None, data_dir: Path | None) -> DataSet:
    """A data set as a posterior knows its own: columns and classes by name, standardised alike; else its own data."""
    name = source or _known_source(recipe.data)
    path = own_path(name)
    known = _known(recipe)
    choices = recipe.choices if name == recipe.data else {}
    seed = int(choices.get("seed", 0))
    data = load(name, data_dir, **choices) if path is None else read_own(path, seed, known)
    if path is not None and not _prepared_alike(recipe, data):
        # Of the raw values: in single precision an outlier among the rows would have rounded the others away.
        known = known._replace(prepared=lambda raw: prepare(_shaped(recipe, raw, name, path), recipe.preprocessing))
        data = read_own(path, seed, known)
        data = replace(data, preprocessing=recipe.preprocessing | data.preprocessing)
    train, test = (
        TensorDataset(_as_known(recipe, x, data, name), _targets(recipe, y, data, name))
        for x, y in (data.train.tensors, data.test.tensors)
    )
    kept = ("source", "split", "columns", "target", "encoding", "notes")
    origin = {key: value for key, value in data.preprocessing.items() if key in kept}
    return replace(
        data,
        train=train,
        test=test,
        n_outputs=len(recipe.class_names) or data.n_outputs,
        class_names=recipe.class_names,
        preprocessing=recipe.preprocessing | origin,
    )


def _known(recipe: Recipe) -> Known:
    """What a posterior knows of its data."""
    return known_of(recipe.preprocessing)._replace(kind="classes" if recipe.class_names else "numbers")


class PreparedInputs(NamedTuple):
    """Rows to predict; their files, or names from a table, where they have some; and notes on how they were read."""

    rows: Rows
    files: tuple[str, ...]
    ids: tuple[str, ...]
    notes: tuple[str, ...]


def inputs_of(
    recipe: Recipe, source: str | None, data_dir: Path | None, id_column: str | None = None
) -> PreparedInputs:
    """Inputs to predict, prepared as the posterior's data were; of a named data set the test rows.

    `id_column` names the rows of a table; else the column of the posterior's own data that does.
    """
    name = source or _known_source(recipe.data)
    path = own_path(name)
    files: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if id_column is not None and (path is None or not is_table(path)):
        raise ValueError(f"the id {id_column!r} is to be a column of a csv or parquet file, which {name!r} is not")
    if path is None:
        data = load(name, data_dir, **(recipe.choices if name == recipe.data else {}))
        x = _as_known(recipe, data.test.tensors[0], data, name)
    else:
        if is_table(path) and len(recipe.input_shape) != 1:
            raise ValueError(f"{name}: a table, but a row of the posterior's data has shape {list(recipe.input_shape)}")
        known = _known(recipe)
        known = known if id_column is None else known._replace(id=id_column)
        raw, files, ids, notes = read_own_inputs(path, known, recipe.input_shape[0])
        if id_column is not None and not ids:
            raise ValueError(f"{name} lacks the column {id_column}")
        x = prepare(_shaped(recipe, raw, name, path), recipe.preprocessing)
    finite = x.flatten(1).isfinite().all(1)
    if not finite.all():
        row = int((~finite).nonzero()[0])
        where = files[row] if files else f"row {row + 1}"
        raise ValueError(f"{name}: {where} has missing or infinite values; remove it")
    return PreparedInputs(Rows(TensorDataset(x), needs_targets=False), files, ids, notes)


def prepared(recipe: Recipe, x: np.ndarray) -> Tensor:
    """Rows of numbers as they are in files, [B, ...], prepared as the posterior's data were."""
    return prepare(_shaped(recipe, x, "inputs", None), recipe.preprocessing)


def example_of(recipe: Recipe) -> Any:
    """One made-up row of numbers as they are in files, near the mean of the posterior's data, as json."""
    rng = torch.Generator().manual_seed(0)
    row = torch.randn((1, *recipe.input_shape), generator=rng)
    low, high = recipe.preprocessing.get("pixel_range", (None, None))
    raw = unprepare(row, recipe.preprocessing)
    raw = np.clip(raw, low, high) if len(recipe.input_shape) == 3 and low is not None else raw
    return np.round(np.asarray(raw[0], dtype=np.float64), 3).tolist()


def _prepared_alike(recipe: Recipe, data: DataSet) -> bool:
    same = (data.preprocessing.get(key) == recipe.preprocessing.get(key) for key in ("pixel_range", "mean", "std"))
    return all(same) and tuple(data.test.tensors[0].shape[1:]) == recipe.input_shape


def _as_known(recipe: Recipe, x: Tensor, data: DataSet, name: str) -> Tensor:
    if _prepared_alike(recipe, data):
        return x
    return prepare(_shaped(recipe, unprepare(x, data.preprocessing), name, None), recipe.preprocessing)


def _shaped(recipe: Recipe, x: np.ndarray, name: str, path: Path | None) -> np.ndarray:
    """Raw inputs in the shape and, where they are pixels, in the units of the posterior's data."""
    wanted = recipe.input_shape
    if x.ndim == 4 and x.shape[1:] == (1, *wanted[1:]) and wanted[0] == 3:  # grey among colours, as in training
        x = np.repeat(x, 3, axis=1)
    low, high = recipe.preprocessing.get("pixel_range", (0.0, 1.0))
    if path is not None and path.is_dir():  # bytes, whatever units the posterior's pixels had
        x = x if (low, high) == (0.0, 255.0) else x / 255 * (high - low) + low
    elif x.ndim == 4 and x.size:
        top = float(np.abs(x).max())
        if (top <= 1 and high > 10 and bool((x != np.round(x)).any())) or top > 10 * max(abs(low), abs(high)):
            raise ValueError(f"{name}: pixels go to {top:g}, those of the posterior's data from {low:g} to {high:g}")
    if x.shape[1:] != wanted:
        raise ValueError(f"{name}: a row has shape {list(x.shape[1:])}, the posterior's data have {list(wanted)}")
    return x


def _targets(recipe: Recipe, y: Tensor, data: DataSet, name: str) -> Tensor:
    """The targets as the posterior's likelihood takes them, classes numbered as it numbers them."""
    if bool(data.class_names) != bool(recipe.class_names):
        kinds = ("numbers", "classes")
        has, wants = kinds[bool(data.class_names)], kinds[bool(recipe.class_names)]
        raise ValueError(f"{name}: its targets are {has}, the posterior was fitted to {wants}")
    if not recipe.class_names:
        return y
    numbered: dict[str | int | None, int] = {name: number for number, name in enumerate(recipe.class_names)}
    spelled = {whole_number(name): number for number, name in enumerate(recipe.class_names)}  # 1, 01, +1: one class
    numbered |= {value: number for value, number in spelled.items() if value is not None}
    found = [numbered.get(name, numbered.get(whole_number(name))) for name in data.class_names]
    unknown = [name or "''" for name, number in zip(data.class_names, found, strict=True) if number is None]
    if unknown:
        classes = f"class{'es' * (len(unknown) > 1)} {listed(unknown)}"
        known = listed(recipe.class_names)
        raise ValueError(f"{name} has the {classes}, which the posterior does not know: it knows {known}")
    labels = torch.tensor(found)[y.flatten().long()]
    return labels.float().unsqueeze(1) if recipe.likelihood == "bernoulli" else labels


def _whole_path(source: str) -> str:
    """A name as it is; a path from the root, so that the posterior can be used from another folder."""
    if names_function(source):
        path, _, function = source.rpartition(":")
        return f"{Path(path).resolve()}:{function}"
    return source


def _known_model(folder: Path, model: str) -> str:
    """The stored model; where its file is gone, the file of that name in the current folder.

    It is run, so it must be one that this user had run before: a folder of somebody else's could name any file.
    """
    path, function = model.rsplit(":", 1)
    here = Path(path).name
    files = [place for place in (path, here) if Path(place).is_file()]
    if not files:
        raise FileNotFoundError(
            f"{folder} needs its model: {path} is not there, nor is {here} in this folder: give --model "
            f"FILE.py:{function}"
        )
    reference = f"{files[0]}:{function}"
    if not was_run_before(reference):
        raise PermissionError(
            f"{folder} names {files[0]} as its model, and reading the model would run that file, which you have not "
            f"run yet as it is now: look at it, and if you trust it give --model {reference}"
        )
    return reference


def _known_source(source: str) -> str:
    """The stored data; where they are made by a function in a file, one that this user had run before."""
    if names_function(source) and not was_run_before(source):
        raise PermissionError(
            f"the posterior's data are made by {source}, a file that you have not run yet as it is now: look at it, "
            f"and if you trust it give --data {source}"
        )
    return source


def _from_file(reference: str) -> nn.Module:
    try:
        function = named_function(reference)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"--model {error}") from error
    built = function()
    if not isinstance(built, nn.Module):
        name = reference.rpartition(":")[2]
        raise ValueError(f"--model {reference}: {name}() returned a {type(built).__name__}, not a torch module")
    return built
