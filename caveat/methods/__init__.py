"""The methods: found by looking, not by a list.

    caveat/methods/swag.py                            the file's name is the method's name in the CLI
    [project.entry-points."caveat.methods"]           so is the name of an entry point in another package:
    fixed_gaussian = "my_package:FixedGaussian"       my_package has a method `fixed_gaussian`

A method is a frozen dataclass that inherits from `Method` (`caveat/engine/method.py`). Other packages are imported when
all methods are asked for, never by `import caveat`, and what is wrong with one of them is a warning, not an error.
`docs/add_a_method.md` has a complete example.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from caveat.engine.method import Method, not_a_method

__all__ = ["ENTRY_POINTS", "Method", "built_in", "discover", "method_name"]

ENTRY_POINTS = "caveat.methods"  # the group in which other packages name their methods


@cache
def discover() -> dict[str, type[Any]]:
    """Every method by its CLI name: those of this package, then those of other packages that are installed.

    A method of another package that cannot be used is left out, with a warning that names the package.
    """
    return built_in() | _plugins()


@cache
def built_in() -> dict[str, type[Any]]:
    """The methods of this package by their CLI names."""
    methods: dict[str, type[Any]] = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for _, member in inspect.getmembers(module, inspect.isclass):
            if (
                member.__module__ == module.__name__
                and dataclasses.is_dataclass(member)
                and hasattr(member, "starts_from")
            ):
                methods[module_info.name] = member
    return methods


def method_name(method: Any) -> str:
    """The CLI name of a method: its entry point's, or else the name of the file that defines it."""
    package, _, file = type(method).__module__.rpartition(".")
    if package == __name__:
        return file
    return next((name for name, plugin in _plugins().items() if plugin is type(method)), file)


@cache
def _plugins() -> dict[str, type[Any]]:
    """The methods of other packages by the names of their entry points; a warning for each that is left out."""
    entries = sorted(entry_points(group=ENTRY_POINTS), key=lambda entry: (entry.name, _package(entry)))
    methods: dict[str, type[Any]] = {}
    for entry in entries:
        method, complaint = None, _name_complaint(entry, entries)
        if complaint is None:
            method, complaint = _loaded(entry)
        if complaint is None and method is not None:
            methods[entry.name] = method
        else:
            _warn(entry, f"{complaint}")
    named_apart = dict(methods)
    for entry in entries:
        if entry.name in methods and (complaint := _class_complaint(entry.name, methods)) is not None:
            _warn(entry, complaint)
            del named_apart[entry.name]
    return named_apart


def _loaded(entry: EntryPoint) -> tuple[type[Any] | None, str | None]:
    """What an entry point names, and why it cannot be used, if it cannot."""
    try:
        method = entry.load()
    except Exception as error:  # whatever somebody else's module may raise
        return None, f"{entry.value} cannot be imported ({type(error).__name__}: {error}): mend the package"
    return method, not_a_method(method)


def _name_complaint(entry: EntryPoint, entries: Sequence[EntryPoint]) -> str | None:
    """Why an entry point's name cannot be a method's; one that two packages claim belongs to neither."""
    if not entry.name.isidentifier():
        return "a method's name is letters, digits and underscores: rename the entry point"
    if entry.name in built_in():
        return "caveat has a method of that name, which is used: rename the entry point"
    others = [_package(other) for other in entries if other.name == entry.name and other is not entry]
    if others:
        return f"{others[0]} has a method of that name as well, and neither is used: rename one of them"
    return None


def _class_complaint(name: str, methods: Mapping[str, type[Any]]) -> str | None:
    """Why a method's class cannot be called what it is; a saved posterior knows its method by its class's name."""
    method = methods[name]
    if method.__name__ in {own.__name__ for own in built_in().values()}:
        return f"caveat has a class called {method.__name__}, which is used: rename the class"
    for other_name, other in methods.items():
        if other is not method and other.__name__ == method.__name__:
            return f"the method {other_name!r} has a class called {method.__name__} too: rename one of them"
    return None


def _warn(entry: EntryPoint, complaint: str) -> None:
    name = _package(entry)
    advice = f"or run: pip uninstall {name}"
    warnings.warn(f"{name}: its method {entry.name!r} is left out. {complaint}, {advice}", stacklevel=2)


def _package(entry: EntryPoint) -> str:
    """The name of the distribution that an entry point belongs to, as pip knows it."""
    return entry.value.partition(":")[0] if entry.dist is None else entry.dist.name
