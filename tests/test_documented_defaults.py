"""The tables of defaults in benchmarks/README.md, and what is said below them, are those of defaults.csv."""

import importlib.util
from pathlib import Path
from statistics import mean
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
CHOSEN_ON = {"sgmcmc": {"boston", "energy", "yacht", "digits"}}  # sets whose test rows a default has looked at


@pytest.fixture(scope="module")
def defaults() -> ModuleType:
    pytest.importorskip("sklearn")
    place = importlib.util.spec_from_file_location("defaults", FOLDER / "defaults.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lines(defaults: ModuleType) -> list[dict[str, str]]:
    return [line for line in defaults.read([FOLDER / "defaults.csv"]) if line["rows"] == "500"]


def methods_of(lines: list[dict[str, str]]) -> list[str]:
    return sorted({line["method"] for line in lines})


def test_every_table_is_that_of_the_file(defaults: ModuleType, lines: list[dict[str, str]]) -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    methods = methods_of(lines)
    rows = defaults.table_of(lines, "nll", defaults.REPORT, methods) + defaults.wins_of(lines, defaults.REPORT, methods)
    rows += defaults.beside_the_gp(lines, defaults.REPORT, methods)
    assert len(rows) > 40
    for row in rows:
        assert row in page, row


def test_what_is_said_of_the_gaussian_process_is_so(defaults: ModuleType, lines: list[dict[str, str]]) -> None:
    page = " ".join((FOLDER / "README.md").read_text(encoding="utf-8").split())
    has_gp = {(x["set"], x["seed"]) for x in lines if x["method"] == "gp"}
    table = defaults.averages([x for x in lines if (x["set"], x["seed"]) in has_gp], "nll")
    assert len(table) == 10
    counts = {}
    for what, left_out in (("all", {}), ("unseen", CHOSEN_ON)):
        best = {
            name: min(v for m, v in row.items() if m not in defaults.OTHERS and name not in left_out.get(m, ()))
            for name, row in table.items()
        }
        near = sum(best[name] <= row["gp"] + 0.1 for name, row in table.items())
        counts[what] = near, sum(best[name] < row["gp"] for name, row in table.items()), mean(best.values())
    near, ahead, score = counts["all"]
    gp, point = (mean(row[method] for row in table.values()) for method in ("gp", "map"))
    short = defaults._short
    assert f"is {short(score)} (`MAP` alone: {short(point)}; the Gaussian process: {short(gp)}" in page
    assert f"within .1 of the Gaussian process on {near} of the ten and ahead on {ahead}" in page
    near, ahead, _ = counts["unseen"]
    assert f"choosing it (below), it is {near}, and ahead on {ahead}" in page


def test_no_fit_is_worse_than_the_marginals_without_a_word(defaults: ModuleType, lines: list[dict[str, str]]) -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    limit = {(x["set"], x["seed"]): float(x["nll"]) for x in lines if x["method"] == "marginals"}
    ours = [x for x in lines if x["method"] not in defaults.OTHERS and x["status"] == "ok"]
    worse = [x for x in ours if float(x["nll"]) > limit[x["set"], x["seed"]]]
    assert all(x["warnings"] or x["evaluation"] for x in worse)
    assert f"{len(worse)} of {len(ours)} fits are worse than the marginals" in page
