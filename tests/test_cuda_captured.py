"""On a GPU: recorded steps are the steps that they replace, they can be killed, and what cannot be recorded says so."""

import csv
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import caveat
from caveat import SGMCMC, Training, bench
from caveat.bench import groups
from caveat.bench.cells import Place
from caveat.engine import captured_steps
from caveat.engine.chains import langevin_chain, langevin_sampler, parallel_chains
from caveat.engine.run import Run
from caveat.engine.training import meeting, point_training
from tests.recorded_steps import CHAINS, SPARSE_CHAINS, Waits, network, rotated, task

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def fitted(method: caveat.Method, problem: caveat.Task | None = None, **more: Any) -> caveat.Posterior:
    return caveat.fit(problem or task(), method, device="cuda", progress=False, **more)


@pytest.mark.parametrize("which", CHAINS)
def test_recorded_chains_are_the_chains(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = task(augment=rotated) if which == "augmented" else task()
    replays: list[int] = []
    run = captured_steps.CapturedSteps.run
    monkeypatch.setattr(captured_steps.CapturedSteps, "run", lambda self, *a: (replays.append(1), run(self, *a)))
    recorded = fitted(CHAINS[which], problem)
    assert replays
    monkeypatch.setattr(langevin_sampler, "are_resident", lambda rows: False)
    replays.clear()
    plain = fitted(CHAINS[which], problem)
    assert not replays
    for name, value in plain.state["params"].items():
        torch.testing.assert_close(recorded.state["params"][name], value, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("which", ["given", "found", "rmsprop"])
def test_a_killed_recorded_chain_goes_on_as_the_same_chain(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A sum in another order, by 1e-6 of the largest gradient, moves the chain with rmsprop by ten times the tolerance:
    # weights whose gradients were tiny at first have next to no mass. On a CPU chains go on bit for bit.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    whole = fitted(CHAINS[which])
    checkpoint = Run.checkpoint

    def killed(self: Run, *given: Any) -> None:
        checkpoint(self, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "checkpoint_due", lambda self: self.folder is not None)
    monkeypatch.setattr(Run, "checkpoint", killed)
    for _ in range(CHAINS[which].plan(200, 128).epochs):
        with pytest.raises(KeyboardInterrupt):
            fitted(CHAINS[which], folder=tmp_path / "p")
    monkeypatch.setattr(Run, "checkpoint", checkpoint)
    resumed = fitted(CHAINS[which], folder=tmp_path / "p")
    for name, value in whole.state["params"].items():
        torch.testing.assert_close(resumed.state["params"][name].to(value), value, rtol=1e-4, atol=1e-5)


def sparse_fit(method: caveat.Method, **more: Any) -> caveat.Posterior:
    middle = nn.Tanh(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    start = caveat.MAP(training=Training(epochs=2)) if isinstance(method, caveat.AEB) else None
    return fitted(method, task(network(*middle), augment=rotated), start=start, **more)


def assert_near(a: caveat.Posterior, b: caveat.Posterior, rtol: float, atol: float) -> None:
    for group, tensors in a.state.items():
        for name, value in tensors.items():
            other = b.state[group][name].to(value.device)
            torch.testing.assert_close(
                other, value, rtol=rtol, atol=atol, msg=lambda m, of=f"{group} {name}": f"{of}: {m}"
            )


@pytest.mark.parametrize("which", SPARSE_CHAINS)
def test_recorded_chains_over_sparse_networks_are_the_chains(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.backends.cudnn, "deterministic", True
    )  # who comes, goes or is smallest may hang on rounding
    monkeypatch.setattr(langevin_chain, "STOOD", 5)
    replays: list[int] = []
    run = captured_steps.CapturedSteps.run
    monkeypatch.setattr(captured_steps.CapturedSteps, "run", lambda self, *a: (run(self, *a), replays.append(1))[1])
    recorded = sparse_fit(SPARSE_CHAINS[which])
    assert replays, recorded.info.warnings
    monkeypatch.setattr(langevin_chain, "are_resident", lambda rows: False)
    replays.clear()
    plain = sparse_fit(SPARSE_CHAINS[which])
    assert not replays
    assert_near(plain, recorded, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("which", SPARSE_CHAINS)
def test_a_killed_recorded_chain_over_sparse_networks_goes_on(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(langevin_chain, "STOOD", 5)
    whole = sparse_fit(SPARSE_CHAINS[which])
    checkpoint, count = Run.checkpoint, 0

    def killed(self: Run, *given: Any) -> None:
        nonlocal count
        checkpoint(self, *given)
        count += 1
        if count in (3, 5):
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "checkpoint_due", lambda self: self.folder is not None)
    monkeypatch.setattr(Run, "checkpoint", killed)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            sparse_fit(SPARSE_CHAINS[which], folder=tmp_path / "p")
    assert_near(whole, sparse_fit(SPARSE_CHAINS[which], folder=tmp_path / "p"), rtol=1e-3, atol=2e-4)


def test_fast_passes_of_chains_give_about_the_same() -> None:
    plain = fitted(SGMCMC(chains=2, length=2, thin=1, burn_in=1, learning_rate=0.001, batch_size=50))
    fast = SGMCMC(
        chains=2,
        length=2,
        thin=1,
        burn_in=1,
        learning_rate=0.001,
        batch_size=50,
        precision="bfloat16",
        channels_last=True,
        compile=True,
    )
    for name, value in fitted(fast).state["params"].items():
        torch.testing.assert_close(value, plain.state["params"][name], rtol=0.05, atol=0.02)


@pytest.mark.parametrize("module", [network(), nn.Sequential(nn.Flatten(), nn.Linear(192, 2))], ids=["conv", "flat"])
def test_the_recorded_gradient_of_hmc_is_its_gradient(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    method = caveat.HMC(chains=2, length=4, warmup=0, step_size=0.02, trajectory=0.1, splits=2)
    recorded = fitted(method, task(module))

    def refused(*given: Any) -> None:
        raise captured_steps.CaptureError("not now")

    monkeypatch.setattr(parallel_chains, "captured", refused)
    plain = fitted(method, task(module))
    assert any("not now" in warning for warning in plain.info.warnings)
    for name, value in plain.state["params"].items():
        torch.testing.assert_close(recorded.state["params"][name], value, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    "training",
    [
        Training(epochs=6, batch_size=48),
        Training(epochs=6, batch_size=48, optimizer="sgd", learning_rate=0.05, clip=1.0),
        Training(epochs=12, batch_size=50, learning_rate=0.05, patience=2),
    ],
    ids=["adam", "sgd", "patience"],
)
def test_members_side_by_side_are_those_trained_alone(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = task(network(nn.BatchNorm2d(8)), validation=0.2, augment=rotated)
    method = caveat.DeepEnsemble(members=3, training=training)
    together = fitted(method, problem)

    def refused(loops: Any) -> None:
        raise captured_steps.CaptureError("not now")

    monkeypatch.setattr(point_training, "run_loops_together", refused)
    alone = fitted(method, problem)
    assert any("not now" in warning for warning in alone.info.warnings)
    assert together.info.gradient_evaluations == alone.info.gradient_evaluations
    assert together.info.flops == pytest.approx(alone.info.flops)
    for name, value in alone.state["params"].items():
        torch.testing.assert_close(together.state["params"][name], value, rtol=1e-2, atol=2e-3)


def test_an_ensemble_killed_side_by_side_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = caveat.DeepEnsemble(members=2, training=Training(epochs=4, batch_size=50))
    whole = fitted(method)
    checkpoint, count = Run.checkpoint, 0

    def killed(self: Run, *given: Any) -> None:
        nonlocal count
        checkpoint(self, *given)
        count += 1
        if count == 3:  # one member is an epoch ahead
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "checkpoint_due", lambda self: self.folder is not None)
    monkeypatch.setattr(Run, "checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        fitted(method, folder=tmp_path / "p")
    resumed = fitted(method, folder=tmp_path / "p")
    for name, value in whole.state["params"].items():
        torch.testing.assert_close(resumed.state["params"][name].to(value), value, rtol=1e-3, atol=1e-4)


def test_what_cannot_be_recorded_is_said_and_done_all_the_same() -> None:
    waits = fitted(CHAINS["given"], task(network(Waits())))
    assert any("waits for the GPU" in warning for warning in waits.info.warnings)
    plain = fitted(CHAINS["given"])
    for name, value in plain.state["params"].items():
        other = {"3.weight": "4.weight"}.get(name, name)
        if value.shape == waits.state["params"].get(other, value[:0]).shape:
            torch.testing.assert_close(waits.state["params"][other], value, rtol=1e-3, atol=2e-4)
    dropout = caveat.DeepEnsemble(members=2, training=Training(epochs=2))
    said = fitted(dropout, task(network(nn.Dropout(0.5)))).info.warnings
    assert any("random numbers of its own" in warning for warning in said)


def test_a_recording_that_cuda_refuses_leaves_random_numbers_usable() -> None:
    rng, same = (torch.Generator("cuda").manual_seed(5) for _ in range(2))
    before, torchs_own = rng.get_state(), torch.cuda.get_rng_state()

    def step() -> None:
        torch.randn(3, device="cuda", generator=rng)
        torch.randn(3, device="cuda")
        torch.cuda.synchronize()  # which no look at the steps before the recording finds

    with pytest.raises(captured_steps.CaptureError, match="CUDA does not record a step"):
        captured_steps._record(step, [rng])
    rng.set_state(before)
    draw, own = torch.randn(3, device="cuda", generator=rng), torch.randn(3, device="cuda")
    assert torch.equal(draw, torch.randn(3, device="cuda", generator=same))
    torch.cuda.set_rng_state(torchs_own)
    assert torch.equal(own, torch.randn(3, device="cuda"))
    captured_steps._record(lambda: torch.randn(3, device="cuda", generator=rng).add_(1), [rng])()


def test_graphs_that_wait_to_be_freed_do_not_end_a_recording() -> None:
    x = torch.zeros(3, device="cuda")
    gc.disable()
    try:
        for _ in range(5):
            cycle: list[Any] = [captured_steps._record(lambda: x.add_(1), [])]
            cycle.append(cycle)
            del cycle
    finally:
        gc.enable()

    def step() -> None:
        kept = [[] for _ in range(20_000)]  # enough for Python to look for what can be freed
        x.add_(len(kept))

    captured_steps._record(step, [])()
    torch.cuda.synchronize()
    assert x.tolist() == [20_000.0] * 3


def test_bench_cells_of_several_seeds_train_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(2, (300,), generator=rng)
    x = torch.randn(300, 3, generator=rng) + y[:, None]
    lines = [",".join(f"{v:.4f}" for v in row) + f",{'ab'[label]}" for row, label in zip(x.tolist(), y, strict=True)]
    (tmp_path / "clouds.csv").write_text("\n".join(["u,v,w,label", *lines]) + "\n")
    file = tmp_path / "small.toml"
    knobs = "[map]\nepochs = 5\n[methods.deep_ensemble]\nmembers = 2\ntraining = {epochs = 5}\n"
    file.write_text(f'data = ["{tmp_path}/clouds.csv"]\nmodels = ["mlp"]\nseeds = [0, 1, 2]\n{knobs}')
    lanes: list[int] = []
    together = meeting.run_loops_together
    monkeypatch.setattr(meeting, "run_loops_together", lambda loops: (lanes.append(len(loops)), together(loops))[1])
    nll: dict[str, list[float]] = {}
    for way in ("together", "alone"):
        monkeypatch.setattr(groups, "_pays", lambda place, way=way: way == "together")
        done = bench.run_bench(file, Place(tmp_path / way, torch.device("cuda")), say=lambda text: None)
        assert not done.failed, done.failed
        with (tmp_path / way / "results.csv").open(newline="") as table:
            rows = [row for row in csv.DictReader(table) if row["metric"] == "nll"]
        nll[way] = [float(row["value"]) for row in rows if row["method"] in ("map", "deep_ensemble")]
    assert lanes == [3, 6], "three MAPs, and three ensembles of two"
    assert nll["together"] == pytest.approx(nll["alone"], abs=1e-3)
