"""`caveat fit METHOD`: from data and a model to the folder of a posterior."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from caveat.cli.verb import Common, Verb
from caveat.knobs import Positive, Range, check_knobs

__all__ = ["Fit"]

LikelihoodName = Literal["auto", "categorical", "bernoulli", "gaussian", "heteroscedastic", "poisson"]


@dataclass(frozen=True)
class Fit(Verb):
    """Fit a method to a data set and write the posterior to a folder."""

    out: Path  # the posterior's folder; an unfinished fit keeps its place in <out>.partial and goes on from there
    data: str = "digits"  # a data set's name, or a path to an npz, a csv, a parquet file or a folder of class folders
    data_dir: Path | None = None  # where named data sets are; else CAVEAT_DATA, else the user's cache
    target: str | None = None  # the column of a table that is the target; the last one unless given
    id: str | None = None  # the column of a table that names its rows: no input, but beside each prediction
    text: tuple[str, ...] = ()  # columns of a table that are categories although they hold numbers, such as postcodes
    model: str = "mlp"  # mlp, lenet5, lenet_caffe, resnet18, resnet20_frn, cnn_lstm, or file.py:function that makes one
    likelihood: LikelihoodName = "auto"  # of the targets; auto goes by the data
    class_weights: Literal["balanced"] | tuple[Positive, ...] | None = None  # balanced, or one number a class
    prior_precision: Positive = 1.0  # of a Gaussian prior on every weight
    parameters: str = "*"  # pattern of the names of the weights that inference is about
    validation: Annotated[float, Range(0, 1, open_high=True)] = 0.1  # share of the training rows held out for tuning
    start: Path | None = None  # a posterior of one point (map) to start from; without it such methods train a MAP first

    def __post_init__(self) -> None:
        check_knobs(self)

    def stopped(self) -> str:
        """Whether the same command would go on from a checkpoint."""
        if [*self.out.with_name(f"{self.out.name}.partial").rglob("*.safetensors")]:
            return "stopped; started again with the same options, the fit goes on from its last checkpoint"
        from caveat.engine.run import Run

        seconds = f"{Run.seconds_between_checkpoints:g} seconds"
        return f"stopped before the first checkpoint (one is written every {seconds}), so nothing was kept"

    def run(self, common: Common, method: Any) -> None:
        """Fit, save, and say what it cost."""
        from caveat.data import load
        from caveat.fitting import fit, remove_leftovers
        from caveat.methods import discover, method_name
        from caveat.priors import GaussianPrior
        from caveat.recipe import Recipe, read_posterior

        if self.out.exists():
            remove_leftovers(self.out)
            raise FileExistsError(f"{self.out} exists: choose another --out, or delete it")
        # One split whatever the seed, so that runs can be compared.
        data = load(self.data, self.data_dir, target=self.target, id=self.id, text=self.text)
        common.show_data(self.data, data)
        recipe = Recipe.of(data, self.data, self.model, self.likelihood)
        task = recipe.task(
            data,
            seed=common.seed,
            prior=GaussianPrior(self.prior_precision),
            parameters=self.parameters,
            validation=self.validation,
            class_weights=self.class_weights,
        )
        start: Any = discover()["map"]() if method.starts_from == "trained" else None
        if self.start is not None:
            start = read_posterior(self.start, common.place(), self.model if ".py:" in self.model else None)[0]
        posterior = fit(
            task,
            method,
            start=start,
            seed=common.seed,
            device=common.place(),
            folder=self.out,
            note={"recipe": dataclasses.asdict(recipe)},
            progress=not common.quiet,
        )
        cost = f"{posterior.info.seconds:.1f} s, {posterior.info.stored_bytes:,} bytes"
        lines = [f"{type(method).__name__}: {cost} -> {self.out}"]
        lines += [] if common.quiet else [f"warning: {warning}" for warning in posterior.info.warnings]
        content = {"out": str(self.out), "method": method_name(method), "info": dataclasses.asdict(posterior.info)}
        common.show(content, "\n".join(lines))
