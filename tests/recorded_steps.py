"""A small problem for steps that are recorded, and recordings on a CPU that behave as CUDA graphs do.

A recording on a CPU is a list of the operations that torch made of a step, forward and back. A replay makes the same
operations on the same tensors again: whatever Python decided or looked up while the step was recorded stays as it was
then, and random numbers come from where a generator is now. A step that looks at a number cannot be recorded, nor one
for which a GPU would wait without a look: a tensor made of numbers that the host has, or an index by a mask. Gradients
are taken on the stream that a leaf was first used on, as long as anything of that graph is left.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import caveat
from caveat import AEB, SGMCMC, MaskedBNN
from caveat.engine import captured_steps
from caveat.engine.chains import langevin_chain, langevin_sampler
from caveat.engine.training import point_training, side_by_side

X = torch.randn(200, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0].mean((1, 2)) > 0).long()

CHAINS = {
    "given": SGMCMC(chains=3, length=3, thin=1, burn_in=2, learning_rate=0.01, momentum=0.9, batch_size=48),
    "found": SGMCMC(chains=2, length=2, thin=1, burn_in=4, batch_size=48),
    "rmsprop": SGMCMC(
        chains=2,
        length=3,
        thin=1,
        burn_in=2,
        learning_rate=0.001,
        preconditioner="rmsprop",
        momentum=0.9,
        batch_size=48,
    ),
    "augmented": SGMCMC(chains=2, length=3, thin=1, burn_in=2, learning_rate=0.01, batch_size=50, augment=True),
    "cyclical": SGMCMC(chains=2, length=2, thin=1, burn_in=1, cycle=3, learning_rate=0.01, batch_size=50),
}

SPARSE_CHAINS = {
    "AEB": AEB(density=0.2, burn_in=4, length=3, thin=1, learning_rate=0.01, batch_size=20),
    "AEB, found": AEB(density=0.2, burn_in=4, length=3, thin=1, batch_size=30),
    "MaskedBNN": MaskedBNN(sparsity=0.35, interval=5, burn_in=4, length=4, thin=1, learning_rate=0.002, batch_size=20),
    "MaskedBNN, found": MaskedBNN(sparsity=0.35, interval=5, burn_in=4, length=3, thin=1, batch_size=30),
}


def network(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), *middle, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def rotated(x: Tensor, rng: torch.Generator) -> Tensor:
    """Some images mirrored, without a look at a number."""
    flip = torch.rand(len(x), generator=rng, device=x.device) < 0.5
    return torch.where(flip[:, None, None, None], x.flip(-1), x)


def task(module: nn.Module | None = None, **more: Any) -> caveat.Task:
    return caveat.Task(module or network(), (X, Y), caveat.Categorical(), **more)


class Waits(nn.Module):
    """Looks at a number, for which the host waits."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().abs().max()) > 1e6 else x


_WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_dim", "bincount",
    "lift_fresh",  # a tensor made of numbers that the host has
}  # fmt: skip
_READING = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}  # of which torch's dispatcher may not hear


def _waits(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a GPU would wait for an operation: of an index by a mask and of uneven repeats the size must be known."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    indices = args[1] if name in ("index", "index_put", "index_put_") else ()
    return name in _WAITING or any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


class _Calls(TorchFunctionMode):
    """Refuses what copies to the host."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READING:
            raise captured_steps.CaptureError(f"a step waits for {function.__name__}")
        return function(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Keeps the operations that are made in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(function.overloadpacket.__name__, args, kwargs or {}):
            raise captured_steps.CaptureError(f"a step waits for {function}")
        outputs = function(*args, **(kwargs or {}))
        self.made.append(tree_map_only(Tensor, Tensor.detach, (function, args, kwargs or {}, outputs)))  # no graphs
        return outputs

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, outputs in self.made:
            again = function(*args, **kwargs)
            for then, now in zip(tree_leaves(outputs), tree_leaves(again), strict=True):
                if isinstance(then, Tensor) and then.data_ptr() != now.data_ptr():
                    then.copy_(now)


_streams = ["the usual one"]  # the present one is the last


@contextlib.contextmanager
def _stream(name: str) -> Iterator[None]:
    _streams.append(name)
    try:
        yield
    finally:
        _streams.pop()


_grad = torch.autograd.grad


def _grad_on_a_stream(outputs: Any, inputs: Any, *more: Any, **options: Any) -> Any:
    """`torch.autograd.grad`, for which no leaf may have a node that was made on another stream."""
    for tensor in tree_leaves(inputs):
        if tensor.is_leaf:
            made_on = get_gradient_edge(tensor).node.metadata.setdefault("stream", _streams[-1])
            assert made_on == _streams[-1], f"a graph made on {made_on} is kept, and takes gradients on {_streams[-1]}"
    return _grad(outputs, inputs, *more, **options)


def _record(step: Callable[[], None], generators: Sequence[torch.Generator]) -> Callable[[], None]:
    with _stream("that of a recording"), _Calls(), _Operations() as operations:
        step()
    return operations.replay


def _warm_up(step: Callable[[], None], device: torch.device) -> None:
    with _stream("that of a warm-up"):
        step()
        with _Calls(), _Operations():
            step()


def _branches(steps: Sequence[Callable[[], None]], device: torch.device) -> Callable[[], None]:
    def all_steps() -> None:
        for step in steps:
            step()

    return all_steps


def record_on_the_cpu(monkeypatch: pytest.MonkeyPatch, growth: float = 1.0) -> list[int]:
    """Have steps recorded on the CPU; returns a list to which every run appends how many lanes were side by side.

    A replay of twice as many lanes seems to take `growth` times as long: with 1 as many as there are pay, with 4 one.
    """
    side_by_side_of_runs: list[int] = []
    run, durations = captured_steps.CapturedSteps.run, (growth**i for i in itertools.count())

    def counted(self: captured_steps.CapturedSteps, *given: Any) -> None:
        run(self, *given)
        side_by_side_of_runs.append(self.side_by_side)

    def seconds(replay: Callable[[], None], times: int) -> float:
        for _ in range(times):
            replay()
        return next(durations)

    stand_ins = {"_record": _record, "_warm_up": _warm_up, "_branches": _branches, "_seconds": seconds}
    for name, stand_in in (stand_ins | {"_drawn": lambda device: torch.get_rng_state().tolist()}).items():
        monkeypatch.setattr(captured_steps, name, stand_in)
    monkeypatch.setattr(captured_steps.CapturedSteps, "run", counted)
    monkeypatch.setattr(torch.autograd, "grad", _grad_on_a_stream)
    monkeypatch.setattr(point_training, "_together", lambda runs: len(runs) > 1)
    for module in (langevin_chain, langevin_sampler, side_by_side):
        monkeypatch.setattr(module, "are_resident", lambda rows: True)
    monkeypatch.setattr(langevin_chain, "STOOD", 5)  # these chains are short
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda *a, **k: ["cpu"])
    return side_by_side_of_runs
