"""An experiment: one small TOML file that says which data, models, methods, seeds and shifts to compare.

    data = ["digits"]                       models = ["mlp"]                seeds = [0, 1, 2]
    ood = ["photographs"]                   [shifts]  rotation = [30, 60]   [map]  epochs = 60
    [methods.swag]  rank = 10               [methods.big]  method = "deep_ensemble"  members = 10

A table of `methods` is named by the label of its rows in the results; its keys are the knobs of the method. `map` and
`map_tempered` are always among them: what others start from, and what others have to beat. Nothing is left to be found
out an hour later: names, knobs and ranges are checked when the file is read, and every complaint begins with the key.
"""

import dataclasses
import difflib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from caveat.bench.conditions import Source, check_shift, outside_names
from caveat.data import crop_and_flip
from caveat.data import names as data_names
from caveat.engine.training import Training
from caveat.knobs import Count, Positive, Range, check_knobs
from caveat.methods import Method, discover
from caveat.models import MODELS
from caveat.reference import load_reference

__all__ = ["AUGMENT", "MAP", "TEMPERED", "Experiment", "read_experiment"]

MAP, TEMPERED = "map", "map_tempered"  # the labels of the two that are always there
AUGMENT = {"crop_and_flip": crop_and_flip}
_LIKELIHOODS = ("auto", "categorical", "bernoulli", "gaussian", "heteroscedastic", "poisson")


@dataclass(frozen=True)
class Experiment:
    """What an experiment file says, checked."""

    name: str
    data: tuple[Source, ...]
    models: dict[str, str]  # label -> name, or file.py:function
    methods: dict[str, Method]  # by label, MAP and tempered MAP first
    title: str = ""
    seeds: tuple[int, ...] = (0,)
    shifts: tuple[tuple[str, tuple[float, ...]], ...] = ()  # name and severities
    ood: tuple[str, ...] = ()
    reference: dict[str, str] = field(default_factory=dict)  # label of data -> a stored reference
    baseline: str = TEMPERED  # the label that the others are compared with
    likelihood: str = "auto"
    prior_precision: Positive = 1.0
    parameters: str = "*"
    validation: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.1
    train_rows: Count | None = None  # trained on, spread evenly over the training rows; all unless given
    augment: str | None = None  # of training images, by the name of the function in caveat.data
    test_rows: Count | None = None  # scored, spread evenly over the test rows; all unless given
    kept_rows: Count = 2000  # of every test set whose whole predictions are kept

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def yardstick(self) -> str:
        """What a posterior has to beat: the tempered MAP, or the plain one where there is no temperature."""
        return TEMPERED if TEMPERED in self.methods else MAP


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
    known = {f.name for f in dataclasses.fields(Experiment)} - {"name"} | {"map"}
    _check_names(content, known, "", "an experiment has no key")
    missing = [key for key in ("data", "models") if not content.get(key)]
    if missing:
        raise ValueError(f"{missing[0]}: an experiment needs it, as in {missing[0]} = [{_EXAMPLES[missing[0]]}]")
    data = _sources(content.pop("data"), path.parent)
    shifts, ood = content.pop("shifts", {}), _strings("ood", content.pop("ood", []))
    for name, severities in _table("shifts", shifts).items():
        _with_key(f"shifts.{name}", lambda name=name, severities=severities: check_shift(name, _list(severities)))
    for name in ood:
        _one_of(f"ood: {name!r}", name, outside_names())
    reference = _table("reference", content.pop("reference", {}))
    for key in ("train_rows", "augment"):
        if reference and content.get(key) is not None:
            raise ValueError(
                f"{key}: a reference is the posterior of its own training rows; leave out {key} or [reference]"
            )
    for label, stored in reference.items():
        _one_of(f"reference.{label}", label, [source.label for source in data])
        _with_key(f"reference.{label}", lambda stored=stored: load_reference(stored))
    for key, choices in {"likelihood": _LIKELIHOODS, "augment": tuple(AUGMENT)}.items():
        if key in content:
            _one_of(key, content[key], choices)
    methods = _methods(content.pop("methods", {}), content.pop("map", {}))
    if content.get("likelihood") == "poisson":  # a rate has no temperature
        del methods[TEMPERED]
        content.setdefault("baseline", MAP)
    if "baseline" in content:
        _one_of("baseline", content["baseline"], methods)
    seeds = _list(content.pop("seeds", [0]))
    if not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds: must be different whole numbers, at least 0, as in seeds = [0, 1, 2]; got {seeds}")
    return Experiment(
        name=path.stem,
        data=data,
        models=_models(content.pop("models"), path.parent),
        methods=methods,
        seeds=tuple(seeds),
        shifts=tuple((name, tuple(map(float, _list(severities)))) for name, severities in shifts.items()),
        ood=ood,
        reference=reference,
        **content,
    )


_EXAMPLES = {"data": '"digits"', "models": '"mlp"'}


def _sources(given: Any, folder: Path) -> tuple[Source, ...]:
    """`["digits"]`, or tables by label for data sets with choices: `[data.gap]  name = "uci/yacht"  gap = true`."""
    tables = given
    if not isinstance(given, dict):
        tables = {name if name in data_names() else Path(name).stem: {"name": name} for name in _strings("data", given)}
    found = []
    for label, table in tables.items():
        where = f"data.{label}" if isinstance(given, dict) else "data"
        options = {f.name for f in dataclasses.fields(Source)} - {"label"}
        _check_names(_table(where, table), options, f"{where}.", "a data set has no choice")
        name = table.get("name", label)
        if name not in data_names():
            if not any((place / name).exists() for place in (folder, Path())):
                raise ValueError(f"{where}: no data set {name!r}, by name or path{_suggestion(name, data_names())}")
            table = table | {"name": str(next(p / name for p in (folder, Path()) if (p / name).exists()))}
        found.append(
            _with_key(where, lambda table=table, label=label: Source(**({"name": label} | table), label=label))
        )
    return tuple(found)


def _models(given: Any, folder: Path) -> dict[str, str]:
    """Models by label; a path is that of a file beside the experiment."""
    found = {}
    for model in _strings("models", given):
        path, _, function = model.rpartition(":")
        if not path.endswith(".py"):
            _one_of("models", model, [*MODELS, "file.py:function"])
            found[model] = model
            continue
        if not (folder / path).is_file():
            raise ValueError(f"models: {path} of {model!r} is not a file in {folder}")
        found[function] = f"{folder / path}:{function}"
    return found


def _methods(given: Any, training: Any) -> dict[str, Method]:
    """The methods by label; the two that are always there come first."""
    kinds = discover()
    start = _made(Training(), _table("map", training), "map")
    found: dict[str, Method] = {
        MAP: kinds["map"](training=start),
        TEMPERED: kinds["map"](temperature=True, training=Training(epochs=0)),
    }
    for label, table in _table("methods", given).items():
        knobs = dict(_table(f"methods.{label}", table))
        if label in found:
            if knobs:
                raise ValueError(f"methods.{label}: is always there, trained as [map] says: give it another label")
            continue
        name = knobs.pop("method", label)
        _one_of(f"methods.{label}", name, kinds)
        found[label] = _made(kinds[name](), knobs, f"methods.{label}")
    same = [(a, b) for a in found for b in found if a < b and found[a] == found[b]]
    if same:
        raise ValueError(f"methods: {same[0][0]} and {same[0][1]} are the same method with the same knobs")
    return found


def _made(default: Any, knobs: Mapping[str, Any], where: str) -> Any:
    """A dataclass with some fields set: nested tables are its nested dataclasses, lists its tuples."""
    known = [f.name for f in dataclasses.fields(default) if f.init]
    _check_names(knobs, known, f"{where}.", f"{type(default).__name__} has no knob")
    values = {}
    for key, value in knobs.items():
        nested = getattr(default, key)
        if dataclasses.is_dataclass(nested) and isinstance(value, dict):
            value = _made(nested, value, f"{where}.{key}")
        values[key] = tuple(value) if isinstance(value, list) else value
    return _with_key(where, lambda: dataclasses.replace(default, **values))


def _with_key(where: str, make: Any) -> Any:
    """What `make()` gives; its complaint begins with the key."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where}: {error}") from error


def _check_names(given: Collection[str], known: Collection[str], prefix: str, what: str) -> None:
    for key in given:
        if key not in known:
            listed = ", ".join(sorted(known))
            raise ValueError(f"{prefix}{key}: {what} {key!r}{_suggestion(key, known)}; there are {listed}")


def _one_of(where: str, name: Any, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"{where}: there is no {name!r}{_suggestion(name, known)}; there are {', '.join(known)}")


def _suggestion(name: Any, known: Collection[str]) -> str:
    near = difflib.get_close_matches(str(name), known, 1, 0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _table(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be a table, [{where}], got {value!r}")
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _strings(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ValueError(f'{where}: must be a list of names, as in {where} = ["a", "b"], got {value!r}')
    if len(set(value)) < len(value):
        raise ValueError(f"{where}: names something twice: {value}")
    return tuple(value)
