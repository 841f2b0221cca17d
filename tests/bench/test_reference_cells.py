"""A method of the experiment itself as the reference of all others; and some cells of a file."""

from pathlib import Path

import pytest

from caveat import bench
from caveat.bench.compare import comparisons
from caveat.bench.plan import cells_of, select
from caveat.bench.results import read_results
from tests.bench.small import GOOD, complaint_of, run

HMC = """
reference = "hmc"
models = ["mlp"]
seeds = [0, 1]
[data.clouds]
name = "{data}"
redraw = true
[map]
epochs = 2
[methods.hmc]
chains = 2
length = 5
warmup = 20
trajectory = 0.1
[methods.last_layer_laplace]
"""


@pytest.fixture
def file(table: Path, tmp_path: Path) -> Path:
    (tmp_path / "hmc.toml").write_text(HMC.format(data=table))
    return tmp_path / "hmc.toml"


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_cell_is_compared_with_the_reference_of_its_seed(jobs: int, file: Path, tmp_path: Path) -> None:
    assert not run(file, tmp_path / "out", jobs=jobs).failed
    results = read_results(bench.read_experiment(file), tmp_path / "out")
    assert len(results) == 8
    for result in results:
        assert ("total_variation" in result.saved.parts[0]["metrics"]) == (result.cell.label != "hmc")
        assert (result.cell.reference is None) == (result.cell.label == "hmc")
    references = {result.cell.seed: result.cell.reference for result in results if result.cell.label == "map"}
    assert references[0] != references[1]


def test_rows_of_each_seed_make_intervals_over_seeds(file: Path, tmp_path: Path) -> None:
    run(file, tmp_path / "out", only=["clouds/mlp/map*"])
    rows = comparisons(read_results(bench.read_experiment(file), tmp_path / "out"), "map_tempered")
    assert {row["over"] for row in rows if row["metric"] == "nll"} == {"seeds"}


def test_some_cells_and_what_they_need(file: Path, tmp_path: Path) -> None:
    cells = cells_of(bench.read_experiment(file))
    chosen = select(cells, ["*/last_layer_laplace/1"])
    assert [cell.path for cell in chosen] == ["clouds/mlp/hmc/1", "clouds/mlp/map/1", "clouds/mlp/last_layer_laplace/1"]
    assert select(cells, ["*"]) == cells
    with pytest.raises(ValueError, match="no cell is named so; they are named as 'clouds/mlp/hmc/0' is"):
        select(cells, ["swag"])


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("swag", "reference on 'digits': there is no 'swag'"),
        ("laplace", "reference: 'laplace' starts from the MAP"),
        ("deep_ensemble", "reference: 'deep_ensemble' has no chains"),
    ],
)
def test_a_reference_has_chains(reference: str, complaint: str, tmp_path: Path) -> None:
    text = f'reference = "{reference}"\n{GOOD}[methods.laplace]\n[methods.deep_ensemble]\n'
    assert complaint in complaint_of(tmp_path, text)
