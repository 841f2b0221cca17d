"""A posterior of samples: its state as groups of tensors and back, and predictions for inputs of any structure."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import caveat
from caveat.engine.linearised.jacobian_features import NetworkBlock
from caveat.engine.linearised.sample_posterior import SamplePredictor, SampleState
from caveat.storage import CorruptFile

N, S = 6, 5


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class TwoInputs(nn.Module):
    """Not the same when its inputs change places; a number may multiply it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 2)

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.left(a).tanh()[:, :2] * self.right(b)


class Named(Dataset):
    """Rows as dicts of their inputs and the label."""

    def __init__(self, rows: int = 20) -> None:
        self.a, self.b = normal(rows, 3, seed=1), normal(rows, 3, seed=2)

    def __len__(self) -> int:
        return len(self.a)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"a": self.a[i], "b": self.b[i], "label": (self.a[i, 0] > 0).long()}


def predictor(by_weights: bool = False, at_once: int = 2) -> tuple[SamplePredictor, SampleState, caveat.Network]:
    torch.manual_seed(0)
    network = caveat.Network(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), caveat.Categorical())
    samples = 0.1 * normal(S, network.n_parameters)
    state = SampleState(network.params(), {}, (samples[:3], samples[3:]), temperature=4.0)
    return SamplePredictor(state, network, by_weights=by_weights, at_once=at_once), state, network


@pytest.mark.parametrize("rows", [1, N])  # a row alone goes by its gradients
def test_outputs_are_the_linearisation_along_each_sample(dense: Any, rows: int) -> None:
    own, state, network = predictor()
    x = normal(rows, 3, seed=3)
    outputs, _ = own.outputs(x, S, torch.Generator().manual_seed(0))
    j = dense(network, network.params(), {}).jacobian(x)
    shifts = torch.einsum("bmd,kd->kbm", j, 2 * torch.cat(state.groups))
    torch.testing.assert_close(outputs, network(network.params(), x) + shifts)
    mean, covariance = own.moments(x)
    torch.testing.assert_close(mean, network(network.params(), x))
    torch.testing.assert_close(covariance, torch.einsum("kbi,kbj->bij", shifts, shifts) / S)
    flat = shifts.flatten(1)
    torch.testing.assert_close(own.moments(x, joint=True)[1], flat.T @ flat / S)


def test_a_row_alone_takes_a_pass_back_for_each_output(monkeypatch: pytest.MonkeyPatch) -> None:
    own, _, _ = predictor()
    pushed: list[int] = []
    forward = NetworkBlock.forward
    monkeypatch.setattr(NetworkBlock, "forward", lambda self, z: pushed.append(len(z)) or forward(self, z))
    alone = own.outputs(normal(3, 3, seed=3)[:1], 9, torch.Generator().manual_seed(0))[0]
    assert not pushed
    together = own.outputs(normal(3, 3, seed=3), 9, torch.Generator().manual_seed(0))[0]
    assert sum(pushed) == S
    torch.testing.assert_close(alone, together[:, :1])
    own.outputs(normal(1, 3), 1, torch.Generator().manual_seed(0))
    assert sum(pushed) == S + 1  # one sample is fewer than two outputs


def test_by_weights_each_sample_goes_through_the_network_itself() -> None:
    own, _, network = predictor(by_weights=True)
    x = normal(N, 3, seed=3)
    outputs, _ = own.outputs(x, S, torch.Generator().manual_seed(0))
    draws = own.draws(S, torch.Generator().manual_seed(0))
    torch.testing.assert_close(outputs, torch.stack([network(draw, x) for draw in draws]))


def test_no_rows_give_no_outputs() -> None:
    own, _, _ = predictor()
    assert own.outputs(normal(0, 3), S, torch.Generator().manual_seed(0))[0].shape == (S, 0, 2)


@pytest.fixture(scope="module")
def posterior() -> caveat.Posterior:
    torch.manual_seed(0)
    task = caveat.Task(TwoInputs().double(), Named(), caveat.Categorical())
    method = caveat.SampledLaplace(samples=4, precision=1.0)
    start = caveat.MAP(training=caveat.Training(epochs=60))
    return caveat.fit(task, method, start=start, progress=False)


def test_inputs_by_name_may_come_in_any_order(posterior: caveat.Posterior) -> None:
    a, b = normal(N, 3, seed=3), normal(N, 3, seed=4)
    wanted = posterior.predict({"a": a, "b": b}).probs
    assert torch.equal(posterior.predict({"b": b, "a": a}).probs, wanted)
    assert torch.equal(posterior.predict({"a": a, "b": b}).probs, wanted), "a program was not taken for another's"
    assert not torch.allclose(posterior.predict({"a": b, "b": a}).probs, wanted)


def test_a_number_among_the_inputs_counts(posterior: caveat.Posterior) -> None:
    a, b = normal(N, 3, seed=3), normal(N, 3, seed=4)
    plain = posterior.predict({"a": a, "b": b})
    one, three = (posterior.predict({"a": a, "b": b, "scale": scale}) for scale in (1.0, 3.0))
    torch.testing.assert_close(one.probs, plain.probs)
    torch.testing.assert_close(three.samples, (3 * plain.samples.log()).softmax(-1))  # linear in the outputs
    assert not torch.allclose(three.probs, one.probs)


def stored(temperature: float = 1.0) -> SampleState:
    samples = torch.arange(21.0).reshape(7, 3)  # sample k is [3 k, 3 k + 1, 3 k + 2]
    return SampleState({"weight": torch.ones(3)}, {}, (samples[:3], samples[3:6], samples[6:]), temperature)


def test_groups_of_tensors_and_back() -> None:
    groups = stored(0.25).tensors()
    assert list(groups["samples"]) == ["0", "3", "6"]
    back = SampleState.of(groups)
    assert back.count == 7
    assert (back.temperature, back.spread) == (0.25, 0.5)
    assert torch.equal(torch.cat(back.groups), torch.cat(stored().groups))


def test_files_from_before_there_was_a_temperature_have_one_of_one() -> None:
    groups = stored(0.25).tensors()
    del groups["posterior"]
    assert SampleState.of(groups).temperature == 1.0


@pytest.mark.parametrize("group", ["params", "hyper", "samples"])
def test_a_missing_group_is_named(group: str) -> None:
    groups = stored().tensors()
    del groups[group]
    with pytest.raises(CorruptFile, match=f"not the state of samples: it has no '{group}'"):
        SampleState.of(groups)


def test_a_group_of_no_samples_is_refused() -> None:
    with pytest.raises(CorruptFile, match="it has no 'samples'"):
        SampleState.of(stored().tensors() | {"samples": {}})


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_chosen_samples_come_once_in_order_and_few_at_a_time(at_once: int) -> None:
    chosen: dict[int, Tensor] = {}
    for numbers, samples in stored().some([5, 0, 6, 4, 0], at_once):
        assert len(samples) == len(numbers) <= at_once
        chosen |= dict(zip(numbers, samples, strict=True))
    assert list(chosen) == [0, 4, 5, 6]
    for number, sample in chosen.items():
        assert torch.equal(sample, stored().sample(number))
        assert float(sample[0]) == 3 * number
