"""Weights that are drawn since their modules compute with them in ways of their own: gradients, and a closed form."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import caveat
from caveat import GaussianPrior, Network, Training
from caveat.engine.sparse import Substitute, WeightLayout, drawn_weights, inferred_weights
from caveat.engine.variational.bound import gaussian_kl, precisions


class Transposed(nn.Module):
    """A linear layer with its weight the other way round, as GPT-2 has them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x[:, None], torch.stack([x, 2 * x], 1), torch.stack([x, -x], 1))[0][:, 0]


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(1, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x[..., None])[0][:, -1]


class Ties(nn.Module):
    """Reads tokens by the weight that it writes them with."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table((x > 0).long()).sum(1))


class OfItsOwn(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight / self.weight.norm()).T + self.bias


KINDS: dict[str, Callable[[], nn.Module]] = {
    "transposed": lambda: Transposed(4, 3),
    "attention": Attends,
    "recurrent": Recurs,
    "tied": Ties,
    "subclass": lambda: OfItsOwn(4, 3),
    "normed": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "circular": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 2, 3, padding=2, padding_mode="circular")),
}


def prepared(kind: str, share: float = 1.0) -> tuple[Substitute, Network, Tensor]:
    """A substitute, the network that it is of, and inputs."""
    torch.manual_seed(0)
    module = KINDS[kind]().double()
    network = Network(module, caveat.Categorical(), GaussianPrior({"*weight*": 2.0, "*": 1.0}))
    weights = inferred_weights(network)
    counts = {name: max(1, round(share * geometry.size)) for name, geometry in weights.items()}
    places = [torch.randperm(g.size)[: counts[n]].sort().values for n, g in weights.items() if counts[n] < g.size]
    indices = torch.cat(places).int() if places else torch.zeros(0, dtype=torch.int32)
    substitute = Substitute(network, WeightLayout(weights, counts, indices), network.params())
    return substitute, network, torch.randn(5, 4, dtype=torch.float64)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_has_the_gradients_of_a_dense_reference(kind: str, share: float) -> None:
    substitute, network, x = prepared(kind, share)
    layout = substitute.layout
    mean = torch.randn(layout.size, dtype=torch.float64, requires_grad=True)
    log_std = (torch.randn(layout.size, dtype=torch.float64) - 2).requires_grad_()
    noise = dict(layout.split(torch.randn(layout.size, dtype=torch.float64)))
    assert all(geometry.drawn for name, geometry in layout.geometries.items() if name != "attention.out_proj")
    order = [name for name in layout.counts if layout.geometries[name].drawn]
    order += [name for name in layout.counts if not layout.geometries[name].drawn]  # read later, in the pass
    given = iter([noise[name] for name in order])
    substitute.draw_noise(None, lambda like: next(given).view(like.shape))
    precision = precisions(network, layout)
    substitute.use(mean, (2 * log_std).exp())
    outputs = substitute.network.training_pass(x)
    bound = outputs.square().sum() + gaussian_kl(mean, log_std, precision)
    found = torch.autograd.grad(bound, (mean, log_std))
    drawn = layout.whole(mean + log_std.exp() * torch.cat([noise[name] for name in layout.counts]))
    expected = functional_call(network.module.train(), drawn, (x,)).square().sum()
    expected = expected + 0.5 * (2 * ((2 * log_std).exp() + mean**2) - 1 - (2 * (2 * log_std).exp()).log()).sum()
    torch.testing.assert_close(found, torch.autograd.grad(expected, (mean, log_std)), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(bound, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exchange_sees_the_gradients_of_whole_weights(kind: str) -> None:
    substitute, network, x = prepared(kind, 0.5)
    layout, gradients = substitute.layout, dict[str, Tensor]()
    mean = torch.randn(layout.size, dtype=torch.float64, requires_grad=True)
    substitute.collect({name: lambda g, n=name: gradients.update({n: g.clone()}) for name in substitute.layers})
    substitute.use(mean)
    torch.autograd.grad(substitute.network.training_pass(x).square().sum(), mean)
    whole = {name: weight.detach().requires_grad_() for name, weight in layout.whole(mean).items()}
    outputs = functional_call(network.module.train(), whole, (x,))
    expected = torch.autograd.grad(outputs.square().sum(), [*whole.values()])
    torch.testing.assert_close([gradients[name] for name in layout.counts], [*expected])


def test_tables_tokens_and_scales_are_points() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 5, 4))
            self.table, self.norm = nn.Embedding(3, 4), nn.LayerNorm((5, 4))
            self.project = nn.Parameter(torch.randn(4, 2))

    network = Network(Tokens(), caveat.Categorical())
    assert list(drawn_weights(network)) == ["project"]
    with pytest.raises(ValueError, match="none of the selected parameters is a weight that is multiplied"):
        inferred_weights(Network(Tokens(), caveat.Categorical(), parameters="table.*"))


def test_a_linear_model_comes_to_the_best_independent_gaussians() -> None:
    """Those have the mean of the exact posterior, and one over the diagonal of its precision."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(120, 3, generator=rng)
    y = x @ torch.tensor([[1.0], [-1.0], [0.5]]) + 0.5 * torch.randn(120, 1, generator=rng)
    torch.manual_seed(0)
    module = Transposed(3, 1)
    module.weight = nn.Parameter(torch.randn(3, 2))
    module.bias.data = torch.zeros(2)
    module.bias.requires_grad_(False)
    task = caveat.Task(module, (x, y.expand(-1, 2)), caveat.Gaussian(noise=0.5, standardise=False), GaussianPrior(1.0))
    training = Training(epochs=600, batch_size=120, learning_rate=0.03)
    method = caveat.MeanFieldVI(kl_weight=1.0, kl_warmup=0.0, std_learning_rate=0.05, training=training)
    posterior = caveat.fit(task, method, progress=False)
    precision = x.T @ x / 0.5**2 + torch.eye(3)
    exact = torch.linalg.solve(precision, x.T @ y / 0.5**2).expand(-1, 2)
    mean, std = (posterior.state["active"][n].view(3, 2) for n in ("mean", "log_std"))
    torch.testing.assert_close(mean, exact, rtol=0, atol=0.03)
    torch.testing.assert_close(std.exp(), precision.diagonal().rsqrt()[:, None].expand(-1, 2), rtol=0.12, atol=0.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's tracer calls what torch warns of
@pytest.mark.parametrize("method", [caveat.RigL, caveat.MeanFieldVI])
def test_compiled_training_draws_them_too(method: type) -> None:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(KINDS["subclass"](), nn.Tanh(), Transposed(3, 2))
        task = caveat.Task(module, (x, (x[:, 0] > 0).long()), caveat.Categorical())
        training = Training(epochs=3, batch_size=8, learning_rate=0.01, optimizer="sgd", compile=compiled)
        found.append(caveat.fit(task, method(training=training), progress=False).state["active"])
    tolerance = 1e-5 if method is caveat.RigL else 0.02  # of Gaussians the noise is another one
    torch.testing.assert_close(found[1]["mean"], found[0]["mean"], rtol=0, atol=tolerance)
    assert torch.equal(found[0]["counts"], found[1]["counts"])
