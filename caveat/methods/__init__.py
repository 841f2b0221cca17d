"""The methods: one file each, found by looking. The file's name is the method's name in the CLI.

A method is a frozen dataclass that inherits from `Method` (`caveat/engine/method.py`); nothing registers it.
`docs/add_a_method.md` has a complete example.
"""

import dataclasses
import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any

from caveat.engine.method import Method

__all__ = ["Method", "discover", "method_name"]


@cache
def discover() -> dict[str, type[Any]]:
    """Every method of this package by its CLI name."""
    found: dict[str, type[Any]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for _, member in inspect.getmembers(module, inspect.isclass):
            if (
                member.__module__ == module.__name__
                and dataclasses.is_dataclass(member)
                and hasattr(member, "starts_from")
            ):
                found[module_info.name] = member
    return found


def method_name(method: Any) -> str:
    """The CLI name of a method: the name of the file that defines it."""
    return type(method).__module__.rsplit(".", 1)[-1]
