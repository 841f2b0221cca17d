import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Protocol

import pytest
import torch

from caveat.knobs import Count, NonNegative, NonNegativeInt, Positive, Range, Share, check_knobs, kinds, knob_classes


class Shaped(Protocol):
    """A protocol, which isinstance cannot ask about."""

    def area(self) -> float: ...


@dataclass(frozen=True)
class Inner:
    depth: Count = 1


@dataclass(frozen=True)
class Knobs:
    positive: Positive = 1.0
    non_negative: NonNegative = 0.0
    share: Share = 0.5
    count: Count = 1
    whole: NonNegativeInt = 0
    open_share: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.5
    optional: Positive | None = None
    either: Count | Share = 1
    choice: Literal["a", "b"] = "a"
    choice_or_tensor: Literal["a"] | torch.Tensor = "a"
    many: tuple[Positive, ...] = ()
    pair: tuple[Share, Count] = (0.5, 2)
    text: str = ""
    flag: bool = False
    inner: Inner = field(default_factory=Inner)
    anything: Any = None
    mapping: Mapping[str, float] | float = 0.0
    function: Callable[[float], float] = abs
    shaped: Shaped | None = None
    constant: ClassVar[Count] = -1  # no field, so never checked

    def __post_init__(self) -> None:
        check_knobs(self)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"positive": 3, "non_negative": 0, "share": 1, "count": 10**12},
        {"optional": None, "either": 7, "choice": "b", "many": (1, 2.5), "pair": (0.0, 1)},
        {"either": 0.3},
        {"choice_or_tensor": torch.ones(3)},
        {"anything": object(), "mapping": {"a": -1.0}, "function": math.sin, "shaped": object()},
    ],
)
def test_values_that_fit_are_taken(values):
    assert all(getattr(Knobs(**values), name) is value for name, value in values.items())


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("positive", 0, "above 0"),
        ("positive", math.nan, "a number above 0"),
        ("positive", math.inf, "above 0"),
        ("positive", "1", "a number above 0"),
        ("positive", True, "a number above 0"),
        ("non_negative", -1e-9, "at least 0"),
        ("share", 1.01, "in [0, 1]"),
        ("open_share", 1.0, "in (0, 1)"),
        ("open_share", 0.0, "in (0, 1)"),
        ("count", 0, "at least 1"),
        ("count", 2.0, "a whole number at least 1"),
        ("count", True, "a whole number at least 1"),
        ("whole", -1, "at least 0"),
        ("optional", -1.0, "above 0 or None"),
        ("optional", "x", "a number above 0 or None"),
        ("either", 1.5, "a whole number at least 1 or in [0, 1]"),
        ("choice", "c", "one of 'a', 'b'"),
        ("choice_or_tensor", "c", "one of 'a' or a Tensor"),
        ("many", (1.0, 0.0), "above 0 in every entry"),
        ("many", [1.0, 2.0], "a tuple"),
        ("many", 1.0, "a tuple"),
        ("pair", (0.5,), "a tuple of 2 entries"),
        ("pair", (0.5, 0), "at least 1 in every entry"),
        ("pair", (2.0, 1), "in [0, 1] in every entry"),
        ("text", 3, "a str"),
        ("flag", 1, "a bool"),
        ("inner", {"depth": 1}, "a Inner"),
    ],
)
def test_the_error_names_the_field_the_value_and_the_range(name, value, complaint):
    with pytest.raises(ValueError, match="must be") as caught:
        Knobs(**{name: value})
    assert str(caught.value) == f"Knobs({name}={value!r}): must be {complaint}"


@pytest.mark.parametrize(
    ("value", "closed", "open_low", "open_high"),
    [
        (-0.1, False, False, False),
        (0.0, True, False, True),
        (0.5, True, True, True),
        (1.0, True, True, False),
        (1.1, False, False, False),
        (math.nan, False, False, False),
    ],
)
def test_a_range_holds_what_lies_between_its_ends(value, closed, open_low, open_high):
    assert (value in Range(0, 1)) == closed
    assert (value in Range(0, 1, open_low=True)) == open_low
    assert (value in Range(0, 1, open_high=True)) == open_high
    assert math.inf not in Range()


@dataclass(frozen=True)
class Outer:
    one_of: Inner | Knobs | None = None
    several: tuple[Annotated[Inner, "noted"] | float, ...] = ()
    by_name: Mapping[str, "Alone"] = field(default_factory=dict)
    itself: "Outer | None" = None
    constant: ClassVar[Range] = Range()  # no field, so never saved


@dataclass(frozen=True)
class Alone:
    number: float = 0.0


def test_classes_of_knobs_are_found_wherever_an_annotation_has_them() -> None:
    assert knob_classes(Alone) == []
    assert knob_classes(Knobs) == [Inner]
    assert knob_classes(Outer) == [Inner, Knobs, Alone]


@pytest.mark.parametrize("value", [10**400, -(10**400), 2**63])
def test_whole_numbers_beyond_all_bounds_are_refused(value: int) -> None:
    for name in ("count", "positive", "share"):
        with pytest.raises(ValueError, match=rf"Knobs\({name}="):
            check_knobs(Knobs(**{name: value}))
    check_knobs(Knobs(count=2**63 - 1))


def test_kinds_of_a_knob_are_words_and_classes() -> None:
    assert kinds(Literal["auto"] | Inner) == {"auto": "auto", "inner": Inner}
    assert kinds(Inner) == kinds(Inner | None) == kinds(Literal["auto"] | float) == {}
