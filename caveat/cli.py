"""The command line: each verb is one arrow of  data -> posterior -> predictions -> scores -> page.

A verb is a dataclass; its fields are its options and their comments its help. A method's knobs come from the method's
own dataclass, so `caveat fit swag --help` shows them all and there is nothing to keep in step by hand.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from caveat.knobs import Count, NonNegativeInt, Positive, Range, check_knobs

__all__ = ["main"]

LikelihoodName = Literal["auto", "categorical", "bernoulli", "gaussian", "heteroscedastic", "poisson"]


@dataclass(frozen=True)
class Common:
    """Options of every verb."""

    seed: int = 0  # of everything random
    device: str = "auto"  # cpu, cuda or cuda:1; auto takes a GPU when there is one
    quiet: bool = False  # no progress, no warnings
    json: bool = False  # print one json object instead of text

    def place(self) -> Any:
        """The device to compute on."""
        import torch

        available = torch.cuda.is_available()
        try:
            place = torch.device(("cuda" if available else "cpu") if self.device == "auto" else self.device)
        except RuntimeError as error:
            raise ValueError(f"--device {self.device}: must be auto, cpu, cuda or cuda:0, cuda:1, ...") from error
        if place.type == "cuda" and not available:
            raise ValueError(f"--device {self.device}: torch sees no GPU here; use --device cpu")
        return place

    def show(self, content: dict[str, Any], text: str) -> None:
        """The verb's result: json, or text for people; under torchrun the first rank speaks."""
        if _first_rank():
            print(json.dumps(content) if self.json else text)

    def show_data(self, source: str, data: Any) -> None:
        """One line on standard error on what was read of data of one's own."""
        from caveat.data.own import describe
        from caveat.data.sets import own_path

        if own_path(source) is not None and not self.quiet and _first_rank():
            print(describe(data), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Demo:
    """Fit every method to digits, score clean, rotated and outside data, print one table and write one page."""

    out: Path = Path("caveat-demo")  # folder for the results; one that the demo made before is replaced

    def run(self, common: Common) -> None:
        """Do it."""
        from caveat import demo

        table = demo.run_demo(self.out, seed=common.seed, device=common.place(), progress=not common.quiet)
        page = self.out / "report.html"
        common.show({"report": str(page), "csv": str(self.out / "results.csv")}, f"{table}\n\nThe page: {page}")


@dataclass(frozen=True)
class Fit:
    """Fit a method to a data set and write the posterior to a folder."""

    out: Path  # the posterior's folder; an unfinished fit keeps its place in <out>.partial and goes on from there
    data: str = "digits"  # a data set's name, or a path to an npz, a csv, or a folder of class folders
    data_dir: Path | None = None  # where named data sets are; else CAVEAT_DATA, else the user's cache
    target: str | None = None  # the column of a csv that is the target; the last one unless given
    model: str = "mlp"  # mlp, lenet5, lenet_caffe, resnet18, resnet20_frn, cnn_lstm, or file.py:function that makes one
    likelihood: LikelihoodName = "auto"  # of the targets; auto goes by the data
    prior_precision: Positive = 1.0  # of a Gaussian prior on every weight
    parameters: str = "*"  # pattern of the names of the weights that inference is about
    validation: Annotated[float, Range(0, 1, open_high=True)] = 0.1  # share of the training rows held out for tuning
    start: Path | None = None  # a posterior of one point (map) to start from; without it such methods train a MAP first

    def __post_init__(self) -> None:
        check_knobs(self)

    def run(self, common: Common, method: Any) -> None:
        """Fit, save, and say what it cost."""
        from caveat.data import load
        from caveat.fitting import fit
        from caveat.methods import discover, method_name
        from caveat.recipe import Recipe, read_posterior

        if self.out.exists():
            raise FileExistsError(f"{self.out} exists: choose another --out, or delete it")
        # One split whatever the seed, so that runs can be compared.
        data = load(self.data, self.data_dir, target=self.target)
        common.show_data(self.data, data)
        recipe = Recipe.of(data, self.data, self.model, self.likelihood)
        task = recipe.task(
            data,
            seed=common.seed,
            prior_precision=self.prior_precision,
            parameters=self.parameters,
            validation=self.validation,
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


@dataclass(frozen=True)
class Predict:
    """Write what a posterior says about inputs to a file: probabilities or moments, and their decomposition."""

    posterior: Path  # a folder that `caveat fit` wrote
    out: Path = Path("predictions.npz")  # the file to write: an npz, or a csv with one line a row
    data: str | None = None  # an npz, a csv or a folder of images, targets or not; or a name; else the posterior's own
    data_dir: Path | None = None  # where named data sets are; else CAVEAT_DATA, else the user's cache
    model: str | None = None  # file.py:function, where the model that was fitted lies elsewhere now
    draws: int | None = None  # posterior draws; the method's own number unless given

    def run(self, common: Common) -> None:
        """Predict and write."""
        import numpy as np

        from caveat.evaluate.predictions import predict_rows, write_prediction_csv
        from caveat.recipe import inputs_of, read_posterior
        from caveat.storage import write_arrays

        if self.out.exists():
            raise FileExistsError(f"--out {self.out} exists: choose another file")
        posterior, recipe = read_posterior(self.posterior, common.place(), self.model)
        rows, files = inputs_of(recipe, self.data, self.data_dir)
        arrays = predict_rows(posterior, rows, draws=self.draws, seed=common.seed, progress=not common.quiet)
        names = {"files": files, "class_names": recipe.class_names}
        arrays |= {name: np.array(texts) for name, texts in names.items() if texts}
        content: dict[str, Any] = {"out": str(self.out), "rows": len(rows)}
        if self.out.suffix == ".csv":
            written = write_prediction_csv(self.out, arrays)
            content["columns"] = written
        else:
            write_arrays(self.out, arrays)
            written = list(arrays)
            content["arrays"] = {name: list(array.shape) for name, array in arrays.items()}
        common.show(content, f"{len(rows)} rows -> {self.out} ({', '.join(written)})")


@dataclass(frozen=True)
class Evaluate:
    """Score posteriors on clean, shifted and outside data; each gets a folder of predictions and metrics."""

    posteriors: tuple[Path, ...]  # folders that `caveat fit` wrote
    out: Path = Path("results")  # one sub-folder a posterior goes here
    data: str | None = None  # a data set whose test rows are scored; the posterior's own unless given
    data_dir: Path | None = None  # where named data sets are; else CAVEAT_DATA, else the user's cache
    model: str | None = None  # file.py:function, where the model that was fitted lies elsewhere now
    rotate: tuple[float, ...] = ()  # degrees by which test images are also rotated
    shift: tuple[str, ...] = ()  # shifts by name, each at all its severities: fog, translation, ...; or corruptions
    ood: tuple[str, ...] = ()  # data from outside: photographs, permuted, constant, noise, or another image set
    draws: int | None = None  # posterior draws a prediction; the method's own number unless given
    samples: bool = False  # also keep every draw's prediction

    def run(self, common: Common) -> None:
        """Score one posterior after the other."""
        from caveat import data as sets
        from caveat import report
        from caveat.evaluate import evaluate
        from caveat.recipe import data_of, read_posterior

        names = [folder.resolve().name for folder in self.posteriors]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"--posteriors: name folders that `caveat fit` wrote, of different names, got {names}")
        shown: set[str] = set()
        for folder in self.posteriors:
            posterior, recipe = read_posterior(folder, common.place(), self.model)
            source = self.data or recipe.data
            data = data_of(recipe, source, self.data_dir)
            if source not in shown:
                common.show_data(source, data)
            shown.add(source)
            x, y = data.test.tensors
            inside: dict[str, Any] = {"clean": data.test}
            if self.rotate:
                black = data.preprocessing.get("black", 0.0)
                inside["rotated"] = {angle: (sets.rotate(x, angle, fill=black), y) for angle in self.rotate}
            for wanted in self.shift:
                kinds = tuple(sets.CORRUPTIONS) if wanted == "corruptions" else (wanted,)
                inside |= {kind: sets.shifted(data, kind, seed=common.seed) for kind in kinds}
            outside = {name: sets.out_of_distribution(name, data, self.data_dir, seed=common.seed) for name in self.ood}
            evaluate(
                posterior,
                inside,
                ood=outside,
                folder=self.out / folder.resolve().name,
                label=folder.resolve().name,
                class_names=data.class_names,
                draws=self.draws,
                seed=common.seed,
                keep_samples=self.samples,
                progress=not common.quiet,
            )
        runs = report.read(self.out)
        report.write_csv(runs, self.out / "results.csv")
        content = {run.label: {s.name: {k: v.mean for k, v in s.metrics.items()} for s in run.data} for run in runs}
        common.show(content, report.format_text(report.table(runs)))


@dataclass(frozen=True)
class Report:
    """Make one self-contained HTML page of a folder of results."""

    results: Path | None = None  # a folder of `caveat bench`, `evaluate` or `demo`; the newest below here unless given
    out: Path | None = None  # the page; report.html in that folder unless given
    title: str | None = None  # of the page; a bench has its own

    def run(self, common: Common) -> None:
        """Write the page."""
        from caveat import report

        page = report.write(self.results or report.newest(), self.out, title=self.title)
        common.show({"report": str(page)}, f"The page: {page}")


@dataclass(frozen=True)
class Bench:
    """Run an experiment file: every method on every data set, model and seed, clean and shifted, in tables.

    Done cells are skipped, a stopped one goes on from its checkpoint, a failed one is tried again. Exit code 1 where
    cells failed; the others are done all the same.
    """

    out: Path | None = None  # folder of the results; results/<name of the file> unless given
    jobs: Count = 1  # cells at a time, each in its own process; the threads are divided among them
    dry_run: bool = False  # only show the grid, with the time and memory it will take
    parquet: bool = False  # write the tables as parquet too; needs pyarrow
    data_dir: Path | None = None  # where named data sets are; else CAVEAT_DATA, else the user's cache

    def __post_init__(self) -> None:
        check_knobs(self)

    def run(self, common: Common, file: Path) -> None:
        """Run what is missing; say where methods are no better than a tempered MAP."""
        from caveat import bench

        out = self.out or Path("results") / file.stem
        place = bench.Place(out, common.place(), self.data_dir, progress=not common.quiet)
        if self.dry_run:
            experiment = bench.read_experiment(file)
            found = bench.estimates(experiment, bench.cells_of(experiment), place)
            common.show({"grid": [dataclasses.asdict(e) for e in found]}, bench.estimate_text(found, self.jobs))
            return

        def say(text: str) -> None:
            if not common.quiet and _first_rank():
                print(text, file=sys.stderr, flush=True)

        done = bench.run_bench(file, place, jobs=self.jobs, parquet=self.parquet, say=say)
        content = {
            "out": str(out),
            "cells": done.cells,
            "ran": done.ran,
            "failed": done.failed,
            "guards": [dataclasses.asdict(guard) for guard in done.guards],
        }
        common.show(
            content, f"{bench.guard_text(done.guards)}\n\nThe tables: {out}\nTheir page: caveat report --results {out}"
        )
        if done.failed:
            listed = "".join(f"\n  {cell}: {error}" for cell, error in done.failed.items())
            raise RuntimeError(
                f"{len(done.failed)} of {done.cells} cells failed; the same command tries them again:{listed}"
            )


@dataclass(frozen=True)
class Diagnose:
    """Say whether the chains of a posterior may be trusted, and why; write one HTML page that shows it."""

    posterior: Path  # a folder that `caveat fit` wrote, of a method that runs chains
    out: Path = Path("diagnose.html")  # the page
    data: str | None = None  # a data set whose test rows are predicted; the posterior's own unless given
    data_dir: Path | None = None  # where named data sets are; else CAVEAT_DATA, else the user's cache
    model: str | None = None  # file.py:function, where the model that was fitted lies elsewhere now
    rows: Count = 500  # test rows to predict, at most
    surface: NonNegativeInt = 25  # points on each side of the plot of the plane through three draws; 0 leaves it out

    def __post_init__(self) -> None:
        check_knobs(self)

    def run(self, common: Common) -> None:
        """Judge the chains, write the page."""
        from caveat.evaluate.diagnosis import gather_evidence, judge, posterior_surface
        from caveat.recipe import data_of, read_posterior
        from caveat.report.chains_page import write_chains

        posterior, recipe = read_posterior(self.posterior, common.place(), self.model)
        data = data_of(recipe, self.data, self.data_dir)
        common.show_data(self.data or recipe.data, data)
        evidence = gather_evidence(posterior, data.test, rows=self.rows, seed=common.seed)
        diagnosis = judge(evidence)
        surface = None
        with contextlib.suppress(ValueError):  # draws that do not move span no plane, and the verdict says so already
            if self.surface:
                surface = posterior_surface(posterior, data.train, points=self.surface, rows=1000)
        title = f"Chains of {self.posterior.resolve().name}"
        try:
            page = write_chains(evidence, diagnosis, self.out, surface=surface, title=title)
        except Exception:
            common.show(dataclasses.asdict(diagnosis), str(diagnosis))  # the verdict is not lost with the page
            raise
        common.show(dataclasses.asdict(diagnosis) | {"page": str(page)}, f"{diagnosis}\n\nThe page: {page}")


@dataclass(frozen=True)
class Reference:
    """Sample a reference posterior by HMC, check that its chains have mixed, and store what it predicts."""

    out: Path | None = None  # the folder to write; else <name> in CAVEAT_REFERENCES, else in the user's cache
    draws: int | None = None  # of each chain; 400 unless given

    def run(self, common: Common, name: str) -> None:
        """Build it."""
        from caveat.reference import build_reference, load_reference

        place = build_reference(
            name,
            out=self.out,
            draws=self.draws,
            seed=common.seed,
            device=common.place(),
            progress=not common.quiet,
        )
        found = load_reference(place)
        common.show({"out": str(place), "facts": found.facts}, f"{name}: {found.summary()} -> {place}")


@dataclass(frozen=True)
class References:
    """List the references: what is known, what is built, and where."""

    def run(self, common: Common) -> None:
        """Print the list."""
        from caveat.reference import find_references, load_reference

        places = find_references()
        found = {name: load_reference(place) for name, place in places.items() if place is not None}
        lines = [
            f"{name:<9} "
            + (f"{found[name].summary()}; {place}" if place else f"not built: caveat reference build {name}")
            for name, place in places.items()
        ]
        content = {name: place and {"out": str(place), "facts": found[name].facts} for name, place in places.items()}
        common.show(content, "\n".join(lines))


@dataclass(frozen=True)
class Methods:
    """List the methods, what each one is, and which likelihoods it supports."""

    def run(self, common: Common) -> None:
        """Print the list and the matrix."""
        from caveat import likelihoods
        from caveat.methods import discover

        known = [name for name in likelihoods.__all__ if name not in ("Hyper", "Likelihood")]
        found = discover()
        width = max(map(len, found))
        lines = [f"{name:<{width}}  {_summary(method)}" for name, method in found.items()]
        lines += ["", " " * width + "  " + "  ".join(known)]
        for name, method in found.items():
            marks = ("yes" if k in method.likelihoods else "-" for k in known)
            lines.append(
                f"{name:<{width}}  " + "  ".join(f"{m:^{len(k)}}" for m, k in zip(marks, known, strict=True)).rstrip()
            )
        content = {
            n: {"summary": _summary(m), "starts_from": m.starts_from, "likelihoods": list(m.likelihoods)}
            for n, m in found.items()
        }
        common.show(content, "\n".join(lines))


def _first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _summary(thing: Any) -> str:
    return str(thing.__doc__).splitlines()[0]


def _commands() -> tuple[Any, dict[type, Callable[[Any], None]]]:
    """The tree of verbs as a type for the parser: a verb's, the common and a method's options on one level."""
    import tyro

    from caveat.methods import discover
    from caveat.reference import RECIPES

    runners: dict[type, Callable[[Any], None]] = {}

    def leaf(name: str, verb: type, method: type | None = None, which: Any = None, about: str = "which one") -> Any:
        flat = tyro.conf.arg(name="")
        fields: list[Any] = [("verb", Annotated[verb, flat])]
        if which is not None:
            fields.insert(0, ("which", Annotated[which, tyro.conf.Positional, tyro.conf.arg(help=about)]))
        if method is not None:
            # A knob that may be of two kinds, as a solver may, is of its default's kind here, with all its knobs shown.
            own: Any = Annotated[method, flat, tyro.conf.AvoidSubcommands]
            fields.append(("method", own, dataclasses.field(default_factory=method)))
        fields.append(("common", Annotated[Common, flat], dataclasses.field(default_factory=Common)))
        parsed = dataclasses.make_dataclass(f"{name}_{verb.__name__}", fields, frozen=True)
        parsed.__doc__ = _summary(method or verb)
        further = [field for field, *_ in fields if field in ("method", "which")]
        runners[parsed] = lambda p: p.verb.run(p.common, *(getattr(p, field) for field in further))
        return Annotated[parsed, tyro.conf.subcommand(name, prefix_name=False, description=_summary(method or verb))]

    fits: Any = Union[tuple(leaf(name, Fit, method) for name, method in discover().items())]  # noqa: UP007
    verbs = {"demo": Demo, "predict": Predict, "evaluate": Evaluate, "report": Report, "methods": Methods}
    verbs |= {"diagnose": Diagnose}
    leaves = {name: leaf(name, verb) for name, verb in verbs.items()}
    leaves["bench"] = leaf("bench", Bench, which=Path, about="the experiment, a TOML file; see docs/bench.md")
    builds = leaf("build", Reference, which=Literal[tuple(RECIPES)])
    references: Any = Union[builds, leaf("list", References)]  # noqa: UP007
    about = "Reference posteriors, which others are compared with: build one, or list them."
    leaves["reference"] = Annotated[references, tyro.conf.subcommand("reference", prefix_name=False, description=about)]
    leaves["fit"] = Annotated[fits, tyro.conf.subcommand("fit", prefix_name=False, description=_summary(Fit))]
    order = ("demo", "fit", "predict", "evaluate", "bench", "report", "diagnose", "reference", "methods")
    return Union[tuple(leaves[name] for name in order)], runners  # noqa: UP007


def _tensors_from_files() -> Any:
    """How the parser reads a knob that may be a tensor: from an npy file."""
    import numpy
    import torch
    from tyro import constructors

    registry = constructors.ConstructorRegistry()

    def read(texts: list[str]) -> Any:
        if not texts[0].endswith(".npy") or not Path(texts[0]).is_file():
            raise ValueError(f"{texts[0]} is no npy file")
        return torch.from_numpy(numpy.load(texts[0], allow_pickle=False))

    @registry.primitive_rule
    def rule(info: Any) -> Any:
        if info.type is not torch.Tensor:
            return None
        return constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="FILE.npy",
            instance_from_str=read,
            is_instance=lambda value: isinstance(value, torch.Tensor),
            str_from_instance=lambda value: [f"a tensor of shape {tuple(value.shape)}"],
        )

    return registry


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0 done, 1 failed with a reason, 2 not understood, 130 stopped."""
    try:
        import tyro
    except ImportError:
        print('error: the command line needs its extra: pip install "caveat[cli]"', file=sys.stderr)
        return 1
    if list(sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        from caveat import __version__

        print(__version__)
        return 0
    commands, runners = _commands()
    try:
        parsed = tyro.cli(
            commands,
            prog="caveat",
            description="Posteriors for PyTorch networks.",
            args=arguments,
            registry=_tensors_from_files(),
        )
    except ValueError as error:  # a value out of its range
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        runners[type(parsed)](parsed)
    except KeyboardInterrupt:
        print(_stopped(parsed.verb), file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, KeyError, OSError, MemoryError, ArithmeticError, ImportError, RuntimeError) as error:
        print(f"error: {_reason(error)}", file=sys.stderr)
        return 1
    return 0


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def _stopped(verb: Any) -> str:
    if isinstance(verb, Bench):
        return "stopped; finished cells are kept, and the same command goes on from there"
    if not isinstance(verb, Fit):
        return "stopped"
    kept = [*verb.out.with_name(f"{verb.out.name}.partial").rglob("*.safetensors")]
    if kept:
        return "stopped; started again with the same options, the fit goes on from its last checkpoint"
    from caveat.engine.run import Run

    seconds = f"{Run.seconds_between_checkpoints:g} seconds"
    return f"stopped before the first checkpoint (one is written every {seconds}), so nothing was kept"


if __name__ == "__main__":
    sys.exit(main())
