"""Another forward function with the same parameters is noticed: on load, on resuming, and nowhere else."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.forward_probe import DRAWN, _outputs, _weights, differs_from, forward_probe
from caveat.engine.run import Run
from caveat.network import Network
from caveat.storage import code_digest

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def mlp(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), activation(), nn.Linear(8, 2))


class Named(nn.Module):
    """Takes a dict of tokens and features, and a flag."""

    def __init__(self, order: int = 1) -> None:
        super().__init__()
        self.order = order
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 2)

    def forward(self, tokens: Tensor, features: Tensor, deep: bool) -> Tensor:
        h = self.embed(tokens).mean(1) + features * self.order
        return self.head(h.tanh() if deep else h)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(())


def network(module: nn.Module) -> Network:
    return Network(module, caveat.Categorical())


@pytest.mark.parametrize("other", [nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Identity])
def test_another_activation_is_noticed(other: type[nn.Module]) -> None:
    probe = forward_probe(network(mlp()), X)
    assert not differs_from(probe, network(mlp()))
    assert differs_from(probe, network(mlp(other)))


def wide(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    """More weights than are drawn of a parameter."""
    return nn.Sequential(nn.Linear(3, 300), activation(), nn.Linear(300, 1024), activation(), nn.Linear(1024, 2))


def test_large_parameters_repeat_numbers_and_no_two_rows_are_alike() -> None:
    probe = forward_probe(network(wide()), X)
    assert not differs_from(probe, network(wide()))
    assert differs_from(probe, network(wide(nn.Tanh)))
    weight = _weights(network(wide()), DRAWN)["2.weight"]
    assert len(weight.unique(dim=0)) == len(weight) == 1024
    assert float(weight.std()) == pytest.approx(300**-0.5, rel=0.01)


def test_probes_of_old_files_had_every_number_drawn() -> None:
    probe = forward_probe(network(wide()), X)
    (outputs,) = _outputs(network(wide()), probe["inputs"], None)
    assert outputs is not None
    old = {"inputs": probe["inputs"], "outputs": outputs.tolist()}
    assert not differs_from(old, network(wide()))
    assert differs_from(old, network(wide(nn.Tanh)))
    assert old["outputs"] != probe["outputs"]


def test_weights_do_not_matter_and_nothing_of_the_data_is_kept() -> None:
    probe = forward_probe(network(mlp()), X)
    assert probe == forward_probe(network(mlp()), X + 100)
    module = mlp()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert not differs_from(probe, network(module))


def test_inputs_of_any_structure() -> None:
    x = {"tokens": torch.randint(7, (2, 5)), "features": torch.randn(2, 4), "deep": True}
    probe = forward_probe(network(Named()), x)
    assert not differs_from(probe, network(Named()))
    assert differs_from(probe, network(Named(order=-1)))
    assert forward_probe(network(Named()), x | {"deep": object()}) == {}, "what cannot be told is not probed"


def test_a_network_that_draws_random_numbers_has_no_probe() -> None:
    net = network(Noisy(3, 2))
    state = torch.random.get_rng_state()
    assert forward_probe(net, X) == {}
    assert torch.equal(state, torch.random.get_rng_state())


def test_batchnorm_and_half_precision() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    module(X)
    net = network(module)
    probe = forward_probe(net, X)
    assert not differs_from(probe, net.with_fixed(net.fixed()))
    assert forward_probe(network(mlp().bfloat16()), X.bfloat16())["inputs"]["type"] == "bfloat16"


@pytest.mark.parametrize("method", [caveat.MAP, caveat.DeepEnsemble, caveat.MeanFieldVI])
def test_load_refuses_another_function(method: Any, tmp_path: Path) -> None:
    task = caveat.Task(mlp(), (X, Y), caveat.Categorical())
    quick = method(training=caveat.Training(epochs=1))
    caveat.fit(task, quick, folder=tmp_path / "p", progress=False)
    assert caveat.load(tmp_path / "p", mlp()).predict(X).probs.shape == (40, 2)
    with pytest.raises(caveat.CorruptFile, match="computes something else with them"):
        caveat.load(tmp_path / "p", mlp(nn.Tanh))


SHORT = caveat.MAP(training=caveat.Training(epochs=3))


def leave_unfinished(task: caveat.Task, folder: Path) -> None:
    """A fit that is killed at its first checkpoint."""
    checkpoint = Run.checkpoint

    def killed(self: Run, *given: Any) -> None:
        checkpoint(self, *given)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Run, "checkpoint_due", lambda self: True)
        patched.setattr(Run, "checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            caveat.fit(task, SHORT, folder=folder, progress=False)


def test_an_unfinished_fit_of_another_function_is_not_gone_on_with(tmp_path: Path) -> None:
    method = SHORT
    leave_unfinished(caveat.Task(mlp(), (X, Y), caveat.Categorical()), tmp_path / "p")
    with pytest.raises(ValueError, match="unfinished fit of a network that computes something else"):
        caveat.fit(
            caveat.Task(mlp(nn.Tanh), (X, Y), caveat.Categorical()), method, folder=tmp_path / "p", progress=False
        )
    caveat.fit(caveat.Task(mlp(), (X, Y), caveat.Categorical()), method, folder=tmp_path / "p", progress=False)


def shifted(by: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    def augment(x: Tensor, rng: torch.Generator) -> Tensor:
        return x + by

    return augment


class Shift:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor, rng: torch.Generator) -> Tensor:
        return x + self.by


def plus(by: float, x: Tensor, rng: torch.Generator) -> Tensor:
    return x + by


@pytest.mark.parametrize("make", [shifted, Shift, lambda by: partial(plus, by), lambda by: lambda x, rng: x * by])
def test_functions_are_told_apart_by_code_and_by_what_they_hold(make: Callable[[float], Any]) -> None:
    assert code_digest(make(1.0)) == code_digest(make(1.0))
    assert code_digest(make(1.0)) != code_digest(make(2.0))
    assert code_digest(lambda x, rng: x + 1) != code_digest(lambda x, rng: x - 1)


def test_an_unfinished_fit_with_another_augmentation_of_the_same_name_is_not_gone_on_with(tmp_path: Path) -> None:
    def task(by: float) -> caveat.Task:
        return caveat.Task(mlp(), (X, Y), caveat.Categorical(), augment=shifted(by))

    leave_unfinished(task(0.1), tmp_path / "p")
    with pytest.raises(ValueError, match="unfinished fit with another code of augment"):
        caveat.fit(task(0.2), SHORT, folder=tmp_path / "p", progress=False)
    caveat.fit(task(0.1), SHORT, folder=tmp_path / "p", progress=False)
