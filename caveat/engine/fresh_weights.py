"""Fresh weights: new initial values for a network, drawn as the module and its layers draw theirs.

What no initialiser reaches (a class token, position embeddings, parametrised weights) is drawn as normal with the mean
and the standard deviation of the values that it came with; what came constant stays constant. Where `initialise=` names
parameters, those are drawn and the others stay as they are: several fine-tunings of one pretrained network.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from caveat.engine.own_initialisers import reset_weights
from caveat.network import Network, Params, copied, layer_of
from caveat.randomness import seeded

__all__ = ["FreshWeights"]


@dataclass(frozen=True)
class _Sources:
    """Where the values of a draw come from, by name."""

    names: list[str]  # of all that a draw holds: the selected parameters, and buffers of their layers
    by_scale: list[str]  # parameters that are drawn by the scale that they came with
    as_they_are: list[str]  # parameters that stay as the module has them


class FreshWeights:
    """Draws initial values of a network's selected parameters, and of their layers' buffers, again and again.

    It keeps a copy of the module without values, since copying the module each time takes longer than drawing. Where
    the values come from is the same each time, so this is found out once.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._module = copied(network.module)
        self._sources: _Sources | None = None

    def __call__(self, rng: torch.Generator) -> Params:
        """New values of the selected parameters, in the network's order, and of their layers' buffers."""
        network, module = self.network, self._module
        with _values_of(network.module, module), seeded(int(torch.randint(2**62, (), generator=rng)), network.device):
            with torch.no_grad():
                (network.initialise if callable(network.initialise) else reset_weights)(module)
                if self._sources is None:
                    self._sources = self._found()
                before, now = dict(network.module.named_parameters()), dict(module.named_parameters())
                for name in self._sources.by_scale:
                    now[name].copy_(_drawn_by_scale(before[name]))
                for name in self._sources.as_they_are:
                    now[name].copy_(before[name])
            values = now | dict(module.named_buffers())
            return {name: values[name].detach() for name in self._sources.names}

    def notes(self) -> list[str]:
        """What a person should know of the draws, once there was one: whose values no initialiser gave."""
        if self._sources is None:
            return []
        notes = []
        if self._sources.by_scale:
            notes.append(
                f"fresh values of {_listed(self._sources.by_scale)} are normal with the mean and spread that the "
                "module came with, since no initialiser of its own reaches them; pass initialise=function for others"
            )
        if self._sources.as_they_are:
            notes.append(f"initialise= leaves {_listed(self._sources.as_they_are)} at the module's own values")
        return notes

    def _found(self) -> _Sources:
        """Where values come from, seen from the module after a draw by its initialisers."""
        network, module = self.network, self._module
        before, now = dict(network.module.named_parameters()), dict(module.named_parameters())
        wanted = network.names if network.initialise is None else _named(network)
        several = [name for name in wanted if now[name].numel() > 1]
        # One stack, so that a device is waited for once; what is the same and constant was drawn as a constant.
        compared = [(now[n] == before[n]).all() & (now[n].amin() < now[n].amax()) for n in several]
        same = torch.stack(compared).tolist() if several else []
        unchanged = [name for name, is_same in zip(several, same, strict=True) if is_same]
        if callable(network.initialise):
            if unchanged and len(unchanged) == len(several):
                raise ValueError(
                    f"no fresh values were drawn for {', '.join(unchanged[:3])}: initialise= must draw new weights in "
                    "place on the module that it is given"
                )
            by_scale, as_they_are = [], unchanged
        else:
            by_scale, as_they_are = unchanged, [name for name in network.names if name not in set(wanted)]
        # A layer that stays as it is keeps its statistics with its weights.
        drawn = set(network.names) - set(as_they_are)
        fixed_layers = {layer_of(name) for name in before} - {layer_of(name) for name in drawn}
        buffers = {name: b for name, b in network.module.named_buffers() if layer_of(name) not in fixed_layers}
        changed = [name for name, buffer in buffers.items() if not torch.equal(module.get_buffer(name), buffer)]
        return _Sources([*network.names, *changed], by_scale, as_they_are)


def _named(network: Network) -> tuple[str, ...]:
    """The selected parameters that `initialise=` is about: all of them unless it names some."""
    patterns = network.initialise
    if patterns is None or callable(patterns):
        return network.names
    return tuple(name for name in network.names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _drawn_by_scale(values: Tensor) -> Tensor:
    """Normal numbers with the mean and the standard deviation of these values."""
    wide = values.detach().to(torch.promote_types(values.dtype, torch.float32))
    return wide.mean() + wide.std() * torch.randn_like(wide)


def _listed(names: list[str]) -> str:
    """A few of the names, and how many there are where there are more."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


@contextlib.contextmanager
def _values_of(source: nn.Module, copied: nn.Module) -> Iterator[None]:
    """Give the copy of a module the values of its original for the length of a block, and take them away again."""
    by_type: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}  # a device copies many of one type at once
    originals, copies = ((*module.parameters(), *module.buffers()) for module in (source, copied))
    for pair in zip(copies, originals, strict=True):
        by_type.setdefault(pair[0].dtype, []).append(pair)
    try:
        for pairs in by_type.values():
            values = [torch.empty_like(value) for _, value in pairs]
            with torch.no_grad():
                torch._foreach_copy_(values, [value for _, value in pairs])
            for (t, _), value in zip(pairs, values, strict=True):
                t.data = value
        yield
    finally:
        for pairs in by_type.values():
            nothing = pairs[0][0].data.new_empty(0)
            for t, _ in pairs:
                t.data = nothing
