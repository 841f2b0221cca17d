"""Candidates: validation rows choose one, what fails is passed over, and a stopped cell repeats nothing."""

from pathlib import Path

import pytest

from caveat import bench
from caveat.bench.plan import Choice
from caveat.bench.results import read_results
from caveat.storage import read_json
from tests.bench.small import run

TUNED = """
data = ["{data}"]
models = ["mlp"]
[map]
epochs = 1
[methods.point]
method = "map"
tune.training.learning_rate = [1e-6, 0.03]
tune.training.epochs = [3]
"""


@pytest.fixture
def file(table: Path, tmp_path: Path) -> Path:
    (tmp_path / "tuned.toml").write_text(TUNED.format(data=table))
    return tmp_path / "tuned.toml"


def test_the_lowest_validation_nll_is_chosen(file: Path, tmp_path: Path) -> None:
    assert not run(file, tmp_path / "out").failed
    result = next(r for r in read_results(bench.read_experiment(file), tmp_path / "out") if r.cell.label == "point")
    assert result.saved.chosen == "learning_rate 0.03, epochs 3"
    scores = read_json(result.saved.folder / "candidates.json")["validation_nll"]
    assert scores["learning_rate 0.03, epochs 3"] < scores["learning_rate 1e-06, epochs 3"]
    assert not (result.saved.folder / "candidates").exists()
    metrics = read_json(result.saved.folder / "metrics.json")
    assert metrics["method"]["fields"]["training"]["learning_rate"] == 0.03
    entry = next(e for e in read_json(tmp_path / "out" / "bench.json")["cells"] if e["method"] == "point")
    assert entry["chosen"] == "learning_rate 0.03, epochs 3"


def test_a_candidate_that_fails_is_passed_over(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from caveat.bench import cells

    fitted: list[float] = []
    fit = cells.fit_beside

    def failing(beside, task, method, *more):  # type: ignore[no-untyped-def]
        fitted.append(method.training.learning_rate)
        if method.training.learning_rate == 0.03:
            raise FloatingPointError("the loss is not finite")
        return fit(beside, task, method, *more)

    monkeypatch.setattr(cells, "fit_beside", failing)
    assert not run(file, tmp_path / "out", only=["*/point/0"]).failed
    result = next(r for r in read_results(bench.read_experiment(file), tmp_path / "out") if r.cell.label == "point")
    assert result.saved.chosen == "learning_rate 1e-06, epochs 3"
    scores = read_json(result.saved.folder / "candidates.json")["validation_nll"]
    assert "the loss is not finite" in scores["learning_rate 0.03, epochs 3"]
    assert fitted == [1e-6, 0.03]


def test_candidates_that_were_scored_are_not_fitted_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from caveat.bench import cells

    fitted: list[float] = []
    fit, stop = cells.fit_beside, True

    def stopping(beside, task, method, *more):  # type: ignore[no-untyped-def]
        fitted.append(method.training.learning_rate)
        if stop and len(fitted) == 2:
            raise KeyboardInterrupt
        return fit(beside, task, method, *more)

    monkeypatch.setattr(cells, "fit_beside", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(file, tmp_path / "out", only=["*/point/0"])
    stop = False
    assert not run(file, tmp_path / "out", only=["*/point/0"]).failed
    assert fitted == [1e-6, 0.03, 0.03]


def test_where_all_candidates_fail_the_cell_fails(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from caveat.bench import cells

    def failing(*_: object, **__: object) -> Choice:
        raise FloatingPointError("the loss is not finite")

    monkeypatch.setattr(cells, "fit_beside", failing)
    done = run(file, tmp_path / "out", only=["*/point/0"])
    assert "every candidate failed" in next(iter(done.failed.values()))
