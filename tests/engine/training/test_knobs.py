"""The schedule, and knobs that are refused."""

import pytest

from caveat import Training


def test_learning_rate_schedules() -> None:
    cosine = Training(warmup=0.1)
    assert cosine.rate(0.05) == pytest.approx(0.5)
    assert cosine.rate(0.1) == pytest.approx(1.0)
    assert cosine.rate(0.55) == pytest.approx(0.5)
    assert cosine.rate(1.0) == pytest.approx(0.0)
    step = Training(schedule="step", warmup=0.0, milestones=(0.5, 0.75))
    assert [step.rate(p) for p in (0.0, 0.49, 0.5, 0.8)] == pytest.approx([1, 1, 0.1, 0.01])
    cycle = Training(schedule="onecycle")
    assert cycle.rate(0.0) == pytest.approx(0.04)
    assert cycle.rate(0.3) == pytest.approx(1.0)
    assert cycle.rate(1.0) == pytest.approx(0.0)
    assert Training(schedule="constant", warmup=0.0).rate(0.9) == 1.0


@pytest.mark.parametrize(
    ("field", "value", "range_"),
    [
        ("epochs", -1, "at least 0"),
        ("learning_rate", 0.0, "above 0"),
        ("learning_rate", float("nan"), "above 0"),
        ("momentum", 1.5, r"in \[0, 1\]"),
        ("optimizer", "lion", "one of 'sgd', 'adam', 'adamw'"),
        ("epochs", 2.5, "a whole number at least 0"),
        ("milestones", (0.5, 7.0), r"in \[0, 1\]"),
    ],
)
def test_bad_values_name_the_field_the_value_and_the_range(field: str, value: object, range_: str) -> None:
    with pytest.raises(ValueError, match=rf"Training\({field}=.*must be .*{range_}"):
        Training(**{field: value})  # type: ignore[arg-type]
