"""Tables as data sets: what is learned is learned from the training rows, and new rows are read by it."""

import json

import numpy as np
import pytest
import torch

from caveat.data import from_frame, load, prepare_table


def lines(n=100, seed=0):
    rng = np.random.default_rng(seed)
    for row in range(n):
        town = "Oslo" if row % 3 else "Bergen"
        yield f'H{row},{rng.normal():.3f},{town},2024-{row % 12 + 1:02}-01,"${1000 * rng.random():,.2f}"'


def write(path, rows, header="house,area,town,sold,price"):
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_a_table_of_all_kinds(tmp_path):
    data = load(str(write(tmp_path / "a.csv", lines())), id="house")
    done = data.preprocessing
    assert done["columns"] == ["area", "town", "sold"]
    assert done["inputs"][:3] == ["area", "town is Bergen", "town is Oslo"]
    assert data.train.tensors[0].shape == (80, len(done["inputs"])) == (80, len(done["mean"]))
    assert (done["target"], done["target_unit"], done["id"]) == ("price", "$", "house")
    torch.testing.assert_close(data.train.tensors[0].mean(0), torch.zeros(len(done["inputs"])), atol=1e-5, rtol=0)


def test_nothing_of_the_test_rows_is_learned(tmp_path):
    rows = list(lines())
    path = write(tmp_path / "a.csv", rows)
    before = load(str(path), id="house").preprocessing
    prices = {round(price, 2) for price in load(str(path), id="house").test.tensors[1].flatten().tolist()}
    test = [row for row in range(100) if float(rows[row].split("$")[1].strip('"').replace(",", "")) in prices]
    assert len(test) == 20
    for row in test:
        cells = rows[row].split(",", 4)
        rows[row] = ",".join([cells[0], "1e6", "Atlantis", "2050-01-01", cells[4]])
    after = load(str(write(path, rows)), id="house").preprocessing
    for key in ("encoding", "mean", "std", "inputs"):
        assert after[key] == before[key]
    assert "'Atlantis' in 20 rows" in " ".join(after["notes"])


def test_new_rows_are_prepared_as_the_data_set_s_own(tmp_path):
    path = write(tmp_path / "a.csv", lines())
    data = load(str(path), id="house")
    every = prepare_table(path, data.preprocessing)
    own = torch.cat([data.train.tensors[0], data.test.tensors[0]])
    assert {tuple(row) for row in every.tolist()} == {tuple(row) for row in own.tolist()}
    again = json.loads(json.dumps(data.preprocessing))
    assert torch.equal(prepare_table(str(path), again), every)
    with pytest.raises(ValueError, match="preprocessing without columns is not of a table"):
        prepare_table(path, {"mean": [0.0], "std": [1.0]})


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_frame_is_what_its_csv_is(tmp_path, library):
    module = pytest.importorskip(library)
    path = write(tmp_path / "a.csv", lines())
    frame = module.read_csv(path)
    data, same = load(str(path), id="house", target="price"), from_frame(frame, id="house", target="price", name="a")
    for part in ("train", "test"):
        for ours, theirs in zip(getattr(data, part).tensors, getattr(same, part).tensors, strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(prepare_table(frame, data.preprocessing), prepare_table(path, data.preprocessing))
    with pytest.raises(ValueError, match="the frame 'a' lacks the column z"):
        from_frame(frame, target="z", name="a")


def test_columns_that_cannot_be_inputs(tmp_path):
    path = write(tmp_path / "a.csv", (f"{row},n{row},{row / 7}" for row in range(30)), ",name,y")
    with pytest.raises(ValueError, match=r"a\.csv: no column can be an input \(name: text that hardly ever"):
        load(str(path))
    path = write(tmp_path / "a.csv", (f"{row},{row % 5},{row / 7}" for row in range(30)), ",a,y")
    assert load(str(path)).preprocessing["columns"] == ["a"], "a column without a name is an index"
    with pytest.raises(ValueError, match="the column y cannot be both the target and the id"):
        load(str(path), id="y")
    with pytest.raises(ValueError, match="lacks the column town"):
        load(str(path), text=("town",))
    with pytest.raises(ValueError, match="needs a header with at least one column besides the target"):
        load(str(write(tmp_path / "b.csv", ["1", "2"], "t")))


def test_rows_without_a_target_are_left_out_and_said(tmp_path):
    rows = [f"{row},{row / 7 if row else ''}" for row in range(31)]
    data = load(str(write(tmp_path / "a.csv", rows, "a,y")))
    assert len(data.train) + len(data.test) == 30
    assert data.preprocessing["notes"] == ["1 row without a target left out"]


def test_rows_that_repeat_others_are_said(tmp_path):
    rows = [f"{row},{row / 7}" for row in range(30)]
    for repeats, said in ((1, "1 row repeats another cell by cell"), (3, "3 rows repeat others cell by cell")):
        data = load(str(write(tmp_path / "a.csv", rows + rows[:repeats], "a,y")))
        assert len(data.train) + len(data.test) == 30 + repeats, "they are data all the same"
        assert data.preprocessing["notes"][0].startswith(said)


def test_errors_name_the_row_of_the_file(tmp_path):
    rows = [f"{row}.5,{row / 7 if row > 2 else ''}" for row in range(40)]
    rows[20] = "oops,1.0"
    with pytest.raises(ValueError, match="row 21, column 'a': 'oops' is not a number"):
        load(str(write(tmp_path / "a.csv", rows, "a,y")))
