"""Class by class: confusion matrices, recalls and the majority baseline on the page."""

import dataclasses

import numpy as np
import pytest

from caveat.report import read
from caveat.report.runs_page.class_tables import class_section

pytest.importorskip("plotly")


def with_predictions(run, probs, targets, names):
    """A run whose clean data say this."""
    clean = dataclasses.replace(run.clean, rows=len(targets))
    clean.__dict__["predictions"] = {"probs": probs, "targets": targets}
    return dataclasses.replace(run, data=(clean,), class_names=names)


def test_a_network_that_always_says_no_is_called_that(classification):
    run = read(classification)[0]
    probs, targets = np.tile([0.9, 0.1], (10, 1)), np.array([0] * 9 + [1])
    page = class_section([with_predictions(run, probs, targets, ("no", "yes"))])
    assert "90.0% of the clean rows are no: that much is right without looking" in page
    assert "90.0% right, no better than always saying the same; lowest recall 0.0%, yes" in page
    assert '<th scope="row">yes</th><td style="--near:1.000">1</td><td style="--near:0.000">0</td><th>0.0%</th>' in page


def test_of_many_classes_the_hardest_are_shown(classification):
    run = read(classification)[0]
    targets = np.arange(30).repeat(2)
    taken = targets.copy()
    taken[6] = 4  # half of the rows of class 3
    names = tuple(f"<c{number}>" for number in range(30))
    page = class_section([with_predictions(run, np.eye(30)[taken], targets, names)])
    assert "<td>50.0%</td><td>&lt;c4&gt;, 1 of 2 rows</td>" in page
    assert page.count("<tr>") == 11
    assert "<c3>" not in page
