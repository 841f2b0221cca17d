"""Fits and benches that are killed at any step on files, and called again: the same result, and nothing left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_contract import METHODS

FEW = ["map", "deep_ensemble", "hmc", "swag", "laplace", "ssvi", "bench", "table", "frozen_base"]


def kills(folder: Path, count: int, seed: int, names: list[str]) -> dict[str, int]:
    """How many kills of each `kill_runs.py` made; it fails at the first that leaves a trace."""
    script = Path(__file__).with_name("kill_runs.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(count), str(seed), *names],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_a_few_kills(tmp_path: Path) -> None:
    counts = kills(tmp_path, 2, 5, FEW)
    assert list(counts) == FEW
    assert sum(counts.values()) >= 2 * len(FEW)


@pytest.mark.slow
def test_five_hundred_kills(tmp_path: Path) -> None:
    counts = kills(tmp_path, 24, 11, ["bench", "table", "frozen_base", *METHODS])
    assert sum(counts.values()) >= 500
    print(counts)
