"""What runs can be compared on: the data that all of them were scored on.

A folder of results may hold runs of several evaluations. A mean over two severities says nothing beside one over three,
so that a shift is averaged over the severities that every run with that shift has. Sentences say what is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from caveat.report.saved.run_folder import SavedData, SavedRun
from caveat.report.wording import joined_by_and

__all__ = [
    "clean_of",
    "data_by_title",
    "left_out_notes",
    "marginal_notes",
    "ood_sets",
    "reference_notes",
    "shared_names",
    "shared_shifts",
    "shift_families",
]


def shift_families(runs: Iterable[SavedRun]) -> list[str]:
    """List the shift families of all runs, in the order they come."""
    return list(dict.fromkeys(family for run in runs for family in run.shifts))


def ood_sets(runs: Iterable[SavedRun]) -> list[str]:
    """List the out-of-distribution sets of all runs by name, in the order they come."""
    return list(dict.fromkeys(data.name for run in runs for data in run.ood))


def clean_of(runs: Sequence[SavedRun], run: SavedRun) -> SavedData | None:
    """Return the clean data of a run, where they are those of the first run."""
    first = next((one.clean.name for one in runs if one.clean), None)
    return run.clean if run.clean and run.clean.name == first else None


def shared_names(runs: Sequence[SavedRun], family: str) -> list[str]:
    """List the data sets of a shift that every run with this shift was scored on, mildest first."""
    shifted = [run for run in runs if family in run.shifts]
    names = [data.name for data in shifted[0].shifts[family]] if shifted else []
    return [name for name in names if all(name in run.by_name for run in shifted)]


def shared_shifts(runs: Sequence[SavedRun]) -> list[str]:
    """List the shifted data sets of all families that every run with any shift was scored on."""
    shifted = [run for run in runs if run.shifts]
    names = [data.name for family in shifted[0].shifts.values() for data in family] if shifted else []
    return [name for name in names if all(name in run.by_name for run in shifted)]


def data_by_title(runs: Sequence[SavedRun]) -> list[tuple[str, list[str]]]:
    """List the data that are shown together, as titles and names: the clean set, and each family at all severities."""
    groups = [("clean data", [run.clean.name]) for run in runs if run.clean][:1]
    for family in shift_families(runs):
        names = shared_names(runs, family)
        every = {data.name for run in runs for data in run.shifts.get(family, ())}
        title = f"{family}, all severities" if len(every) > 1 else family
        if len(names) < len(every):
            title = f"{family}, severities that all runs have"
        groups += [(title, names)] if names else []
    return groups


def left_out_notes(runs: Sequence[SavedRun]) -> list[str]:
    """Write a sentence for everything that some runs were scored on and others not."""
    first = next((run.clean.name for run in runs if run.clean), None)
    notes = [
        f"{first}: {run.label} was scored on {run.clean.name} instead, which is left out."
        for run in runs
        if run.clean and run.clean.name != first
    ]
    families_by_text: dict[str, list[str]] = {}  # shifts of which the same is to be said share a sentence
    for family in shift_families(runs):
        for text in (_lacking(runs, family), _averaged_over(runs, family)):
            families_by_text.setdefault(text, []).append(family)
    return notes + [f"{joined_by_and(families)}: {text}" for text, families in families_by_text.items() if text]


def _lacking(runs: Sequence[SavedRun], family: str) -> str:
    labels = [run.label for run in runs if family not in run.shifts]
    return f"not scored for {joined_by_and(labels)}." if labels else ""


def _averaged_over(runs: Sequence[SavedRun], family: str) -> str:
    every = {data.name: data for run in runs for data in run.shifts.get(family, ())}
    names = shared_names(runs, family)
    ordered = sorted(every.values(), key=lambda data: data.severity or 0.0)
    shared, dropped = (
        [_severity(data) for data in ordered if (data.name in names) == is_in] for is_in in (True, False)
    )
    if not dropped:
        return ""
    if not shared:
        return "no severity is one that all runs with this shift have, so there is no mean."
    verb = "is" if len(dropped) == 1 else "are"
    return (
        f"means are over {joined_by_and(shared)}, which all runs with this shift have; "
        f"{joined_by_and(dropped)} {verb} left out."
    )


def marginal_notes(runs: Sequence[SavedRun]) -> list[str]:
    """Write a sentence for each run whose clean predictions have a warning, and one for those of shifted data."""
    notes = [
        f"{run.label} on {run.clean.name}: {warning}." for run in runs if run.clean for warning in run.clean.warnings
    ]
    shifted = []
    for run in runs:
        every = [data for family in run.shifts.values() for data in family]
        names = [data.name for data in every if data.warnings]
        if names:
            few = joined_by_and(names) if len(names) <= 3 else f"{len(names)} of {len(every)} sets"
            shifted.append(f"{run.label} ({few})")
    if shifted:
        notes.append(f"No better than the marginals of shifted targets, or not clearly: {joined_by_and(shifted)}.")
    return notes


def reference_notes(runs: Sequence[SavedRun]) -> list[str]:
    """Write a sentence for everything but the method in which runs differ from the reference."""
    labels_by_notes: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        labels_by_notes.setdefault(run.notes, []).append(run.label)
    return [
        f"Closeness of {joined_by_and(labels)} to the reference is not of methods alone: {'; '.join(notes)}."
        for notes, labels in labels_by_notes.items()
        if notes
    ]


def _severity(data: SavedData) -> str:
    return data.name if data.severity is None else f"{data.severity:g}"
