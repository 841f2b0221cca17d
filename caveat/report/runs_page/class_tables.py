"""How every class fares: confusion matrices with the recall of each class, and the majority baseline."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import torch

from caveat.evaluate.metrics import ByClass, by_class
from caveat.report.draw import fold, scrolling, section
from caveat.report.saved import SavedRun

__all__ = ["class_section"]

MOST_SHOWN = 20  # classes of a whole matrix
HARDEST_SHOWN = 10  # of more classes than that


def class_section(runs: Sequence[SavedRun]) -> str:
    """Show for every run what each class of the clean rows is taken for; the first run is open."""
    tables = {run.label: _counted(run) for run in runs if run.clean}
    if not tables:
        return ""
    names = {run.label: _names(run, len(tables[run.label].counts)) for run in runs if run.label in tables}
    first = next(iter(tables))
    always = f"{tables[first].majority:.1%} of the clean rows are {names[first][tables[first].majority_class]}"
    lead = (
        f"{always}: that much is right without looking. Recall is the share of a class's rows that are found; a rare "
        "class may be lost while accuracy stays high."
    )
    folds = ""
    for label, table in tables.items():
        whole = len(table.counts) <= MOST_SHOWN
        body = _matrix(label, table, names[label]) if whole else _hardest(label, table, names[label])
        folds += fold(label, _note(table, names[label]), body, label == first)
    return section("classes", "Class by class", lead, folds)


def _counted(run: SavedRun) -> ByClass:
    assert run.clean is not None
    arrays = run.clean.predictions
    return by_class(torch.from_numpy(arrays["probs"]), torch.from_numpy(arrays["targets"]))


def _names(run: SavedRun, classes: int) -> list[str]:
    """Names of the classes; of independent labels, which are rows of no and yes, these two."""
    if len(run.class_names) == classes:
        return list(run.class_names)
    return ["no", "yes"] if classes == 2 else [str(number) for number in range(classes)]


def _note(table: ByClass, names: Sequence[str]) -> str:
    """The accuracy beside the majority's, and the class that is found least."""
    right = float(table.counts.diagonal().sum() / table.counts.sum())
    level = f"{right:.1%}" == f"{table.majority:.1%}"
    word = ", no better than" if level else ", worse than" if right < table.majority else ""
    verdict = f"{word} always saying the same" if word else ""
    worst = int(table.recall.nan_to_num(2.0).argmin())
    return f"{right:.1%} right{verdict}; lowest recall {table.recall[worst]:.1%}, {names[worst]}"


def _matrix(label: str, table: ByClass, names: Sequence[str]) -> str:
    """The whole matrix: a row for each true class, its recall at the end."""
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    head = f'<thead><tr><th scope="col">True class, taken for</th>{heads}<th scope="col">Recall</th></tr></thead>'
    rows = ""
    for name, counts, recall in zip(names, table.counts, table.recall.tolist(), strict=True):
        shares = (counts / counts.sum().clamp_min(1)).tolist()
        cells = "".join(
            f'<td style="--near:{share:.3f}">{count:,}</td>'
            for count, share in zip(counts.tolist(), shares, strict=True)
        )
        rows += f'<tr><th scope="row">{escape(name)}</th>{cells}<th>{_share(recall)}</th></tr>'
    return scrolling(
        f"Confusion matrix of {label}, scrolls sideways", f'<table class="matrix">{head}<tbody>{rows}</tbody></table>'
    )


def _hardest(label: str, table: ByClass, names: Sequence[str]) -> str:
    """The classes that are found least, each with what it is most often taken for."""
    order = table.recall.nan_to_num(2.0).argsort(stable=True)[:HARDEST_SHOWN].tolist()
    mistaken = table.counts - torch.diag(table.counts.diagonal())
    rows = ""
    for number in order:
        other = int(mistaken[number].argmax())
        count = int(mistaken[number, other])
        taken = (
            f"{escape(names[other])}, {count:,} of {int(table.counts[number].sum()):,} rows" if count else "no other"
        )
        rows += f'<tr><th scope="row">{escape(names[number])}</th><td>{_share(table.recall[number].item())}</td>'
        rows += f"<td>{taken}</td></tr>"
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("Class", "Recall", "Most often taken for"))
    return scrolling(
        f"The classes that {label} finds least", f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    )


def _share(value: float) -> str:
    return "no rows" if value != value else f"{value:.1%}"
