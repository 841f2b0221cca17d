"""Two real processes add, gather and wait; one process alone does the same without torch.distributed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from caveat.engine.distributed import Ranks, current_ranks

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch import distributed
from caveat.engine.distributed import Ranks, current_ranks

folder = Path(sys.argv[1])
ranks = current_ranks(torch.device("cpu"))
assert ranks == Ranks(int(os.environ["RANK"]), 2), ranks
del os.environ["WORLD_SIZE"]  # a group that was joined counts, however it was started
assert current_ranks(torch.device("cpu")) == ranks
r = ranks.rank

sums = [torch.full((2, 3), 1.0 + r, dtype=torch.float64), torch.tensor(10**15 + r), torch.zeros(0)]
sums.append(torch.arange(6.0).reshape(2, 3).T)
strided = torch.zeros(4, 4)
view = strided[::2, 1::2]
view += 1 + r
ranks.add([*sums, view])
assert torch.equal(sums[0], torch.full((2, 3), 3.0, dtype=torch.float64))
assert int(sums[1]) == 2 * 10**15 + 1
assert torch.equal(sums[3], 2 * torch.arange(6.0).reshape(2, 3).T)
assert torch.equal(strided[::2, 1::2], torch.full((2, 2), 3.0)) and float(strided.sum()) == 12.0
ranks.add([])

def draw(i):
    rng = torch.Generator().manual_seed(i)
    return {
        "w": torch.randn(2, 3, generator=rng, dtype=torch.float64),
        "scalar": torch.tensor(-0.0),
        "count": torch.tensor(2**62 + i),
        "mask": torch.tensor([True, i == 1]),
        "half": torch.randn(5, generator=rng).bfloat16(),
        "none": torch.zeros(0),
    }

for count in (3, 1, 2, 5):
    jobs = ranks.mine(range(count))
    assert jobs == list(range(r, count, 2))
    gathered = ranks.gather({i: draw(i) for i in jobs}, count)
    for name, stack in gathered.items():
        expected = torch.stack([draw(i)[name] for i in range(count)])
        assert stack.dtype == expected.dtype and stack.shape == expected.shape, (name, stack.dtype)
        bits, wanted = (t.reshape(-1).view(torch.uint8) for t in (stack, expected))
        assert torch.equal(bits, wanted), (count, name)
    assert list(gathered) == list(draw(0))
    states = ranks.share({i: ({"a": draw(i), f"only {i}": {}}, {"number": i}) for i in jobs}, count)
    for i, (state, told) in enumerate(states):
        assert told == {"number": i} and list(state) == ["a", f"only {i}"]
        for name, value in draw(i).items():
            assert state["a"][name].dtype == value.dtype and torch.equal(state["a"][name], value), (count, name)

for n in (7, 2, 1):
    part = ranks.part(torch.arange(n))
    length = torch.tensor(len(part))
    (folder / f"part-{n}-{r}").write_text(" ".join(map(str, part.tolist())))
    ranks.add([length])
    assert int(length) == n

if r == 1:
    time.sleep(0.5)
    (folder / "late").write_text("written before rank 0 goes on")
ranks.wait()
assert (folder / "late").exists()
ranks.wait()
(folder / f"done-{r}").write_text("done")
distributed.destroy_process_group()
"""


def test_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [sys.executable, *launcher, *meeting, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "done-0").exists()
    assert (tmp_path / "done-1").exists()
    parts = {n: [(tmp_path / f"part-{n}-{r}").read_text() for r in (0, 1)] for n in (7, 2, 1)}
    assert parts == {7: ["0 1 2 3", "4 5 6"], 2: ["0", "1"], 1: ["0", ""]}


def test_alone_everything_is_ones_own(monkeypatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    ranks = current_ranks(torch.device("cpu"))
    assert ranks == Ranks()
    assert ranks.first
    assert ranks.mine(range(3)) == [0, 1, 2]
    rows, value = torch.arange(5), torch.tensor([2.0])
    assert torch.equal(ranks.part(rows), rows)
    ranks.add([value])
    ranks.wait()
    assert float(value) == 2.0
    draws = {i: {"w": torch.full((2,), float(i)), "count": torch.tensor(i)} for i in (2, 0, 1)}
    gathered = ranks.gather(draws, 3)
    assert torch.equal(gathered["w"], torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]))
    assert torch.equal(gathered["count"], torch.tensor([0, 1, 2]))


def test_a_job_of_one_process_is_alone(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert current_ranks(torch.device("cpu")) == Ranks()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_shares_cover_everything_once(size: int, count: int) -> None:
    ranks = [Ranks(rank, size) for rank in range(size)]
    rows = torch.arange(count)
    assert torch.equal(torch.cat([r.part(rows) for r in ranks]), rows)
    lengths = [len(r.part(rows)) for r in ranks]
    assert max(lengths) - min(lengths) <= 1
    assert sorted(job for r in ranks for job in r.mine(range(count))) == list(range(count))
    assert [r.first for r in ranks] == [True] + [False] * (size - 1)
