"""Running moments are those of all values at once."""

import torch

from caveat.engine.running_moments import RunningMoments


def test_moments_are_those_of_all_values_at_once() -> None:
    values = 1e3 + torch.randn(50, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments = RunningMoments.like(values[0])
    for value in values:
        moments.add(value)
    assert moments.count == 50
    torch.testing.assert_close(moments.mean, values.mean(0))
    torch.testing.assert_close(moments.squares / 50, values.var(0, correction=0))


def test_moments_go_on_in_the_tensors_that_they_were_given() -> None:
    values = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mean, squares = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for count, value in enumerate(values):
        RunningMoments(mean, squares, count).add(value)
    torch.testing.assert_close(mean, values.mean(0))
    torch.testing.assert_close(squares, 3 * values.var(0))
