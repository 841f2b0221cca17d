"""Words that sentences of all rooms are made of: plurals and enumerations."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["joined_by_and", "plural"]


def joined_by_and(words: Sequence[str]) -> str:
    """Write words as an enumeration: `a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def plural(count: int, word: str) -> str:
    """Write a count with its noun: `1 run`, `3 runs`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
