"""An experiment: one small TOML file that says which data, models, methods, seeds and shifts to compare.

    data = ["digits"]                       models = ["mlp"]                seeds = [0, 1, 2]
    ood = ["photographs"]                   [shifts]  rotation = [30, 60]   [map]  epochs = 60
    [methods.swag]  rank = 10               [methods.big]  method = "deep_ensemble"  members = 10

`problem.py` has the keys of a data set, `choices.py` those of a method. `map` and `map_tempered` are always among the
methods: what others start from, and what others have to beat. Nothing is left to be found out an hour later: names,
knobs and ranges are checked when the file is read, and every complaint begins with the key.
"""

import dataclasses
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from caveat.bench.plan.choices import MAP, TEMPERED, Choice
from caveat.bench.plan.keys import as_list, as_table, check_known, check_names, merged, with_key
from caveat.bench.plan.problem import PROBLEM_KEYS, Problem, problem_of, sources_of
from caveat.knobs import Count, check_knobs
from caveat.references import load_reference

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Experiment", "read_experiment"]


@dataclass(frozen=True)
class Experiment:
    """What an experiment file says, checked."""

    name: str
    problems: tuple[Problem, ...]  # one for each data set
    title: str = ""
    seeds: tuple[int, ...] = (0,)
    reference: dict[str, str] = field(default_factory=dict)  # label of data -> a stored reference
    reference_method: str | None = None  # the label whose posterior of the same data, model and seed is the reference
    baseline: str = TEMPERED  # the label that the others are compared with
    kept_rows: Count = 2000  # of every test set whose whole predictions are kept

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def methods(self) -> dict[str, tuple[Choice, ...]]:
        """The candidates of every label, on the first data set that has it."""
        return {label: choices for p in reversed(self.problems) for label, choices in p.methods.items()}

    @property
    def yardstick(self) -> str:
        """What a posterior has to beat: the tempered MAP, or the plain one where there is no temperature."""
        return TEMPERED if all(TEMPERED in problem.methods for problem in self.problems) else MAP


def read_experiment(path: str | Path) -> Experiment:
    """Read an experiment file; a ValueError names the key that is wrong and what it could be."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: give an experiment file, such as experiments/shift_digits.toml"
        )
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    try:
        return _experiment(content, path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: {error}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _experiment(content: dict[str, Any], path: Path) -> Experiment:
    fields = {f.name for f in dataclasses.fields(Experiment)} - {"name", "problems", "reference_method"}
    check_names(content, fields | PROBLEM_KEYS | {"data"}, "", "an experiment has no key")
    if not content.get("data"):
        raise ValueError('data: an experiment needs it, as in data = ["digits"]')
    general = {key: value for key, value in content.items() if key in PROBLEM_KEYS}
    problems = []
    for source, special in sources_of(content["data"], path.parent):
        problems.append(problem_of(source, merged(general, special), path.parent))
    _check_method_data(content.get("methods", {}), problems)
    experiment = Experiment(
        path.stem,
        tuple(problems),
        seeds=_seeds(content.get("seeds", [0])),
        **_references(content.get("reference", {}), problems),
        **{key: content[key] for key in ("title", "baseline", "kept_rows") if key in content},
    )
    if "baseline" not in content:
        return dataclasses.replace(experiment, baseline=experiment.yardstick)
    check_known("baseline", experiment.baseline, experiment.methods)
    return experiment


def _seeds(given: Any) -> tuple[int, ...]:
    seeds = as_list(given)
    if not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds: must be different whole numbers, at least 0, as in seeds = [0, 1, 2]; got {seeds}")
    return tuple(seeds)


def _references(given: Any, problems: list[Problem]) -> dict[str, Any]:
    """`reference = "hmc"`, a label of this file; or a table of stored references by data set."""
    if isinstance(given, str):
        for problem in problems:
            check_known(f"reference on {problem.source.label!r}", given, problem.methods)
            for choice in problem.methods[given]:
                if choice.method.starts_from == "trained":
                    raise ValueError(f"reference: {given!r} starts from the MAP, which is to be compared with it")
                if "chains" not in {f.name for f in dataclasses.fields(choice.method)}:  # type: ignore[arg-type]
                    raise ValueError(f"reference: {given!r} has no chains to compare with: name one that has, as hmc")
        return {"reference_method": given}
    stored = as_table("reference", given)
    for label, name in stored.items():
        check_known(f"reference.{label}", label, [problem.source.label for problem in problems])
        with_key(f"reference.{label}", partial(load_reference, name))
    for problem in problems:
        for key, value in (("train_rows", problem.train_rows), ("augment", problem.augment)):
            if problem.source.label in stored and value is not None:
                raise ValueError(
                    f"{key}: a reference is the posterior of its own training rows; leave out {key} or [reference]"
                )
    return {"reference": stored}


def _check_method_data(tables: Any, problems: list[Problem]) -> None:
    """Refuse methods that name a data set that there is not."""
    labels = [problem.source.label for problem in problems]
    for label, table in as_table("methods", tables).items():
        for name in as_table(f"methods.{label}", table).get("data", ()):
            check_known(f"methods.{label}.data", name, labels)
