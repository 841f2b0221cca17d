"""The grid of cells, and how they are named."""

from pathlib import Path

from caveat import bench
from caveat.bench.plan import cells_of, evaluation_key


def test_the_grid_has_the_two_maps_and_every_method(finished: tuple[Path, Path]) -> None:
    experiment = bench.read_experiment(finished[0])
    cells = cells_of(experiment)
    assert list(experiment.methods) == ["map", "map_tempered", "last_layer_laplace"]
    assert len(cells) == len({cell.name for cell in cells}) == 6
    points = {(cell.seed): cell.name for cell in cells if cell.label == "map"}
    assert all(cell.start == (None if cell.label == "map" else points[cell.seed]) for cell in cells)


def test_a_model_file_is_known_by_its_content(tmp_path: Path) -> None:
    keys = []
    for folder, width in (("a", 4), ("b", 4), ("c", 5)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "nets.py").write_text(
            f"from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, {width}))\n"
        )
        file = tmp_path / folder / "x.toml"
        file.write_text('data = ["digits"]\nmodels = ["nets.py:net"]\n')
        experiment = bench.read_experiment(file)
        cell = cells_of(experiment)[0]
        keys.append((cell.name, evaluation_key(experiment, cell)))
    assert keys[0] == keys[1]
    assert keys[0][0] != keys[2][0]
