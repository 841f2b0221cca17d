"""The tables of methods: each label of the results, with the fits that stand for it.

    [methods.cold]                         # a label
    method = "hmc"                         # the label unless given
    like = "hmc"                           # or: begin with the keys of that label, without its `sweep` and `tune`
    chains = 4                             # any knob of the method
    of = "swag"                            # of an ensemble: a method, or a table of `method` and its knobs
    solver = {kind = "exact"}              # a knob of several kinds: a word, or a table of `kind` and its knobs
    prior = "laplace"                      # a family, as wide as 1 / prior_precision, or file.py:function
    prior_factor = 10.0                    # the prior's variance times this
    data = ["digits"]                      # fitted to these data sets only
    from_map = true                        # begin at the MAP's weights; methods that train, as mean_field_vi
    sweep.temperature = [0.03, 0.3]        # a label for each value: "cold, temperature 0.03"
    tune.step_size = [0.01, 0.1]           # the value with the lowest NLL on validation rows

Several keys under `sweep` or `tune` are crossed. Tuned candidates are fitted one after the other within a cell.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from caveat.bench.plan.keys import as_list, as_strings, as_table, beside, check_known, check_names, merged, with_key
from caveat.bench.plan.priors import FAMILIES
from caveat.engine.training import Training
from caveat.files import names_function
from caveat.knobs import Positive, check_knobs, kinds
from caveat.methods import Method, discover

__all__ = ["MAP", "TEMPERED", "Choice", "choices_of", "family"]

MAP, TEMPERED = "map", "map_tempered"  # the labels of the two that are always there
_PRIOR_KEYS = ("prior", "prior_precision", "prior_factor")


@dataclass(frozen=True)
class Choice:
    """One fit that may stand for a label: a method with its knobs, under a prior."""

    method: Method
    prior: str = "gaussian"  # a family, or file.py:function
    prior_precision: Positive = 1.0  # one over the prior's variance
    knobs: str = field(default="", compare=False)  # what tells it from the other candidates, in words
    from_map: bool = False  # begin at the MAP's weights, where the method would begin at the network's own

    def __post_init__(self) -> None:
        check_knobs(self)


def choices_of(tables: Any, training: Any, base: Choice, data: str, folder: Path) -> dict[str, tuple[Choice, ...]]:
    """The candidates of every label on one data set; MAP and the tempered MAP come first.

    Args:
        tables: what the file says under `methods`.
        training: what it says under `map`, the training of the MAP.
        base: its method is of no account; its prior is that of all tables without their own.
        data: the label of the data set.
        folder: where files of your own are looked for.
    """
    kinds = discover()
    point = dict(as_table("map", training))
    tune = {"tune": {"training": point.pop("tune")}} if "tune" in point else {}
    table = {"method": "map", "training": point} | tune
    by_label = {MAP: _candidates(table, "map", base, folder, inner="training")}
    tempered = kinds["map"](temperature=True, training=Training(epochs=0))
    by_label[TEMPERED] = (dataclasses.replace(base, method=tempered),)
    for label, content in as_table("methods", tables).items():
        table = _with_likeness(label, tables)
        if label in by_label:
            if content:
                raise ValueError(f"methods.{label}: is always there, trained as [map] says: give it another label")
            continue
        if data not in as_strings(f"methods.{label}.data", table.pop("data", [data])):
            continue
        check_known(f"methods.{label}", table.setdefault("method", label), kinds)
        by_label |= _swept(table, label, base, folder)
    same = [(a, b) for a in by_label for b in by_label if a < b and by_label[a] == by_label[b]]
    if same:
        raise ValueError(f"methods: {same[0][0]} and {same[0][1]} are the same method with the same knobs")
    return by_label


def _with_likeness(label: str, tables: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a label, on top of that of the label which it is `like`."""
    key = f"methods.{label}"
    table = dict(as_table(key, tables[label]))
    other = table.pop("like", None)
    if other is None:
        return table
    check_known(f"{key}.like", other, [name for name in tables if name != label])
    if "like" in as_table(f"methods.{other}", tables[other]):
        raise ValueError(f"{key}.like: {other!r} is itself like another: name that one")
    likeness = {name: value for name, value in tables[other].items() if name not in ("sweep", "tune")}
    return merged({"method": other} | likeness, table)


def _swept(table: dict[str, Any], label: str, base: Choice, folder: Path) -> dict[str, tuple[Choice, ...]]:
    """One label for each combination of values in `sweep`, or the one label without it."""
    key = f"methods.{label}"
    by_label = {}
    for words, values in _combinations(table.pop("sweep", {}), f"{key}.sweep"):
        name = f"{label}, {words}" if words else label
        by_label[name] = _candidates(merged(table, values), key, base, folder)
    return by_label


def _candidates(table: dict[str, Any], key: str, base: Choice, folder: Path, inner: str = "") -> tuple[Choice, ...]:
    """The fits among which validation rows choose: one, unless the table has `tune`.

    `inner` is the knob whose keys stand directly under `key` in the file, so that complaints name what was written.
    """
    table = dict(table)
    return tuple(
        _choice(merged(table, values), key, words, base, folder, inner)
        for words, values in _combinations(table.pop("tune", {}), f"{key}.tune")
    )


def _choice(table: dict[str, Any], key: str, words: str, base: Choice, folder: Path, inner: str) -> Choice:
    special = {name: table.pop(name) for name in _PRIOR_KEYS if name in table}
    from_map = table.pop("from_map", False)
    default: Any = discover()[table.pop("method")]()
    if inner:
        nested = _with_knobs(getattr(default, inner), table.pop(inner), key)
        method = dataclasses.replace(default, **{inner: nested})
    else:
        method = _with_knobs(default, table, key)
    if not isinstance(from_map, bool) or (from_map and method.starts_from != "scratch"):
        raise ValueError(
            f"{key}.from_map: must be true or false, and is for methods that train by themselves: "
            f"{type(method).__name__} starts from {method.starts_from} weights, got {from_map!r}"
        )
    if special and (from_map or method.starts_from == "trained"):
        raise ValueError(
            f"{key}.{next(iter(special))}: {type(method).__name__} starts from the MAP, which has the prior of the "
            "file: give a prior to methods that train by themselves, or to the whole data set"
        )
    factor = special.get("prior_factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not factor > 0:
        raise ValueError(f"{key}.prior_factor: must be a number above 0, got {factor!r}")
    precision = special.get("prior_precision", base.prior_precision)
    prior = family(f"{key}.prior", special["prior"], folder) if "prior" in special else base.prior
    return with_key(key, lambda: Choice(method, prior, precision / factor, words, from_map))


def family(key: str, given: Any, folder: Path) -> str:
    """A family of priors by name, or the whole path of `file.py:function`."""
    if isinstance(given, str) and names_function(given):
        return beside(key, given, folder)
    check_known(key, given, FAMILIES)
    return str(given)


def _combinations(table: Any, key: str) -> list[tuple[str, dict[str, Any]]]:
    """All combinations of the lists at the leaves of a table: in words, and as tables with one value for each."""
    leaves = _leaves(as_table(key, table), key)
    combinations = []
    for values in itertools.product(*(options for _, options in leaves)):
        content: dict[str, Any] = {}
        words = []
        for (path, _), value in zip(leaves, values, strict=True):
            nested: dict[str, Any] = {path[-1]: value}
            for name in reversed(path[:-1]):
                nested = {name: nested}
            content = merged(content, nested)
            words.append(f"{path[-1]} {value:g}" if isinstance(value, float) else f"{path[-1]} {value}")
        combinations.append((", ".join(words), content))
    return combinations


def _leaves(table: Mapping[str, Any], key: str) -> list[tuple[tuple[str, ...], list[Any]]]:
    leaves: list[tuple[tuple[str, ...], list[Any]]] = []
    for name, value in table.items():
        if isinstance(value, dict):
            leaves += [((name, *path), values) for path, values in _leaves(value, f"{key}.{name}")]
            continue
        values = as_list(value)
        if not values or any(values.count(one) > 1 for one in values):
            raise ValueError(f"{key}.{name}: must be a list of different values, got {value!r}")
        leaves.append(((name,), values))
    return leaves


def _inner_method(given: Any, key: str) -> Any:
    """The method that is a knob of another: a name, or a table of `method` and its knobs."""
    knobs = {"method": given} if isinstance(given, str) else dict(as_table(key, given))
    name = knobs.pop("method", None)
    check_known(f"{key}.method", name, discover())
    return _with_knobs(discover()[str(name)](), knobs, key)


def _of_kind(options: Mapping[str, Any], given: Any, key: str) -> Any:
    """A knob that is one of several kinds: a word, or a table of `kind` and that kind's knobs."""
    knobs = {"kind": given} if isinstance(given, str) else dict(as_table(key, given))
    kind = knobs.pop("kind", None)
    check_known(f"{key}.kind", kind, options)
    option = options[str(kind)]
    if isinstance(option, type):
        return _with_knobs(option(), knobs, key)
    check_names(knobs, [], f"{key}.", f"{kind!r} has no knob")
    return option


def _with_knobs(default: Any, knobs: Mapping[str, Any], key: str) -> Any:
    """A dataclass with some fields set: nested tables are its nested dataclasses, lists its tuples."""
    known = [f.name for f in dataclasses.fields(default) if f.init]
    check_names(knobs, known, f"{key}.", f"{type(default).__name__} has no knob")
    values = {}
    for name, value in knobs.items():
        nested, hint = getattr(default, name), get_type_hints(type(default))[name]
        if Method in get_args(hint):
            value = _inner_method(value, f"{key}.{name}")
        elif kinds(hint):
            value = _of_kind(kinds(hint), value, f"{key}.{name}")
        elif dataclasses.is_dataclass(nested) and isinstance(value, dict):
            value = _with_knobs(nested, value, f"{key}.{name}")
        values[name] = tuple(value) if isinstance(value, list) else value
    return with_key(key, lambda: dataclasses.replace(default, **values))
