"""Test sets: clean, rotated, shifted and from outside, built in one place."""

from pathlib import Path

import pytest
import torch

from caveat.data import SHIFTS, conditions, load, rotate
from caveat.data.condition_sets import shift_label


def test_clean_rows_come_first_and_the_others_as_they_were_asked_for() -> None:
    digits = load("digits")
    tests = conditions(digits, angles=[30], shifts={"contrast": None, "fog": [2]}, ood=["permuted"])
    assert list(tests.inside) == ["clean", "rotated", "contrast", "fog"]
    assert tests.inside["clean"] is digits.test
    assert list(tests.inside["contrast"]) == list(SHIFTS["contrast"].severities)
    assert list(tests.inside["fog"]) == [2]
    x, y = tests.inside["rotated"][30]
    torch.testing.assert_close(x, rotate(digits.test.tensors[0], 30, fill=digits.preprocessing["black"]))
    assert y is digits.test.tensors[1]
    assert list(tests.ood) == ["permuted"]
    assert list(conditions(digits).inside) == ["clean"]


def test_a_shift_of_ones_own_needs_severities(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def brighter(data, more, seed):\n    return data.test.tensors[0] + more\n")
    digits, name = load("digits"), f"{file}:brighter"
    x, _ = conditions(digits, shifts={name: [0.5]}).inside["brighter"][0.5].tensors
    torch.testing.assert_close(x, digits.test.tensors[0] + 0.5)
    assert shift_label(name) == "brighter"
    with pytest.raises(ValueError, match="has no severities unless they are given"):
        conditions(digits, shifts={name: None})
