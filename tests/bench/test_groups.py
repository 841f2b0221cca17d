"""Cells that differ in their seeds train at the same time on a GPU (here by recordings on a CPU) as they do alone."""

from pathlib import Path
from typing import Any

import pytest

from caveat.bench import groups
from caveat.engine.run import Run
from caveat.engine.training import meeting, side_by_side
from caveat.storage import read_json
from tests.bench.small import rows_of, run, write
from tests.recorded_steps import record_on_the_cpu

MORE = "[methods.deep_ensemble]\nmembers = 2\ntraining = {epochs = 5}\n"


@pytest.fixture(scope="module")
def alone(table: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An experiment and its results, cell by cell."""
    folder = tmp_path_factory.mktemp("groups")
    file = write(folder / "tiny.toml", table, more=MORE)
    assert not run(file, folder / "out").failed
    return file, folder / "out"


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many networks trained at the same time, in each epoch."""
    monkeypatch.setattr(groups, "_pays", lambda place: True)
    return record_on_the_cpu(monkeypatch)


def assert_same_numbers(out: Path, other: Path) -> None:
    numbers, others = rows_of(out / "results.csv"), rows_of(other / "results.csv")
    keys = ("data", "model", "method", "seed", "condition", "metric")
    assert [[row[key] for key in keys if key in row] for row in numbers] == [
        [row[key] for key in keys if key in row] for row in others
    ]
    compared = 0
    for row, same in zip(numbers, others, strict=True):
        if row["metric"] in ("nll", "brier") and row["method"] in ("map", "deep_ensemble"):
            compared += 1
            assert float(row["value"]) == pytest.approx(float(same["value"]), abs=1e-5), row
    assert compared >= 16


def test_cells_of_several_seeds_train_at_the_same_time_and_are_the_same(
    alone: tuple[Path, Path], lanes: list[int], tmp_path: Path
) -> None:
    file, out = alone
    assert not run(file, tmp_path / "out").failed
    assert set(lanes) == {2, 4}, "two MAPs, and two ensembles of two"
    assert_same_numbers(out, tmp_path / "out")


def test_a_killed_group_goes_on_where_it_was(
    alone: tuple[Path, Path], lanes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = alone
    checkpoint, count = Run.checkpoint, 0

    def killed(self: Run, *given: Any) -> None:
        nonlocal count
        checkpoint(self, *given)
        count += 1
        if count in (3, 14):  # the first network of two is an epoch ahead
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "checkpoint_due", lambda self: self.folder is not None)
    monkeypatch.setattr(Run, "checkpoint", killed)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(file, tmp_path / "out")
    assert not run(file, tmp_path / "out").failed
    assert_same_numbers(out, tmp_path / "out")


def test_what_ends_the_training_of_one_leaves_the_others(
    alone: tuple[Path, Path], lanes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(loops: Any) -> None:
        side_by_side._Together(loops).run_epoch()
        raise FloatingPointError("the loss of one became nan")

    monkeypatch.setattr(meeting, "run_loops_together", broken)
    file, out = alone
    assert not run(file, tmp_path / "out").failed
    assert_same_numbers(out, tmp_path / "out")
    assert not list((tmp_path / "out").glob("cells/*/failure.json"))


def test_time_of_others_is_no_time_of_a_fit(
    alone: tuple[Path, Path], lanes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    together = side_by_side.run_loops_together

    def slow(loops: Any) -> None:
        together(loops)
        now[0] += 1000.0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

    for module in (meeting, __import__("caveat.engine.run", fromlist=["run"])):
        monkeypatch.setattr(module, "time", Clock)
    monkeypatch.setattr(meeting, "run_loops_together", slow)
    run(alone[0], tmp_path / "out", only=["*/map/*"])
    seconds = [read_json(path)["cost"]["fit_seconds"] for path in (tmp_path / "out").glob("cells/*map*/result.json")]
    assert seconds == [500.0, 500.0]
