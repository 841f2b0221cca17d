"""What the knobs of Laplace do, what a fit reports, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import caveat
from caveat import Laplace
from tests.methods.laplace_reference import PRIOR, assert_close, at, data, fit, normal, trained


def test_every_way_to_a_precision_is_reported(dense: Any) -> None:
    task, start = trained("Categorical")
    x, _ = data("Categorical", 4, seed=7)
    by_number = fit(task, start, precision=3.0)
    ggn = at(dense, by_number).ggn(*task.train.everything())
    j = at(dense, by_number).jacobian(x)
    assert_close(by_number.moments(x)[1], j @ (ggn + 3 * torch.eye(len(ggn)).double()).inverse() @ j.mT)
    assert by_number.info.diagnostics["prior_precision"] == 3.0
    given = fit(task, start).info.diagnostics
    assert (given["precision_from"], given["prior_precision_multiple"]) == ("given", 1.0)
    assert given["prior_precision"] == [0.5, 2.0]
    assert given["rows_skipped"] == {"rows": 0, "share_of_information": 0.0}
    for how in ("auto", "evidence"):
        report = fit(task, start, precision=how).info.diagnostics
        assert report["precision_from"] == "evidence"
        assert report["log_marginal_likelihood"] >= given["log_marginal_likelihood"]
    by_layer = fit(task, start, precision="layers").info.diagnostics
    assert set(by_layer["prior_precision"]) == {"0", "2"}
    assert by_layer["log_marginal_likelihood"] >= report["log_marginal_likelihood"] - 0.01
    split = caveat.Task(
        task.network.module.requires_grad_(True), data("Categorical", 40), caveat.Categorical(), PRIOR, validation=0.3
    )
    for how, prediction in (("auto", "samples"), ("validation", "weights"), ("validation", "closed")):
        report = fit(split, start, precision=how, prediction=prediction, structure="kronecker").info.diagnostics
        assert report["precision_from"] in (
            ("evidence", "evidence, overruled by validation") if how == "auto" else (how,)
        )
        assert report["validation_nll"] > 0


def test_skipped_rows_change_little_and_are_counted() -> None:
    torch.manual_seed(0)
    x, y = data("Categorical", 60)
    x = torch.cat([x, 20 * x[:40]])  # far out the network is sure
    y = torch.cat([y, y[:40]])
    task = caveat.Task(nn.Linear(3, 3).double(), (x, y), caveat.Categorical())
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=60)), progress=False)
    whole, fewer = fit(task, start), fit(task, start, skip=0.01)
    skipped = fewer.info.diagnostics["rows_skipped"]
    assert 5 < skipped["rows"] < 60
    assert 0 < skipped["share_of_information"] <= 0.01
    new = normal(5, 3, seed=3)
    torch.testing.assert_close(fewer.moments(new)[1], whole.moments(new)[1], rtol=0.3, atol=0)
    outputs = start.network(start.state["params"], x).softmax(-1)
    information = (outputs * (1 - outputs)).sum(-1).sort().values
    share = float(information[: skipped["rows"]].sum() / information.sum())
    assert skipped["share_of_information"] == pytest.approx(share)


@pytest.mark.parametrize("structure", ["full", "diagonal", "kronecker", "low_rank"])
def test_half_precision_and_one_random_cotangent_come_near(structure: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    x, y = data("Categorical", 400)
    single = caveat.Task(module, (x.float(), y), caveat.Categorical(), PRIOR)
    point = caveat.fit(single, caveat.MAP(training=caveat.Training(epochs=20)), progress=False)
    x = normal(5, 3, seed=7).float()
    exact = fit(single, point, structure=structure).moments(x)[1]
    half = fit(single, point, structure=structure, arithmetic="bfloat16").moments(x)[1]
    random = fit(single, point, structure=structure, fisher="mc").moments(x)[1]
    assert half.dtype == random.dtype == torch.float32
    torch.testing.assert_close(half, exact, rtol=0.1, atol=0.02 * float(exact.max()))
    torch.testing.assert_close(random, exact, rtol=0.8, atol=0.2 * float(exact.max()))
    assert not torch.equal(random, exact)
    assert fit(single, point, structure=structure, prediction="bridge").predict(x).samples.dtype == torch.float32


def test_coverage_says_what_each_layer_got() -> None:
    torch.manual_seed(0)
    x, y = data("Categorical", 40)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 3)).double()
    module[3].bias.requires_grad_(False)
    task = caveat.Task(module, (x, y), caveat.Categorical())
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=60)), progress=False)

    def said(structure: str) -> list[str]:
        return [entry["treatment"] for entry in fit(task, start, structure=structure).info.coverage]

    assert said("full") == ["Gaussian, full covariance"] * 2 + ["Gaussian, full covariance, in part"]
    assert said("diagonal")[:2] == ["diagonal Gaussian"] * 2
    assert said("low_rank")[:2] == ["Gaussian, low-rank precision"] * 2
    assert said("kronecker") == [
        "Gaussian, Kronecker-factored",
        "diagonal Gaussian (this BatchNorm1d has no Kronecker factors)",
        "Gaussian, Kronecker-factored, in part",
    ]


@pytest.mark.parametrize("structure", ["full", "kronecker"])
def test_loads_with_the_same_moments(structure: str, tmp_path: Path) -> None:
    posterior = fit(*trained("Categorical", 4), structure=structure)
    posterior.save(tmp_path / "posterior")
    torch.manual_seed(9)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    loaded, (x, y) = caveat.load(tmp_path / "posterior", module), data("Categorical", 9, seed=3)
    for kind in (False, True):
        assert torch.equal(loaded.moments(x, joint=kind)[1], posterior.moments(x, joint=kind)[1])
    updated = [p.update((x, y), progress=False).moments(x)[1] for p in (loaded, posterior)]
    assert_close(*updated)


def test_what_it_cannot_do_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    task, start = trained("Categorical")
    x, y = data("Categorical", 30)
    other = caveat.Task(task.network.module.requires_grad_(True), (x, y), caveat.Categorical(), caveat.LaplacePrior())
    with pytest.raises(ValueError, match=r"needs a Gaussian prior.*this is a LaplacePrior"):
        fit(other, start)
    with pytest.raises(ValueError, match=r"precision='validation' needs validation rows"):
        fit(task, start, precision="validation")
    with pytest.raises(ValueError, match=r"prediction='bridge' is for classes, and this is Gaussian"):
        fit(*trained("Gaussian"), prediction="bridge")
    with pytest.raises(ValueError, match="Poisson prediction has no closed form"):
        fit(*trained("Poisson"), prediction="closed")
    uneven = caveat.GaussianPrior({"*.weight": 1.0, "*": 2.0})
    mixed = caveat.Task(task.network.module.requires_grad_(True), (x, y), caveat.Categorical(), uneven)
    with pytest.raises(ValueError, match=r"one prior precision for 0\.weight and 0\.bias"):
        fit(mixed, start, structure="kronecker")
    for knobs, said in (
        ({"precision": -1.0}, "precision"),
        ({"structure": "half"}, "structure"),
        ({"skip": 2}, "skip"),
    ):
        with pytest.raises(ValueError, match=f"Laplace\\({said}="):
            Laplace(**knobs)
    monkeypatch.setattr("caveat.engine.cost.free_bytes", lambda device: 11_000)
    with pytest.raises(
        MemoryError, match=r"full structure over 31 weights \(the precision matrix\) needs 3.\.. kB, 11\.0 kB"
    ):
        fit(task, start)
    with pytest.raises(MemoryError, match=r"31 weights \(20 rows of gradients\) needs 11\.4 kB.*try.*'diagonal'"):
        fit(*trained("Categorical", 10))
    monkeypatch.setattr("caveat.engine.cost.free_bytes", lambda device: 5000)
    for structure in ("kronecker", "low_rank"):
        advice = r"needs .*try Laplace\(structure='diagonal'\) or SubnetworkLaplace\(weights=(\d+)\)"
        with pytest.raises(MemoryError, match=f"{structure} structure over 31 weights {advice}"):
            fit(task, start, structure=structure)
    assert fit(task, start, structure="diagonal").info.diagnostics["form"] == "layered", "the advice holds"


def test_gaussian_predictions_are_exact_by_default_and_as_good_as_they_were_tuned_to_be() -> None:
    """Of an interpolating network the noise is tiny: a mixture of draws would be a comb."""
    x, y = data("Gaussian", 40, seed=3)
    other = data("Gaussian", 60, seed=8)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 100), nn.Tanh(), nn.Linear(100, 1)).double()
    task = caveat.Task(module, (x, y), caveat.Gaussian(standardise=True), caveat.GaussianPrior(1e-3), validation=other)
    start = caveat.MAP(training=caveat.Training(epochs=400, learning_rate=0.02))
    posterior = caveat.fit(task, Laplace("full"), start=start, progress=False)
    prediction = posterior.predict(other[0])
    nll = -float(prediction.log_prob(other[1]).mean())
    assert nll == pytest.approx(posterior.info.diagnostics["validation_nll"], rel=1e-6)
    assert len(prediction.samples) == 1
    assert len(posterior.predict(other[0], draws=7).samples) == 7


def test_half_precision_weights_are_refused_with_advice() -> None:
    x, y = data("Categorical", 20)
    module = nn.Sequential(nn.Linear(3, 3)).bfloat16()
    task = caveat.Task(module, (x.bfloat16(), y), caveat.Categorical())
    with pytest.raises(ValueError, match=r"float32 or float64.*module\.float\(\)"):
        caveat.fit(task, Laplace(), start=caveat.MAP(training=caveat.Training(epochs=60)), progress=False)


def test_the_temperature_of_the_start_is_left_out_and_said() -> None:
    x, y = data("Categorical", 60)
    module = nn.Sequential(nn.Linear(3, 3)).double()
    task = caveat.Task(module, (x, y), caveat.Categorical(), validation=0.3)
    start = caveat.MAP(temperature=True, training=caveat.Training(epochs=60))
    posterior = caveat.fit(task, Laplace(), start=start, progress=False)
    assert "temperature" not in posterior.state["hyper"]
    assert any("temperature was left out" in warning for warning in posterior.info.warnings)
