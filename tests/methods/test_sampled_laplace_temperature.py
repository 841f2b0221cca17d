"""The temperature of a fit: given, or chosen by validation rows, against fits at temperatures by hand."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import caveat
from caveat import SampledLaplace, Training
from tests.methods.sampled_reference import fitted, rooted, rows, trained, untrained


def test_a_temperature_multiplies_the_covariance(tmp_path: Path) -> None:
    x, _ = rows("Categorical", 7, seed=4)
    method = SampledLaplace(samples=6, precision=0.5)
    plain = fitted("Categorical", method)
    cold = fitted("Categorical", dataclasses.replace(method, temperature=0.04))
    torch.testing.assert_close(cold.moments(x)[1], 0.04 * plain.moments(x)[1])
    f, ours = plain.moments(x)[0], cold.predictor.outputs(x, 6, torch.Generator())[0]
    theirs = plain.predictor.outputs(x, 6, torch.Generator())[0]
    torch.testing.assert_close(ours - f, 0.2 * (theirs - f))
    point = plain.state["params"]
    for one, other in zip(plain.sample(3), cold.sample(3), strict=True):
        for name in plain.network.names:
            torch.testing.assert_close(other[name] - point[name], 0.2 * (one[name] - point[name]))
    cold.save(tmp_path / "cold")
    loaded = caveat.load(tmp_path / "cold", trained("Categorical")[0].network.module)
    assert torch.equal(loaded.moments(x)[1], cold.moments(x)[1])
    assert (cold.info.diagnostics["temperature"], plain.info.diagnostics["temperature"]) == (0.04, 1.0)
    del plain.state["posterior"]  # as files were before there were temperatures
    torch.testing.assert_close(cold.moments(x)[1], 0.04 * plain.moments(x)[1])


@pytest.mark.parametrize(
    ("kind", "prediction"), [("Categorical", "auto"), ("Categorical", "closed"), ("Gaussian", "auto")]
)
def test_validation_rows_choose_the_temperature(kind: str, prediction: Any) -> None:
    task, start = trained(kind)
    x, y = rows(kind, 900, seed=8)
    method = SampledLaplace(samples=8, precision=0.02, prediction=prediction, temperature="validation")
    held_out = untrained(kind, (x, y))
    found = caveat.fit(held_out, method, start=start, progress=False).info.diagnostics
    by_hand = {
        temperature: -float(
            caveat.fit(task, dataclasses.replace(method, temperature=temperature), start=start, progress=False)
            .predict(x)
            .log_prob(y)
            .mean()
        )
        for temperature in (
            found["temperature"] * factor for factor in (1, 10**-0.25, 10**0.25, 1 / found["temperature"])
        )
    }
    assert found["validation_nll"] == pytest.approx(by_hand[found["temperature"]], rel=1e-6)
    assert min(by_hand, key=by_hand.__getitem__) == found["temperature"]
    # So weak a prior is too wide for classes; regression has a misfit that its noise is too small for.
    assert found["temperature"] > 10 if kind == "Gaussian" else found["temperature"] < 0.2


def test_a_temperature_that_cannot_be_found_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="prediction='weights' makes others"):
        SampledLaplace(temperature="validation", prediction="weights")
    task, start = untrained("Categorical"), caveat.MAP(training=Training(epochs=10**6))
    with pytest.raises(ValueError, match="temperature='validation' needs validation rows"):
        caveat.fit(task, SampledLaplace(temperature="validation"), start=start, progress=False)
    x, y = rows("Categorical")
    half = caveat.Task(nn.Linear(3, 3).bfloat16(), (x.bfloat16(), y), caveat.Categorical())
    with pytest.raises(ValueError, match="needs weights in float32 or float64"):
        caveat.fit(half, SampledLaplace(), start=start, progress=False)


def test_a_fault_of_validation_rows_is_said_and_no_sample_is_lost(tmp_path: Path) -> None:
    (x, y), (validation, labels) = rows("Categorical"), rows("Categorical", 20, seed=8)
    validation[7] = 0
    task = caveat.Task(rooted(), (x, y), caveat.Categorical(), validation=(validation, labels))
    method = SampledLaplace(samples=4, precision=1.0, temperature="validation")
    with pytest.raises(ValueError, match=r"of 20 validation rows, .*: .*row 7 hold NaN or infinity"):
        caveat.fit(task, method, folder=tmp_path / "kept", progress=False)
    assert list((tmp_path / "kept.partial").rglob("samples/*.safetensors"))
