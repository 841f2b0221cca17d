"""Json of files as typed objects: what is missing, does not belong there or is of another type is refused by name.

    @dataclass(frozen=True)
    class Entry:
        file: str
        costs: dict[str, float]

    read_as(path, Entry)

Fields with a default may be missing, as in files of an earlier version.
"""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from caveat.storage import CorruptFile, read_json

__all__ = ["as_kind", "read_as"]

Kind = TypeVar("Kind")
_LARGEST = 2**63  # whole numbers of files are below


def read_as(path: Path, kind: type[Kind]) -> Kind:
    """A json file, its checksum checked, as a dataclass; `format` and `checksum` are not among the fields."""
    content = read_json(path)
    del content["format"]
    return as_kind(content, kind, str(path))


def as_kind(content: Any, kind: type[Kind], where: str) -> Kind:
    """A json object as a dataclass; a CorruptFile says what is amiss, and where."""
    if not isinstance(content, dict):
        raise CorruptFile(f"{where} is not an object but {_short(content)}")
    hints, fields = get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    extra = [name for name in content if name not in fields]
    missing = [name for name in fields if name not in content and _is_needed(fields[name])]
    if missing:
        raise CorruptFile(f"{where} lacks {missing[0]!r}")
    if extra:
        raise CorruptFile(f"{where} has {_short(extra[0])}, which is not known")
    return kind(**{name: _value(hints[name], value, f"{where}: {name}") for name, value in content.items()})


def _is_needed(field: Any) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(hint: Any, value: Any, where: str) -> Any:
    """The value, which must fit an annotation."""
    origin, inner = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return as_kind(value, hint, where)
    if origin in (typing.Union, types.UnionType):
        for option in inner:
            try:
                return _value(option, value, where)
            except CorruptFile:
                continue
    elif origin is list and isinstance(value, list):
        return [_value(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    elif origin is tuple and isinstance(value, list) and inner[-1] is Ellipsis:
        return tuple(_value(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    elif origin is dict and isinstance(value, dict):
        return {key: _value(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    elif hint is Any or (hint is type(None) and value is None) or (hint in (str, bool) and type(value) is hint):
        return value
    elif (hint is int and type(value) is int) or (hint is float and type(value) in (int, float)):
        whole = type(value) is int
        if not whole or abs(value) < _LARGEST:
            return value
    raise CorruptFile(f"{where} is {_short(value)}, which is not {getattr(hint, '__name__', str(hint))}")


def _short(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'table'} of {len(value)} entries"
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}..."
