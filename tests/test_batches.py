import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caveat.batches import concatenate, count_rows, first_not_finite, map_tensors, move, slices, tensors


def structures(rows):
    """The same rows as a tensor, a tuple and a nested dict with entries that are no rows."""
    x = torch.arange(3.0 * rows).reshape(rows, 3)
    tokens = torch.arange(rows)
    return [x, (x, tokens), {"x": x, "more": {"tokens": tokens, "flag": True}, "scale": torch.tensor(2.0), "name": "n"}]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@given(rows=st.integers(0, 12), size=st.integers(1, 15))
@settings(max_examples=40, deadline=None)
def test_slices_join_to_the_whole(rows, size):
    for x in structures(rows):
        pieces = list(slices(x, size))
        assert len(pieces) == max(1, math.ceil(rows / size))
        assert all(count_rows(piece) == size for piece in pieces[:-1])
        assert count_rows(pieces[-1]) <= size
        assert same(concatenate(pieces), x)


def test_pieces_may_be_kept_and_used_later():
    pieces = [*slices(torch.arange(7), 3)]
    assert [piece.tolist() for piece in pieces] == [[0, 1, 2], [3, 4, 5], [6]]


def test_tensors_come_in_order_and_other_entries_ride_along():
    nested = {"a": torch.tensor([1]), "b": (torch.tensor([2]), "text", [torch.tensor([3]), None]), "c": 4}
    assert [int(t) for t in tensors(nested)] == [1, 2, 3]
    doubled = map_tensors(lambda t: 2 * t, nested)
    assert [int(t) for t in tensors(doubled)] == [2, 4, 6]
    assert doubled["b"][1] == "text"
    assert doubled["b"][2][1] is None  # a list becomes a tuple
    assert doubled["c"] == 4
    assert tensors("nothing") == []


def test_rows_are_counted_over_tensors_that_have_rows():
    assert [count_rows(x) for x in structures(5)] == [5, 5, 5]
    with pytest.raises(ValueError, match=r"share their first axis, got lengths \[2, 3\] in a tuple: give every"):
        count_rows((torch.zeros(2), torch.zeros(3, 1)))
    with pytest.raises(ValueError, match=r"got lengths \[\] in a dict"):
        count_rows({"flag": True, "scale": torch.tensor(1.0)})


def test_joining_refuses_pieces_of_different_length():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        concatenate([(torch.zeros(1), torch.zeros(1)), (torch.zeros(1),)])


def test_move_keeps_structure_and_values():
    for x in structures(4):
        moved = move(x, torch.device("cpu"))
        assert same(moved, x)
        assert all(tensor.is_meta for tensor in tensors(move(x, torch.device("meta"))))


def test_the_copy_to_the_cpu_waits_until_it_is_there(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking: calls.append(non_blocking) or self)
    move(torch.zeros(1), torch.device("cpu"))
    move(torch.zeros(1), torch.device("cuda"))
    assert calls == [False, True]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_row_that_is_not_finite(bad):
    x = torch.zeros(5, 2, 2)
    y = torch.zeros(5, dtype=torch.float64)
    assert first_not_finite((x, y)) is None
    x[3, 0, 1] = bad
    assert first_not_finite(x) == 3
    x[4] = bad
    assert first_not_finite({"x": x}) == 3
    y[1] = bad
    assert first_not_finite((x, y)) == first_not_finite((y, x)) == 1


def test_what_has_no_rows_or_no_fractions_is_finite():
    assert first_not_finite(torch.tensor(math.nan)) is None  # no row to name
    assert first_not_finite((torch.arange(3), torch.tensor([True]), "text")) is None
    assert first_not_finite(torch.zeros(0, 4)) is None
    assert first_not_finite(torch.zeros(4, 0)) is None
    assert first_not_finite(torch.full((4, 4), 3e38)) is None  # though their sum is not finite
