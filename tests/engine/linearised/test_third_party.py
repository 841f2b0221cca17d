"""Networks of other packages under Laplace, SubnetworkLaplace and SampledLaplace, against dense float64 posteriors."""

from typing import Any

import pytest
import torch
from torch import Tensor

import caveat
from caveat.engine.linear_model import ConjugateGradients, DenseFeatures, LinearModel, RowNoise, SampleRandomness
from caveat.engine.linearised import jacobian_features
from tests.engine.linearised.third_party_reference import NETWORKS, QUICK, DensePosterior, trained

PRECISION, SAMPLES = 2.0, 3
SLOW = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS]
FINE = {"rtol": 1e-7, "atol": 1e-9}
IN_SINGLE = {"rtol": 1e-4, "atol": 1e-5}  # Llama's norms and rotations are in single precision, whatever its weights


def close(name: str) -> dict[str, float]:
    return IN_SINGLE if name.startswith(("Llama", "Mixtral")) else FINE


def fitted(name: str, method: Any) -> caveat.Posterior:
    task, _, point = trained(name)
    return caveat.fit(task, method, start=point, progress=False)


@pytest.mark.parametrize("name", SLOW)
def test_the_three_posteriors_are_those_of_dense_matrices(name: str) -> None:
    task, x, point = trained(name)
    dense = DensePosterior(task.network, point, x, PRECISION)
    laplace = fitted(name, caveat.Laplace(structure="full", precision=PRECISION, skip=0.0))
    mean, covariance = laplace.moments(x)
    torch.testing.assert_close(mean, dense.f, **close(name))
    torch.testing.assert_close(covariance, dense.covariance(), **close(name))

    score = torch.rand(task.network.n_parameters, generator=torch.Generator().manual_seed(1))
    method = caveat.SubnetworkLaplace(weights=30, score=score, keep_dead=True, precision=PRECISION, skip=0.0)
    subnetwork = DensePosterior(task.network, point, x, PRECISION, score.topk(30).indices.sort().values)
    torch.testing.assert_close(fitted(name, method).moments(x)[1], subnetwork.covariance(), **close(name))

    sampled = caveat.SampledLaplace(
        samples=SAMPLES, precision=PRECISION, negligible=0.0, g_prior=False, prediction="samples"
    )
    posterior = fitted(name, sampled)
    assert posterior.info.diagnostics["solver"] == "Exact"
    z = torch.cat(list(posterior.state["samples"].values()))
    torch.testing.assert_close(z, samples_of(dense), **close(name))
    outputs, _ = posterior.predictor.outputs(x, SAMPLES, torch.Generator())
    torch.testing.assert_close(outputs, dense.f + torch.einsum("ncd,kd->knc", dense.J, z), **close(name))


def samples_of(dense: DensePosterior) -> Tensor:
    """The samples of the same random numbers, by a dense solve."""
    precision = torch.full((1,), PRECISION, dtype=torch.float64)
    model = LinearModel(DenseFeatures(dense.J), RowNoise(dense.factor), precision)
    return torch.linalg.solve(dense.H, SampleRandomness(model, SAMPLES, seed=0).system(model).right.T).T


WAYS = {
    "packed LSTM": "autograd",
    "weight norm": "autograd",
    "U-Net": "a traced program",
    "BERT with LoRA": "autograd",
    "GPT-2, tied": "autograd",
}


@pytest.mark.parametrize("name", SLOW)
def test_conjugate_gradients_find_the_same_by_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacobian_features, "FEW_ROWS", 1)
    task, x, point = trained(name)
    method = caveat.SampledLaplace(
        samples=SAMPLES,
        precision=PRECISION,
        negligible=0.0,
        g_prior=False,
        solver=ConjugateGradients(tolerance=1e-10, rest=1e-9),
    )
    posterior = fitted(name, method)
    z = torch.cat(list(posterior.state["samples"].values()))
    single = close(name) is IN_SINGLE
    tolerance = IN_SINGLE if single else {"rtol": 1e-6, "atol": 1e-8}
    torch.testing.assert_close(z, samples_of(DensePosterior(task.network, point, x, PRECISION)), **tolerance)
    diagnostics = posterior.info.diagnostics
    assert diagnostics["products"].startswith(WAYS.get(name, ""))
    assert diagnostics["why"]
