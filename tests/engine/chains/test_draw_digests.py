"""Draws of an unfinished chain that are not as they were written are refused, whatever was done to them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import caveat
from caveat.engine.run import Run

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
METHODS = {
    "hmc": caveat.HMC(chains=2, length=6, warmup=20, trajectory=0.1),
    "sgmcmc": caveat.SGMCMC(chains=2, length=6, thin=1, burn_in=2, learning_rate=0.01),
}


def task() -> caveat.Task:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return caveat.Task(module, (X, (X[:, 0] > 0).long()), caveat.Categorical())


def stop_late(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit that is killed when most of its draws are made."""
    checkpoint, count = Run.checkpoint, 0
    last = 24 if name == "hmc" else 6

    def killed(self: Run, *given: object) -> None:
        nonlocal count
        checkpoint(self, *given)  # type: ignore[arg-type]
        count += 1
        if count == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Run, "checkpoint_due", lambda self: True)
        patched.setattr(Run, "checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            caveat.fit(task(), METHODS[name], folder=folder, progress=False)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[140] ^= 1
    path.write_bytes(content)


def zeroed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[128:160] = bytes(32)
    path.write_bytes(content)


def not_a_number(path: Path) -> None:
    array = np.load(path)
    array[0, 0] = np.nan
    np.save(path, array)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("damage", [flipped, zeroed, not_a_number, cut])
def test_damaged_draws_are_refused(
    name: str, damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_late(name, tmp_path / "p", monkeypatch)
    damage(tmp_path / "p.partial" / "params-0.npy")
    with pytest.raises((caveat.CorruptFile, ValueError)):
        caveat.fit(task(), METHODS[name], folder=tmp_path / "p", progress=False)
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("name", METHODS)
def test_whole_draws_are_gone_on_with(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = caveat.fit(task(), METHODS[name], progress=False)
    stop_late(name, tmp_path / "p", monkeypatch)
    resumed = caveat.fit(task(), METHODS[name], folder=tmp_path / "p", progress=False)
    assert torch.equal(resumed.predict(X).samples, whole.predict(X).samples)
