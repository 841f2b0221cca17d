"""Shifts of tables and signals, and splits that leave a gap."""

import itertools

import pytest
import torch

from caveat.data import gap_mask, gap_split, load, shift
from caveat.data.shifts import SHIFTS

NAMES = [name for name, found in SHIFTS.items() if found.group == "rows"]


def rows(n=400, d=12):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_the_same_in_any_batch_and_damage_grows(name):
    x = rows().double()
    whole = shift(x, name, SHIFTS[name].severities[2], seed=1)
    assert (whole.dtype, whole.shape) == (x.dtype, x.shape)
    assert torch.equal(shift(x[[9, 3]], name, SHIFTS[name].severities[2], seed=1), whole[[9, 3]])
    assert not torch.equal(shift(x, name, SHIFTS[name].severities[2], seed=2), whole)
    assert shift(x[:0], name, SHIFTS[name].severities[0]).shape == (0, 12)


@pytest.mark.parametrize("name", NAMES)
def test_damage_grows(name):
    if name == "signal_shift":  # noise has no neighbours that are alike: a wave has
        x = torch.sin(torch.linspace(0, 4, 40) + torch.linspace(0, 6, 50)[:, None])
    else:
        x = rows()
    damage = [(shift(x, name, severity) - x).square().mean().item() for severity in SHIFTS[name].severities]
    assert all(first < second for first, second in itertools.pairwise(damage)), damage


def test_features_move_by_whole_deviations_one_way_for_all_rows():
    x = rows(6, 30)
    moved = shift(x, "feature_shift", 1.5) - x
    torch.testing.assert_close(moved.abs(), torch.full_like(x, 1.5))
    assert torch.equal(moved.sign(), moved[:1].sign().expand_as(x))
    assert 5 < int((moved[0] > 0).sum()) < 25


def test_signals_slide_along_their_axis_either_way():
    x = rows(50, 40)
    moved = shift(x, "signal_shift", 0.05)  # two of forty
    left, right = (torch.isclose(moved, x.roll(by, 1), atol=1e-5).all(1) for by in (-2, 2))
    assert (left | right).all()
    assert 10 < int(left.sum()) < 40
    between = shift(x, "signal_shift", 0.0125)  # half of one
    either = [(x + x.roll(by, 1)) / 2 for by in (-1, 1)]
    assert torch.stack([torch.isclose(between, mean, atol=1e-5).all(1) for mean in either]).any(0).all()


def test_noise_and_scale_are_as_large_as_they_say():
    x = rows(2000)
    noise = shift(x, "signal_noise", 0.4) - x
    assert noise.std().item() == pytest.approx(0.4, rel=0.03)
    assert abs(noise.mean().item()) < 0.01
    ratio = shift(x, "signal_scale", 1.0) / x
    assert torch.isclose(ratio, torch.tensor(2.0), rtol=1e-4).logical_or(torch.isclose(ratio, torch.tensor(0.5))).all()
    assert (ratio > 1).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_a_gap_is_the_middle_of_a_column():
    values = torch.randn(300, generator=torch.Generator().manual_seed(1))
    mask = gap_mask(values)
    assert mask.sum() == 100
    middle, outer = values[mask], values[~mask]
    assert ((outer < middle.min()) | (outer > middle.max())).all()
    assert (outer < middle.min()).sum() == 100


def test_equal_values_are_in_the_gap_by_chance_of_the_seed():
    values = torch.zeros(90)
    assert torch.equal(gap_mask(values, 0.5, seed=1), gap_mask(values, 0.5, seed=1))
    assert not torch.equal(gap_mask(values, 0.5, seed=1), gap_mask(values, 0.5, seed=2))
    with pytest.raises(ValueError, match=r"a share in \(0, 1\), not shape \(90,\) and 1.5"):
        gap_mask(values, 1.5)


@pytest.mark.parametrize("name", ["diabetes", "breast_cancer"])
def test_a_table_is_split_anew(name):
    data = load(name)
    gap = gap_split(data, feature=2)
    n = len(data.train) + len(data.test)
    assert (len(gap.train), len(gap.test)) == (n - round(n / 3), round(n / 3))
    x, y = gap.train.tensors
    torch.testing.assert_close(x.mean(0), torch.zeros(x.shape[1]), atol=1e-4, rtol=0)
    assert (y.dtype, y.shape[1:]) == (data.train.tensors[1].dtype, data.train.tensors[1].shape[1:])
    low, high = gap.test.tensors[0][:, 2].aminmax()
    assert ((x[:, 2] <= low + 1e-5) | (x[:, 2] >= high - 1e-5)).all()
    # the same rows in all, in their own units
    mean, std = (torch.tensor(gap.preprocessing[key]) for key in ("mean", "std"))
    old_mean, old_std = (torch.tensor(data.preprocessing[key]) for key in ("mean", "std"))
    new = torch.cat([x, gap.test.tensors[0]]) * std + mean
    old = torch.cat([data.train.tensors[0], data.test.tensors[0]]) * old_std + old_mean
    torch.testing.assert_close(new.sort(0).values, old.sort(0).values, rtol=1e-4, atol=1e-3)
    assert gap.preprocessing["split"] == "gap in feature 2, seed 0"


def test_a_gap_that_is_none_is_refused():
    with pytest.raises(ValueError, match="feature=10, but diabetes has features 0 to 9"):
        gap_split(load("diabetes"), 10)
    with pytest.raises(ValueError, match="digits is not a table"):
        gap_split(load("digits"), 0)


def test_a_gap_is_like_the_published_one_where_no_values_tie(need):
    folder = need("uci_regression.npz")
    ours, published = gap_split(load("uci/kin8nm", folder), 3), load("uci/kin8nm", folder, split=3, gap=True)
    assert abs(len(ours.test) - len(published.test)) <= 1
    torch.testing.assert_close(
        ours.test.tensors[1].sort(0).values[5:-5:50],
        published.test.tensors[1].sort(0).values[5:-5:50],
        atol=0.01,
        rtol=0,
    )
