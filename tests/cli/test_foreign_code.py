"""A posterior's folder can name a Python file, and somebody else may have made the folder: its code is not run."""

import json
from pathlib import Path

import pytest

from caveat.storage import read_json, write_json
from tests.cli.command import run
from tests.cli.own_data import clusters, table

NET = "from pathlib import Path\nfrom torch import nn\nPath({mark!r}).touch()\ndef net():\n    return nn.Linear(2, 3)\n"
DATA = "from pathlib import Path\nPath({mark!r}).touch()\ndef rows(folder, seed):\n    raise ValueError('run')\n"
QUICK = ["--training.epochs", "1", "--quiet"]
VERBS = [
    ["predict", "--posterior", "p", "--out", "out.npz"],
    ["evaluate", "--posteriors", "p"],
    ["diagnose", "--posterior", "p"],
    ["fit", "map", "--data", "ok.csv", "--start", "p", "--out", "next", *QUICK],
]


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A posterior p that this user fitted to a model file of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("net.py").write_text(NET.format(mark="mine"))
    table(Path("ok.csv"), clusters(), "a,b,y")
    assert run(capsys, "fit", "map", "--data", "ok.csv", "--model", "net.py:net", "--out", "p", *QUICK)[0] == 0
    return tmp_path


def change_recipe(**content: str) -> None:
    """Edit what the folder says, with a checksum that fits."""
    path = Path("p/posterior.json")
    whole = read_json(path)
    whole["note"]["recipe"] |= content
    path.unlink()
    write_json(path, whole)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
@pytest.mark.parametrize("where", ["inside the folder", "in the place of the model"])
def test_a_folder_cannot_have_its_own_code_run(
    folder: Path, where: str, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    target = Path("p/net.py") if where == "inside the folder" else Path("net.py")
    target.write_text(NET.format(mark="theirs"))
    change_recipe(model=f"{target.resolve()}:net")
    code, _, err = run(capsys, *verb)
    assert (code, "which you have not run yet as it is now" in err) == (1, True), err
    assert not Path("theirs").exists()


def test_nor_a_file_that_makes_its_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("rows.py").write_text(DATA.format(mark="theirs"))
    change_recipe(data=f"{Path('rows.py').resolve()}:rows")
    for verb in VERBS[:3]:
        code, _, err = run(capsys, *verb)
        assert (code, "a file that you have not run yet as it is now" in err) == (1, True), err
    assert not Path("theirs").exists()


def test_ones_own_model_is_run_again_and_a_named_one_is_remembered(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "predict", "--posterior", "p", "--out", "a.npz", "--quiet")[0] == 0
    Path("net.py").write_text(NET.format(mark="changed"))
    assert run(capsys, "predict", "--posterior", "p", "--out", "b.npz", "--quiet")[0] == 1
    named = ["--model", "net.py:net"]
    assert run(capsys, "predict", "--posterior", "p", "--out", "b.npz", "--quiet", *named)[0] == 0
    assert run(capsys, "predict", "--posterior", "p", "--out", "c.npz", "--quiet")[0] == 0
    record = folder / "state" / "caveat" / "files_run.json"
    assert list(json.loads(record.read_text())) == [str(folder / "net.py")]
    record.write_text("not json")  # nothing is known then, and nothing is run
    assert run(capsys, "predict", "--posterior", "p", "--out", "d.npz", "--quiet")[0] == 1
