"""What an experiment asks of its data is refused before a fit."""

from pathlib import Path

import pytest

from caveat.cli import main


@pytest.mark.parametrize(
    ("head", "shifts", "complaint"),
    [
        ('models = ["mlp"]', "rotation = [30]", "shifts.rotation on 'clouds': rotation is no shift for clouds"),
        ('models = ["mlp"]\nood = ["photographs"]', "", "ood: 'photographs' for 'clouds': 'photographs' is no out-of-"),
        ('models = ["lenet5"]', "", "models: 'lenet5' on 'clouds': lenet5 takes images"),
        ('models = ["own.py:narrow"]', "", "models: 'narrow' on 'clouds': the network could not take"),
        ('models = ["own.py:broken"]', "", "models: 'broken' on 'clouds': ZeroDivisionError"),
    ],
)
def test_what_the_data_cannot_have_is_refused_before_a_fit(
    head: str, shifts: str, complaint: str, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = "from torch import nn\ndef {}():\n    return nn.Linear({}, 2)\n"
    (tmp_path / "own.py").write_text(made.format("narrow", "2") + made.format("broken", "1 // 0"))
    (tmp_path / "bad.toml").write_text(f'data = ["{table}"]\n{head}\n[shifts]\n{shifts}\n[map]\nepochs = 1\n')
    for way in ([], ["--dry-run"]):
        assert main(["bench", str(tmp_path / "bad.toml"), "--out", str(tmp_path / "out"), *way]) != 0
        assert f"bad.toml: {complaint}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
