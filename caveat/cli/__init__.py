"""The command line: each verb is one arrow of  data -> posterior -> predictions -> scores -> page.

    verb.py       the options of all verbs              commands.py    the tree of verbs, for the parser
    fit.py  predict.py  evaluate.py  bench.py  report.py  demo.py  diagnose.py  reference.py  methods.py    a verb each

`main` runs a command line and is the entry point `caveat`.
"""

import os
import sys
from collections.abc import Sequence

from caveat.cli.commands import commands, tensors_from_files

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code: 0 done, 1 failed with a reason, 2 not understood, 130 stopped."""
    try:
        import tyro
    except ImportError:
        print('error: the command line needs its extra: pip install "caveat[cli]"', file=sys.stderr)
        return 1
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        from caveat import __version__

        print(__version__)
        return 0
    tree, runners = commands(arguments)
    try:
        parsed = tyro.cli(
            tree,
            prog="caveat",
            description="Posteriors for PyTorch networks.",
            args=arguments,
            registry=tensors_from_files(arguments),
        )
    except ValueError as error:  # a value out of its range
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        runners[type(parsed)](parsed)
    except KeyboardInterrupt:
        print(parsed.verb.stopped(), file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, KeyError, OSError, MemoryError, ArithmeticError, ImportError, RuntimeError) as error:
        print(f"error: {_reason(error)}", file=sys.stderr)
        return 1
    return 0


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
