"""A pass over the data that was killed goes on to the identical sum."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from caveat.engine.laplace.sweep import Sweep
from caveat.engine.row_gradients import Jacobian
from caveat.engine.run import Run
from tests.engine.laplace.sweep_reference import N, assert_close, diagonal, flat, matrix, sweep

PASSES: dict[str, Callable[[Sweep], Any]] = {
    "full": lambda s: s.full(None)[0].ggn,
    "stacked": lambda s: s.stacked(None)[0].rows,
    "diagonal": lambda s: diagonal(s),
    "kronecker": lambda s: matrix(s.kronecker()[0]),
    "low_rank": lambda s: s.low_rank(3)[0].rows,
    "scores": lambda s: torch.stack([flat(found, s) for found in s.scores(exact=False)]),
}


def kill_at_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = Run.checkpoint

    def killed(self: Run, carry: Any, note: Any) -> None:
        keep(self, carry, note)
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "checkpoint_due", lambda self: self.folder is not None)
    monkeypatch.setattr(Run, "checkpoint", killed)


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_a_killed_pass_goes_on_to_the_identical_sum(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, fisher: str
) -> None:
    monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0: 3)
    identity = {"fit": "this one"}
    plain = PASSES[name](sweep("categorical", fisher=fisher))
    monkeypatch.setattr(Run, "checkpoint_due", lambda self: self.folder is not None)
    kept = sweep("categorical", fisher=fisher, run=Run(0, folder=tmp_path / "whole", identity=identity))
    whole = PASSES[name](kept)
    kill_at_checkpoints(monkeypatch)
    attempts, found = 0, None
    while found is None:
        attempts += 1
        assert attempts < 20
        again = sweep("categorical", fisher=fisher, run=Run(0, folder=tmp_path / "killed", identity=identity))
        try:
            found = PASSES[name](again)
        except KeyboardInterrupt:
            continue
    assert attempts == 1 + math.ceil(N / 3) * (3 if name == "low_rank" else 1), "no batch was summed twice"
    assert torch.equal(found, whole)
    assert_close(found, plain, 1e-12)


@pytest.mark.parametrize("name", ["full", "diagonal", "kronecker"])
def test_a_killed_pass_goes_on_in_pieces_of_another_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Which is that of the memory which is free."""
    plain = PASSES[name](sweep("categorical"))
    kill_at_checkpoints(monkeypatch)

    def go_on(size: int) -> Tensor:
        monkeypatch.setattr(Jacobian, "rows_at_once", lambda self, columns=0: size)
        return PASSES[name](sweep("categorical", run=Run(0, folder=tmp_path / "killed")))

    for size in (3, 2, N):  # ends with the last row
        with pytest.raises(KeyboardInterrupt):
            go_on(size)
    assert_close(go_on(1), plain, 1e-12)
