"""Tables of a bench: the same numbers as its csv files."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from caveat import report
from caveat.evaluate.metrics import format_number
from caveat.report.bench_page.bench_tables import between_table
from caveat.report.saved import read_bench

pytest.importorskip("plotly")
TableOf = Callable[[str], tuple[list[str], list[tuple[str, list[str]]]]]
CsvLines = Callable[[Path], list[dict[str, str]]]


def test_the_table_has_the_numbers_of_the_summary(
    digits: Path,
    results_table_of: TableOf,
    csv_lines: CsvLines,
) -> None:
    keys, rows = results_table_of(report.write(digits).read_text(encoding="utf-8"))
    by_method = {name.split()[0].replace(" ", ""): losses for name, losses in rows}
    summary = {r["method"]: r for r in csv_lines(digits / "summary.csv") if r["role"] == "clean"}
    shifted = [r for r in csv_lines(digits / "results.csv") if r["shift"] == "rotation" and r["metric"] == "nll"]
    assert len(rows) == len(summary) == 4
    for method in ("map", "swag"):
        found = dict(zip(keys, by_method[method], strict=True))
        assert float(found["nll"]) == pytest.approx(float(summary[method]["nll"]))
        assert float(found["accuracy"]) == pytest.approx(-float(summary[method]["accuracy"]))
        assert float(found["flops"]) == pytest.approx(float(summary[method]["flops"]))
        mean = np.mean([float(r["value"]) for r in shifted if r["method"] == method])
        assert float(found["rotation.nll"]) == pytest.approx(mean)


def test_means_and_errors_are_over_seeds(digits: Path, csv_lines: CsvLines) -> None:
    (group,) = read_bench(digits).groups
    swag = next(r for r in group.runs if r.label == "swag")
    row = next(r for r in csv_lines(digits / "summary.csv") if r["method"] == "swag" and r["severity"] == "60.0")
    scored = swag.by_name["rotation 60"].metrics["brier"]
    assert (scored.mean, scored.stderr) == pytest.approx((float(row["brier"]), float(row["brier_stderr"])))


def test_methods_are_compared_with_each_other(digits: Path) -> None:
    (group,) = read_bench(digits).groups
    expected = []
    for seed in (0, 1):
        one, other = (group.cells[name][seed].run.clean.predictions["probs"] for name in ("map", "swag"))
        expected.append(0.5 * np.abs(one - other).sum(1).mean())
    row = re.search(r'<tr data-run="0">.*?</tr>', between_table(group), re.S)[0]
    assert f">{format_number(float(np.mean(expected)))} " in row
