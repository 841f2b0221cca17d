"""Random command lines end with an exit code and a reason, never with a traceback."""

import random
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.cli.random_commands import made_places, random_command

CODES = {0, 1, 2}


def _not_now(*arguments: object, **options: object) -> None:
    raise ValueError("a reference takes hours: not here")


def try_commands(
    seeds: range, folder: Path, posterior: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> dict[int, int]:
    """Run the command lines of these seeds in a folder; returns how often each exit code came."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr("caveat.references.build_reference", _not_now)
    (folder / "here").mkdir()
    (folder / "places").mkdir()
    monkeypatch.chdir(folder / "here")
    places = made_places(folder / "places", posterior)
    counts: dict[int, int] = {}
    for seed in seeds:
        command = random_command(random.Random(seed), places, seed)
        try:
            code, out, err = run(capsys, *command)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: caveat {' '.join(map(repr, command))}") from error
        assert code in CODES, command
        assert "Traceback" not in out + err, command
        assert code == 0 or (out + err).strip(), f"no reason given: {command}"
        counts[code] = counts.get(code, 0) + 1
    return counts


def test_forty_random_command_lines(
    plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = try_commands(range(40), tmp_path, plane, capsys, monkeypatch)
    assert len(counts) == len(CODES), "some are understood, some refused, some not understood"


@pytest.mark.slow
def test_three_hundred_random_command_lines(
    plane: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try_commands(range(1000, 1300), tmp_path, plane, capsys, monkeypatch)
