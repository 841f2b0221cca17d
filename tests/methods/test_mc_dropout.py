"""MC dropout: the moments of its passes in closed form, for every kind of dropout and for dropout put in."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import caveat
from caveat.methods.mc_dropout import _Masks


class Functional(nn.Module):
    """Dropout as a function call, which has no layer to switch on."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(x, 0.3, self.training))


def fitted(module: nn.Module, rate: float | None = None, features: int = 6) -> tuple[caveat.Posterior, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(20, features, generator=rng, dtype=torch.float64)
    module = module.double()
    with torch.no_grad():
        y = module.eval()(x) + 0.01 * torch.randn(20, 1, generator=rng, dtype=torch.float64)
    task = caveat.Task(module, (x, y), caveat.Gaussian(noise=0.02))
    return caveat.fit(task, caveat.MCDropout(rate=rate), progress=False), x


@pytest.mark.parametrize("kind", ["layer", "function", "inserted"])
def test_mean_and_variance_of_passes_are_those_of_the_mask(kind: str) -> None:
    torch.manual_seed(0)
    rate = 0.3
    if kind == "layer":
        module: nn.Module = nn.Sequential(nn.Dropout(rate), nn.Linear(6, 1))
        posterior, x = fitted(module)
        hidden, weights, bias = x, module[1].weight[0], module[1].bias
    elif kind == "function":
        module = Functional()
        posterior, x = fitted(module)
        hidden, weights, bias = x, module.head.weight[0], module.head.bias
    else:
        module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
        posterior, x = fitted(module, rate)
        hidden, weights, bias = module[0](x), module[1].weight[0], module[1].bias
    passes = posterior.predict(x, draws=20_000).samples[..., 0]
    # f = sum_i w_i h_i m_i / (1 - p) + b with m_i ~ Bernoulli(1 - p)
    variance = (rate / (1 - rate) * (weights * hidden) ** 2).sum(-1)
    torch.testing.assert_close(passes.var(0), variance.detach(), rtol=0.06, atol=0)
    error = (passes.mean(0) - (hidden @ weights + bias).detach()) / (variance.detach() / 20_000).sqrt()
    assert float(error.abs().max()) < 4.5
    cross = torch.corrcoef(passes[:, :2].T)[0, 1]
    assert abs(float(cross)) < 0.04, "rows have masks of their own"


def test_channel_dropout_drops_whole_channels_and_alpha_dropout_keeps_moments() -> None:
    x = torch.ones(4, 50, 3, 3)
    with _Masks(None, torch.Generator().manual_seed(0)):
        dropped = F.dropout2d(x, 0.4, training=False)
        selu = F.alpha_dropout(torch.randn(200_000, generator=torch.Generator().manual_seed(1)), 0.2, training=False)
    per_channel = dropped.flatten(2)
    assert bool(((per_channel == 0).all(-1) | (per_channel == 1 / 0.6).all(-1)).all())
    assert 0.25 < float((per_channel[..., 0] == 0).float().mean()) < 0.55
    assert float(selu.mean()) == pytest.approx(0, abs=0.02)
    assert float(selu.std()) == pytest.approx(1, abs=0.02)
    expected = F.alpha_dropout(torch.zeros(10_000), 0.2, training=True).unique()
    with _Masks(None, torch.Generator().manual_seed(0)):
        torch.testing.assert_close(F.alpha_dropout(torch.zeros(10_000), 0.2, training=False).unique(), expected)


def test_inserted_dropout_spares_the_inputs_and_reaches_every_other_layer() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 2)
    )
    x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with _Masks(0.5, torch.Generator().manual_seed(0)) as masks, torch.no_grad():
        module(x)
    assert masks.drawn == 2


def test_training_uses_the_masks() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    task = caveat.Task(module, (x, x[:, :1] * 2), caveat.Gaussian(noise=0.5), caveat.GaussianPrior(1e-3))
    start = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=300, learning_rate=0.01)), progress=False)
    error = {}
    for epochs in (0, 300):
        method = caveat.MCDropout(rate=0.3, training=caveat.Training(epochs=epochs))
        posterior = caveat.fit(task, method, start=start, progress=False)
        error[epochs] = float((posterior.predict(x).samples - x[:, :1] * 2).square().mean())
        assert bool(posterior.info.warnings) == (epochs == 0), "weights that never saw dropout are warned about"
    assert error[300] < 0.8 * error[0], "training with masks lowers the error under masks"


def test_refuses_a_network_without_dropout_and_weight_draws() -> None:
    with pytest.raises(ValueError, match=r"MCDropout\(rate=0\.1"):
        fitted(nn.Linear(6, 1))
    posterior, _ = fitted(nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 1)))
    with pytest.raises(TypeError, match="no weight draws"):
        posterior.sample(2)
    with pytest.raises(ValueError, match=r"rate=1\.5.*in \(0, 1\)"):
        caveat.MCDropout(rate=1.5)


class Recurrent(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.cell = kind(6, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(8, 1)
        self.head.weight.data.mul_(20)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.unsqueeze(1))[0][:, 0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, x.flip(-1), 2 * x], 1)
        return self.head(self.attend(tokens, tokens, tokens, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("build", [lambda: Recurrent(nn.LSTM), lambda: Recurrent(nn.GRU), Attention])
def test_dropout_inside_recurrent_and_attention_layers_is_on(build) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    posterior, x = fitted(build())
    state = torch.random.get_rng_state()
    first, second = posterior.predict(x, draws=4, seed=1), posterior.predict(x, draws=4, seed=1)
    assert float(first.epistemic.min()) > 0
    assert torch.equal(first.samples, second.samples)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_rate_of_zero_is_no_dropout_and_a_rate_of_one_drops_all() -> None:
    with pytest.raises(ValueError, match="no dropout layers"):
        fitted(nn.Sequential(nn.Dropout(0.0), nn.Linear(6, 1)))
    with _Masks(None, torch.Generator().manual_seed(0)):
        assert bool((F.dropout(torch.ones(5), 1.0) == 0).all())
