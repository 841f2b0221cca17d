import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, root_mean_squared_error
from torchmetrics.functional.classification import multiclass_accuracy

from caveat.evaluate.metrics import per_row as metrics


def predictions(n, classes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(2 * torch.randn(n, classes, generator=generator, dtype=dtype), dim=1)
    return probs, torch.randint(0, classes, (n,), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [2, 5])
def test_accuracy_and_brier_against_scikit_learn_and_torchmetrics(classes, dtype):
    probs, targets = predictions(200, classes, dtype=dtype)
    accuracy, brier = metrics.accuracy(probs, targets), metrics.brier(probs, targets)
    assert accuracy.shape == brier.shape == (200,)
    assert accuracy.mean().item() == accuracy_score(targets, probs.argmax(1))
    assert accuracy.mean().item() == pytest.approx(
        multiclass_accuracy(probs, targets, num_classes=classes, average="micro").item()
    )
    in_one_hot = torch.nn.functional.one_hot(targets, classes).numpy()
    expected = brier_score_loss(in_one_hot, probs.numpy(), scale_by_half=False)
    assert brier.mean().item() == pytest.approx(expected, abs=10 * torch.finfo(dtype).eps)


@given(classes=st.integers(1, 6), n=st.integers(1, 30), seed=st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_perfect_predictions_score_perfectly_and_all_scores_are_bounded(classes, n, seed):
    probs, targets = predictions(n, classes, seed)
    perfect = torch.nn.functional.one_hot(targets, classes).float()
    assert metrics.accuracy(perfect, targets).min() == 1
    assert metrics.brier(perfect, targets).max() == 0
    brier = metrics.brier(probs, targets)
    assert brier.min() >= 0
    assert brier.max() <= 2


def test_certain_and_wrong_has_brier_two():
    assert metrics.brier(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([2])).item() == 2


@pytest.mark.parametrize("score", [metrics.accuracy, metrics.brier])
@pytest.mark.parametrize(
    ("probs", "targets", "message"),
    [
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), "at least one row"),
        (torch.tensor([[0.5, math.nan]]), torch.tensor([0]), "1 of 1 rows of probs hold NaN"),
        (torch.tensor([[3.0, -2.0]]), torch.tensor([0]), "softmax"),
        (torch.tensor([[0.9, 0.9]]), torch.tensor([0]), "softmax"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([2]), r"0\.\.1"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([-1]), r"0\.\.1"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0, 1]), r"\[1\]"),
        (torch.tensor([[0.5, 0.5]]), torch.tensor([0.0]), "integer type"),
        (torch.tensor([0.5, 0.5]), torch.tensor([0, 1]), r"\[N, C\]"),
    ],
)
def test_bad_classification_input_is_refused_with_a_reason(score, probs, targets, message):
    with pytest.raises(ValueError, match=message):
        score(probs, targets)


def test_squared_error_averages_the_outputs_of_a_row():
    mean, targets = torch.tensor([[0.0, 1.0], [2.0, 2.0]]), torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    assert metrics.squared_error(mean, targets).tolist() == [2.5, 0.0]
    assert metrics.squared_error(mean[:, 0], targets[:, 0]).tolist() == [1.0, 0.0]


def test_squared_error_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"\[3\].*\[3, 1\]"):
        metrics.squared_error(torch.zeros(3), torch.zeros(3, 1))


def test_regression_input_that_is_empty_or_nan_is_refused():
    with pytest.raises(ValueError, match="at least one row"):
        metrics.squared_error(torch.zeros(0, 1), torch.zeros(0, 1))
    with pytest.raises(ValueError, match="mean holds NaN in 1 of 2"):
        metrics.squared_error(torch.tensor([0.0, math.nan]), torch.zeros(2))


def test_interval_coverage_includes_its_ends():
    lower, upper = torch.zeros(4, 1), torch.ones(4, 1)
    targets = torch.tensor([[0.0], [1.0], [1.01], [-0.01]])
    assert metrics.interval_coverage(lower, upper, targets).tolist() == [1, 1, 0, 0]
    two = metrics.interval_coverage(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[0.5, 2.0]]))
    assert two.tolist() == [0.5]
    with pytest.raises(ValueError, match="4 intervals have lower > upper"):
        metrics.interval_coverage(upper, lower, targets)


def test_mean_and_stderr():
    assert metrics.mean_and_stderr(torch.tensor([1.0, 2.0, 3.0, 6.0])) == (
        3.0,
        pytest.approx(math.sqrt((4 + 1 + 0 + 9) / 3 / 4)),
    )
    assert metrics.mean_and_stderr(torch.tensor([2.0])) == (2.0, None)
    assert metrics.mean_and_stderr(torch.tensor([1.0, math.inf])) == (math.inf, None)


def test_mean_and_stderr_counts_rows_not_outputs():
    rows = torch.tensor([1.0, 2.0, 4.0])
    assert metrics.mean_and_stderr(rows[:, None].expand(3, 5)) == pytest.approx(metrics.mean_and_stderr(rows))


def test_mean_and_stderr_sums_in_float64():
    assert metrics.mean_and_stderr(torch.tensor([1e8, 1.0, -1e8, 3.0], dtype=torch.float32))[0] == 1.0


def test_mean_and_stderr_refuses_empty_and_nan():
    with pytest.raises(ValueError, match="at least one row"):
        metrics.mean_and_stderr(torch.zeros(0))
    with pytest.raises(ValueError, match="1 of 2 scores are NaN"):
        metrics.mean_and_stderr(torch.tensor([math.nan, 1.0]))


def test_rmse_against_scikit_learn_and_its_stderr_against_many_data_sets():
    generator = torch.Generator().manual_seed(0)
    errors = torch.randn(2000, 400, generator=generator, dtype=torch.float64)  # 2000 data sets of 400 points
    root, stderr = metrics.rmse(metrics.squared_error(errors[0], torch.zeros(400, dtype=torch.float64)))
    assert root == pytest.approx(root_mean_squared_error([0] * 400, errors[0]))
    spread = errors.square().mean(dim=1).sqrt().std().item()
    stderrs = [metrics.rmse(row.square())[1] for row in errors[:200]]
    assert sum(stderrs) / 200 == pytest.approx(spread, rel=0.05)
    assert stderr == pytest.approx(spread, rel=0.25)


def test_rmse_of_perfect_and_single_predictions():
    assert metrics.rmse(torch.zeros(3)) == (0.0, 0.0)
    assert metrics.rmse(torch.tensor([4.0])) == (2.0, None)


def test_the_standard_error_of_scores_that_share_rows_is_that_of_the_rows():
    """Forty copies of one score a row carry no more information than one."""
    scores = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.arange(50).repeat_interleave(40)
    mean, stderr = metrics.mean_and_stderr(scores.repeat_interleave(40), rows)
    assert (mean, stderr) == pytest.approx(metrics.mean_and_stderr(scores))
    assert metrics.mean_and_stderr(scores, torch.arange(50)) == pytest.approx(metrics.mean_and_stderr(scores))
    uneven = torch.cat([torch.zeros(30, dtype=torch.long), torch.arange(1, 21)])
    deviations = scores - scores.mean()
    sums = torch.stack([deviations[:30].sum(), *deviations[30:]])
    assert metrics.mean_and_stderr(scores, uneven)[1] == pytest.approx(
        float((21 / 20 * sums.square().sum()).sqrt() / 50)
    )
    assert metrics.mean_and_stderr(scores, torch.zeros(50))[1] is None
