"""A gallery of images that the networks get wrong, with what each run said of them.

Images come from the `thumbnails` of any run's prediction file; what a run said comes from its own predictions at the
same position, so that a run which kept no image of a row, or images of other rows, is shown as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from caveat.report.draw import Exhibit, exhibit_fold, section
from caveat.report.saved import SavedRun, matched

__all__ = ["exhibits", "gallery_section"]

WRONG_SHOWN = 12
OOD_SHOWN = 6


def exhibits(runs: Sequence[SavedRun]) -> list[Exhibit]:
    """Choose images of clean data, of the middle severity of each family, and of each out-of-distribution set."""
    names = [run.clean.name for run in runs if run.clean]
    for run in runs:
        with_images = [[data.name for data in family if _has_images(runs, data.name)] for family in run.shifts.values()]
        names += [family[len(family) // 2] for family in with_images if family]
        names += [data.name for data in run.ood]
    candidates = (_surest_mistakes(runs, name) for name in dict.fromkeys(names) if _has_images(runs, name))
    return [exhibit for exhibit in candidates if len(exhibit.positions)]


def _has_images(runs: Sequence[SavedRun], name: str) -> bool:
    return any(name in run.by_name and "thumbnails" in run.by_name[name].predictions for run in runs)


def _surest_mistakes(runs: Sequence[SavedRun], name: str) -> Exhibit:
    """The images that the runs are most surely wrong about; without targets, those that they are most sure of."""
    by_label = {run.label: run.by_name[name] for run in runs if name in run.by_name}
    first = next(iter(by_label.values()))
    predictions = {label: matched(data, first)[0] for label, data in by_label.items()}
    images: dict[int, np.ndarray] = {}  # by position; runs may have kept different rows
    for arrays in predictions.values():
        for position, image in zip(arrays.get("thumbnail_rows", ()), arrays.get("thumbnails", ()), strict=True):
            images.setdefault(int(position), image)
    positions = np.array(sorted(images))
    probs = np.stack([arrays["probs"][positions] for arrays in predictions.values()])  # [R, K, C]
    targets = first.predictions.get("targets")
    if targets is None:
        order = np.argsort(-probs.max(axis=2).mean(axis=0), kind="stable")[:OOD_SHOWN]  # the most sure first
    else:
        wrong = probs.argmax(axis=2) != targets[positions]  # [R, K]
        sure = (probs.max(axis=2) * wrong).sum(axis=0)  # [K], how surely the runs are wrong, summed
        order = np.argsort(-sure, kind="stable")[: min(WRONG_SHOWN, int(wrong.any(axis=0).sum()))]
    chosen = positions[order]
    return Exhibit(name, chosen, [images[int(position)] for position in chosen], predictions, targets)


def gallery_section(runs: Sequence[SavedRun]) -> str:
    """Show every exhibit as cards; the first is open."""
    body = "".join(exhibit_fold(runs, exhibit, index == 0) for index, exhibit in enumerate(exhibits(runs)))
    lead = (
        "Images that at least one run gets wrong, the most surely wrong first; of out-of-distribution data, those that "
        "the runs are most sure of. Entropy is in nats."
    )
    return section("gallery", "Where they go wrong", lead, body)
