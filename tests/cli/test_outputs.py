"""What a command prints: json also of a failure, nothing that commands a terminal, silence where nobody reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import caveat
from caveat.cli import main, verb
from tests.cli.command import run
from tests.cli.own_data import TRAINED, accuracy, clusters, table

OTHER_MODEL = """
from torch import nn


def wider():
    return nn.Sequential(nn.Flatten(), nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 3))
"""


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["fit", "map", "--data", "no_such_set"], 1, "'no_such_set' is neither a known data set"),
        (["fit", "lastlayer"], 2, "there is no method 'lastlayer' (did you mean last_layer_laplace?)"),
        (["predikt"], 2, "there is no verb 'predikt' (did you mean predict?)"),
        (["fit", "map", "--validation", "1.0"], 2, "must be in [0, 1)"),
        (["fit", "map", "--no-such-option", "1"], 2, "was not understood"),
        (["predict", "--posterior", "nowhere"], 1, "nowhere is not a posterior"),
        (["bench", "nowhere.toml"], 1, "nowhere.toml"),
    ],
)
def test_a_failure_is_json_too(
    arguments: list[str], code: int, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = run(capsys, *arguments, "--out", tmp_path / "p", "--json")
    content = json.loads(out)
    assert (found, content["code"]) == (code, code)
    assert reason in content["error"]
    assert err.strip(), "and for people on standard error"


def test_cells_that_failed_are_told_in_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = '[methods.broken]\nmethod = "last_layer_laplace"\nlayer = "nowhere"\n'
    (tmp_path / "e.toml").write_text(f'data = ["digits"]\nmodels = ["mlp"]\nseeds = [0]\n[map]\nepochs = 1\n{broken}')
    code, out, err = run(capsys, "bench", tmp_path / "e.toml", "--out", tmp_path / "r", "--json", "--quiet")
    content = json.loads(out)
    assert (code, content["code"], len(content["failed"])) == (1, 1, 1), err
    assert "layer='nowhere'" in content["error"]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["fit", "hmc", "--help"], ["methods"]])
def test_a_reader_that_has_seen_enough_is_no_error(arguments: list[str]) -> None:
    """As in `caveat --help | head -1`: the pipe is closed before all is written."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "caveat.cli", *arguments]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_help_lists_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--version" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == caveat.__version__


def test_names_from_files_do_not_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\x1b[31m"
    data = table(tmp_path / "evil.csv", clusters(), "a,b,y")
    data.write_text(data.read_text().replace("a,b,y", f"a,{evil}b,y"))
    code, out, err = run(capsys, "fit", "map", "--data", data, "--out", tmp_path / "p", "--training.epochs", "3")
    assert code == 0, err
    assert "\\x1b]0;owned\\x07\\x1b[31mb" in err
    code, out, err_again = run(capsys, "fit", "map", "--data", data, "--target", f"{evil}c", "--out", tmp_path / "q")
    assert code == 1
    assert not {character for character in out + err + err_again if ord(character) < 32} - {"\n", "\t", "\r"}


def test_printable_keeps_what_people_write() -> None:
    text = "Größe µ 数 ✓\n\tab"
    assert verb.printable(text) == text
    assert verb.printable("a\x1b[2Jb\x9b\u202ec\x7f\r") == "a\\x1b[2Jb\\x9b\\u202ec\\x7f\\r"


def test_a_model_that_is_named_takes_the_place_of_one_of_the_package(
    plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was passed over without a word."""
    (tmp_path / "net.py").write_text(OTHER_MODEL)
    named = ["predict", "--posterior", plane, "--out", tmp_path / "p.npz", "--model"]
    code, _, err = run(capsys, *named, f"{tmp_path}/net.py:wider")
    assert (code, "is a posterior of another model" in err) == (1, True), err
    code, _, err = run(capsys, *named, "no_such_model")
    assert (code, "no model 'no_such_model'" in err) == (1, True), err
    assert run(capsys, *named, "mlp")[0] == 0


def test_a_posterior_that_python_saved_is_exported_with_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(OTHER_MODEL)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 9), nn.ReLU(), nn.Linear(9, 3))
    x = torch.randn(30, 2)
    task = caveat.Task(model, (x, torch.arange(30) % 3), caveat.Categorical())
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=2)), progress=False)
    folder = posterior.save(tmp_path / "mine")
    export = ["export", "--posterior", folder, "--out", tmp_path / "whole.pt2"]
    code, _, err = run(capsys, *export)
    assert (code, "--model file.py:function" in err) == (1, True), err
    code, out, err = run(capsys, *export, "--model", f"{tmp_path}/net.py:wider")
    assert (code, "gives mean" in out) == (0, True), err
    alone = torch.export.load(tmp_path / "whole.pt2").module()
    torch.testing.assert_close(alone(x)["mean"], posterior.predict(x).probs)


def test_classes_match_those_of_the_posterior_by_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A posterior of 0, 1, 2 knows 00, +1 and 02."""
    plain = table(tmp_path / "plain.csv", clusters(), "a,b,y")
    other = table(tmp_path / "other.csv", clusters(names=("00", "+1", "02")), "a,b,y")
    assert run(capsys, "fit", "map", "--data", plain, "--out", tmp_path / "map", *TRAINED)[0] == 0
    assert accuracy(capsys, tmp_path / "map", other) == accuracy(capsys, tmp_path / "map", plain) == 1
    unknown = table(tmp_path / "unknown.csv", clusters(names=("0", "1", "7")), "a,b,y")
    code, _, err = run(capsys, "evaluate", "--posteriors", tmp_path / "map", "--data", unknown, "--out", tmp_path / "r")
    assert (code, "has the class 7, which the posterior does not know" in err) == (1, True), err
