"""Modules that are called as a network's own module is, as programs of `torch.export` for any number of rows."""

import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from caveat.batches import Inputs
from caveat.network import Network

__all__ = ["CALLED", "NotServed", "exported"]

CALLED = "called."  # before the names of a module's tensors in its program


class NotServed(ValueError):  # noqa: N818 - the name says what it is
    """A network that cannot be written down, with what is in the way."""


def exported(module: nn.Module, network: Network, example: Inputs) -> ExportedProgram:
    """The program of a module that takes a network's inputs; `example` is a few rows, which the program keeps."""
    args, kwargs = network.arguments(example)
    rows = torch.export.Dim("rows", min=1)
    shapes = pytree.tree_map(lambda t: {0: rows} if isinstance(t, Tensor) and t.ndim else None, (args, kwargs))
    with torch.no_grad():
        try:
            called = _Called(module, kwargs)
            shapes_by_name = shapes[1] if kwargs else {"inputs": shapes[0]}
            return torch.export.export(called, args, kwargs, dynamic_shapes=shapes_by_name)
        except NotServed:
            raise
        except (RuntimeError, ValueError, TypeError, AttributeError, torch._dynamo.exc.UserError) as error:
            raise NotServed(
                f"torch.export does not take this network for any number of rows ({_reason(error)}): change what it "
                "names, or serve the posterior with predict"
            ) from error


class _Called(nn.Module):
    """A module whose signature has the names of its arguments: torch loses the shapes of those under `**`."""

    def __init__(self, called: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.called = called
        self.forward = _by_name(called, names) if names else self._in_order
        self.training = False

    def _in_order(self, *inputs: Any) -> Any:
        return self.called(*inputs)


def _by_name(called: nn.Module, names: Iterable[str]) -> Any:
    def forward(**inputs: Any) -> Any:
        return called(**inputs)

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


def _reason(error: Exception) -> str:
    lines = [line.strip(" -") for line in str(error).strip().splitlines()[:2]]
    return " ".join(re.split(r"(?<=[.!]) ", line)[0] for line in lines if line).rstrip(".")
