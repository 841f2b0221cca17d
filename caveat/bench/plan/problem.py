"""A problem: a data set, and all that goes for it.

Keys of the file go for every data set, those of a data set's own table for it alone.

    prior_precision = 10.0                 # for all
    [data.digits]                          # a label; `name` unless it is the data set's own
    redraw = true                          # each seed draws training and test rows anew
    [data.mnist]
    prior_precision = 30.0                 # for this one
    methods.hmc.length = 100
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from caveat import data as sets
from caveat.bench.plan.choices import MAP, TEMPERED, Choice, choices_of, family
from caveat.bench.plan.keys import (
    as_list,
    as_strings,
    as_table,
    beside,
    check_known,
    check_names,
    labelled,
    suggestion,
    with_key,
)
from caveat.data import crop_and_flip
from caveat.data import names as data_names
from caveat.data.condition_sets import check_shift_labels
from caveat.data.ood import MADE_FOR_IMAGES, MADE_FOR_TABLES, OTHER_IMAGES
from caveat.data.shifts import known_shift
from caveat.evaluate.predictions import file_stem
from caveat.files import names_function
from caveat.knobs import Count, Positive, Range, check_knobs
from caveat.methods import discover
from caveat.models import MODELS

__all__ = ["AUGMENT", "PROBLEM_KEYS", "Problem", "Source", "problem_of", "sources_of"]

AUGMENT = {"crop_and_flip": crop_and_flip}
_LIKELIHOODS = ("auto", "categorical", "bernoulli", "gaussian", "heteroscedastic", "poisson")
_OOD = tuple(dict.fromkeys([*MADE_FOR_IMAGES, *MADE_FOR_TABLES, *OTHER_IMAGES]))


@dataclass(frozen=True)
class Source:
    """A data set and the choices that `caveat.data.load` offers."""

    label: str
    name: str
    split: int = 0
    gap: bool = False
    seed: int = 0
    redraw: bool = False  # each seed of the experiment draws the rows anew, by `seed` plus its own

    def load(self, data_dir: Path | None) -> sets.DataSet:
        """The data set."""
        return sets.load(self.name, data_dir, split=self.split, gap=self.gap, seed=self.seed)

    def at(self, seed: int) -> "Source":
        """The data set that a seed of the experiment sees."""
        return dataclasses.replace(self, seed=self.seed + seed) if self.redraw else self


@dataclass(frozen=True)
class Problem:
    """A data set with the models, methods and conditions of its cells."""

    source: Source
    models: dict[str, str]  # label -> name, or file.py:function
    methods: dict[str, tuple[Choice, ...]] = field(repr=False)  # candidates by label, MAP and tempered MAP first
    shifts: tuple[tuple[str, tuple[float, ...]], ...] = ()  # name and severities
    ood: tuple[str, ...] = ()
    likelihood: str = "auto"
    prior_precision: Positive = 1.0
    parameters: str = "*"
    validation: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.1
    train_rows: Count | None = None  # trained on, spread evenly over the training rows; all unless given
    augment: str | None = None  # of training images, by the name of the function in caveat.data
    test_rows: Count | None = None  # scored, spread evenly over the test rows; all unless given

    def __post_init__(self) -> None:
        check_knobs(self)


_PLAIN_KEYS = ("likelihood", "prior_precision", "parameters", "validation", "train_rows", "augment", "test_rows")
PROBLEM_KEYS = frozenset({"models", "methods", "map", "shifts", "ood", "prior", *_PLAIN_KEYS})


def problem_of(source: Source, content: dict[str, Any], folder: Path) -> Problem:
    """The problem of a data set, from the keys that go for it."""
    if not content.get("models"):
        raise ValueError('models: an experiment needs it, as in models = ["mlp"]')
    for key, choices in {"likelihood": _LIKELIHOODS, "augment": tuple(AUGMENT)}.items():
        if key in content:
            check_known(key, content[key], choices)
    ood = as_strings("ood", content.get("ood", []))
    for name in ood:
        check_known(f"ood: {name!r}", name, _OOD)
    plain = {key: content[key] for key in _PLAIN_KEYS if key in content}
    draft = Problem(source, {}, {}, **plain)  # its numbers are in range
    prior = family("prior", content.get("prior", "gaussian"), folder)
    base = Choice(discover()[MAP](), prior, draft.prior_precision)
    methods = choices_of(content.get("methods", {}), content.get("map", {}), base, source.label, folder)
    if draft.likelihood == "poisson":  # a rate has no temperature
        del methods[TEMPERED]
    return dataclasses.replace(
        draft,
        models=_models(content["models"], folder),
        methods=methods,
        shifts=_shifts(content.get("shifts", {}), folder),
        ood=ood,
    )


def sources_of(given: Any, folder: Path) -> list[tuple[Source, dict[str, Any]]]:
    """Every data set with the keys of its own: from `["digits"]`, or from tables by label."""
    tables = given
    if not isinstance(given, dict):
        tables = {label: {"name": name} for label, name in labelled(as_strings("data", given), _label).items()}
    options = {f.name for f in dataclasses.fields(Source)} - {"label"}
    sources = []
    for label, content in tables.items():
        key = f"data.{label}" if isinstance(given, dict) else "data"
        table = as_table(key, content)
        check_names(table, options | PROBLEM_KEYS, f"{key}.", "a data set has no key")
        values = {"name": label} | {name: value for name, value in table.items() if name in options}
        values["name"] = _place(key, values["name"], folder)
        source = with_key(key, partial(Source, label=label, **values))
        sources.append((source, {name: value for name, value in table.items() if name not in options}))
    _check_file_names([source.label for source, _ in sources])
    return sources


def _check_file_names(labels: Sequence[str]) -> None:
    """Refuse labels that would share the folder of their inputs."""
    by_stem: dict[str, str] = {}
    for label in labels:
        other = by_stem.setdefault(file_stem(label), label)
        if other != label:
            raise ValueError(f"data: {other!r} and {label!r} must differ in letters or digits: give one another label")


def _label(name: str) -> str:
    if names_function(name):
        return name.rpartition(":")[2]
    return name if name in data_names() else Path(name).stem


def _place(key: str, name: Any, folder: Path) -> str:
    """A known name, or where the data lie: seen from the experiment file, or from the current folder."""
    if isinstance(name, str) and names_function(name):
        return beside(key, name, folder)
    if name in data_names():
        return str(name)
    places = [place / name for place in (folder, Path()) if (place / name).exists()]
    if not places:
        raise ValueError(f"{key}: no data set {name!r}, by name or path{suggestion(name, data_names())}")
    return str(places[0])


def _models(given: Any, folder: Path) -> dict[str, str]:
    """Models by label; a path is that of a file beside the experiment."""
    by_label = {}
    for label, model in labelled(as_strings("models", given), _model_label).items():
        if names_function(model):
            by_label[label] = beside("models", model, folder)
        else:
            check_known("models", model, [*MODELS, "file.py:function"])
            by_label[label] = model
    return by_label


def _model_label(name: str) -> str:
    return name.rpartition(":")[2] if names_function(name) else name


def _shifts(given: Any, folder: Path) -> tuple[tuple[str, tuple[float, ...]], ...]:
    shifts = []
    for name, severities in as_table("shifts", given).items():
        values = as_list(severities)
        key = f"shifts.{name}"
        with_key(key, partial(_check_shift, name, values))
        place = beside(key, name, folder) if names_function(name) else name
        shifts.append((place, tuple(map(float, values))))
    check_shift_labels([name for name, _ in shifts])
    return tuple(shifts)


def _check_shift(name: str, severities: Sequence[Any]) -> None:
    """Refuse a shift that there is not, or a severity that it does not have."""
    known = None if names_function(name) else known_shift(name)
    if not severities or len(set(severities)) < len(severities):
        example = "" if known is None else f", as in {list(known.severities)}"
        raise ValueError(f"must be different severities{example}; got {severities}")
    for severity in severities:
        if isinstance(severity, bool) or not isinstance(severity, int | float):
            unit = "" if known is None else f" ({known.unit})"
            raise ValueError(f"severities are numbers{unit}, got {severity!r}")
        if known is not None:
            known.check(severity)
