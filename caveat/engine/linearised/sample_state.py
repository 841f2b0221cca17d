"""What a posterior of samples keeps: the point, what is known of the noise, the samples, and their temperature."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from caveat.likelihoods import Hyper
from caveat.network import Params
from caveat.storage import CorruptFile, State

__all__ = ["SampleState"]


@dataclass(frozen=True)
class SampleState:
    """Deviations from a point, [K, d], in the groups in which they were made."""

    params: Params  # the point, with buffers
    hyper: Hyper
    groups: tuple[Tensor, ...]  # [k, d] each, of unit temperature; they may lie in files
    temperature: float = 1.0  # multiplies the covariance

    def tensors(self) -> State:
        """As a posterior keeps it; a group of samples is named by the number of its first one."""
        starts = [sum(map(len, self.groups[:number])) for number in range(len(self.groups))]
        return {
            "params": self.params,
            "hyper": self.hyper,
            "samples": {str(start): group for start, group in zip(starts, self.groups, strict=True)},
            "posterior": {"temperature": torch.tensor(self.temperature, dtype=torch.float64)},
        }

    @classmethod
    def of(cls, state: State) -> "SampleState":
        """The state that `tensors` made groups of; in older files the temperature is 1 and not there."""
        missing = {"params", "hyper", "samples"} - state.keys()
        if missing or not state["samples"]:
            raise CorruptFile(f"this is not the state of samples: it has no {sorted(missing or {'samples'})[0]!r}")
        temperature = float(state["posterior"]["temperature"]) if "posterior" in state else 1.0
        return cls(state["params"], state["hyper"], tuple(state["samples"].values()), temperature)

    @property
    def count(self) -> int:
        """How many samples there are."""
        return sum(map(len, self.groups))

    @property
    def spread(self) -> float:
        """The factor that samples are multiplied by, the root of the temperature."""
        return self.temperature**0.5

    def sample(self, number: int) -> Tensor:
        """One sample, [d], of unit temperature."""
        return next(self.some([number], 1))[1][0]

    def some(self, numbers: Sequence[int], at_once: int) -> Iterator[tuple[list[int], Tensor]]:
        """Chosen samples, each once and in order, at most so many at once: their numbers, and they [k, d]."""
        begin = 0
        for group in self.groups:
            here = [number for number in sorted(set(numbers)) if begin <= number < begin + len(group)]
            for part in (here[i : i + at_once] for i in range(0, len(here), at_once)):
                yield part, group[[number - begin for number in part]]
            begin += len(group)
