"""Laplace methods with many classes: memory as the outputs take, not their square; refused in time where it is not."""

from typing import Any

import pytest
import torch
from torch import nn

import caveat
from caveat.engine import cost
from caveat.engine.laplace import laplace_methods
from caveat.engine.linear_model import ConjugateGradients
from caveat.engine.method import Method


def problem(classes: int, rows: int) -> tuple[caveat.Task, caveat.Posterior]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator)
    y = torch.arange(rows) % classes
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, classes))
    task = caveat.Task(module, (x, y), caveat.Categorical())
    return task, caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=1)), progress=False)


class LargestAllocation(torch.utils._python_dispatch.TorchDispatchMode):
    """The most numbers that any tensor made meanwhile holds."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.most = max(self.most, value.untyped_storage().nbytes() // value.element_size())
        return result


@pytest.mark.parametrize(
    "method",
    [
        caveat.LastLayerLaplace(structure="diagonal", precision="given"),
        caveat.LastLayerLaplace(structure="kronecker", precision="given"),
        caveat.Laplace(structure="diagonal", precision="given"),
        caveat.Laplace(structure="diagonal", precision="given", fisher="mc"),
    ],
    ids=lambda method: repr(method)[:14] + method.structure + method.fisher,
)
def test_no_tensor_has_as_many_numbers_as_rows_times_classes_squared(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A diagonal over 1,000 classes took 11.8 GB, and over 10,000 the allocator failed."""
    monkeypatch.setattr("caveat.fitting.check_against_marginals", lambda *given: None)  # predicts, with many draws
    classes, rows = 300, 300
    task, start = problem(classes, rows)
    with LargestAllocation() as tensors:
        caveat.fit(task, method, start=start, progress=False)
    assert tensors.most <= 4 * classes * max(rows, classes), f"{tensors.most:,} numbers"


def test_ten_thousand_classes_fit_into_little_memory() -> None:
    task, start = problem(10_000, 50)
    for method in (
        caveat.LastLayerLaplace(structure="diagonal", precision="evidence"),
        caveat.Laplace(structure="diagonal", precision="evidence", fisher="mc"),
    ):
        with LargestAllocation() as tensors:
            posterior = caveat.fit(task, method, start=start, progress=False)
            probs = posterior.predict(task.train.dataset.tensors[0][:3], draws=3).probs
        assert tensors.most < 50_000_000, f"{tensors.most:,} numbers"  # a whole factor of one row has 100,000,000
        torch.testing.assert_close(probs.sum(-1), torch.ones(3))
        assert not [text for text in posterior.info.warnings if "passes back" in text]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "most"),
    [
        (caveat.Laplace(structure="kronecker", precision="given", fisher="mc"), 5 * 10**6),
        (caveat.SampledLaplace(samples=4, precision=1.0), 10**8),  # of a row's factor, minutes
    ],
    ids=["kronecker", "sampled"],
)
def test_ten_thousand_classes_in_other_structures(method: Method, most: int) -> None:
    task, start = problem(10_000, 20)
    with LargestAllocation() as tensors:
        posterior = caveat.fit(task, method, start=start, progress=False)
    assert tensors.most <= most, f"{tensors.most:,} numbers"
    probs = posterior.predict(task.train.dataset.tensors[0][:3], draws=3).probs
    torch.testing.assert_close(probs.sum(-1), torch.ones(3))


def test_exact_kronecker_factors_of_ten_thousand_classes_are_refused_where_they_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, start = problem(10_000, 20)
    monkeypatch.setattr(cost, "free_bytes", lambda device: 15 * 10**8)
    method = caveat.LastLayerLaplace(structure="kronecker", precision="given")
    with pytest.raises(MemoryError, match=r"needs 3\.2 GB, 1\.5 GB are free.*structure='diagonal'"):
        caveat.fit(task, method, start=start, progress=False)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_the_last_layer_in_one_go_is_that_of_all_columns(structure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task, start = problem(7, 40)
    method = caveat.LastLayerLaplace(structure=structure, precision="given", skip=0.0)
    quick = caveat.fit(task, method, start=start, progress=False)
    monkeypatch.setattr(laplace_methods.Sweep, "_without_cotangents", lambda self: None)
    slow = caveat.fit(task, method, start=start, progress=False)
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(quick.moments(x)[1], slow.moments(x)[1], rtol=1e-4, atol=1e-6)


def test_many_passes_are_told() -> None:
    task, start = problem(600, 10)
    posterior = caveat.fit(task, caveat.Laplace(structure="diagonal", precision="given"), start=start, progress=False)
    (warning,) = [text for text in posterior.info.warnings if "passes back" in text]
    assert "599" in warning
    assert "fisher='mc'" in warning


def test_samples_with_many_classes_take_few_rows_at_a_time_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    classes, rows = 60, 60
    task, start = problem(classes, rows)
    method = caveat.SampledLaplace(samples=2, precision=1.0, solver=ConjugateGradients())
    monkeypatch.setattr("caveat.engine.linearised.jacobian_features._BESIDE_NUMBERS", {"cpu": 60_000})
    with LargestAllocation() as tensors:
        posterior = caveat.fit(task, method, start=start, progress=False)
    assert tensors.most <= 100_000, f"{tensors.most:,} numbers"  # all rows at once would be 212,400
    assert posterior.predict(task.train.dataset.tensors[0][:3]).probs.shape == (3, classes)
    monkeypatch.setattr(cost, "free_bytes", lambda device: 10**4)
    with pytest.raises(MemoryError, match=r"Fisher information of 1 row with 60 outputs needs .*LastLayerLaplace"):
        method.check(task, torch.device("cpu"))
