"""Runs of HMC that are cut short, killed or divided over ranks give the draws of a run that was not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import caveat
from caveat.engine.cost import forward_flops
from caveat.engine.run import Run
from tests.methods.hmc_reference import flat_draws, network_task

# Runs that are cut short.


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fit that was interrupted after draw 12 of 20."""
    keep = Run.checkpoint

    def stop(self: Run, carry: Any, note: dict[str, Any]) -> None:
        keep(self, carry, note)
        if note["iteration"] == 4 + 12:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "checkpoint_due", lambda self: True)
        patch.setattr(Run, "checkpoint", stop)
        with pytest.raises(KeyboardInterrupt):
            caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), folder=tmp_path / "posterior", progress=False)
    return tmp_path / "posterior"


def test_draws_are_in_files_while_the_run_goes_on(interrupted: Path) -> None:
    partial = interrupted.with_name("posterior.partial")
    whole = caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), progress=False)
    for i, stack in enumerate(whole.state["params"].values()):
        array = numpy.load(partial / f"params-{i}.npy")
        assert array.shape == tuple(stack.shape)
        assert (array[:, :12] == stack[:, :12].numpy()).all()
        assert (array[:, 12:] == 0).all()
    assert (numpy.load(partial / "stats-lp.npy")[:, :12] == whole.state["stats"]["lp"][:, :12].numpy()).all()
    resumed = caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), folder=interrupted, progress=False)
    assert torch.equal(flat_draws(resumed), flat_draws(whole))
    assert not partial.exists()
    loaded = caveat.load(interrupted, network_task().network.module)
    assert torch.equal(flat_draws(loaded), flat_draws(whole))


def test_a_folder_without_one_of_its_files_is_refused(interrupted: Path) -> None:
    (interrupted.with_name("posterior.partial") / "params-0.npy").unlink()
    with pytest.raises(caveat.CorruptFile, match=r"params-0\.npy is missing, and with it draws that were made"):
        caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), folder=interrupted, progress=False)


def test_goes_on_whatever_weights_the_module_has(interrupted: Path) -> None:
    task = network_task()
    with torch.no_grad():
        for parameter in task.network.module.parameters():
            parameter.add_(1.0)
    whole = caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), progress=False)
    resumed = caveat.fit(task, caveat.HMC(2, 20, 4, 0.2), folder=interrupted, progress=False)
    assert torch.equal(flat_draws(resumed), flat_draws(whole))


def test_another_configuration_is_refused_and_the_draws_are_kept(interrupted: Path) -> None:
    partial = interrupted.with_name("posterior.partial")
    before = {path.name: path.read_bytes() for path in partial.iterdir()}
    for method in (caveat.HMC(2, 30, 4, 0.2), caveat.HMC(2, 20, 4, 0.1)):
        with pytest.raises(ValueError, match=r"\.partial holds an unfinished fit with other knobs of the method"):
            caveat.fit(network_task(), method, folder=interrupted, progress=False)
    with pytest.raises(ValueError, match="unfinished fit with another seed"):
        caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), seed=1, folder=interrupted, progress=False)
    with pytest.raises(ValueError, match="unfinished fit with another data"):
        caveat.fit(network_task(n=21), caveat.HMC(2, 20, 4, 0.2), folder=interrupted, progress=False)
    assert {path.name: path.read_bytes() for path in partial.iterdir()} == before


def test_a_fit_that_fails_keeps_the_draws_that_it_had(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = interrupted.with_name("posterior.partial")
    before = {path.name: path.read_bytes() for path in partial.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("caveat.engine.chains.hamiltonian_sampler.DIVERGED", -1.0)  # every proposal, from now on
        patch.setattr("caveat.engine.chains.hamiltonian_sampler.HOPELESS", 1)
        with pytest.raises(ValueError, match="every proposal diverged"):
            caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), folder=interrupted, progress=False)
    assert {path.name: path.read_bytes() for path in partial.iterdir()} == before
    whole = caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), progress=False)
    resumed = caveat.fit(network_task(), caveat.HMC(2, 20, 4, 0.2), folder=interrupted, progress=False)
    assert torch.equal(flat_draws(resumed), flat_draws(whole))


def run_script(text: str, folder: Path, ranks: int = 1) -> str:
    """What a script that has this module as `here` prints, in one process or in several."""
    script = folder / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        f"from tests.methods import test_hmc_resume as here\n{text}"
    )
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [sys.executable, *([*launcher, *meeting] if ranks > 1 else []), str(script), str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def long_run(folder: Path | None) -> caveat.Posterior:
    """Warm-up, a mass matrix, jitter, a trajectory that varies, and divergences."""
    method = caveat.HMC(2, 120, 100, trajectory=0.8, jitter=0.3, mass="diagonal", target_acceptance=0.45)
    return caveat.fit(network_task(likelihood="Poisson"), method, seed=3, folder=folder, progress=False)


def load_what_fits_need() -> None:
    """Import what is imported at first use, once for all processes that fork from this one."""
    task = network_task()
    forward_flops(task.network, task.network.params(), task.train.everything()[0])


KILLS = """
import json, os, random, signal, time
from pathlib import Path
from caveat.engine.run import Run

here.load_what_fits_need()
calls = [0]
def due(self):  # kept every third iteration: in the fit itself that is every ten seconds
    calls[0] += 1
    return self.folder is not None and calls[0] % 3 == 0
Run.checkpoint_due = due

folder = Path(sys.argv[1]) / "posterior"
kept = Path(f"{folder}.partial") / "checkpoint.json"
def reached():
    return json.loads(kept.read_text())["note"]["iteration"] if kept.exists() else 0

rng, kills, total = random.Random(7), 0, 220
while True:
    child = os.fork()  # torch is loaded and idle: a new process without waiting for it
    if child == 0:
        here.long_run(folder)
        os._exit(0)
    wanted = (kills - 1 + rng.random()) / 10 * total if kills < 10 else float("inf")
    while reached() < wanted and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    if kills == 10:
        break
    time.sleep(rng.random() * 0.03)
    os.kill(child, signal.SIGKILL)  # fails where it has ended by itself, which it must not
    os.waitpid(child, 0)
    kills += 1
print(kills)
"""


def test_killed_ten_times_it_is_as_if_it_never_was(tmp_path: Path) -> None:
    whole = long_run(None)
    assert 0 < whole.info.diagnostics["divergences"] < 240
    assert run_script(KILLS, tmp_path).strip() == "10"
    resumed = caveat.load(tmp_path / "posterior", network_task(likelihood="Poisson").network.module)
    for group, tensors in whole.state.items():
        for name, value in tensors.items():
            assert torch.equal(resumed.state[group][name], value), f"{group} {name}"
    assert resumed.info.diagnostics == whole.info.diagnostics
    assert resumed.info.gradient_evaluations == whole.info.gradient_evaluations


SHARED = {  # chains over the ranks, and the rows where the chains cannot be shared out
    "chains": caveat.HMC(2, 5, 100, mass="diagonal", trajectory=0.5),
    "rows": caveat.HMC(3, 10, 4, step_size=0.1, splits=2, jitter=0.2),  # few: rounding grows by every trajectory
}


RANKS = """
from pathlib import Path
import torch
for name, method in here.SHARED.items():
    folder = Path(sys.argv[1]) / name
    posterior = here.caveat.fit(here.network_task(torch.float64, "Gaussian"), method, folder=folder, progress=False)
    assert posterior.predict(torch.zeros(2, 3, dtype=torch.float64)).samples.isfinite().all()
"""


def test_ranks_share_chains_or_rows_and_give_the_same_draws(tmp_path: Path) -> None:
    run_script(RANKS, tmp_path, ranks=2)
    for name, method in SHARED.items():
        alone = caveat.fit(network_task(torch.float64, "Gaussian"), method, progress=False)
        shared = caveat.load(tmp_path / name, network_task(torch.float64, "Gaussian").network.module)
        for group, tensors in alone.state.items():
            for key, value in tensors.items():
                torch.testing.assert_close(shared.state[group][key], value, rtol=1e-9, atol=1e-9, msg=f"{name} {key}")
        if name == "chains":
            assert torch.equal(flat_draws(shared), flat_draws(alone))
        assert shared.info.gradient_evaluations == alone.info.gradient_evaluations


MEMORY = """
import json, os, threading, time
from pathlib import Path
import torch
from torch import nn

here.load_what_fits_need()

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def peak(name, length, trajectory):
    \"\"\"The most anonymous memory while a network of 130,000 weights is fitted, in kilobytes.\"\"\"
    reading, writing = os.pipe()
    if os.fork() == 0:
        most, ended = [0], [False]
        def watch():
            while not ended[0]:
                most[0] = max(most[0], anonymous())
                time.sleep(0.002)
        watcher = threading.Thread(target=watch)
        watcher.start()
        x, y = torch.randn(4, 500), torch.tensor([0.0, 1.0, 1.0, 0.0])
        module = nn.Sequential(nn.Linear(500, 260), nn.Tanh(), nn.Linear(260, 1))
        method = here.caveat.HMC(1, length, 0, step_size=0.02, trajectory=trajectory)
        task = here.caveat.Task(module, (x, y), here.caveat.Bernoulli())
        here.caveat.fit(task, method, folder=Path(sys.argv[1]) / name, progress=False)
        ended[0] = True
        watcher.join()
        os.write(writing, str(most[0]).encode())
        os._exit(0)
    os.wait()
    return int(os.read(reading, 100))

print(json.dumps([peak("few", 10, 0.02), peak("many", 110, 0.02), peak("long", 10, 0.6)]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says how much memory is anonymous")
def test_memory_does_not_grow_with_draws_nor_with_trajectories(tmp_path: Path) -> None:
    few, many, long = json.loads(run_script(MEMORY, tmp_path))
    draws = 100 * 130_000 * 4 / 1024  # kilobytes that the others take
    assert abs(many - few) < 0.2 * draws
    assert abs(long - few) < 0.2 * draws
