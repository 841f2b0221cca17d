"""Dropout of attention that asks its module's mode is on at prediction: moments in closed form, masks counted."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import caveat

RATE = 0.3


class Attention(nn.Module):
    """Rows [B, 6] as one query beside three tokens; the rate is passed only in training mode."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.key, self.head = fused, nn.Linear(6, 6), nn.Linear(6, 1, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("ones", torch.ones(()))

    def tokens(self, x: Tensor) -> Tensor:
        return torch.stack([x, x.flip(-1), 2 * x], 1) * self.ones  # [B, 3, 6]

    def shares(self, x: Tensor) -> Tensor:
        q, k = x.unsqueeze(1), self.key(self.tokens(x))
        return (q @ k.mT / 6**0.5).softmax(-1)  # [B, 1, 3]

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        tokens, rate = self.tokens(x), RATE if self.training else 0.0
        if self.fused:
            q, k = x.unsqueeze(1), self.key(tokens)
            attended = F.scaled_dot_product_attention(q, k, tokens, dropout_p=rate)
        else:
            attended = F.dropout(self.shares(x), rate, self.training) @ tokens
        return self.head(attended[:, 0])


class Writes(Attention):
    """Counts its passes in training mode, in a buffer of its own."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.ones.add_(1)
        return super().forward(x)


class Twice(nn.Module):
    """Two modules with attention inside another, and dropout of the usual kind."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.drop = Attention(True), Attention(False), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        return self.drop(self.one(x) + self.other(x))


def fitted(module: nn.Module) -> tuple[caveat.Posterior, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(20, 6, generator=rng, dtype=torch.float64)
    with torch.no_grad():
        y = module.double().eval()(x) + 0.01 * torch.randn(20, 1, generator=rng, dtype=torch.float64)
    return caveat.fit(caveat.Task(module, (x, y), caveat.Gaussian(noise=0.02)), caveat.MCDropout(), progress=False), x


@pytest.mark.parametrize("fused", [True, False])
def test_mean_and_variance_of_passes_are_those_of_masks_on_attention(fused: bool, tmp_path) -> None:
    torch.manual_seed(0)
    module = Attention(fused)
    posterior, x = fitted(module)
    assert posterior.info.diagnostics["masks_per_pass"] == 1
    posterior.save(tmp_path / "posterior")
    torch.manual_seed(1)
    posterior = caveat.load(tmp_path / "posterior", Attention(fused).double())
    state, draws = torch.random.get_rng_state(), 4_000
    passes = posterior.predict(x, draws=draws).samples[..., 0]
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(passes, posterior.predict(x, draws=draws).samples[..., 0])
    # f = sum_j a_j m_j / (1 - p) w . v_j with m_j ~ Bernoulli(1 - p)
    with torch.no_grad():
        normed = module.norm(x)
        terms = module.shares(normed)[:, 0] * module.head(module.tokens(normed))[..., 0]  # [B, 3]
    variance = (RATE / (1 - RATE) * terms**2).sum(-1)
    torch.testing.assert_close(passes.var(0), variance, rtol=0.15, atol=0)
    assert float(((passes.mean(0) - terms.sum(-1)) / (variance / draws).sqrt()).abs().max()) < 4.5


def test_only_the_modules_with_attention_change_their_mode() -> None:
    torch.manual_seed(0)
    posterior, x = fitted(Twice())
    assert posterior.info.diagnostics["masks_per_pass"] == 3
    before = posterior.network.buffers()
    assert float(posterior.predict(x).epistemic.min()) > 0
    assert all(torch.equal(value, before[name]) for name, value in posterior.network.buffers().items())


def test_a_module_that_writes_in_training_mode_stays_as_it_is_and_is_named() -> None:
    torch.manual_seed(0)
    posterior, x = fitted(nn.Sequential(nn.Dropout(0.1), Writes(True)))
    assert posterior.info.diagnostics["masks_per_pass"] == 1
    assert any("dropout inside 1 stays off" in warning for warning in posterior.info.warnings)
    posterior.predict(x)
    assert float(posterior.network.buffers()["1.ones"]) == 1


def test_every_mask_of_bert_is_drawn() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    tokens = torch.randint(2, 20, (12, 5), generator=torch.Generator().manual_seed(0))
    for attention in ("sdpa", "eager"):
        config = transformers.BertConfig(vocab_size=20, attn_implementation=attention, **small)
        bert = transformers.BertForSequenceClassification(config)
        task = caveat.Task(bert, (tokens, (tokens[:, 0] > 10).long()), caveat.Categorical())
        start = caveat.MAP(training=caveat.Training(epochs=30, learning_rate=0.01))
        posterior = caveat.fit(task, caveat.MCDropout(), start=start, progress=False)
        # Embeddings, then attention and two more in each of two layers, then the head.
        assert posterior.info.diagnostics["masks_per_pass"] == 8
