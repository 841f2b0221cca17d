"""The folder of a fit: one process at a time works on it, and what a killed one leaves is gone after the next call."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import caveat
from caveat import fitting
from caveat.engine.run import Run
from caveat.files import FolderInUse, remove_folder, sole_use


def small_task() -> caveat.Task:
    torch.manual_seed(0)
    x = torch.randn(20, 2)
    return caveat.Task(nn.Linear(2, 1), (x, x.sum(1, keepdim=True)), caveat.Gaussian())


def fitted(folder: Path, epochs: int = 2) -> caveat.Posterior:
    method = caveat.MAP(training=caveat.Training(epochs=epochs))
    return caveat.fit(small_task(), method, folder=folder, progress=False)


def test_a_second_fit_in_one_folder_is_refused_before_it_does_any_work(tmp_path: Path) -> None:
    folder = tmp_path / "posterior"
    with sole_use(folder):
        with pytest.raises(FolderInUse, match=rf"posterior is in use by process {os.getpid()} on .*: wait until it is"):
            fitted(folder)
        with pytest.raises(FolderInUse):
            fitted(tmp_path / "other").save(folder)
    fitted(folder)
    with sole_use(folder), pytest.raises(FolderInUse):
        fitted(tmp_path / "third").save(folder, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "posterior", "third"]


TWO = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from caveat import fitting
from tests.test_fit_folder import fitted
run, folder = fitting._fitted, Path({folder!r})
def slowly(*arguments):
    (folder.parent / "begun").touch()
    while not (folder.parent / "go").exists():
        time.sleep(0.01)
    return run(*arguments)
fitting._fitted = slowly
fitted(folder)
"""


def test_of_two_processes_one_does_the_work(tmp_path: Path) -> None:
    folder, root = tmp_path / "results" / "posterior", str(Path(__file__).parents[1])
    (tmp_path / "results").mkdir()
    with subprocess.Popen([sys.executable, "-c", TWO.format(root=root, folder=str(folder))]) as first:
        while not (tmp_path / "results" / "begun").exists():
            assert first.poll() is None
        with pytest.raises(FolderInUse, match=f"in use by process {first.pid} on "):
            fitted(folder)
        (tmp_path / "results" / "go").touch()
        assert first.wait() == 0
    with pytest.raises(FileExistsError, match=r"posterior exists: load it with caveat\.load"):
        fitted(folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["begun", "go", "posterior"]


def test_what_is_left_beside_a_finished_posterior_goes_with_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, partial = tmp_path / "posterior", tmp_path / "posterior.partial"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "discard", lambda self: None)  # as if killed before it
        fitted(folder)
    assert (partial / "run.json").exists()
    with pytest.raises(FileExistsError, match="posterior exists"):
        fitted(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["posterior"]


def test_the_place_of_another_fit_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, partial = tmp_path / "posterior", tmp_path / "posterior.partial"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "discard", lambda self: None)
        fitted(folder)
    remove_folder(folder)
    fitted(tmp_path / "other", epochs=3).save(folder)
    with pytest.raises(FileExistsError, match="posterior exists"):
        fitted(folder)
    assert (partial / "run.json").exists(), "it is not what became of this posterior"
    (partial / "finished.json").unlink()
    with pytest.raises(FileExistsError, match="posterior exists"):
        fitted(folder)
    assert (partial / "run.json").exists()


def test_nothing_is_tidied_while_another_process_is_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, partial = tmp_path / "posterior", tmp_path / "posterior.partial"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "discard", lambda self: None)
        fitted(folder)
    with sole_use(folder):
        fitting.remove_leftovers(folder)
    assert partial.exists()
    fitting.remove_leftovers(folder)
    assert not partial.exists()
