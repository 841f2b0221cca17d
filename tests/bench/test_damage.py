"""Results that were damaged after they were written: a page names the file, and the next run scores the cell again."""

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from caveat import CorruptFile, report
from caveat.bench import read_cell
from caveat.bench.cell_files import damage_of
from caveat.storage import read_json, write_json
from tests.bench.small import rows_of, run, stamps

pytest.importorskip("plotly")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(path: Path) -> None:
    """One bit is another: of a number, not of the time that a zip file has of each part."""
    content, place = bytearray(path.read_bytes()), path.stat().st_size // 3
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as parts:
            largest = max(parts.infolist(), key=lambda part: part.compress_size)
        place = largest.header_offset + 30 + len(largest.filename) + largest.compress_size // 2
    content[place] ^= 4
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def without_numbers(path: Path) -> None:
    np.savez(path, rows=np.arange(3))


def of_other_rows(path: Path) -> None:
    np.savez(path, rows=np.arange(3), x=np.zeros((4, 3)))


DAMAGE = [
    ("scores/clean.npz", cut),
    ("scores/feature-shift-2.npz", flipped),
    ("scores/noise.npz", emptied),
    ("scores/clean.npz", without_numbers),
    ("scores/clean.npz", Path.unlink),
    ("predictions/clean.npz", cut),
    ("predictions/clean.npz", flipped),
    ("metrics.json", flipped),
    ("metrics.json", cut),
]


@pytest.fixture
def copy(finished: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The experiment file and a copy of its results."""
    file, out = finished
    shutil.copytree(out, tmp_path / "out")
    assert run(file, tmp_path / "out").ran == 0  # tables of this experiment, where another has used the folder since
    return file, tmp_path / "out"


@pytest.mark.parametrize(("name", "damage"), DAMAGE, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_file_is_named_and_scored_again(
    copy: tuple[Path, Path], name: str, damage: Callable[[Path], object]
) -> None:
    file, out = copy
    before = {row["metric"] + str(i): row["value"] for i, row in enumerate(rows_of(out / "results.csv"))}
    path = next(out.glob(f"cells/*map_tempered-seed0*/{name}"))
    damage(path)
    with pytest.raises(CorruptFile, match=path.name):
        report.write(out)
    assert path.name in (damage_of(path.parents[len(Path(name).parts) - 1]) or "")
    untouched = {name: stamp for name, stamp in stamps(out).items() if "map_tempered-seed0" not in name}
    assert run(file, out).ran == 1
    assert {name: stamp for name, stamp in stamps(out).items() if name in untouched} == untouched
    after = {row["metric"] + str(i): row["value"] for i, row in enumerate(rows_of(out / "results.csv"))}
    assert {key for key in before if before[key] != after[key] and "seconds" not in key} == set()
    report.write(out)


def test_damaged_inputs_are_named_and_written_again(copy: tuple[Path, Path]) -> None:
    file, out = copy
    path = next(out.glob("inputs/*/clean.npz"))
    for damage in (cut, emptied, of_other_rows):
        damage(path)
        with pytest.raises(CorruptFile, match=r"inputs/.*clean\.npz"):
            _every_input(out)
        assert run(file, out).ran == 0
        _every_input(out)


def _every_input(out: Path) -> None:
    """Read the inputs of every condition of a bench."""
    for group in report.saved.read_bench(out).groups:
        for data in group.done[0].data:
            if group.inputs.joinpath(data.path.name).exists():
                assert len(group.shown_inputs(data)) == 2


def test_a_damaged_cell_that_is_not_asked_for_no_longer_counts_as_done(copy: tuple[Path, Path]) -> None:
    file, out = copy
    cut(next(out.glob("cells/*last_layer_laplace-seed1*/scores/clean.npz")))
    assert run(file, out, only=["*/map/0"]).ran == 0
    statuses = {(c["method"], c["seed"]): c["status"] for c in read_json(out / "bench.json")["cells"]}
    assert statuses["last_layer_laplace", 1] == "missing"
    assert list(statuses.values()).count("done") == 5


def test_what_a_damaged_failure_said_is_not_known(copy: tuple[Path, Path]) -> None:
    file, out = copy
    folder = next(out.glob("cells/*map-seed0*"))
    (folder / "result.json").unlink()
    (folder / "failure.json").write_text("{")
    assert run(file, out, only=["*/map/1"]).ran == 0
    (entry,) = [c for c in read_json(out / "bench.json")["cells"] if c["status"] == "failed"]
    assert "failure.json is not a whole file" in entry["error"]


def test_a_cell_with_parts_missing_is_refused(copy: tuple[Path, Path]) -> None:
    _, out = copy
    folder = next(out.glob("cells/*map-seed0*"))
    content = read_json(folder / "metrics.json")
    for change in ({"kind": 3}, {"data": 5}, {"data": [{}]}, {"reference": []}):
        write_json(folder / "metrics.json", content | change)
        with pytest.raises(CorruptFile, match=r"metrics\.json or result\.json in .* lacks something"):
            read_cell(folder)
