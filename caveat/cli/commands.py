"""The tree of verbs as types, from which the parser makes options and help.

A verb's fields are its options and their comments its help. A method's knobs come from the method's own dataclass, so
that `caveat fit swag --help` shows them all and there is nothing to keep in step by hand. Only methods that a command
line names are imported, since torch comes with them and takes longer than all the rest of a `--help`.
"""

import ast
import contextlib
import dataclasses
import difflib
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from caveat.cli.bench import Bench
from caveat.cli.demo import Demo
from caveat.cli.diagnose import Diagnose
from caveat.cli.evaluate import Calibrate, Evaluate
from caveat.cli.fit import Fit
from caveat.cli.methods import Methods
from caveat.cli.predict import Predict
from caveat.cli.reference import FetchReference, ImportReference, Reference, References
from caveat.cli.report import Report
from caveat.cli.service import Export, Serve
from caveat.cli.verb import Common, Verb, summary

__all__ = ["VERBS", "commands", "knobs_from_words", "method_summaries", "misspelt"]

PLAIN: dict[str, type[Verb]] = {  # verbs with options and nothing else
    "demo": Demo,
    "predict": Predict,
    "calibrate": Calibrate,
    "evaluate": Evaluate,
    "export": Export,
    "serve": Serve,
    "report": Report,
    "methods": Methods,
    "diagnose": Diagnose,
}
VERBS: tuple[type[Verb], ...] = (*PLAIN.values(), Fit, Bench, Reference, ImportReference, FetchReference, References)


def commands(arguments: Sequence[str]) -> tuple[Any, dict[type, Callable[[Any], None]]]:
    """The tree of verbs as a type for the parser: a verb's, the common and a method's options on one level.

    A method that the arguments do not name is there by its name and first line only, and so are the references.
    """
    import tyro

    runners: dict[type, Callable[[Any], None]] = {}

    def leaf(name: str, verb: type, method: type | None = None, which: Any = None, about: str | None = None) -> Any:
        flat = tyro.conf.arg(name="")
        fields: list[Any] = [("verb", Annotated[verb, flat])]
        if which is not None:
            fields.insert(0, ("which", Annotated[which[0], tyro.conf.Positional, tyro.conf.arg(help=which[1])]))
        if method is not None:
            # A knob that may be of two kinds, as a solver may, is of its default's kind here, with all its knobs shown.
            knobs: Any = Annotated[method, tyro.conf.AvoidSubcommands]
            if not _names(method) & (_names(verb) | _names(Common)):  # else a knob `seed` is --method.seed
                knobs = Annotated[knobs, flat]
            fields.append(("method", knobs, dataclasses.field(default_factory=method)))
        fields.append(("common", Annotated[Common, flat], dataclasses.field(default_factory=Common)))
        parsed = dataclasses.make_dataclass(f"{name}_{verb.__name__}", fields, frozen=True)
        parsed.__doc__ = about or summary(verb)
        further = [field for field, *_ in fields if field in ("method", "which")]
        runners[parsed] = lambda p: p.verb.run(p.common, *(getattr(p, field) for field in further))
        return Annotated[parsed, tyro.conf.subcommand(name, prefix_name=False, description=parsed.__doc__)]

    leaves = {name: leaf(name, verb) for name, verb in PLAIN.items()}
    leaves["bench"] = leaf("bench", Bench, which=(Path, "the experiment, a TOML file; see docs/bench.md"))
    references: Any = Union[  # noqa: UP007
        leaf("build", Reference, which=(_reference_names(arguments, "build"), "which one")),
        leaf("import", ImportReference, which=(Path, "probabilities as csv, npy or npz: [rows, classes]")),
        leaf("fetch", FetchReference, which=(_reference_names(arguments, "fetch"), "which one")),
        leaf("list", References),
    ]
    about = "Reference posteriors, which others are compared with: build one, import or fetch a published one, or list."
    leaves["reference"] = Annotated[references, tyro.conf.subcommand("reference", prefix_name=False, description=about)]
    methods = _methods_named(arguments)
    fits: Any = leaf("fit", Fit)
    if "fit" in arguments:
        lines = method_summaries()
        fits = Union[tuple(leaf(name, Fit, methods.get(name), about=line) for name, line in lines.items())]  # noqa: UP007
        fits = Annotated[fits, tyro.conf.subcommand("fit", prefix_name=False, description=summary(Fit))]
    leaves["fit"] = fits
    scoring = ("calibrate", "predict", "evaluate", "export", "serve")
    order = ("demo", "fit", *scoring, "bench", "report", "diagnose", "reference", "methods")
    return Union[tuple(leaves[name] for name in order)], runners  # noqa: UP007


def method_summaries() -> dict[str, str]:
    """The first line of every method by its CLI name: read from this package's files, imported from other packages."""
    from caveat import __path__ as places

    if entry_points(group="caveat.methods"):
        from caveat.methods import discover

        return {name: summary(method) for name, method in discover().items()}
    summaries = {}
    for file in sorted((Path(places[0]) / "methods").glob("[!_]*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name.lower() == file.stem.replace("_", ""):
                summaries[file.stem] = str(ast.get_docstring(node)).splitlines()[0]
    return summaries


def misspelt(arguments: Sequence[str]) -> str | None:
    """What is amiss with the name of a verb, or of a method to fit, and what it may have been meant to be."""
    verb, *others = (*arguments, "")
    which = others[0] if others else ""
    method = which.replace("-", "_")
    if verb and not verb.startswith("-") and verb not in (known := {*PLAIN, "fit", "bench", "reference"}):
        return f"there is no verb {verb!r}{_meant(verb, known)}; `caveat --help` lists them"
    if verb == "fit" and which and not which.startswith("-") and method not in (names := set(method_summaries())):
        return f"there is no method {which!r}{_meant(method, names)}; `caveat methods` lists them"
    return None


def _meant(word: str, known: set[str]) -> str:
    near = difflib.get_close_matches(word, sorted(known), 1, 0.5)
    return f" (did you mean {near[0]}?)" if near else ""


def _methods_named(arguments: Sequence[str]) -> dict[str, type]:
    """The methods that a command line of `fit` names, imported."""
    words = {argument.replace("-", "_") for argument in arguments}
    if "fit" not in words or not words & method_summaries().keys():
        return {}
    from caveat.methods import discover

    return {name: method for name, method in discover().items() if name in words}


def _reference_names(arguments: Sequence[str], verb: str) -> Any:
    """The type of the name of a reference that is built or fetched."""
    if not {"reference", verb} <= set(arguments):
        return str
    from caveat.references import PUBLISHED, RECIPES

    return Literal[tuple(RECIPES if verb == "build" else PUBLISHED)]


def _names(options: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(options)}


def knobs_from_words(arguments: Sequence[str]) -> Any:
    """How the parser reads knobs that no word stands for: a tensor is an npy file, a method a method's name.

    None where no method's knobs are read.
    """
    if not _methods_named(arguments):
        return None
    import torch
    from tyro import constructors

    from caveat.knobs import kinds
    from caveat.methods import Method, method_name

    registry = constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: Any) -> Any:
        if info.type is torch.Tensor:
            return constructors.PrimitiveConstructorSpec(
                nargs=1,
                metavar="FILE.npy",
                instance_from_str=_tensor,
                is_instance=lambda value: isinstance(value, torch.Tensor),
                str_from_instance=lambda value: [f"a tensor of shape {tuple(value.shape)}"],
            )
        if info.type is Method:
            return constructors.PrimitiveConstructorSpec(
                nargs=1,
                metavar="METHOD",
                instance_from_str=_method,
                is_instance=lambda value: Method in type(value).__mro__,
                str_from_instance=lambda value: [method_name(value)],
            )
        if kinds(info.type):
            return constructors.PrimitiveConstructorSpec(
                nargs=1,
                metavar=f"{{{','.join(kinds(info.type))}}}[:KNOB=VALUE,...]",
                instance_from_str=lambda texts: _of_kind(kinds(info.type), texts[0]),
                is_instance=lambda value: value in kinds(info.type) or type(value) in kinds(info.type).values(),
                str_from_instance=lambda value: [str(value)],
            )
        return None

    return registry


def _tensor(texts: list[str]) -> Any:
    import numpy
    import torch

    if not texts[0].endswith(".npy") or not Path(texts[0]).is_file():
        raise ValueError(f"{texts[0]} is no npy file")
    return torch.from_numpy(numpy.load(texts[0], allow_pickle=False))


def _of_kind(options: dict[str, Any], text: str) -> Any:
    """A knob of several kinds: a word alone, or `conjugate_gradients:rank=64,tolerance=.01`."""
    word, _, knobs = text.partition(":")
    word = word.replace("-", "_")
    if word not in options:
        raise ValueError(f"{word} is none of {', '.join(options)}")
    option = options[word]
    if not isinstance(option, type):
        if knobs:
            raise ValueError(f"{word} has no knobs, such as {knobs}")
        return option
    known = [field.name for field in dataclasses.fields(option)]
    values = {}
    for knob in filter(None, knobs.split(",")):
        name, _, value = knob.partition("=")
        if name not in known:
            raise ValueError(f"{word} has no knob {name!r}: it has {', '.join(known)}")
        values[name] = _number_or_word(value)
    return option(**values)


def _number_or_word(text: str) -> int | float | str:
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(text)
    return text


def _method(texts: list[str]) -> Any:
    """A method by its name, with its defaults."""
    from caveat.methods import discover

    name = texts[0].replace("-", "_")
    if name not in discover():
        raise ValueError(f"{texts[0]} is no method: there are {', '.join(discover())}")
    return discover()[name]()
