"""Eight threads predict at once, with one posterior and with eight: equal to one after the other, bit for bit."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat

THREADS = 8
TRAINING = caveat.Training(epochs=3, batch_size=16)
METHODS: dict[str, Any] = {
    "MAP": caveat.MAP(training=TRAINING),
    "DeepEnsemble": caveat.DeepEnsemble(members=2, training=TRAINING),
    "Laplace": caveat.Laplace("kronecker", precision=1.0, default_draws=4),
    "SubnetworkLaplace": caveat.SubnetworkLaplace(weights=40, precision=1.0, default_draws=4),
    "LastLayerLaplace": caveat.LastLayerLaplace(precision=1.0, default_draws=4),
    "SampledLaplace": caveat.SampledLaplace(samples=4, precision=1.0, prediction="samples"),
    "MCDropout": caveat.MCDropout(training=TRAINING),
    "SWAG": caveat.SWAG.quick,
    "SSVI": caveat.SSVI(density=0.5, training=TRAINING, interval=2),
}


class Block(nn.Module):
    """relu(x + body(x)) with BatchNorm, whose statistics a module holds while it runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](self.first(x)).relu()
        return (x + self.norms[1](self.second(h))).relu()


def resnet() -> nn.Module:
    torch.manual_seed(0)
    stem = [nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*stem, Block(4), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))


def images(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images with a bright band in one of three places, and which."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (rows,), generator=rng)
    x = 0.5 * torch.randn(rows, 1, 8, 8, generator=rng)
    for image, label in zip(x, y.tolist(), strict=True):
        image[0, 2 * label : 2 * label + 2] += 1.5
    return x, y


@cache
def task() -> caveat.Task:
    return caveat.Task(resnet(), images(48, 0), caveat.Categorical(), caveat.GaussianPrior(0.5))


@cache
def point() -> caveat.Posterior:
    return caveat.fit(task(), caveat.MAP(training=caveat.Training(epochs=8, batch_size=16)), progress=False)


def fitted(name: str) -> caveat.Posterior:
    method = METHODS[name]
    start = point() if method.starts_from == "trained" else None
    return caveat.fit(task(), method, start=start, progress=False)


def at_once(jobs: list[Callable[[], Tensor]]) -> list[Tensor]:
    """All jobs on threads of their own, which begin together."""
    ready = threading.Barrier(len(jobs), timeout=60)

    def run(job: Callable[[], Tensor]) -> Tensor:
        ready.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


@pytest.mark.parametrize("name", METHODS)
def test_threads_predict_as_if_each_were_alone(name: str) -> None:
    posterior = fitted(name)
    pieces = [images(5 + number % 2, 10 + number)[0] for number in range(THREADS)]  # of two shapes

    def jobs(posteriors: list[caveat.Posterior]) -> list[Callable[[], Tensor]]:
        def job(number: int) -> Tensor:
            return posteriors[number].predict(pieces[number], seed=number).samples

        return [lambda number=number: job(number) for number in range(THREADS)]  # type: ignore[misc]

    alone = [job() for job in jobs([posterior] * THREADS)]
    assert not any(torch.equal(one[:, :5], other[:, :5]) for one, other in itertools.pairwise(alone))
    # With one posterior, before it has predicted anything and afterwards; and with eight.
    fresh = posterior.to(posterior.network.device)
    eight = [posterior.to(posterior.network.device) for _ in range(THREADS)]
    for posteriors in ([fresh] * THREADS, [fresh] * THREADS, eight):
        for found, wanted in zip(at_once(jobs(posteriors)), alone, strict=True):
            assert torch.equal(found, wanted)


def test_threads_predict_with_different_methods_at_once() -> None:
    names = ["MAP", "DeepEnsemble", "Laplace", "LastLayerLaplace", "SampledLaplace", "MCDropout", "SWAG", "SSVI"]
    x, posteriors = images(6, 9)[0], [fitted(name) for name in names]
    jobs = [lambda posterior=posterior: posterior.predict(x, seed=1).samples for posterior in posteriors]
    alone = [job() for job in jobs]
    assert all(torch.equal(*pair) for pair in zip(at_once(jobs), alone, strict=True))
