"""A dry run."""

import json
from pathlib import Path

import pytest

from caveat.cli import main


def test_dry_run_shows_the_grid(
    finished: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = finished
    assert main(["bench", str(file), "--dry-run", "--out", str(tmp_path / "none"), "--json"]) == 0
    grid = json.loads(capsys.readouterr().out)["grid"]
    assert [(e["method"], e["cells"], e["done"]) for e in grid] == [
        ("map", 2, 0),
        ("map_tempered", 2, 0),
        ("last_layer_laplace", 2, 0),
    ]
    assert 0 < grid[0]["seconds"] < 60
    assert grid[2]["seconds"] is None
    assert all(e["memory"] > 0 for e in grid)
    assert not (tmp_path / "none").exists()
    assert main(["bench", str(file), "--dry-run", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "finished cells" in printed
    assert "6 cells, 6 done" in printed
