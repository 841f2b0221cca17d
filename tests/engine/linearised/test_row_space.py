"""A linear model with a coordinate for each output of each row: against float64 references, and when it is taken."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from caveat import Categorical, Network, SampledLaplace
from caveat.engine import cost
from caveat.engine.linear_model import ConjugateGradients, Tuning
from caveat.engine.linearised import row_space, sampler
from caveat.engine.linearised.jacobian_features import NetworkFeatures
from caveat.engine.linearised.row_space import in_row_space, outer_products, row_space_pays
from caveat.engine.linearised.sampler import linearise
from caveat.engine.run import Run
from caveat.rows import Rows
from tests.engine.tangents.program_reference import CASES, N, dense_jacobian, doubled, network_of
from tests.methods.sampled_reference import LIKELIHOODS, Dense, deviations, fitted, trained


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks this small would have their Jacobian held."""
    monkeypatch.setattr(sampler, "holding_pays", lambda *a: "")
    monkeypatch.setattr(sampler, "row_space_pays", lambda *a: True)


@pytest.mark.parametrize("slices", [1, 7])
@pytest.mark.parametrize("name", ["in place", "tied", "tokens", "recurrent and attention", "partly frozen"])
def test_the_matrix_is_the_product_of_the_jacobian_with_itself(
    name: str, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module, x = CASES[name]()
    network, x = network_of(module), doubled(x)
    features = NetworkFeatures(network, network.params(), Rows((x, torch.zeros(N, dtype=torch.long))))
    J, told = dense_jacobian(network, network.names, x), []
    scale = torch.rand(features.size).double() * (torch.rand(features.size) > 0.2)
    monkeypatch.setitem(row_space._SLICE_BYTES, "cpu", 8 * J.numel() / slices)
    monkeypatch.setitem(row_space._AT_ONCE, "cpu", 5)
    for units in (None, scale):
        phi = (J if units is None else J * units).flatten(0, 1)
        gram = outer_products(features, units, lambda *a: told.append(a))
        torch.testing.assert_close(gram, phi @ phi.T)
    assert told[-1] == (features.size, features.size)
    once = [done for done, _ in told[len(told) // 2 :]]
    assert once == sorted(once)
    assert once[0] <= features.size // 2
    assert features.size // 2 < once[-2] < features.size


@pytest.mark.parametrize(("coarse", "error"), [(True, 1e-3), (False, 1e-5)])
def test_a_gpus_matrix_from_bfloat16(coarse: bool, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_space, "sums_in_float32", lambda device: True)
    torch.manual_seed(0)
    module, x = CASES["in place"]()
    network = network_of(module)
    J = dense_jacobian(network, network.names, doubled(x)).flatten(0, 1)
    single = Network(copy.deepcopy(network.module).float().requires_grad_(), Categorical())
    data = Rows((x.float(), torch.zeros(N, dtype=torch.long)))
    features = NetworkFeatures(single, single.params(), data)
    most, real = [], row_space.split
    monkeypatch.setitem(cost.WORKING_NUMBERS, "cpu", 10 * len(J))
    monkeypatch.setattr(row_space, "split", lambda columns: (most.append(columns.numel()), real(columns))[1])
    off = outer_products(features, None, coarse=coarse) - J @ J.T
    assert max(most, default=0) == (0 if coarse else 10 * len(J)), "the parts are copies"
    assert error / 100 < float(off.norm() / (J @ J.T).norm()) < error


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("g_prior", [False, True])
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_outputs_mean_and_effective_dimension_are_those_of_the_weights(kind: str, g_prior: bool) -> None:
    task, start = trained(kind)
    params, hyper = start.state["params"], start.state["hyper"]
    linear, _ = linearise(task, task.network, params, hyper, Run(), g_prior=g_prior)
    rows = linear.by_rows
    assert rows is not None
    torch.testing.assert_close(rows.seen(rows.weights), linear.seen(linear.weights))
    (block,) = rows.features.blocks()
    L = block.forward(torch.eye(rows.features.size).double()).flatten(1).T
    torch.testing.assert_close(L, L.tril())
    for alpha in (0.1, 10.0):
        models = [m.model.with_precision(torch.tensor([alpha], dtype=torch.float64)) for m in (linear, rows)]
        sizes, shares = [], []
        for network, model in zip((linear, rows), models, strict=True):
            d = model.features.size
            M = model.curvature(torch.eye(d).double())
            shares.append(torch.linalg.solve(M + alpha * torch.eye(d), M).trace())
            solve, _ = network.solving(1e-9)
            prepared = ConjugateGradients(tolerance=1e-10, rank=20).prepare(model)
            system = sampler.SampleRandomness(model, 1, 0).system(model)
            start_at = torch.stack([system.prior[0], network.inside(network.weights)])
            sizes.append(solve(model, prepared, system, start_at)[1].square().sum())
        torch.testing.assert_close(*shares)
        torch.testing.assert_close(*sizes, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_precision_is_where_the_evidence_does_not_change(kind: str) -> None:
    method = SampledLaplace(samples=2, g_prior=False, tuning=Tuning(samples=2000, tolerance=1e-3))
    posterior = fitted(kind, method)
    assert posterior.info.diagnostics["solver"] == "Exact"
    alpha, dense = posterior.info.diagnostics["prior_precision"], Dense(kind, posterior)
    update = float(dense.shares(alpha).sum() / dense.mean(alpha, dense.w).square().sum())
    assert abs(update / alpha - 1) < 0.05  # by two thousand samples


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("g_prior", [False, True])
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_samples_are_those_of_conjugate_gradients(kind: str, g_prior: bool) -> None:
    knobs: dict[str, Any] = {"samples": 5, "at_once": 3, "precision": 2.0, "g_prior": g_prior}
    exact = fitted(kind, SampledLaplace(**knobs))
    gradients = fitted(kind, SampledLaplace(solver=ConjugateGradients(tolerance=1e-9), **knobs))
    torch.testing.assert_close(deviations(exact), deviations(gradients), rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("forced")
def test_what_is_found_once_is_not_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = SampledLaplace(samples=4, at_once=2, g_prior=True)
    whole, real = fitted("Categorical", method), sampler.SampleRandomness.system

    def killed(self: Any, model: Any) -> Any:
        if self.samples == range(2, 4):  # the second group
            raise KeyboardInterrupt
        return real(self, model)

    monkeypatch.setattr(sampler.SampleRandomness, "system", killed)
    with pytest.raises(KeyboardInterrupt):
        fitted("Categorical", method, folder=tmp_path / "fit")
    monkeypatch.setattr(sampler.SampleRandomness, "system", real)
    monkeypatch.setattr(sampler, "tune", lambda *a: pytest.fail("the precision was there"))
    again = fitted("Categorical", method, folder=tmp_path / "fit")
    assert torch.equal(deviations(again), deviations(whole))


@pytest.mark.usefixtures("forced")
def test_rows_that_are_alike_leave_a_matrix_that_can_be_factorised() -> None:
    task, start = trained("Categorical")
    linear, _ = linearise(task, task.network, start.state["params"], start.state["hyper"], Run(), g_prior=False)
    gram = outer_products(linear.features, None)  # 180 outputs, 31 weights
    found = in_row_space(linear, gram.clone()).features.dense.phi.flatten(0, 1)
    assert float((found @ found.T - gram).norm() / gram.norm()) < 1e-12
    assert in_row_space(linear, torch.zeros_like(gram)).features.dense.phi.isfinite().all()


@pytest.mark.usefixtures("forced")
def test_layers_have_no_such_matrix_and_bad_rows_are_named() -> None:
    layers = fitted("Categorical", SampledLaplace(samples=2, precision="layers"))
    assert layers.info.diagnostics["solver"] == "ConjugateGradients"
    task, start = trained("Categorical")
    linear, _ = linearise(task, task.network, start.state["params"], start.state["hyper"], Run(), g_prior=False)
    scale = torch.ones(linear.features.size).double()
    scale[3] = torch.nan
    with pytest.raises(ValueError, match="row 0 give products that hold NaN"):
        outer_products(linear.features, scale)


@pytest.mark.usefixtures("forced")
def test_too_little_memory_is_said_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "free_bytes", lambda device: 2_000_000)
    monkeypatch.setattr(row_space, "Jacobian", lambda *a, **k: pytest.fail("the work began"))
    with pytest.raises(MemoryError, match=r"60 rows x 3 outputs.* needs 2.1 MB, 2.0 MB are free.*ConjugateGradients"):
        fitted("Categorical", SampledLaplace(samples=2, g_prior=False))


@pytest.mark.usefixtures("forced")
def test_it_is_said_and_its_progress_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, int] = {}
    real = Run.bar

    def bar(self: Run, total: int, unit: str, *a: Any, **k: Any) -> Any:
        told[unit] = told.get(unit, 0) + 1
        return real(self, total, unit, *a, **k)

    monkeypatch.setattr(Run, "bar", bar)
    posterior = fitted("Categorical", SampledLaplace(samples=2, g_prior=False))
    assert {"weight", "product", "step", "sample"} <= set(told)
    assert posterior.info.diagnostics["matrix"] == "over 180 rows x outputs, by which systems are solved"
    gradients = fitted("Categorical", SampledLaplace(samples=2, g_prior=False, solver=ConjugateGradients()))
    assert "matrix" not in gradients.info.diagnostics


def test_it_pays_where_rows_and_outputs_are_fewer_than_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, x = CASES["in place"]()
    network, x = network_of(module), doubled(x)
    features = NetworkFeatures(network, network.params(), Rows((x, torch.zeros(N, dtype=torch.long))))
    assert row_space_pays(features, 1e6)
    assert not row_space_pays(features, 1.0), "passes through so small a network are cheaper"
    monkeypatch.setitem(row_space.EXACT_UP_TO, "cpu", N * features.outputs - 1)
    assert not row_space_pays(features, 1e6)
    monkeypatch.undo()
    features.float16 = True
    assert not row_space_pays(features, 1e6), "a matrix of passes in half precision is that of another network"
    features.float16 = False
    features.size = N * features.outputs - 1
    assert not row_space_pays(features, 1e6)
