"""Ranks that were given different things are refused before any work, whichever comes first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from caveat.files import sole_use

SCRIPT = """
import sys, os
import torch
from torch import nn
import caveat
from caveat.files import FolderInUse
rank, case = int(os.environ["RANK"]), {case!r}
rng = torch.Generator().manual_seed(0)
x = torch.randn(40, 3, generator=rng)
y = (x[:, 0] > 0).long()
if case != "weights" or rank == 0:
    torch.manual_seed(0)
module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
rows = slice(20 * rank, 20 * rank + 20) if case == "rows" else slice(None)
task = caveat.Task(module, (x[rows], y[rows]), caveat.Categorical())
method = caveat.MAP(training=caveat.Training(epochs=2 + rank * (case == "knobs")))
seed = rank if case == "seed" else 0
try:
    posterior = caveat.fit(task, method, seed=seed, progress=False, folder={folder!r})
    print("fitted")
except (ValueError, FolderInUse) as error:
    print("refused:", error)
"""


def on_two_ranks(case: str, place: Path, folder: Path | None) -> subprocess.CompletedProcess[str]:
    """The script as two processes, once both have ended."""
    script = place / "fit.py"
    script.write_text(SCRIPT.format(case=case, folder=None if folder is None else str(folder)))
    torchrun = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:0"
    command = [sys.executable, *torchrun.split(), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.parametrize(
    ("case", "folder", "words"),
    [
        ("weights", True, "(start): they start from other weights: call torch.manual_seed"),
        ("rows", False, "(data): they have other training rows: give every rank the whole data set"),
        ("rows", True, "(data): they have other training rows: give every rank the whole data set"),
        ("knobs", False, "(knobs): the method has other knobs there"),
        ("seed", False, "(seed): they were given another seed"),
        ("nothing", True, ""),
    ],
)
def test_ranks_that_differ_are_refused(case: str, folder: bool, words: str, tmp_path: Path) -> None:
    done = on_two_ranks(case, tmp_path, tmp_path / "posterior" if folder else None)
    if case == "nothing":
        assert done.stdout.count("fitted") == 2
    else:
        assert done.stdout.count("rank 1 and rank 0 were not given the same") == 2, done.stdout
        assert words in done.stdout
        assert not (tmp_path / "posterior").exists()
        assert not (tmp_path / "posterior.partial").exists()


def test_a_folder_that_is_in_use_is_refused_on_every_rank(tmp_path: Path) -> None:
    with sole_use(tmp_path / "posterior"):
        done = on_two_ranks("nothing", tmp_path, tmp_path / "posterior")
    assert done.stdout.count(f"posterior is in use by process {os.getpid()} on ") == 2, done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["fit.py"]
