"""What all verbs share: their common options, and how a verb says that it was stopped."""

import json
import os
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Common", "Failure", "Verb", "is_first_rank", "printable", "summary"]


@dataclass(frozen=True)
class Common:
    """Options of every verb."""

    seed: int = 0  # of everything random
    device: str = "auto"  # cpu, cuda or cuda:1; auto takes a GPU when there is one
    quiet: bool = False  # no progress, no warnings
    json: bool = False  # print one json object instead of text

    def place(self) -> Any:
        """The device to compute on."""
        import torch

        available = torch.cuda.is_available()
        try:
            place = torch.device(("cuda" if available else "cpu") if self.device == "auto" else self.device)
        except RuntimeError as error:
            raise ValueError(f"--device {self.device}: must be auto, cpu, cuda or cuda:0, cuda:1, ...") from error
        if place.type == "cuda" and not available:
            raise ValueError(f"--device {self.device}: torch sees no GPU here; use --device cpu")
        return place

    def show(self, content: dict[str, Any], text: str) -> None:
        """The verb's result: json, or text for people; under torchrun the first rank speaks."""
        if is_first_rank():
            print(json.dumps(content) if self.json else printable(text))

    def show_data(self, source: str, data: Any) -> None:
        """One line on standard error on what was read of data of one's own."""
        from caveat.data.own import what_was_read
        from caveat.data.sets import own_path

        if own_path(source) is not None and not self.quiet and is_first_rank():
            print(printable(what_was_read(data)), file=sys.stderr, flush=True)
            self.note(data.preprocessing.get("notes", ()))

    def note(self, notes: Sequence[str]) -> None:
        """Notes on standard error, a line each."""
        if not self.quiet and is_first_rank():
            for note in notes:
                print(printable(f"note: {note}"), file=sys.stderr, flush=True)


class Failure(RuntimeError):  # noqa: N818 - the name says what it is
    """A failure of which there is more to tell: `content` stands beside the error where json is printed."""

    def __init__(self, reason: str, content: dict[str, Any]) -> None:
        super().__init__(reason)
        self.content = content


class Verb:
    """A verb of the command line: a dataclass whose fields are its options, with a method `run`."""

    def stopped(self) -> str:
        """What to say after a Ctrl-C."""
        return "stopped"


def is_first_rank() -> bool:
    """Whether this process is the one that prints, under torchrun or alone."""
    return os.environ.get("RANK", "0") == "0"


def printable(text: str) -> str:
    """A text in which names from files cannot command a terminal: control characters stand as they are written."""
    hidden = ("Cc", "Cf", "Cs")  # controls, marks of direction, halves of a character
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in hidden
        else character.encode("unicode_escape").decode()
        for character in text
    )


def summary(documented: Any) -> str:
    """The first line of a docstring."""
    return str(documented.__doc__).splitlines()[0]
