"""The state of a posterior of samples: groups there and back, chosen samples, and a reason where groups are missing."""

import pytest
import torch
from torch import Tensor

from caveat.engine.linearised.sample_state import SampleState
from caveat.storage import CorruptFile


def state(temperature: float = 1.0) -> SampleState:
    samples = torch.arange(21.0).reshape(7, 3)  # sample k is [3 k, 3 k + 1, 3 k + 2]
    return SampleState({"weight": torch.ones(3)}, {}, (samples[:3], samples[3:6], samples[6:]), temperature)


def test_groups_of_tensors_and_back() -> None:
    groups = state(0.25).tensors()
    assert list(groups["samples"]) == ["0", "3", "6"]
    back = SampleState.of(groups)
    assert back.count == 7
    assert (back.temperature, back.spread) == (0.25, 0.5)
    assert torch.equal(torch.cat(back.groups), torch.cat(state().groups))


def test_files_from_before_there_was_a_temperature_have_one_of_one() -> None:
    groups = state(0.25).tensors()
    del groups["posterior"]
    assert SampleState.of(groups).temperature == 1.0


@pytest.mark.parametrize("group", ["params", "hyper", "samples"])
def test_a_missing_group_is_named(group: str) -> None:
    groups = state().tensors()
    del groups[group]
    with pytest.raises(CorruptFile, match=f"not the state of samples: it has no '{group}'"):
        SampleState.of(groups)


def test_a_group_of_no_samples_is_refused() -> None:
    with pytest.raises(CorruptFile, match="it has no 'samples'"):
        SampleState.of(state().tensors() | {"samples": {}})


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_chosen_samples_come_once_in_order_and_few_at_a_time(at_once: int) -> None:
    chosen: dict[int, Tensor] = {}
    for numbers, samples in state().some([5, 0, 6, 4, 0], at_once):
        assert len(samples) == len(numbers) <= at_once
        chosen |= dict(zip(numbers, samples, strict=True))
    assert list(chosen) == [0, 4, 5, 6]
    for number, sample in chosen.items():
        assert torch.equal(sample, state().sample(number))
        assert float(sample[0]) == 3 * number
