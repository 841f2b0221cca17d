"""The command line: each verb is one arrow of  data -> posterior -> predictions -> scores -> page.

    verb.py       the options of all verbs              commands.py    the tree of verbs, for the parser
    fit.py  predict.py  evaluate.py  bench.py  report.py  demo.py  diagnose.py  reference.py  methods.py  service.py
                  a verb each

`main` runs a command line and is the entry point `caveat`.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from caveat.cli.commands import commands, knobs_from_words, misspelt
from caveat.cli.verb import Failure, is_first_rank, printable

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0 done, 1 failed with a reason, 2 not understood, 130 stopped."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _version() if arguments == ["--version"] else _run(arguments)
        sys.stdout.flush()  # here, where a closed pipe is expected
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _version() -> int:
    from caveat import __version__

    print(__version__)
    return 0


def _run(arguments: list[str]) -> int:
    """Parse and run a command line; returns the exit code."""
    try:
        import tyro
    except ImportError:
        print('error: the command line needs its extra: pip install "caveat[cli]"', file=sys.stderr)
        return 1
    if slip := misspelt(arguments):
        return _failed(slip, 2, "--json" in arguments)
    tree, runners = commands(arguments)
    try:
        parsed = tyro.cli(
            tree,
            prog="caveat",
            description="Posteriors for PyTorch networks. caveat --version prints the version.",
            args=arguments,
            registry=knobs_from_words(arguments),
        )
    except ValueError as error:  # a value out of its range
        return _failed(str(error), 2, "--json" in arguments)
    except SystemExit as stop:
        sys.stdout.flush()
        if stop.code and "--json" in arguments:  # the parser has said on standard error what it did not understand
            print(json.dumps({"error": "the command line was not understood", "code": stop.code}))
        raise
    try:
        runners[type(parsed)](parsed)
    except KeyboardInterrupt:
        return _failed(parsed.verb.stopped(), 130, parsed.common.json)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, KeyError, OSError, MemoryError, ArithmeticError, ImportError, RuntimeError) as error:
        known = error.content if isinstance(error, Failure) else {}
        return _failed(_reason(error), 1, parsed.common.json, known)
    return 0


def _failed(reason: str, code: int, as_json: bool, known: dict[str, Any] | None = None) -> int:
    """Say what went wrong: on standard error for people, on standard output as json where that is wanted."""
    print(printable(reason if code == 130 else f"error: {reason}"), file=sys.stderr)
    if as_json and is_first_rank():
        print(json.dumps((known or {}) | {"error": reason, "code": code}))
    return code


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
