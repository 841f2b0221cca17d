"""What runs can be compared on: the data that all of them were scored on.

A folder of results may hold runs of several evaluations. A mean over two severities says nothing beside one over three,
so that a shift is averaged over the severities that every run with that shift has. What is left out is said.
"""

from __future__ import annotations

from collections.abc import Sequence

from caveat.report.runs import Run, Scored

__all__ = ["clean_of", "left_out", "listed", "reference_notes", "shared_names", "shared_shifts"]


def clean_of(runs: Sequence[Run], run: Run) -> Scored | None:
    """The clean data of a run, where they are those of the first run."""
    first = next((one.clean.name for one in runs if one.clean), None)
    return run.clean if run.clean and run.clean.name == first else None


def shared_names(runs: Sequence[Run], family: str) -> list[str]:
    """The data sets of a shift that every run with this shift was scored on, mildest first."""
    having = [run for run in runs if family in run.shifts]
    names = [scored.name for scored in having[0].shifts[family]] if having else []
    return [name for name in names if all(name in run.by_name for run in having)]


def shared_shifts(runs: Sequence[Run]) -> list[str]:
    """The shifted data sets of all kinds that every run with any shift was scored on."""
    having = [run for run in runs if run.shifts]
    names = [scored.name for family in having[0].shifts.values() for scored in family] if having else []
    return [name for name in names if all(name in run.by_name for run in having)]


def left_out(runs: Sequence[Run]) -> list[str]:
    """A sentence for everything that some runs were scored on and others not."""
    first = next((run.clean.name for run in runs if run.clean), None)
    said = [
        f"{first}: {run.label} was scored on {run.clean.name} instead, which is left out."
        for run in runs
        if run.clean and run.clean.name != first
    ]
    alike: dict[str, list[str]] = {}  # what is to be said -> of which shifts
    for family in dict.fromkeys(family for run in runs for family in run.shifts):
        for words in (_lacking(runs, family), _averaged(runs, family)):
            alike.setdefault(words, []).append(family)
    return said + [f"{listed(families)}: {words}" for words, families in alike.items() if words]


def _lacking(runs: Sequence[Run], family: str) -> str:
    labels = [run.label for run in runs if family not in run.shifts]
    return f"not scored for {listed(labels)}." if labels else ""


def _averaged(runs: Sequence[Run], family: str) -> str:
    every = {scored.name: scored for run in runs for scored in run.shifts.get(family, ())}
    names = shared_names(runs, family)
    ordered = sorted(every.values(), key=lambda scored: scored.severity or 0.0)
    kept, dropped = ([_severity(s) for s in ordered if (s.name in names) == inside] for inside in (True, False))
    if not dropped:
        return ""
    if not kept:
        return "no severity is one that all runs with this shift have, so there is no mean."
    verb = "is" if len(dropped) == 1 else "are"
    return f"means are over {listed(kept)}, which all runs with this shift have; {listed(dropped)} {verb} left out."


def reference_notes(runs: Sequence[Run]) -> list[str]:
    """In what but the method runs differ from the reference that they were compared with."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        alike.setdefault(run.notes, []).append(run.label)
    return [
        f"Closeness of {listed(labels)} to the reference is not of methods alone: {'; '.join(notes)}."
        for notes, labels in alike.items()
        if notes
    ]


def _severity(scored: Scored) -> str:
    return scored.name if scored.severity is None else f"{scored.severity:g}"


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
