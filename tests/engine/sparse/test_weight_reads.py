"""Weights that modules read instead of calling the layer: drawn once a pass, with the gradients of their formula."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import caveat
from caveat import Network
from caveat.engine.sparse import Substitute, WeightLayout, sparse_layers
from caveat.engine.sparse.held_weights import TINY
from caveat.engine.sparse.weight_reads import WeightRead


class Reads(nn.Module):
    """Its first layer is never called, and its second one is called after a look at the type of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.read.weight, self.read.bias)
        return self.called(h.to(self.called.weight.dtype)) + F.linear(x, self.read.weight)[..., :3]


def substitute_of(module: nn.Module, share: float = 1.0) -> Substitute:
    network = Network(module.double(), caveat.Categorical())
    layers = sparse_layers(network)
    counts = {name: max(1, round(share * geometry.size)) for name, geometry in layers.items()}
    rng = torch.Generator().manual_seed(0)
    places = [
        torch.randperm(g.size, generator=rng)[: counts[n]].sort().values.int()
        for n, g in layers.items()
        if counts[n] < g.size
    ]
    indices = torch.cat(places) if places else torch.zeros(0, dtype=torch.int32)
    return Substitute(network, WeightLayout(layers, counts, indices), network.params())


def numbers(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_the_bound_has_the_gradients_of_a_dense_reference(share: float) -> None:
    torch.manual_seed(0)
    substitute, x = substitute_of(Reads(), share), torch.randn(6, 5, dtype=torch.float64)
    layout, module = substitute.layout, substitute.network.module
    mean, log_std = numbers(layout.size, 1).requires_grad_(), (numbers(layout.size, 2) - 2).requires_grad_()
    of_weights, of_outputs = numbers(layout.counts["read"], 3), numbers(18, 4).view(6, 3)
    substitute.draw_noise(lambda like: of_outputs, lambda like: of_weights.view(like.shape))
    substitute.use(mean, (2 * log_std).exp())
    found = torch.autograd.grad(module(x).square().sum(), (mean, log_std))
    of_mean, of_std = (dict(layout.split(part)) for part in (mean, log_std.exp()))
    drawn = torch.zeros(20, dtype=torch.float64)
    places = layout.indices_of()["read"]
    values = of_mean["read"] + of_std["read"] * of_weights
    drawn = values if places is None else drawn.scatter(0, places.long(), values)
    h, whole = F.linear(x, drawn.view(4, 5), module.read.bias), layout.whole(mean)["called.weight"]
    spread = h.square() @ layout.whole(log_std.exp().square())["called.weight"].T
    outputs = h @ whole.T + module.called.bias + (spread + TINY).sqrt() * of_outputs + (x @ drawn.view(4, 5).T)[:, :3]
    expected = torch.autograd.grad(outputs.square().sum(), (mean, log_std))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7)


def test_a_weight_is_drawn_when_it_is_computed_with_and_once_a_pass() -> None:
    substitute = substitute_of(Reads())
    layer, size = substitute.layers["read"], substitute.layout.size
    draws: list[int] = []

    def noise(like: Tensor) -> Tensor:
        draws.append(like.numel())
        return torch.randn_like(like)

    substitute.draw_noise(None, noise)
    substitute.use(torch.zeros(size).double().requires_grad_(), torch.ones(size).double())
    weight = layer.weight
    assert isinstance(weight, WeightRead)
    assert (weight.dtype, weight.device, weight.shape) == (torch.float64, torch.device("cpu"), (4, 5))
    assert (weight.ndim, weight.size(0), len(weight), weight.requires_grad) == (2, 4, 4, True)
    assert not draws
    first = weight + 0
    assert torch.equal(layer.weight.clone(), first)
    assert draws == [20]
    assert type(first) is Tensor
    substitute.use(torch.zeros(size).double(), torch.ones(size).double())
    assert not torch.equal(layer.weight.clone(), first)
    layer.weight.view(-1)  # any operation gets the draw
    with torch.no_grad():
        many = torch.stack([_anew(substitute, size) for _ in range(4000)])
    assert float(many.mean(0).abs().max()) < 5 / 4000**0.5
    assert float((many.var(0) - 1).abs().max()) < 5 * (2 / 4000) ** 0.5


def _anew(substitute: Substitute, size: int) -> Tensor:
    substitute.use(torch.zeros(size).double(), torch.ones(size).double())
    return substitute.layers["read"].weight.flatten()


def test_an_exchange_sees_the_gradient_of_a_weight_that_is_read() -> None:
    torch.manual_seed(0)
    substitute, x = substitute_of(Reads(), 0.4), torch.randn(6, 5, dtype=torch.float64)
    mean = numbers(substitute.layout.size, 1).requires_grad_()
    gradients: dict[str, Tensor] = {}
    substitute.collect({name: lambda g, n=name: gradients.update({n: g.clone()}) for name in substitute.layers})
    substitute.use(mean)
    torch.autograd.grad(substitute.network.module(x).square().sum(), mean)
    whole = {name: w.detach().requires_grad_() for name, w in substitute.layout.whole(mean).items()}
    module = Reads().double()
    rest = {f"{name}.bias": substitute.layers[name].bias for name in substitute.layers}
    outputs = torch.func.functional_call(module, whole | rest, (x,))
    expected = torch.autograd.grad(outputs.square().sum(), [*whole.values()])
    torch.testing.assert_close([gradients["read"], gradients["called"]], [*expected])


def test_which_layers_are_read_is_found_by_a_pass_that_changes_nothing() -> None:
    module = nn.Sequential(Reads(), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    substitute, x = substitute_of(module), torch.randn(6, 5, dtype=torch.float64)
    substitute.use(numbers(substitute.layout.size, 1))
    before, state = substitute.rest(), torch.random.get_rng_state()
    assert substitute.read_in_training(x) == {"0.read"}
    assert all(torch.equal(value, before[name]) for name, value in substitute.rest().items())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_units_leave_out_layers_whose_weights_are_read() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 5)
    task = caveat.Task(Reads(), (x, (x[:, 0] > 0).long()), caveat.Categorical())
    method = caveat.GroupVariationalDropout(training=caveat.Training(epochs=2))
    info = caveat.fit(task, method, progress=False).info
    assert list(info.diagnostics["units"]) == ["inputs of called"]
    assert any("read.weight stay without a posterior" in warning for warning in info.warnings)
    alone = nn.Sequential(Reads())
    alone[0].called.requires_grad_(False)
    with pytest.raises(ValueError, match=r"modules read the weights of 0\.read instead of calling"):
        caveat.fit(caveat.Task(alone, (x, (x[:, 0] > 0).long()), caveat.Categorical()), method, progress=False)
