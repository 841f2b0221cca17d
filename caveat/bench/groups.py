"""Cells side by side on one GPU: fits of one method to one problem that differ in their seeds train at the same time.

A network that is small for a GPU leaves most of it empty. Cells whose methods train no points follow one another.
"""

from collections.abc import Iterator, Sequence

from caveat.bench.cells import Outcome, Place, run_cell
from caveat.bench.plan import Cell, Experiment
from caveat.engine.captured_steps import CaptureError
from caveat.engine.distributed import current_ranks
from caveat.engine.training import Meeting

__all__ = ["in_groups", "run_group"]

MOST = 8  # cells of a group, whose rows and weights are all on the GPU


def in_groups(cells: Sequence[Cell], place: Place) -> list[list[Cell]]:
    """The cells in groups that may train at the same time; those that others start from stay before these."""
    if not _pays(place):
        return [[cell] for cell in cells]
    alike: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells:
        # A search among candidates has several fits, which follow from one another.
        alone = () if len(cell.candidates) == 1 else (cell.name,)
        alike.setdefault((cell.data.label, cell.model, cell.label, *alone), []).append(cell)
    return [group[i : i + MOST] for group in alike.values() for i in range(0, len(group), MOST)]


def _pays(place: Place) -> bool:
    return place.device.type == "cuda" and current_ranks(place.device).size == 1


def run_group(experiment: Experiment, group: Sequence[Cell], place: Place) -> Iterator[tuple[Cell, Outcome]]:
    """Every cell of a group and how it went; those that failed while they were trained together go on by themselves."""
    if len(group) == 1:
        yield group[0], run_cell(experiment, group[0], place)
        return
    waiting, outcomes = list(group), dict[str, Outcome]()

    def another() -> bool:
        if not waiting:
            return False
        cell = waiting.pop(0)
        outcomes[cell.name] = run_cell(experiment, cell, place, meeting)
        return True

    meeting = Meeting(another)
    while another():
        pass
    together = meeting.error is None or isinstance(meeting.error, CaptureError)
    for cell in group:
        failed = outcomes[cell.name].error is not None and not together
        yield cell, run_cell(experiment, cell, place) if failed else outcomes[cell.name]
