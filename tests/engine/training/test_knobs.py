"""The schedule, and knobs that are refused."""

import dataclasses

import pytest

import caveat
from caveat import Training
from caveat.methods import built_in
from caveat.storage import decode, encode, settings_digest

PATH = {"optimizer": "sgd", "learning_rate": 0.1, "schedule": "constant", "warmup": 0.0, "clip": 1.0}
TRAINED = [m for m in built_in().values() if any(field.name == "training" for field in dataclasses.fields(m))]


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


def test_what_is_not_given_is_the_methods_own() -> None:
    path = caveat.SWAG(training=Training(batch_size=7)).training
    assert path == caveat.SWAG(training=Training(epochs=30, batch_size=7, **PATH)).training  # type: ignore[arg-type]
    assert caveat.SWAG(training=Training(epochs=9, learning_rate=0.5)).training.learning_rate == 0.5
    assert caveat.IVON(training=Training(epochs=9)).training.learning_rate == 0.1
    assert caveat.MAP(training=Training(epochs=9)).training.learning_rate == 0.003
    assert caveat.MCDropout(training=Training(learning_rate=0.1)).training.epochs is None  # whoever trains, trains


@pytest.mark.parametrize("method", TRAINED, ids=lambda method: method.__name__)
def test_every_method_that_trains_says_what_it_trains_with(method: type) -> None:
    """A method whose knobs were left open is one whose knobs were given: the same in files and in digests."""
    own = method().training
    assert None not in (own.optimizer, own.learning_rate, own.schedule, own.warmup, own.clip)
    short = method(training=Training(epochs=9))
    named = method(training=dataclasses.replace(own, epochs=9))
    assert short == named
    assert settings_digest(short) == settings_digest(named)
    assert decode(encode(named, {}, ""), {}, [method, Training]) == short


def test_a_training_by_itself_is_adams() -> None:
    """As in a method of somebody's own, which leaves the knobs as they were given."""
    assert Training().rate(0.025) == pytest.approx(0.5)
    assert Training().descent.learning_rate == 0.003
    assert Training(clip=2.0).descent.clip == 2.0
    settings = {"type": "Training", "fields": {"epochs": 3, "learning_rate": 0.003, "optimizer": "adam"}}
    assert decode(settings, {}, [Training]).descent == Training().descent  # a file of before
