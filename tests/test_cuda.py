"""On a GPU: every method fits, predicts what a CPU predicts from the same state, saves and loads."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import caveat
from caveat import Network, Training, models
from caveat.engine.linearised.jacobian_features import NetworkFeatures
from caveat.engine.row_gradients import Jacobian
from caveat.engine.torch_settings import full_precision
from caveat.methods import discover
from caveat.randomness import SMALL, normals
from caveat.rows import Rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def task() -> caveat.Task:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(256, 3, 8, 8, generator=rng)
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    labels = (x[:, 0].mean((1, 2)) > 0).long()
    return caveat.Task(module, DataLoader(TensorDataset(x, labels), 64), caveat.Categorical(), validation=0.2)


@pytest.mark.parametrize("name", discover())
def test_fits_on_the_gpu_and_predicts_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    problem = task()
    start = caveat.fit(problem, caveat.MAP(training=Training(epochs=30)), device="cuda", progress=False)
    method = discover()[name].quick
    posterior = caveat.fit(
        problem, method, start=start if method.starts_from == "trained" else None, device="cuda", progress=False
    )
    x, y = problem.train.everything()
    prediction = posterior.predict(x)
    assert prediction.probs.device.type == "cuda"
    assert posterior.info.peak_bytes > 0
    posterior.save(tmp_path / "p")
    on_cpu = caveat.load(tmp_path / "p", task().network.module)
    if name != "mc_dropout":  # masks come from the device's own generator
        torch.testing.assert_close(on_cpu.predict(x).probs, prediction.probs.cpu(), atol=2e-3, rtol=0)
    scores = caveat.evaluate(posterior, {"clean": (x, y)}, progress=False)
    assert scores["clean"]["accuracy"].mean > 0.6


@pytest.mark.parametrize("compiled", [False, True])
def test_fast_training_gives_about_the_same(compiled: bool) -> None:
    problem = task()
    plain = caveat.fit(problem, caveat.MAP(training=Training(epochs=10)), device="cuda", progress=False)
    fast = Training(epochs=10, precision="bfloat16", channels_last=True, compile=compiled)
    other = caveat.fit(problem, caveat.MAP(training=fast), device="cuda", progress=False)
    x, _ = problem.train.everything()
    torch.testing.assert_close(other.predict(x).probs, plain.predict(x).probs, atol=0.05, rtol=0)


def test_compiled_variational_training_is_a_graph_that_goes_on_learning() -> None:
    problem = task()
    fast = Training(
        epochs=60, batch_size=51, learning_rate=0.01, precision="bfloat16", channels_last=True, compile=True
    )
    for structure in ("unstructured", "channel"):
        method = caveat.SSVI(density=0.4, structure=structure, interval=10, kl_weight=0.1, training=fast)
        posterior = caveat.fit(problem, method, device="cuda", progress=False)
        assert posterior.info.diagnostics["exchanges"] > 10
        scores = caveat.evaluate(posterior, {"clean": problem.train.everything()}, progress=False)
        assert scores["clean"]["accuracy"].mean > 0.75  # .85 and more without compiling, on a CPU, three seeds


def test_resumes_on_the_gpu_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from caveat.engine import run
    from caveat.engine.training import loop

    torch.use_deterministic_algorithms(True, warn_only=True)
    whole = caveat.fit(task(), caveat.MAP(training=Training(epochs=4)), device="cuda", progress=False)
    monkeypatch.setattr(run.Run, "checkpoint_due", lambda self: self.folder is not None)
    checkpoint = loop.Loop.checkpoint

    def killed(self: object) -> None:
        checkpoint(self)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Loop, "checkpoint", killed)
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            caveat.fit(
                task(), caveat.MAP(training=Training(epochs=4)), device="cuda", folder=tmp_path / "p", progress=False
            )
    resumed = caveat.fit(
        task(), caveat.MAP(training=Training(epochs=4)), device="cuda", folder=tmp_path / "p", progress=False
    )
    torch.use_deterministic_algorithms(False)
    for name, value in whole.state["params"].items():
        torch.testing.assert_close(resumed.state["params"][name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["hmc", "sgmcmc"])
def test_chains_of_a_gpu_are_judged_and_compared(name: str) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=rng)
    problem = caveat.Task(nn.Sequential(nn.Linear(4, 2)), (x, (x[:, 0] > 0).long()), caveat.Categorical())
    posterior = caveat.fit(problem, discover()[name].quick, device="cuda", progress=False)
    other = caveat.fit(problem, discover()["hmc"].quick, device="cuda", progress=False)
    data = (x, (x[:, 0] > 0).long())
    assert str(caveat.diagnose(posterior, data))
    assert caveat.posterior_surface(posterior, data, points=5).log_density.isfinite().all()
    assert caveat.fidelity(posterior, other, data)["agreement"].mean > 0.8


def test_derivatives_of_a_deep_network_are_recognised_in_spite_of_rounding() -> None:
    """Convolutions that round to ten bits turn relus over: the first layer's gradient is 4% off between batch sizes."""
    torch.manual_seed(0)
    network = Network(models.resnet18(), caveat.Categorical()).to(torch.device("cuda"))
    x, y = torch.randn(4, 3, 32, 32), torch.zeros(4, dtype=torch.long)
    assert torch.backends.cudnn.allow_tf32
    features = NetworkFeatures(network, network.params(), Rows((x, y)))
    assert features.outputs == 10
    assert not Jacobian(network, network.params(), x.cuda()).plan.general


def test_many_normals_are_made_on_the_gpu_and_few_are_the_same_everywhere() -> None:
    here, there = torch.zeros(1), torch.zeros(1, device="cuda")

    def made(count: int, like: torch.Tensor) -> torch.Tensor:
        return normals((count,), torch.Generator().manual_seed(3), like)

    assert torch.equal(made(SMALL, there).cpu(), made(SMALL, here))
    many = made(4 * SMALL, there)
    assert many.device.type == "cuda"
    assert torch.equal(many, made(4 * SMALL, there))
    assert abs(float(many.mean())) < 0.01
    assert abs(float(many.std()) - 1) < 0.01


def test_products_in_float16_round_as_those_of_tf32() -> None:
    torch.manual_seed(0)
    network = Network(models.resnet18(width=16), caveat.Categorical()).to(torch.device("cuda"))
    rows = Rows((torch.randn(64, 3, 32, 32), torch.zeros(64, dtype=torch.long)))
    exact = NetworkFeatures(network, network.params(), rows)
    short = NetworkFeatures(network, network.params(), rows, float16=True)
    z, v = torch.randn(8, exact.size, device="cuda"), torch.randn(8, 64, 10, device="cuda")
    with full_precision(torch.device("cuda")):
        block = next(exact.blocks())
        wanted = block.forward(z), block.backward(v)
    for features in (exact, short):
        block = next(features.blocks())
        for found, expected in zip((block.forward(z), block.backward(v)), wanted, strict=True):
            # Most of it is where a rounded number changes its sign before a relu, there and back alike.
            assert float((found - expected).norm() / expected.norm()) < 0.03
