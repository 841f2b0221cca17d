"""Sparse layers: the moments of what they draw, which layers there are, and where their weights lie."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import Network
from caveat.engine.sparse.held_weights import TINY, drawn_weights
from caveat.engine.sparse.kernels import LayerGeometry, Pattern
from caveat.engine.sparse.substitute import (
    SparseLayer,
    Substitute,
    _Draw,
    all_weights,
    dense_pair,
    inferred_weights,
    left_out,
    sparse_layers,
)
from caveat.engine.sparse.weight_layout import WeightLayout
from caveat.engine.variational import LayerState

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 5), (6,)),
    "linear of positions": (lambda: nn.Linear(6, 5, bias=False), (4, 6)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (3, 7)),
    "conv1d strided": (lambda: nn.Conv1d(4, 4, 3, stride=2, dilation=2, groups=2, bias=False), (4, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), (3, 5, 5)),
    "conv2d same": (lambda: nn.Conv2d(2, 4, (3, 5), padding="same"), (2, 5, 6)),
    "conv2d strided": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (3, 6, 6)),
    "conv2d dilated": (lambda: nn.Conv2d(2, 4, 3, dilation=2, padding=(1, 2), bias=False), (2, 7, 7)),
    "conv2d grouped": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), (4, 5, 5)),
}


def network(module: nn.Module, **kwargs: object) -> Network:
    return Network(module, caveat.Categorical(), **kwargs)  # type: ignore[arg-type]


def prepared(layer: nn.Module, share: float, dtype: torch.dtype) -> tuple[SparseLayer, Tensor, Tensor]:
    """A layer with a share of its weights, and whole weights of its means and variances."""
    geometry = LayerGeometry.of(layer)
    assert geometry is not None
    rng = torch.Generator().manual_seed(1)
    mean = torch.randn(geometry.shape, generator=rng, dtype=dtype)
    variance = torch.rand(geometry.shape, generator=rng, dtype=dtype)
    made = SparseLayer(layer.to(dtype), geometry)
    if share == 1:
        made.values, made.variance = mean, variance
        return made, mean, variance
    places = torch.randperm(geometry.size, generator=rng)[: round(share * geometry.size)].sort().values.int()
    made.pattern = Pattern(geometry, places)
    made.values, made.variance = made.pattern.at(mean), made.pattern.at(variance)
    return made, made.pattern.whole(made.values), made.pattern.whole(made.variance)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_have_the_mean_and_variance_of_the_weights(kind: str, share: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    plain = make()
    layer, mean, variance = prepared(plain, share, dtype)
    x = torch.randn(3, *shape, dtype=dtype)
    passes = 4000
    with torch.no_grad():
        many = layer(x.repeat(passes, *[1] * len(shape))).unflatten(0, (passes, 3))
        bias = plain.bias
        plain.weight.copy_(mean)
        expected = plain(x)
        plain.weight.copy_(variance)
        spread = plain(x.square()) - (0 if bias is None else bias.view(-1, *[1] * (expected.ndim - 2)))
        many, expected, spread = many.double(), expected.double(), spread.double().clamp_min(0)
    error = (many.mean(0) - expected).abs() / (spread + 1e-12).sqrt() * passes**0.5
    assert float(error.max()) < 5
    # The standard error of a normal's variance is sqrt(2 / passes) of it.
    relative = (many.var(0) - spread).abs() / (spread + 1e-9) * (passes / 2) ** 0.5
    assert float(relative.max()) < 5.5
    layer.variance = None
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-5, rtol=1e-5)


def test_the_noise_of_outputs_is_independent() -> None:
    torch.manual_seed(0)
    layer, _, _ = prepared(nn.Linear(4, 2, bias=False), 1.0, torch.float64)
    out = layer(torch.ones(20_000, 4, dtype=torch.float64)).detach()
    assert float(torch.corrcoef(out.T)[0, 1].abs()) < 0.04
    assert float(torch.corrcoef(torch.stack([out[:-1, 0], out[1:, 0]]))[0, 1].abs()) < 0.04


@pytest.mark.parametrize("share", [1.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_gradients_are_finite_where_all_inputs_are_zero(kind: str, share: float, dtype: torch.dtype) -> None:
    make, shape = LAYERS[kind]
    layer, _, _ = prepared(make(), share, dtype)
    log_std = layer.variance.log().div(2).requires_grad_()  # type: ignore[union-attr]
    layer.values.requires_grad_()
    layer.variance = (2 * log_std).exp()
    x = torch.zeros(2, *shape, dtype=dtype, requires_grad=True)
    layer(x).square().sum().backward()
    for gradient in (x.grad, layer.values.grad, log_std.grad):
        assert gradient is not None
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_gradients_are_those_of_reparameterised_outputs(share: float) -> None:
    layer, mean, variance = prepared(nn.Conv2d(2, 3, 3, padding=1), share, torch.float64)
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    noise = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    layer.noise = lambda like: noise
    layer.values.requires_grad_()
    layer.variance.requires_grad_()  # type: ignore[union-attr]
    found = torch.autograd.grad(layer(x).tanh().sum(), [x, layer.values, layer.variance])  # type: ignore[list-item]
    mean.requires_grad_()
    variance.requires_grad_()
    m, v = (nn.functional.conv2d(a, w, padding=1) for a, w in ((x, mean), (x.square(), variance)))
    y = m + layer.bias.view(-1, 1, 1) + (v + 1e-16).sqrt() * noise  # type: ignore[union-attr]
    to_x, to_mean, to_variance = torch.autograd.grad(y.tanh().sum(), [x, mean, variance])
    if layer.pattern is not None:
        to_mean, to_variance = layer.pattern.at(to_mean), layer.pattern.at(to_variance)
    for one, other in zip(found, (to_x, to_mean, to_variance), strict=True):
        torch.testing.assert_close(one, other)


class Mixed(nn.Module):
    """Layers of every kind that cannot be made sparse, beside two that can."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.tied = nn.Linear(8, 8)
        self.tie = nn.Linear(8, 8)
        self.tie.weight = self.tied.weight
        self.shared = nn.Linear(8, 8)
        self.again = self.shared
        self.hooked = nn.Linear(8, 8)
        self.hooked.register_forward_hook(lambda *_: None)
        self.watched = nn.Linear(8, 8)
        self.watched.register_forward_pre_hook(lambda *_: None)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.transposed = nn.ConvTranspose1d(1, 1, 1)
        self.volume = nn.Conv3d(1, 1, 1)
        self.circular = nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular")
        self.bilinear = nn.Bilinear(8, 8, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tie(self.tied(self.first(x).relu()).relu())
        h = self.watched(self.hooked(self.again(self.shared(h).relu())))
        h = h + self.attention(h[:, None], h[:, None], h[:, None])[0][:, 0]
        h = self.circular(self.transposed(h[:, None]))
        h = self.volume(h[:, :, None, None])[:, 0, 0, 0]
        return self.last(self.normed(self.frozen(self.bilinear(h, h))))


DRAWN = ["tied.weight", "shared.weight", "hooked.weight", "watched.weight", "attention.in_proj_weight"]
DRAWN += ["transposed.weight", "volume.weight", "circular.weight", "bilinear.weight"]
DRAWN += ["normed.parametrizations.weight.original1"]
MAGNITUDES = "normed.parametrizations.weight.original0"


def test_weights_that_layers_cannot_hold_are_drawn() -> None:
    whole = network(Mixed())
    layers = sparse_layers(whole)
    assert list(layers) == ["first", "last", "attention.out_proj"]
    assert left_out(whole, layers) == (DRAWN, [MAGNITUDES])
    weights = inferred_weights(whole)
    assert list(weights) == [*layers, *DRAWN]
    assert left_out(whole, weights) == ([], [MAGNITUDES])
    drawn = [*drawn_weights(whole)]
    assert [*all_weights(whole)][-len(drawn) :] == drawn
    assert set(drawn) == {*DRAWN, "first.weight", "last.weight", "attention.out_proj.weight"}


@pytest.mark.parametrize("method", [caveat.MeanFieldVI, caveat.SSVI, caveat.RigL])
def test_every_matrix_has_a_posterior_and_what_has_none_is_said(method: type, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Mixed()
    x = torch.randn(24, 4)
    task = caveat.Task(module, (x, (x[:, 0] > 0).long()), caveat.Categorical())
    training = caveat.Training(epochs=4, batch_size=8, learning_rate=0.01)
    sparse = {} if method is caveat.MeanFieldVI else {"density": 0.5, "interval": 2}
    posterior = caveat.fit(task, method(training=training, **sparse), progress=False)
    (said,) = [w for w in posterior.info.warnings if "stay without a posterior" in w]
    assert said.startswith(f"{MAGNITUDES} stay")
    treatments = {entry["layer"]: entry["treatment"] for entry in posterior.info.coverage}
    assert treatments["frozen"] == "fixed"
    kind = "point" if method is caveat.RigL else "Gaussian"
    share = "all weights" if method is caveat.MeanFieldVI else "32 of 64 weights"
    for name in ("tied", "shared", "hooked", "watched"):
        assert treatments[name] == f"{kind}, {share}; bias a point"
    assert treatments["attention"].startswith(kind)
    draw = next(posterior.sample(1, seed=3))
    assert {"first.weight", "tied.weight", "volume.weight", "attention.in_proj_weight"} <= draw.keys()
    assert "frozen.weight" not in posterior.state["rest"]
    samples = posterior.predict(x, draws=1, seed=3).samples[0]
    torch.testing.assert_close(samples, posterior.network(draw, x).softmax(-1))
    posterior.save(tmp_path / "posterior")
    other = Mixed()
    other.first.register_forward_hook(lambda *_: None)  # hooks of another kind do not change which weights are whose
    loaded = caveat.load(tmp_path / "posterior", other)
    assert torch.equal(loaded.predict(x, seed=1).samples, posterior.predict(x, seed=1).samples)


def test_files_of_before_weights_were_drawn_are_read(tmp_path: Path) -> None:
    """Their counts are of torch's own layers alone, and everything else is a point."""
    torch.manual_seed(0)
    module = Attending()
    x = torch.randn(20, 4)
    task = caveat.Task(module, (x, (x[:, 0] > 0).long()), caveat.Categorical())
    posterior = caveat.fit(task, caveat.MeanFieldVI(training=caveat.Training(epochs=1)), progress=False)
    assert len(posterior.state["active"]["counts"]) > 5
    layout = LayerState.of(posterior.state).layout(posterior.network)
    whole = layout.whole(posterior.state["active"]["mean"])
    kept = ["embed", "block.linear1", "block.linear2", "head"]
    old = WeightLayout({n: layout.geometries[n] for n in kept}, {n: layout.counts[n] for n in kept}, layout.indices)
    mean = old.gathered({n: whole[f"{n}.weight"] for n in kept})
    rest = {name: value for name, value in whole.items() if name.removesuffix(".weight") not in kept}
    active = {"mean": mean, "indices": layout.indices, "counts": torch.tensor([*old.counts.values()])}
    active["log_std"] = torch.full_like(mean, -30.0)
    state = posterior.state | {"active": active, "rest": posterior.state["rest"] | rest}
    dataclasses.replace(posterior, state=state).save(tmp_path / "posterior")
    loaded = caveat.load(tmp_path / "posterior", Attending())
    at_means = posterior.network(posterior.state["rest"] | whole, x).softmax(-1)
    torch.testing.assert_close(loaded.predict(x, draws=1).samples[0], at_means)


def test_a_parameter_filter_keeps_layers_out() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    assert list(sparse_layers(network(module, parameters="2.*"))) == ["2"]
    assert list(sparse_layers(network(module, parameters=("0.weight", "3.*")))) == ["0", "3"]
    assert left_out(network(module, parameters="2.*"), {}) == (["2.weight"], [])


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Embedding(4, 8), nn.Flatten(), nn.LayerNorm(8)),
        nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.Sequential(nn.Conv1d(2, 2, 4, padding="same")),  # padded more on one side
    ],
    ids=lambda m: type(m).__name__,
)
def test_no_layer_at_all_is_an_error(module: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"no linear or convolutional layer .*selected by parameters="):
        sparse_layers(network(module))
    with pytest.raises(ValueError, match="no linear or convolutional layer"):
        sparse_layers(network(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), parameters="1.*"))


def test_a_module_that_is_itself_a_layer() -> None:
    whole = network(nn.Linear(3, 2))
    geometries = sparse_layers(whole)
    layout = WeightLayout(geometries, {"": 2}, torch.tensor([1, 5], dtype=torch.int32))
    substitute = Substitute(whole, layout, {})
    substitute.use(torch.tensor([2.0, 3.0]))
    x = torch.randn(4, 3)
    expected = torch.stack([2 * x[:, 1], 3 * x[:, 2]], 1) + whole.module.bias  # type: ignore[operator]
    torch.testing.assert_close(substitute.network.evaluation_pass(x), expected)
    assert list(layout.whole(torch.ones(2))) == ["weight"]
    assert substitute.network.names == ("bias",)
    assert type(whole.module) is nn.Linear, "the network given is as it was"


def test_a_layout_gathers_splits_and_makes_whole() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(2, 2, 3), nn.Linear(2, 2))
    whole = network(module)
    indices = torch.tensor([0, 7, 11, 3, 20], dtype=torch.int32)
    layout = WeightLayout(sparse_layers(whole), {"0": 3, "1": 2, "2": 4}, indices)
    assert layout.size == 9
    assert [layout.is_dense(name) for name in layout.counts] == [False, False, True]
    weights = {str(i): module[i].weight.detach() for i in range(3)}
    flat = layout.gathered(weights)
    expected = torch.cat([weights["0"].flatten()[[0, 7, 11]], weights["1"].flatten()[[3, 20]], weights["2"].flatten()])
    assert torch.equal(flat, expected)
    assert {name: len(part) for name, part in layout.split(flat)} == layout.counts
    back = layout.whole(flat)
    assert {name: int((w != 0).sum()) for name, w in back.items()} == {"0.weight": 3, "1.weight": 2, "2.weight": 4}
    assert torch.equal(layout.gathered({name.removesuffix(".weight"): w for name, w in back.items()}), flat)
    places = layout.indices_of()
    assert places["2"] is None
    assert places["1"] is not None
    assert places["1"].tolist() == [3, 20]


def test_a_substitute_computes_what_the_network_with_those_weights_does() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    whole = network(module)
    before = copy.deepcopy(whole.module.state_dict())
    geometries = sparse_layers(whole)
    indices = torch.cat([torch.randperm(36)[:9].sort().values, torch.randperm(108)[:20].sort().values]).int()
    layout = WeightLayout(geometries, {"0": 9, "4": 20}, indices)
    rest = {"1.weight": torch.rand(4), "1.running_mean": torch.randn(4), "4.bias": torch.randn(3)}
    substitute = Substitute(whole, layout, rest | {"0.weight": torch.ones(4, 1, 3, 3)})
    values = torch.randn(29)
    substitute.use(values)
    x = torch.randn(5, 1, 5, 5)
    expected = whole(rest | layout.whole(values), x)
    torch.testing.assert_close(substitute.network.evaluation_pass(x), expected)
    assert all(torch.equal(before[name], value) for name, value in whole.module.state_dict().items())
    assert substitute.rest().keys() == {
        "0.bias", "1.weight", "1.bias", "4.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked",
    }  # fmt: skip
    assert torch.equal(substitute.rest()["4.bias"], rest["4.bias"])
    largest = max(t.numel() for t in (*substitute.network.module.parameters(), *substitute.network.module.buffers()))
    assert largest <= 4, "no whole weight is left in it"


class Attending(nn.Module):
    """In evaluation, torch's encoder layer takes the weights of its linear layers without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x[..., None])).mean(1))


def test_a_module_that_takes_the_weight_instead_of_calling_the_layer() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 4)
    task = caveat.Task(Attending(), (x, (x[:, 0] > 0).long()), caveat.Categorical())
    training = caveat.Training(epochs=2)
    posterior = caveat.fit(task, caveat.SSVI(density=0.3, training=training), progress=False)
    draw = next(posterior.sample(1, seed=3))
    expected = task.network(draw, x).softmax(-1)
    torch.testing.assert_close(posterior.predict(x, draws=1, seed=3).samples[0], expected)
    local = caveat.fit(task, caveat.SSVI(density=0.3, prediction="local", training=training), progress=False)
    samples = [p.predict(x, draws=2000).samples.logit() for p in (local, posterior)]
    error = 5 * (samples[0].var(0) + samples[1].var(0)).sqrt() / 2000**0.5
    assert bool(((samples[0].mean(0) - samples[1].mean(0)).abs() < error).all()), "rows and weights are drawn alike"


def test_a_draw_has_the_gradients_of_its_formula() -> None:
    mean, variance, noise = (torch.rand(3, 4, dtype=torch.float64) for _ in range(3))
    inputs = (mean.requires_grad_(), variance.requires_grad_())
    assert torch.autograd.gradcheck(lambda m, v: _Draw.apply(m, v, noise), inputs)
    torch.testing.assert_close(_Draw.apply(mean, variance, noise), mean + (variance + TINY).sqrt() * noise)
    at_zero = torch.zeros(3, 4, requires_grad=True)
    (found,) = torch.autograd.grad(_Draw.apply(mean.float(), at_zero, noise.float()).sum(), at_zero)
    assert found.isfinite().all()


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind.startswith("conv2d")])
def test_narrow_convolutions_are_taken_together(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    plain = make().double()
    geometry = LayerGeometry.of(plain)
    assert geometry is not None
    mean, variance = torch.randn(geometry.shape).double(), torch.rand(geometry.shape).double()
    bias = None if plain.bias is None else torch.randn(geometry.shape[0]).double()
    x = torch.randn(3, *shape).double()
    given = [t.requires_grad_() for t in (x, mean, variance, bias) if t is not None]
    calls, dense = [], LayerGeometry.dense
    monkeypatch.setattr(LayerGeometry, "dense", lambda *a: (calls.append(1), dense(*a))[1])
    found = []
    for narrow in (0, 4):
        pair = dense_pair(geometry, x, mean, variance, bias, narrow)
        gradients = torch.autograd.grad((pair[0].sin() + pair[1].cos()).sum(), given)
        found.append([*pair, *gradients])
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
    assert len(calls) == (4 if geometry.groups > 1 else 3)
