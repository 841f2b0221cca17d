"""A linearised network's module against dense Jacobians in float64; the networks have every rule for tangents."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

import caveat
from caveat.engine.predictors import LinearDraws
from caveat.engine.served import served_module
from caveat.network import Network


class Attention(nn.Module):
    """An embedding, attention, a concatenation and a product: what language models are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 8), nn.LayerNorm(8)
        self.three, self.out = nn.Linear(8, 24), nn.Linear(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.three(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        both = torch.cat([attended, x * torch.sigmoid(attended)], -1)
        return self.out(F.gelu(both, approximate="tanh").amax(1))


class Slopes(nn.Module):
    """Operations on each number, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(3, 6), nn.Parameter(torch.rand(6) + 0.5), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).to(x.dtype)  # which an exporter checks
        h = F.elu(h) + F.leaky_relu(h) - F.softplus(h) / (1 + h.square()) + F.hardtanh(h) * h.exp().log1p()
        h = h * self.scale + (h.abs() + self.scale).sqrt() + torch.where(h > 0, h.sin(), h.cos()) + torch.erf(h)
        h = torch.maximum(h, self.scale) + torch.minimum(h.tanh(), self.scale * h) + torch.maximum(h, h)
        return self.last(F.softmax(h, 1) * F.log_softmax(h, -1) + h.clamp(-1, 1) ** 3 - h.neg())


def convolutions() -> nn.Module:
    first = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
    second = [
        nn.Conv2d(4, 8, 3, stride=2, groups=2),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.AvgPool2d(2),
    ]
    third = [nn.ConvTranspose2d(8, 4, 2), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*first, *second, *third, nn.Linear(4, 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class Normalised(nn.Module):
    """Weight norm, and rows of unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.utils.parametrizations.weight_norm(nn.Linear(3, 6)), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.normalize(self.first(x), dim=1)
        return self.out(h.clamp_max(0.6)) * h.norm() + torch.linalg.vector_norm(h[:, :2], dim=1, keepdim=True)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (Attention, (5,)),
    "slopes": (Slopes, (3,)),
    "convolutions": (convolutions, (2, 8, 8)),
    "recurrent": (Recurrent, (4, 2)),
    "normalised": (Normalised, (3,)),
}


def problem(name: str) -> tuple[Network, Tensor]:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    network = Network(make().double(), caveat.HeteroscedasticGaussian())
    x = torch.randint(7, (5, *shape)) if name == "attention" else torch.randn(5, *shape, dtype=torch.float64)
    return network, x


def shifts(network: Network, x: Tensor, directions: Tensor, index: Tensor | None) -> Tensor:
    """J d for each direction by autograd, [K, B, D]."""
    params = network.params()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        jacobian = jacrev(lambda p: functional_call(network.module, p, (x,)))(params)
    whole = torch.cat([jacobian[name].flatten(2) for name in network.names], 2)
    return torch.einsum("bdn,kn->kbd", whole if index is None else whole[..., index], directions)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # the reference's
@pytest.mark.parametrize("chosen", [False, True], ids=["all weights", "some"])
@pytest.mark.parametrize("name", NETWORKS)
def test_draws_are_the_networks_output_plus_the_jacobians_product(name: str, chosen: bool) -> None:
    network, x = problem(name)
    count = network.n_parameters
    index = torch.arange(0, count, 3) if chosen else None
    directions = 0.3 * torch.randn(4, count if index is None else len(index), dtype=torch.float64)
    hyper = {n: torch.tensor([v], dtype=torch.float64) for n, v in (("target_mean", 0.0), ("target_scale", 1.0))}
    hyper["log_noise"] = torch.zeros(1, dtype=torch.float64)
    form = LinearDraws(network, network.params() | network.buffers(), directions, index, hyper, closed=False)
    module = served_module(form, caveat.Gaussian(), x[:3])
    with torch.no_grad():
        outputs = network(network.params(), x) + shifts(network, x, directions, index)
        given = module(x)
    torch.testing.assert_close(given["mean"], outputs.mean(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(given["epistemic"], outputs.var(0, correction=0), rtol=1e-8, atol=1e-9)


def test_an_operation_without_a_rule_is_named() -> None:
    class Sorted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sort(-1).values

    network = Network(Sorted(3, 2), caveat.Gaussian())
    form = LinearDraws(network, network.params(), torch.randn(2, 8), None, {}, closed=False)
    with pytest.raises(ValueError, match=r"no rule for aten\.sort"):
        served_module(form, caveat.Gaussian(), torch.randn(3, 3))


def test_attentions_own_layer_has_a_module_for_any_number_of_rows() -> None:
    """An exporter took the tangents of its attention for those of the example's rows and no others."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layer(x).mean(1))

    x = torch.randn(40, 5, 8, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        task = caveat.Task(Encoder(), (x, torch.arange(40) % 3), caveat.Categorical())
    start = caveat.MAP(training=caveat.Training(epochs=5))
    posterior = caveat.fit(task, caveat.SubnetworkLaplace(precision=1.0), start=start, progress=False)
    module = posterior.module()
    for rows in (1, 7):
        torch.testing.assert_close(module(x[:rows])["mean"], posterior.predict(x[:rows]).probs, rtol=0, atol=1e-5)
