"""Reference sets: HMC posteriors that were checked once and are compared against without being made again.

A recipe is everything that a reference follows from: data, network, likelihood, prior, sampler. `build_reference` runs
it, refuses a run whose chains have not mixed in function space (the largest split R-hat of the predictions for the test
rows is 1.015 or more), and keeps the predictions; `caveat/evaluate/fidelity/reference_set.py` describes the files. The
same recipe, seed and versions give the same predictions, bit for bit.

The package brings those of digits and of grainy digits.
"""

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from caveat import data, models
from caveat.evaluate import evaluate
from caveat.evaluate.diagnosis import diagnose
from caveat.evaluate.fidelity import (
    ReferenceSet,
    chain_tensors,
    identity,
    noise_floor,
    on_cpu,
    some_draws,
)
from caveat.fitting import fit
from caveat.likelihoods import Categorical, HeteroscedasticGaussian, Likelihood
from caveat.methods.hmc import HMC
from caveat.posterior import Posterior, load
from caveat.priors import GaussianPrior, Prior
from caveat.randomness import seeded
from caveat.references.places import new_place
from caveat.storage import encode
from caveat.task import Task

__all__ = ["RECIPES", "ReferenceRecipe", "build_reference", "reference_task"]

RHAT_LIMIT = 1.015  # of the prediction with the largest one


@dataclass(frozen=True)
class ReferenceRecipe:
    """Everything that a reference follows from, but for the seed: a network of one hidden layer on a data set."""

    source: str  # name of the data set
    likelihood: Likelihood
    hidden: int  # units
    n_outputs: int
    prior: Prior
    sampler: HMC
    activation: type[nn.Module] = nn.SiLU  # of these units
    training_rows: int | None = None  # the first ones of the data set; all unless given
    rotations: tuple[int, ...] = ()  # degrees by which the test images are also rotated
    kept: int = 40  # draws of class probabilities that are stored, of each chain
    validation: float = 0.1  # share of the training rows that the posterior does not see, for methods that tune

    def task(self, rows: data.DataSet, seed: int) -> Task:
        """The network and the rows that the reference is about; the seed draws the module's initial weights."""
        x, y = (tensor[: self.training_rows] for tensor in rows.train.tensors)
        with seeded(seed):
            module = models.mlp(x[0].numel(), self.n_outputs, hidden=(self.hidden,), activation=self.activation)
        loader = DataLoader(TensorDataset(x, y), 64)
        return Task(module, loader, self.likelihood, self.prior, validation=self.validation)

    def parts(self, rows: data.DataSet) -> dict[str, tuple[Tensor, Tensor]]:
        """The test rows, clean and rotated, by name."""
        x, y = rows.test.tensors
        rotated = {f"rotated {a}": (data.rotate(x, a, fill=rows.preprocessing["black"]), y) for a in self.rotations}
        return {"clean": (x, y), **rotated}


_SAMPLER = HMC(chains=4, length=400, jitter=0.2)
_SMALL_STEPS = HMC(chains=4, length=400, jitter=0.2, step_size=0.01)  # a learned variance makes for steep places
_LONG = HMC(chains=4, length=600, jitter=0.2)  # ten thousand predictions must all have mixed
_LONGER = HMC(chains=4, length=1000, jitter=0.2)  # under a weak prior
_PRIOR, _NUMBERS = GaussianPrior(precision=10.0), HeteroscedasticGaussian(standardise=True)
RECIPES = {
    "digits": ReferenceRecipe("digits", Categorical(), 32, 10, _PRIOR, _SAMPLER, rotations=(15, 30, 45, 60, 75, 90)),
    "grainy_digits": ReferenceRecipe(
        "grainy_digits",
        Categorical(),
        50,
        10,
        GaussianPrior(precision=3.0),
        _LONGER,
        nn.ReLU,
        rotations=(15, 30, 45),
        kept=10,
        validation=0.2,
    ),
    "diabetes": ReferenceRecipe("diabetes", _NUMBERS, 50, 2, _PRIOR, _SMALL_STEPS),
    "mnist1d": ReferenceRecipe("mnist1d", Categorical(), 100, 10, _PRIOR, _LONG, training_rows=1000),
}


def reference_task(name: str, *, seed: int = 0) -> Task:
    """The task that a reference is the posterior of: what to fit a method to that is to be compared with it."""
    recipe = _recipe(name)
    return recipe.task(data.load(recipe.source), seed)


def build_reference(
    name: str,
    *,
    out: str | Path | None = None,
    draws: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> Path:
    """Sample a reference, check it, store it; returns its folder.

    Args:
        name: of the recipe.
        out: the folder to write; `name` in CAVEAT_REFERENCES, else in the user's cache, unless given.
        draws: of each chain, where the recipe's number is not enough.
        seed: of everything random.
        device: where to sample.
        progress: show progress on standard error.
    """
    recipe = _recipe(name)
    if draws is not None:
        recipe = dataclasses.replace(recipe, sampler=dataclasses.replace(recipe.sampler, length=draws))
    place = new_place(name, out)
    rows = data.load(recipe.source)
    task = recipe.task(rows, seed)
    chains = place.with_name(f"{place.name}.chains")  # a run that was stopped goes on, one that failed can be looked at
    posterior = _sampled(recipe, task, chains, seed, device, progress)
    reference = make_reference(name, recipe, rows, task, posterior)
    worst = reference.facts["diagnostics"]["clean"]["predictions"]["rhat_max"]
    if worst is None or not worst < RHAT_LIMIT:
        found = "cannot be computed" if worst is None else f"is {worst:.4f}"
        raise ValueError(
            f"the chains of {name} have not mixed: the largest R-hat of a prediction {found}, it must be below "
            f"{RHAT_LIMIT}. No reference was stored; the chains are in {chains}. Remove them and take more draws, such "
            f"as draws={2 * recipe.sampler.length}"
        )
    reference.save(place)
    shutil.rmtree(chains)
    return place


def _sampled(
    recipe: ReferenceRecipe, task: Task, folder: Path, seed: int, device: torch.device | str, progress: bool
) -> Posterior:
    """The chains, sampled or, where that was done before, read."""
    sampler: Any = recipe.sampler
    if not folder.exists():
        return fit(task, sampler, seed=seed, device=device, folder=folder, progress=progress)
    found = load(folder, task.network.module, device=device)
    if (found.method, found.info.seed) != (sampler, seed):
        raise FileExistsError(f"{folder} holds the chains of another run: remove it first, or choose another folder")
    return found


def make_reference(
    name: str, recipe: ReferenceRecipe, rows: data.DataSet, task: Task, posterior: Posterior
) -> ReferenceSet:
    """A reference from chains: the predictions that are kept, and every fact about them. Nothing is judged here."""
    chains, draws = posterior.state["stats"]["lp"].shape
    stored, diagnoses, floors = {}, {}, {}
    for part, (x, y) in recipe.parts(rows).items():
        prediction = on_cpu(posterior.predict(x, draws=chains * draws))
        stored[part] = {"inputs": x.half()} | chain_tensors(prediction, chains, recipe.kept if part == "clean" else 0)
        weights = 2000 if part == "clean" else 1  # which do not depend on the rows
        diagnoses[part] = dataclasses.asdict(diagnose(posterior, (x, y), rows=len(x), weights=weights))
        floor = noise_floor([some_draws(prediction, slice(c * draws, (c + 1) * draws)) for c in range(chains)])
        floors[part] = {score: dataclasses.asdict(value) for score, value in floor.items()}
    scores = evaluate(posterior, {"clean": rows.test}, progress=False)["clean"].metrics
    facts = {
        "name": name,
        "kind": posterior.network.likelihood.kind,
        "chains": chains,
        "draws": draws,
        "network": str(task.network.module),
        "identity": identity(task.network),
        "data": {
            "name": recipe.source,
            "preprocessing": rows.preprocessing,
            "training_rows": task.n,
            "left_out_rows": 0 if task.validation is None else len(task.validation),
            "fingerprint": task.fingerprint(),
        },
        "method": encode(posterior.method, {}, "method"),
        "seed": posterior.info.seed,
        "versions": posterior.info.versions,
        "seconds": posterior.info.seconds,
        "gradient_evaluations": posterior.info.gradient_evaluations,
        "sampler": posterior.info.diagnostics,
        "diagnostics": diagnoses,
        "floor": floors,
        "scores": {metric: dataclasses.asdict(score) for metric, score in scores.items()},
    }
    return ReferenceSet(facts, stored)


def _recipe(name: str) -> ReferenceRecipe:
    if name not in RECIPES:
        raise ValueError(f"there is no reference {name!r}, by name or as a folder: there are {', '.join(RECIPES)}")
    return RECIPES[name]
