import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caveat.evaluate.metrics import risk_at_coverage, risk_coverage, risk_coverage_area

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=6)


def columns(rows):
    uncertainty, error = zip(*rows, strict=True)
    return torch.tensor(uncertainty).float(), torch.tensor(error).float()


@given(rows=ROWS)
@settings(max_examples=60, deadline=None)
def test_risk_is_its_mean_over_every_order_of_the_tied(rows):
    uncertainty, error = columns(rows)
    curves = []
    for order in itertools.permutations(range(len(rows))):
        in_order = [rows[i] for i in order]
        ranked = [e for _, e in sorted(in_order, key=lambda row: row[0])]  # stable: ties keep the permuted order
        curves.append(np.cumsum(ranked) / np.arange(1, len(rows) + 1))
    expected = np.mean(curves, axis=0)
    curve = risk_coverage(uncertainty, error)
    np.testing.assert_allclose(curve.risk.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(curve.coverage.numpy(), np.arange(1, len(rows) + 1) / len(rows))
    assert risk_coverage_area(uncertainty, error) == pytest.approx(expected.mean())


@given(rows=ROWS, seed=st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_area_does_not_depend_on_row_order_and_is_bounded(rows, seed):
    uncertainty, error = columns(rows)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    area = risk_coverage_area(uncertainty, error)
    assert 0 <= area <= 1
    assert risk_coverage_area(uncertainty[order], error[order]) == area


def test_area_by_hand():
    uncertainty, error = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert risk_coverage(uncertainty, error).risk.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 2])
    assert risk_coverage_area(uncertainty, error) == pytest.approx(5 / 24)
    assert risk_coverage_area(-uncertainty, error) == pytest.approx((1 + 1 + 2 / 3 + 1 / 2) / 4)


def test_constant_uncertainty_has_the_plain_risk_everywhere():
    error = torch.tensor([3.0, 0.0, 1.0, 0.0])  # any loss, not only mistakes
    assert risk_coverage(torch.zeros(4), error).risk.tolist() == [1.0] * 4


def test_one_row():
    assert risk_coverage_area(torch.tensor([0.3]), torch.tensor([1.0])) == 1.0


def test_risk_at_coverage():
    uncertainty = torch.arange(10.0)
    error = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 0, 1])
    risk = risk_at_coverage(uncertainty, error, torch.tensor([0.01, 0.6, 0.65, 0.7, 1.0]))
    assert risk.tolist() == pytest.approx([0, 0, 1 / 7, 1 / 7, 0.3])  # 1, 6, 7, 7 and 10 rows kept
    for kept in range(1, 11):  # k / N in either precision keeps exactly k rows
        expected = error[:kept].double().mean().item()
        assert risk_at_coverage(uncertainty, error, torch.tensor([kept / 10])).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("uncertainty", "error", "message"),
    [
        (torch.zeros(0), torch.zeros(0), "uncertainty must be"),
        (torch.zeros(2), torch.zeros(3), "given 2 and 3"),
        (torch.tensor([math.nan]), torch.zeros(1), "1 of 1 values of uncertainty are NaN"),
        (torch.zeros(1), torch.tensor([math.nan]), "1 of 1 values of error are NaN"),
    ],
)
def test_bad_input_is_refused(uncertainty, error, message):
    with pytest.raises(ValueError, match=message):
        risk_coverage_area(uncertainty, error)


def test_coverages_beyond_all_rows_are_refused():
    with pytest.raises(ValueError, match=r"within \(0, 1\]"):
        risk_at_coverage(torch.zeros(2), torch.zeros(2), torch.tensor([0.0, 1.0]))
