"""A killed Laplace fit goes on, and predictions go in pieces and factor nothing."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import caveat
from caveat import Laplace
from caveat.engine.row_gradients import Jacobian
from caveat.engine.run import Run
from tests.methods.laplace_reference import (
    assert_close,
    data,
    fit,
    trained,
)


@pytest.mark.parametrize("structure", ["full", "kronecker", "low_rank"])
def test_a_killed_fit_goes_on_to_the_same_posterior(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, structure: str
) -> None:
    task, start = trained("Categorical")
    whole, (x, _) = fit(task, start, structure=structure), data("Categorical", 5)
    monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0, layers=1: 11)
    monkeypatch.setattr(Run, "checkpoint_due", lambda self: self.folder is not None)
    keep, folder = Run.checkpoint, tmp_path / "posterior"

    def killed(self: Run, carry: Any, note: Any) -> None:
        keep(self, carry, note)
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "checkpoint", killed)
    attempts = 0
    while not folder.exists():
        attempts += 1
        assert attempts < 20
        method = Laplace(skip=0.0, precision="given", structure=structure)
        with contextlib.suppress(KeyboardInterrupt):
            resumed = caveat.fit(task, method, start=start, folder=folder, progress=False)
    assert attempts == (10 if structure == "low_rank" else 4)
    assert_close(resumed.moments(x)[1], whole.moments(x)[1])  # whose rows were one batch
    assert not folder.with_name("posterior.partial").exists()


@pytest.mark.parametrize("structure", ["full", "diagonal", "kronecker"])
def test_inputs_go_through_in_pieces(monkeypatch: pytest.MonkeyPatch, structure: str) -> None:
    posterior = fit(*trained("Categorical"), structure=structure)
    x, _ = data("Categorical", 7, seed=7)
    covariance, samples = posterior.moments(x)[1], posterior.predict(x).samples
    monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0, layers=1: 3)
    assert_close(posterior.moments(x)[1], covariance)
    assert_close(posterior.predict(x).samples, samples)  # the same draws for all of them
    assert_close(posterior.predict(x[2:5]).samples, samples[:, 2:5])


@pytest.mark.parametrize(("structure", "n"), [("full", 4), ("full", 30), ("kronecker", 30), ("low_rank", 30)])
def test_a_prediction_factors_nothing(monkeypatch: pytest.MonkeyPatch, structure: str, n: int) -> None:
    posterior = fit(*trained("Categorical", n), structure=structure)
    x, _ = data("Categorical", 5)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a factorisation at every prediction")

    for name in ("cholesky", "cholesky_ex", "eigh", "eigvalsh", "inv", "inv_ex", "solve", "svd", "qr"):
        monkeypatch.setattr(torch.linalg, name, refused)
    for name in ("cholesky", "cholesky_inverse", "inverse", "svd", "qr"):
        monkeypatch.setattr(torch, name, refused)
    posterior.predict(x)
    posterior.moments(x, joint=True)
    next(posterior.sample(1))
    dataclasses.replace(posterior, method=dataclasses.replace(posterior.method, prediction="closed")).predict(x)
