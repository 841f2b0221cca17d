"""Methods against the baseline, and ranks."""

from pathlib import Path

import numpy as np
import pytest

from caveat import bench
from caveat.bench.compare import comparisons, ranks
from caveat.bench.results import read_results


def test_comparisons_are_paired_by_row_and_seed(finished: tuple[Path, Path]) -> None:
    file, out = finished
    results = read_results(bench.read_experiment(file), out)
    table = comparisons(results, "map_tempered")
    by = {(r.cell.label, r.cell.seed): r.saved for r in results}
    row = next(
        r
        for r in table
        if (r["method"], r["shift"], r["severity"], r["metric"]) == ("map", "feature_shift", None, "nll")
    )
    assert (row["severities"], row["seeds"], row["rows"], row["over"]) == (2, 2, 60, "seeds and rows")
    gains = []
    for seed in (0, 1):
        ours, theirs = (
            np.mean([by[label, seed].rows(p["name"])["log_prob"] for p in by[label, seed].parts[1:3]], axis=0)
            for label in ("map", "map_tempered")
        )
        gains.append(ours - theirs)
    assert row["gain"] == pytest.approx(np.mean(gains), rel=1e-4)
    ood = next(r for r in table if (r["method"], r["metric"]) == ("last_layer_laplace", "auroc_entropy"))
    auroc = {
        label: np.mean([by[label, s].parts[-1]["metrics"]["auroc_entropy"]["mean"] for s in (0, 1)])
        for label in ("last_layer_laplace", "map_tempered")
    }
    assert ood["gain"] == pytest.approx(auroc["last_layer_laplace"] - auroc["map_tempered"], abs=1e-6)
    assert not [r for r in table if r["method"] == "map_tempered"]


def test_ranks() -> None:
    def row(method: str, shift: str, severity: float, value: float, metric: str = "nll") -> dict[str, object]:
        role = "clean" if shift == "clean" else "shift"
        who = {"data": "d", "model": "m", "method": method, "seed": 0, "shift": shift, "severity": severity}
        return who | {"metric": metric, "value": value, "stderr": None, "role": role}

    table = [row("a", "s", 1, 0.2), row("a", "s", 2, 0.4), row("b", "s", 1, 0.3), row("b", "s", 2, 0.5)]
    table += [
        row("c", "s", 1, 0.3),
        row("c", "s", 2, 0.5),
        row("a", "t", 1, 0.9),
        row("b", "t", 1, 0.1),
        row("c", "t", 1, 0.5),
    ]
    table += [row("a", "s", 1, 0.9, "accuracy"), row("b", "s", 1, 0.8, "accuracy")]
    found = {(r["method"], r["metric"], r["shift"]): r["rank"] for r in ranks(table)}
    assert [found[m, "nll", "s"] for m in "abc"] == [1, 2.5, 2.5], "b and c tie"
    assert [found[m, "nll", "all shifts"] for m in "abc"] == [2, 1.75, 2.25]
    assert (found["a", "accuracy", "s"], found["b", "accuracy", "s"]) == (1, 2), "higher is better"
