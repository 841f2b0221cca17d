"""The tables of a run."""

import sys
from pathlib import Path

import numpy as np
import pytest

from caveat import bench
from caveat.bench.results import read_results, summary_table
from caveat.storage import read_json
from tests.bench.small import rows_of, run


def test_tables_hold_what_the_cells_measured(finished: tuple[Path, Path]) -> None:
    file, out = finished
    results = read_results(bench.read_experiment(file), out)
    table = rows_of(out / "results.csv")
    columns = ["data", "model", "method", "seed", "shift", "severity", "metric", "value", "stderr", "role"]
    assert list(table[0]) == columns
    chosen = [r for r in table if (r["method"], r["shift"], r["metric"]) == ("map", "feature_shift", "nll")]
    assert [(r["seed"], r["severity"]) for r in chosen] == [("0", "0.5"), ("0", "2.0"), ("1", "0.5"), ("1", "2.0")]
    for result in results:
        for part in result.saved.parts:
            if part["role"] == "test":
                scores = result.saved.rows(part["name"])
                assert part["metrics"]["nll"]["mean"] == pytest.approx(-scores["log_prob"].mean(), rel=1e-5)
                assert part["metrics"]["accuracy"]["mean"] == pytest.approx(scores["correct"].mean())
                assert part["metrics"]["brier"]["mean"] == pytest.approx(scores["brier"].mean(), rel=1e-5)
                assert scores["bin_count"].sum() == len(scores["rows"]) == 60
    wide = [r for r in rows_of(out / "summary.csv") if r["method"] == "map" and r["shift"] == "clean"]
    values = [float(r["value"]) for r in table if (r["method"], r["shift"], r["metric"]) == ("map", "clean", "nll")]
    assert len(wide) == 1
    assert wide[0]["seeds"] == "2"
    assert float(wide[0]["nll"]) == pytest.approx(np.mean(values))
    assert float(wide[0]["nll_stderr"]) == pytest.approx(np.std(values, ddof=1) / np.sqrt(2))
    assert wide[0]["start_seconds"] == "", "a MAP starts from nothing, which is not zero"
    index = read_json(out / "bench.json")
    assert [entry["status"] for entry in index["cells"]] == ["done"] * 6
    with np.load(next((out / "inputs").glob("*/clean.npz"))) as shown:
        assert shown["x"].shape == (60, 3)


def test_summary_has_no_number_that_was_not_measured() -> None:
    who = {
        "data": "d",
        "model": "m",
        "method": "a",
        "shift": "clean",
        "severity": None,
        "stderr": None,
        "role": "clean",
    }
    cost = {"shift": None, "role": "cost", "metric": "flops"}
    table = [who | {"seed": s, "metric": "nll", "value": v} for s, v in ((0, 0.5), (1, None))]
    table += [who | cost | {"seed": s, "value": v} for s, v in ((0, 7.0), (1, 7.0))]
    (line,) = summary_table(table)
    assert (line["nll"], line["nll_stderr"], line["flops"], line["flops_stderr"]) == (None, None, 7.0, 0.0)


def test_parquet(finished: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = finished
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(ImportError, match="pip install pyarrow"):
            run(file, out, parquet=True)
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    run(file, out, parquet=True)
    table = pyarrow.parquet.read_table(out / "results.parquet")
    assert table.num_rows == len(rows_of(out / "results.csv"))
