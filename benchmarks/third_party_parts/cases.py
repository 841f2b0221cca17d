"""A case: a network that people use, tiny and with random weights, and a few rows that it can learn.

    @case("bert", needs="transformers")
    def bert() -> Case: ...

Rows are as people have them: a tensor, or a dict of tensors as a tokenizer makes it. The labels depend on the inputs,
so that a trained point is better than knowing nothing, as methods that start from one ask for.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import caveat

ROWS, NEW_ROWS, BATCH = 32, 8, 16
VOCABULARY, LENGTH = 40, 8
PADDING = 0


@dataclass(frozen=True)
class Case:
    """A module and its data."""

    module: nn.Module
    inputs: Any  # a tensor or a dict of tensors, ROWS + NEW_ROWS rows
    targets: Tensor
    likelihood: caveat.likelihoods.Likelihood = caveat.Categorical()  # noqa: RUF009
    parameters: str | tuple[str, ...] = "*"
    learning_rate: float = 3e-3
    epochs: int = 30

    def task(self) -> caveat.Task:
        """Of the training rows."""
        loader = DataLoader(RowsOf(self.inputs, self.targets, ROWS), BATCH)
        prior = caveat.GaussianPrior(1.0)
        return caveat.Task(self.module, loader, self.likelihood, prior, parameters=self.parameters)

    @property
    def new_inputs(self) -> Any:
        """Inputs that are not trained on."""
        if isinstance(self.inputs, dict):
            return {name: value[ROWS:] for name, value in self.inputs.items()}
        return self.inputs[ROWS:]


class RowsOf(Dataset):
    """The first rows, one by one: pairs, or dicts with the label among their entries."""

    def __init__(self, inputs: Any, targets: Tensor, count: int) -> None:
        self.inputs, self.targets, self.count = inputs, targets, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        if not isinstance(self.inputs, dict):
            return self.inputs[row], self.targets[row]
        return {name: value[row] for name, value in self.inputs.items()} | {"labels": self.targets[row]}


@dataclass(frozen=True)
class Entry:
    """A case by name, with the packages that it comes from."""

    name: str
    needs: tuple[str, ...]
    build: Callable[[], Case]

    def missing(self) -> str | None:
        """The first package that cannot be imported, with the reason."""
        for package in self.needs:
            try:
                importlib.import_module(package)
            except Exception as error:  # a package may fail in ways of its own
                return f"{package}: {type(error).__name__}: {error}"
        return None

    def made(self) -> Case:
        """The case with weights from a fixed seed."""
        torch.manual_seed(0)
        return self.build()


CASES: dict[str, Entry] = {}


def case(name: str, *needs: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Register the function below as the case of this name."""

    def registered(build: Callable[[], Case]) -> Callable[[], Case]:
        CASES[name] = Entry(name, needs, build)
        return build

    return registered


def text(labels: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    """Token ids padded on the right with their mask, and two classes that the first token decides."""
    rng = torch.Generator().manual_seed(1)
    n = ROWS + NEW_ROWS
    tokens = torch.randint(4, VOCABULARY, (n, LENGTH), generator=rng)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (n, 1), generator=rng)
    lengths[0] = LENGTH
    mask = (torch.arange(LENGTH) < lengths).long()
    targets = (tokens[:, 0] > VOCABULARY // 2).long()
    return {"input_ids": tokens * mask + PADDING * (1 - mask), "attention_mask": mask}, targets


def images(size: int = 16, channels: int = 3) -> tuple[Tensor, Tensor]:
    """Noise, and two classes by the brightness of the first channel."""
    x = torch.randn(ROWS + NEW_ROWS, channels, size, size, generator=torch.Generator().manual_seed(2))
    targets = torch.arange(len(x)) % 2
    x[:, 0] += (2.0 * targets - 1)[:, None, None]
    return x, targets


def table(columns: int = 6) -> tuple[Tensor, Tensor]:
    """Normal columns, and three classes by the first two."""
    x = torch.randn(ROWS + NEW_ROWS, columns, generator=torch.Generator().manual_seed(3))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def define_operators_of_torchvision() -> None:
    """Declare what a torchvision that was built for another torch would have defined, so that it can be imported.

    timm and others import it for image files and pretrained weights; none of the networks here calls these operators.
    """
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.modules.setdefault("__torchvision_operators__", library)  # type: ignore[arg-type]  # else it is forgotten
