"""Knobs: dataclass fields that state their own range, checked when the object is made.

    @dataclass(frozen=True)
    class Example:
        rate: Share = 0.1          # a number in [0, 1]

        def __post_init__(self) -> None:
            check_knobs(self)

The annotation is the only place a range is written: errors, `--help` and the docs read it from there.
"""

import dataclasses
import math
import re
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

__all__ = [
    "Count",
    "NonNegative",
    "NonNegativeInt",
    "Positive",
    "Range",
    "Share",
    "check_knobs",
    "kinds",
    "knob_classes",
]


@dataclass(frozen=True)
class Range:
    """The values a number may take; an open end excludes its bound."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        """Whether the value lies inside; NaN, infinity and whole numbers of more than 64 bits never do."""
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return False
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        """The range in words."""
        if self.high == math.inf:
            return f"{'above' if self.open_low else 'at least'} {self.low:g}"
        return f"in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}{')' if self.open_high else ']'}"


Positive = Annotated[float, Range(0, open_low=True)]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Count = Annotated[int, Range(1)]
NonNegativeInt = Annotated[int, Range(0)]


def check_knobs(instance: Any) -> None:
    """Raise a ValueError that names the field, the value and the range of the first knob out of range."""
    hints = get_type_hints(type(instance), include_extras=True)
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        complaint = _complaint(hints[field.name], value)
        if complaint:
            raise ValueError(f"{type(instance).__name__}({field.name}={value!r}): must be {complaint}")


def knob_classes(owner: type) -> list[type]:
    """The dataclasses that a dataclass's knobs may be of, and those of their own knobs, each once."""
    hints, fields = get_type_hints(owner), dataclasses.fields(owner)
    options = [option for field in fields for option in _options(hints[field.name])]
    nested = [cls for cls in options if isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls is not owner]
    return list(dict.fromkeys(inner for cls in nested for inner in (cls, *knob_classes(cls))))


def kinds(hint: Any) -> dict[str, Any]:
    """What a knob that is a word or one of several dataclasses may be, by the words of files and command lines.

    `Literal["auto"] | ConjugateGradients` may be "auto", or conjugate_gradients: the class, whose fields are knobs.
    """
    options = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else ()
    words = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
    classes = [option for option in options if isinstance(option, type) and dataclasses.is_dataclass(option)]
    if not words or not classes:
        return {}
    named = {re.sub("(?<!^)(?=[A-Z])", "_", option.__name__).lower(): option for option in classes}
    return {word: word for word in words} | named


def _options(hint: Any) -> list[Any]:
    """An annotation and everything inside its brackets."""
    return [hint, *(inner for part in get_args(hint) for inner in _options(part))]


def _complaint(hint: Any, value: Any) -> str | None:
    """What the value should have been, or None when it fits the annotation (unknown annotations fit)."""
    origin = get_origin(hint)
    if origin is Annotated:
        base, *notes = get_args(hint)
        base_complaint = _complaint(base, value)
        ranges = [note for note in notes if isinstance(note, Range)]
        if base_complaint:
            return f"{base_complaint} {ranges[0]}" if ranges else base_complaint
        outside = [str(r) for r in ranges if value not in r]
        return outside[0] if outside else None
    if origin in (typing.Union, types.UnionType):
        complaints = [_complaint(option, value) for option in get_args(hint)]
        return None if None in complaints else " or ".join(dict.fromkeys(c for c in complaints if c))
    if origin is Literal:
        return None if value in get_args(hint) else "one of " + ", ".join(map(repr, get_args(hint)))
    if origin is tuple:
        return _tuple_complaint(get_args(hint), value)
    if hint is type(None):
        return None if value is None else "None"
    if hint is int:
        return None if isinstance(value, int) and not isinstance(value, bool) else "a whole number"
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value == value  # NaN is not
        return None if is_number else "a number"
    if origin is None and isinstance(hint, type) and hint is not Any and not getattr(hint, "_is_protocol", False):
        return None if isinstance(value, hint) else f"a {hint.__name__}"
    return None


def _tuple_complaint(entries: tuple[Any, ...], value: Any) -> str | None:
    if not isinstance(value, tuple):
        return "a tuple"
    hints = entries[:1] * len(value) if entries[-1] is Ellipsis else entries
    if len(hints) != len(value):
        return f"a tuple of {len(hints)} entries"
    complaints = (_complaint(hint, entry) for hint, entry in zip(hints, value, strict=True))
    return next((f"{complaint} in every entry" for complaint in complaints if complaint), None)
