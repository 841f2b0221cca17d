"""Fresh weights: new initial values for a network, drawn as its own layers draw theirs."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from caveat.network import Network, Params, copied, layer_of
from caveat.randomness import seeded

__all__ = ["FreshWeights"]


class FreshWeights:
    """Draws initial values of a network's selected parameters, and of their layers' buffers, again and again.

    It keeps a copy of the module without values, since copying the module each time takes longer than drawing. Which
    tensors are drawn anew is the same each time, so this is found out once.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self._module = copied(network.module)
        self._names: list[str] | None = None  # of what a draw makes anew

    def __call__(self, rng: torch.Generator) -> Params:
        """New values of the selected parameters, in the network's order, and of their layers' buffers."""
        network, module = self.network, self._module
        with _values_of(network.module, module), seeded(int(torch.randint(2**62, (), generator=rng)), network.device):
            with torch.no_grad():
                (network.initialise or _reset)(module)
            if self._names is None:
                self._names = self._drawn_names()
            values = dict(module.named_parameters()) | dict(module.named_buffers())
            return {name: values[name].detach() for name in self._names}

    def _drawn_names(self) -> list[str]:
        """The names of what was drawn anew, which must be all selected parameters."""
        network, module = self.network, self._module
        before, now = dict(network.module.named_parameters()), dict(module.named_parameters())
        several = [name for name in network.names if now[name].numel() > 1]
        same = torch.stack([(now[n] == before[n]).all() & (now[n].std() > 0) for n in several]) if several else ()
        unchanged = [name for name, is_same in zip(several, same, strict=True) if is_same]
        if unchanged:
            raise ValueError(
                f"no fresh values could be drawn for {', '.join(unchanged[:3])}: no layer's reset_parameters() reaches "
                "it; pass initialise=function that draws new weights in place on a module"
            )
        # A frozen layer keeps its statistics with its weights.
        fixed_layers = {layer_of(name) for name in before} - {layer_of(name) for name in network.names}
        buffers = {name: b for name, b in network.module.named_buffers() if layer_of(name) not in fixed_layers}
        return [*network.names, *(name for name, b in buffers.items() if not torch.equal(module.get_buffer(name), b))]


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


def _reset(module: nn.Module) -> None:
    for child in module.modules():
        reset = getattr(child, "reset_parameters", None) or getattr(child, "_reset_parameters", None)
        if callable(reset):
            reset()
