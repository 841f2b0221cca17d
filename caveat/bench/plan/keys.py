"""Checks of what a TOML file says. Every complaint begins with the key, and says what was probably meant."""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from caveat.files import names_function

__all__ = [
    "as_list",
    "as_strings",
    "as_table",
    "beside",
    "check_known",
    "check_names",
    "labelled",
    "merged",
    "suggestion",
    "with_key",
]

Made = TypeVar("Made")


def with_key(key: str, make: Callable[[], Made]) -> Made:
    """What `make()` returns; its complaint begins with the key."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        raise ValueError(f"{key}: {error}") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{key}: {error}") from error


def check_names(given: Collection[str], known: Collection[str], prefix: str, complaint: str) -> None:
    """Refuse keys that are not known."""
    for key in given:
        if key not in known:
            listed = ", ".join(sorted(known))
            raise ValueError(f"{prefix}{key}: {complaint} {key!r}{suggestion(key, known)}; there are {listed}")


def check_known(key: str, name: Any, known: Collection[str]) -> None:
    """Refuse a value that is not one of those known."""
    if name not in known:
        raise ValueError(f"{key}: there is no {name!r}{suggestion(name, known)}; there are {', '.join(known)}")


def suggestion(name: Any, known: Collection[str]) -> str:
    """What was probably meant, in brackets; nothing where no known name is near."""
    near = difflib.get_close_matches(str(name), known, 1, 0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def as_table(key: str, value: Any) -> dict[str, Any]:
    """The value, which must be a table."""
    if not isinstance(value, dict):
        raise ValueError(f"{key}: must be a table, [{key}], got {value!r}")
    return value


def as_list(value: Any) -> list[Any]:
    """The value as a list; one value needs no brackets."""
    return value if isinstance(value, list) else [value]


def as_strings(key: str, value: Any) -> tuple[str, ...]:
    """The value, which must be a list of different texts."""
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise ValueError(f'{key}: must be a list of names, as in {key} = ["a", "b"], got {value!r}')
    if len(set(value)) < len(value):
        raise ValueError(f"{key}: names something twice: {value}")
    return tuple(value)


def labelled(names: Sequence[str], short: Callable[[str], str]) -> dict[str, str]:
    """The names by their labels, short ones where these differ; those that would share one are called by all of it.

    `a.py:make` and `b.py:make` are not both `make`: each is then its own label, as it stands in the file.
    """
    labels = [short(name) for name in names]
    by_label = {label if labels.count(label) == 1 else name: name for label, name in zip(labels, names, strict=True)}
    return by_label if len(by_label) == len(names) else {name: name for name in names}


def beside(key: str, reference: str, folder: Path) -> str:
    """`file.py:function` with the file's path, which is given from the folder of the experiment file."""
    path, _, function = reference.rpartition(":")
    if not names_function(reference) or not (folder / path).is_file():
        raise ValueError(f"{key}: {path} of {reference!r} is not a file in {folder}")
    return f"{folder / path}:{function}"


def merged(general: Mapping[str, Any], special: Mapping[str, Any]) -> dict[str, Any]:
    """A table with some of its keys replaced, nested tables key by key."""
    table = dict(general)
    for key, value in special.items():
        nested = table.get(key)
        table[key] = merged(nested, value) if isinstance(nested, dict) and isinstance(value, dict) else value
    return table
