"""A module's own initialisers, called in the order in which building it called them.

A layer is built before the module that holds it, so what a module draws for its layers comes after what they drew for
themselves: `reset_parameters()` of every layer, a model's `_init_weights(layer)` over its layers or its
`init_weights()` as a whole, and at last adapters, which are put into a model that is there already.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

__all__ = ["reset_weights"]

_OF_A_LAYER = ("reset_parameters", "_reset_parameters")
_OF_A_MODEL = ("init_weights", "initialize_weights", "_init_weights", "_initialize_weights")


def reset_weights(module: nn.Module) -> None:
    """Draw new weights in place by every initialiser that the module and its layers have."""
    for child in _inside_out(module):
        _call(_first_without_arguments(child, _OF_A_LAYER))
        for_layers = _required_arguments(child, "_init_weights") == 1
        if for_layers:
            for layer in _inside_out(child, stop=lambda inner: _required_arguments(inner, "_init_weights") == 1):
                _call(_method(child, "_init_weights"), layer)
        # Those of transformers draw for what was not loaded from a file only, and tie weights anew.
        if not (for_layers and hasattr(child, "tie_weights")):
            _call(_first_without_arguments(child, _OF_A_MODEL))
    for child in module.modules():
        if callable(getattr(child, "reset_lora_parameters", None)):
            _reset_adapters(child, _adapter_settings(module))


def _inside_out(module: nn.Module, stop: Callable[[nn.Module], bool] = lambda _: False) -> Iterator[nn.Module]:
    """Every module once, after all that it holds; not what is inside of children at which to `stop`, nor these."""
    seen: set[int] = set()

    def walk(current: nn.Module) -> Iterator[nn.Module]:
        seen.add(id(current))
        for child in current.children():
            if id(child) not in seen and not stop(child):
                yield from walk(child)
        yield current

    return walk(module)


def _required_arguments(module: nn.Module, name: str) -> int | None:
    """How many arguments a method of a module must be given; None without such a method."""
    method = _method(module, name)
    if method is None:
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(method).parameters.values()
    return sum(p.default is inspect.Parameter.empty and p.kind in kinds for p in parameters)


def _method(module: nn.Module, name: str) -> Callable[..., Any] | None:
    method = getattr(module, name, None)
    return method if callable(method) and not isinstance(method, nn.Module) else None


def _first_without_arguments(module: nn.Module, names: tuple[str, ...]) -> Callable[[], Any] | None:
    return next((_method(module, name) for name in names if _required_arguments(module, name) == 0), None)


def _call(initialiser: Callable[..., Any] | None, *arguments: Any) -> None:
    if initialiser is None:
        return
    try:
        initialiser(*arguments)
    except Exception as error:
        name = getattr(initialiser, "__qualname__", repr(initialiser))
        advice = "pass initialise=function that draws new weights in place on a module"
        raise ValueError(f"the module's own {name} could not draw fresh weights: {error}; {advice}") from error


def _adapter_settings(module: nn.Module) -> dict[str, Any]:
    """The settings of the adapters that peft put into a module, by their names."""
    configs = (getattr(child, "peft_config", None) for child in module.modules())
    return next((dict(config) for config in configs if config), {})


def _reset_adapters(layer: Any, settings: dict[str, Any]) -> None:
    """Draw a layer's adapters anew as peft does: without effect at first, where that is how they began.

    Ways to begin that take the base weights apart are beyond `reset_lora_parameters`, and left to what the layers do.
    """
    for adapter in layer.active_adapters:
        way = getattr(settings.get(adapter), "init_lora_weights", True)
        known = isinstance(way, bool) or way == "gaussian"
        takes_way = _required_arguments(layer, "reset_lora_parameters") == 2
        _call(layer.reset_lora_parameters, adapter, *([way if known else True] if takes_way else []))
