"""Json as typed objects: what fits is taken, and what does not is named."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from caveat import CorruptFile
from caveat.storage import FORMAT, write_json
from caveat.typed_json import as_kind, read_as


@dataclass(frozen=True)
class Inner:
    rate: float
    name: str | None = None


@dataclass(frozen=True)
class Outer:
    count: int
    inner: Inner
    shape: tuple[int, ...] = ()
    names: list[str] = field(default_factory=list)
    table: dict[str, float] = field(default_factory=dict)
    flag: bool = False
    anything: Any = None


def test_what_fits_comes_back_typed(tmp_path: Path) -> None:
    content = {"count": 3, "inner": {"rate": 1}, "shape": [1, 2], "names": ["a"], "table": {"b": 0.5}, "flag": True}
    write_json(tmp_path / "a.json", {"format": FORMAT} | content)
    assert read_as(tmp_path / "a.json", Outer) == Outer(3, Inner(1), (1, 2), ["a"], {"b": 0.5}, True)
    assert as_kind({"count": 3, "inner": {"rate": 0.1, "name": None}}, Outer, "here") == Outer(3, Inner(0.1))
    assert as_kind({"count": 3, "inner": {"rate": 0.1}, "anything": [[{}]]}, Outer, "here").anything == [[{}]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"count": 1.0}, "here: count is 1.0, which is not int"),
        ({"count": True}, "here: count is True, which is not int"),
        ({"count": 2**63}, "here: count is 9223372036854775808, which is not int"),
        ({"count": None}, "here: count is None"),
        ({"inner": 3}, "here: inner is not an object but 3"),
        ({"inner": {}}, "here: inner lacks 'rate'"),
        ({"inner": {"rate": "x" * 99}}, r"here: inner: rate is 'xxxxx.*\.\.\., which is not float"),
        ({"inner": {"rate": 1, "name": 2}}, "here: inner: name is 2"),
        ({"inner": {"rate": 1, "more": 2}}, "here: inner has 'more', which is not known"),
        ({"shape": [1, "2"]}, r"here: shape\[1\] is '2', which is not int"),
        ({"shape": 3}, "here: shape is 3"),
        ({"names": {"a": 1}}, "here: names is a table of 1 entries"),
        ({"table": {"a": []}}, "here: table.a is a list of 0 entries"),
        ({"flag": 1}, "here: flag is 1, which is not bool"),
        ({"other": 1}, "here has 'other', which is not known"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], told: str) -> None:
    with pytest.raises(CorruptFile, match=told):
        as_kind({"count": 3, "inner": {"rate": 0.5}} | change, Outer, "here")
