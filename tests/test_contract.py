"""Every discovered method, through the same checks. A new method is in here without a line being added.

Those of other packages are too, where such are installed: `pytest tests/test_contract.py -k fixed_gaussian`.
"""

import contextlib
import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import caveat
from caveat import likelihoods
from caveat.engine.method import not_a_method
from caveat.methods import built_in, discover, method_name
from caveat.storage import State

METHODS = discover()
KNOWN = [name for name in likelihoods.__all__ if dataclasses.is_dataclass(getattr(likelihoods, name))]
LEAST = {"Categorical", "Bernoulli", "Gaussian", "HeteroscedasticGaussian"}
WIDTH = {"Categorical": 3, "Bernoulli": 1, "Gaussian": 1, "HeteroscedasticGaussian": 2, "Poisson": 1}
SUPPORTED = [(name, likelihood) for name, method in METHODS.items() for likelihood in method.likelihoods]

every_method = pytest.mark.parametrize("name", METHODS)


def problem(likelihood: str, dtype: torch.dtype = torch.float32, n: int = 60) -> tuple[Tensor, Tensor]:
    """Inputs [n, 4] and targets that a small network can learn."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=rng, dtype=torch.float64)
    signal = x[:, :1] + x[:, 1:2] ** 2
    noise = torch.randn(n, 1, generator=rng, dtype=torch.float64)
    targets = {
        "Categorical": torch.bucketize(signal[:, 0].contiguous(), torch.tensor([0.0, 1.5], dtype=torch.float64)),
        "Bernoulli": (signal > 0.5).to(dtype),
        "Gaussian": (signal + 0.1 * noise).to(dtype),
        "HeteroscedasticGaussian": (signal + 0.1 * (1 + x[:, 2:3].abs()) * noise).to(dtype),
        "Poisson": torch.poisson((signal / 2).exp(), generator=rng).to(dtype),
    }
    return x.to(dtype), targets[likelihood]


def build(likelihood: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, WIDTH[likelihood])).to(dtype)


def make_task(
    likelihood: str = "Categorical", dtype: torch.dtype = torch.float32, model: nn.Module | None = None
) -> caveat.Task:
    x, y = problem(likelihood, dtype)
    return caveat.Task(
        model or build(likelihood, dtype),
        DataLoader(TensorDataset(x, y), 20),
        getattr(caveat, likelihood)(),
        caveat.GaussianPrior(0.1),
        validation=0.2,
    )


def short(method: type) -> caveat.Method:
    """The quick instance with less training: the checks here are about behaviour, not about quality."""
    quick = method.quick
    if any(field.name == "training" for field in dataclasses.fields(quick)):
        return dataclasses.replace(quick, training=dataclasses.replace(quick.training, epochs=3))
    if any(field.name == "trajectory" for field in dataclasses.fields(quick)):
        return dataclasses.replace(quick, length=10, warmup=20, trajectory=0.1)
    if any(field.name == "learning_rate" for field in dataclasses.fields(quick)):
        return dataclasses.replace(quick, learning_rate=0.01)
    return quick


def fitted(name: str, task: caveat.Task, seed: int = 0) -> caveat.Posterior:
    method = METHODS[name]
    start = caveat.MAP(training=caveat.Training(epochs=60)) if method.starts_from == "trained" else None
    return caveat.fit(task, short(method), start=start, seed=seed, progress=False)


@every_method
def test_describes_itself(name: str) -> None:
    method = METHODS[name]
    assert not_a_method(method) is None
    assert method.__doc__.strip().splitlines()[0].endswith(".")
    assert method_name(method.quick) == name
    assert LEAST <= set(method.likelihoods) <= set(KNOWN)


@pytest.mark.parametrize("name", built_in())
def test_a_method_of_this_package_has_a_name_a_test_and_a_page(name: str) -> None:
    method = built_in()[name]
    assert getattr(caveat, method.__name__) is method
    assert method.__name__ in dir(caveat)
    assert (Path(__file__).parent / "methods" / f"test_{name}.py").exists(), "a method has a test file"
    assert (Path(__file__).parents[1] / "docs" / "methods" / f"{name}.md").exists(), "a method has a docs page"


@pytest.mark.parametrize(("name", "likelihood"), SUPPORTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_predicts_with_every_likelihood(name: str, likelihood: str, dtype: torch.dtype) -> None:
    task = make_task(likelihood, dtype)
    posterior = fitted(name, task)
    x, y = problem(likelihood, dtype)
    prediction = posterior.predict(x)
    closed = posterior.method.closed_form(task.network.likelihood)
    assert len(prediction.samples) == (1 if closed else posterior.method.default_draws)
    assert prediction.samples.shape[1] == len(x)
    assert prediction.samples.dtype == dtype
    for value in (prediction.samples, prediction.aleatoric, prediction.epistemic, prediction.log_prob(y)):
        assert bool(torch.isfinite(value).all())
    assert bool((prediction.epistemic >= 0).all())
    assert bool((prediction.aleatoric >= 0).all())
    if prediction.kind == "classification":
        whole = prediction.probs.sum(-1) if likelihood == "Categorical" else torch.ones(len(x), dtype=dtype)
        torch.testing.assert_close(whole, torch.ones(len(x), dtype=dtype))
        torch.testing.assert_close(
            prediction.entropy, prediction.aleatoric + prediction.epistemic, atol=1e-5, rtol=1e-4
        )
    else:
        assert prediction.mean.shape == y.shape
        torch.testing.assert_close(
            prediction.variance, prediction.aleatoric + prediction.epistemic, atol=1e-5, rtol=1e-4
        )
        lower, upper = prediction.interval(0.9)
        assert bool((lower <= upper).all())
    baseline = task.network.likelihood.baseline(y)
    assert float(prediction.log_prob(y).double().mean()) > baseline - 2.0, "not wildly worse than knowing nothing"


@every_method
def test_threads_that_predict_at_once_get_what_each_would_get_alone(name: str) -> None:
    posterior, x = fitted(name, make_task()), problem("Categorical")[0]
    alone = [posterior.predict(x, seed=seed).samples for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        together = [pool.submit(posterior.predict, x, seed=seed % 3) for seed in range(30)]
        assert all(torch.equal(job.result().samples, alone[seed % 3]) for seed, job in enumerate(together))


@every_method
def test_batch_of_one_empty_batch_and_number_of_draws(name: str) -> None:
    posterior = fitted(name, make_task())
    x, _ = problem("Categorical")
    assert posterior.predict(x[:1]).probs.shape == (1, 3)
    assert posterior.predict(x[:0]).probs.shape == (0, 3)
    assert posterior.predict(x[:2], draws=3).samples.shape == (3, 2, 3)
    with pytest.raises(ValueError, match="draws=0"):
        posterior.predict(x, draws=0)


@every_method
def test_refuses_bad_inputs(name: str) -> None:
    posterior = fitted(name, make_task())
    x, _ = problem("Categorical")
    with pytest.raises(ValueError, match=r"could not take these inputs \(shapes \[\(60, 3\)\]\)"):
        posterior.predict(x[:, :3])
    with pytest.raises(ValueError, match=r"float64 but the network's weights are torch\.float32"):
        posterior.predict(x.double())
    x[3, 1] = float("nan")
    with pytest.raises(ValueError, match="first in row 3 of 60"):
        posterior.predict(x)


@dataclasses.dataclass(frozen=True)
class ForClassesOnly(caveat.MAP):
    likelihoods = ("Categorical",)


@pytest.mark.parametrize("likelihood", KNOWN)
def test_a_likelihood_that_a_method_does_not_support_is_refused(likelihood: str) -> None:
    method = ForClassesOnly(training=caveat.Training(epochs=1))
    if likelihood == "Categorical":
        assert caveat.fit(make_task(likelihood), method, progress=False).info.seconds > 0
        return
    with pytest.raises(ValueError, match=f"ForClassesOnly does not support {likelihood}: it supports Categorical"):
        caveat.fit(make_task(likelihood), method, progress=False)


@every_method
def test_what_a_method_cannot_do_it_refuses_with_a_reason(name: str) -> None:
    posterior, (x, y) = fitted(name, make_task()), problem("Categorical")
    with contextlib.suppress(TypeError):  # or it can
        assert posterior.moments(x)[0].shape == (60, 3)
    if METHODS[name].update is caveat.Method.update:
        with pytest.raises(TypeError, match="cannot take more data once it is fitted"):
            posterior.update((x, y), progress=False)
    else:
        assert posterior.update((x, y), progress=False).info.diagnostics["updated_with_rows"] == 60


@every_method
def test_same_seed_same_answer_and_other_seed_another(name: str) -> None:
    x, _ = problem("Categorical")
    state = torch.random.get_rng_state()
    first, second, other = (fitted(name, make_task(), seed) for seed in (3, 3, 4))
    torch.testing.assert_close(first.predict(x, seed=5).samples, second.predict(x, seed=5).samples, rtol=0, atol=0)
    assert not torch.equal(first.predict(x, seed=5).samples, other.predict(x, seed=5).samples)
    assert torch.equal(state, torch.random.get_rng_state()), "the global random state was moved"


@every_method
def test_saves_and_loads_bit_for_bit(name: str, tmp_path: Path) -> None:
    posterior = fitted(name, make_task("Gaussian"))
    posterior.save(tmp_path / "posterior")
    x, _ = problem("Gaussian")
    loaded = caveat.load(tmp_path / "posterior", build("Gaussian").requires_grad_(False))
    assert loaded.method == posterior.method
    assert loaded.info == posterior.info
    before, after = posterior.predict(x, seed=2), loaded.predict(x, seed=2)
    assert torch.equal(before.samples, after.samples)
    assert torch.equal(before.variance, after.variance)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        posterior.save(tmp_path / "posterior")
    with pytest.raises(caveat.CorruptFile, match="another model"):
        caveat.load(tmp_path / "posterior", nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))


class ThirdParty(nn.Module):
    """In-place ReLU, BatchNorm, dict input, a frozen layer, a tied weight, a hook: what real modules hold."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.ReLU(inplace=True)
        self.twice = nn.Linear(16, 16)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.twice.weight
        self.head = nn.Linear(16, 3)
        self.register_buffer("shift", torch.full((16,), 0.1))
        self.stem.bias.requires_grad_(False)

    def forward(self, features: Tensor, scale: Tensor) -> dict[str, Tensor]:
        h = self.act(self.norm(self.stem(features * scale)))
        return {"logits": self.head(self.again(torch.relu_(self.twice(h) + self.shift)))}


class Rows(torch.utils.data.Dataset):
    def __init__(self, n: int = 64) -> None:
        self.x, self.y = problem("Categorical", n=n)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"features": self.x[i], "scale": torch.ones(1), "labels": self.y[i]}


def snapshot(module: nn.Module) -> list[object]:
    tensors = [t.clone() for t in (*module.parameters(), *module.buffers())]
    flags = [p.requires_grad for p in module.parameters()]
    return [tensors, flags, [m.training for m in module.modules()], [dict(m._forward_hooks) for m in module.modules()]]


@every_method
def test_leaves_a_third_party_module_untouched_through_the_whole_way(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = ThirdParty().train()
    module.norm.eval()
    calls: list[int] = []
    module.head.register_forward_hook(lambda *_: calls.append(1))
    before = snapshot(module)
    grads = [p.grad for p in module.parameters()]
    task = caveat.Task(module, DataLoader(Rows(), 16), caveat.Categorical(), validation=0.25)
    posterior = fitted(name, task)
    posterior.save(tmp_path / "posterior")
    after = snapshot(module)
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))  # type: ignore[call-overload]
    assert before[1:] == after[1:]
    assert grads == [p.grad for p in module.parameters()]
    x = {"features": Rows().x, "scale": torch.ones(64, 1)}
    loaded = caveat.load(tmp_path / "posterior", ThirdParty())
    assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)
    scores = caveat.evaluate(loaded, {"clean": DataLoader(Rows(), 16)}, folder=tmp_path / "run", progress=False)
    assert 0 <= scores["clean"]["accuracy"].mean <= 1
    treatments = {entry["layer"]: entry["treatment"] for entry in posterior.info.coverage}
    assert treatments["stem"].endswith("in part"), "a frozen bias is said to be left out"


@every_method
def test_honours_the_parameter_filter(name: str) -> None:
    x, y = problem("Categorical")
    module = build("Categorical")
    trained = caveat.fit(make_task(model=module), caveat.MAP(training=caveat.Training(epochs=60)), progress=False)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            parameter.copy_(trained.state["params"][key])
    task = caveat.Task(module, (x, y), caveat.Categorical(), validation=0.2, parameters="2.*")
    posterior = caveat.fit(task, short(METHODS[name]), progress=False)
    assert task.network.names == ("2.weight", "2.bias")
    assert {e["layer"]: e["treatment"] for e in posterior.info.coverage}["0"] == "fixed"
    with contextlib.suppress(TypeError):  # a method may have no weight draws, and says so
        assert not any(key.startswith("0.") for key in next(posterior.sample(1)))


@every_method
def test_says_what_it_cost(name: str) -> None:
    info = fitted(name, make_task()).info
    assert info.seconds > 0
    assert info.peak_bytes > 0
    assert info.stored_bytes > 0
    assert info.versions["torch"] == torch.__version__
    assert {entry["layer"] for entry in info.coverage} == {"0", "2"}
    json.dumps(dataclasses.asdict(info), allow_nan=False)


@every_method
def test_refuses_what_does_not_fit_into_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caveat.engine.cost.free_bytes", lambda device: 10)
    with pytest.raises(MemoryError, match="10 bytes are free"):
        caveat.fit(make_task(), short(METHODS[name]), progress=False)


@every_method
def test_resumes_after_a_kill_as_if_nothing_had_happened(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from caveat.engine import run

    whole = fitted(name, make_task())
    start = (
        caveat.fit(make_task(), caveat.MAP(training=caveat.Training(epochs=60)), progress=False)
        if METHODS[name].starts_from == "trained"
        else None
    )
    monkeypatch.setattr(run.Run, "checkpoint_due", lambda self: self.folder is not None)
    checkpoint, attempts, kept = run.Run.checkpoint, 0, 0

    def killed(self: run.Run, carry: State, note: dict[str, object]) -> None:
        nonlocal kept
        checkpoint(self, carry, note)
        kept += 1
        if kept == attempts:  # one more each time: many short iterations come to an end as well
            raise KeyboardInterrupt

    monkeypatch.setattr(run.Run, "checkpoint", killed)
    while not (tmp_path / "posterior").exists():
        attempts, kept = attempts + 1, 0
        assert attempts < 60
        try:
            resumed = caveat.fit(
                make_task(), short(METHODS[name]), start=start, folder=tmp_path / "posterior", progress=False
            )
        except KeyboardInterrupt:
            assert not (tmp_path / "posterior").exists()
    x, _ = problem("Categorical")
    assert torch.equal(resumed.predict(x).samples, whole.predict(x).samples)
    assert not (tmp_path / "posterior.partial").exists()


def early_stopped() -> caveat.Posterior:
    """BatchNorm and early stopping: on several ranks all must stop at the same epoch and hold the same statistics."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    x, y = problem("Categorical")
    task = caveat.Task(module, DataLoader(TensorDataset(x, y), 16), caveat.Categorical(), validation=0.3)
    training = caveat.Training(epochs=60, patience=2, learning_rate=0.05)
    return caveat.fit(task, caveat.MAP(training=training), progress=False)


RANKS = """
import sys
sys.path.insert(0, {tests!r})
import importlib.util, torch
spec = importlib.util.spec_from_file_location("contract", {file!r})
contract = importlib.util.module_from_spec(spec)
spec.loader.exec_module(contract)
import torch.distributed as dist
for name in {names!r}:
    posterior = contract.fitted(name, contract.make_task("Gaussian"))
    x, _ = contract.problem("Gaussian")
    prediction = posterior.predict(x)
    stops = contract.early_stopped()
    assert stops.state["params"]["1.running_mean"].isfinite().all()
    if dist.is_initialized():
        means = [torch.zeros(16) for _ in range(2)]
        dist.all_gather(means, stops.state["params"]["1.running_mean"])
        assert torch.equal(*means), "ranks hold different statistics"
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({{"samples": prediction.samples, "variance": prediction.variance}}, f"{out}/{{name}}.pt")
"""


def test_two_ranks_give_the_same_as_one(tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    results = {}
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        out.mkdir()
        script.write_text(RANKS.format(tests=str(Path(__file__).parent), file=__file__, names=list(METHODS), out=out))
        launcher = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
        ]
        command = [sys.executable, *(launcher if ranks == 2 else []), str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        results[ranks] = {name: torch.load(out / f"{name}.pt", weights_only=True) for name in METHODS}
    for name in METHODS:
        for key in ("samples", "variance"):
            torch.testing.assert_close(
                results[1][name][key], results[2][name][key], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )
