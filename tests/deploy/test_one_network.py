"""A deployed network gives the outputs of the posterior's own network at the same weights."""

import pytest
import torch
from torch import nn

import caveat
from caveat import (
    MAP,
    SSVI,
    GroupVariationalDropout,
    MeanFieldVI,
    RigL,
    StructuredBayesianPruning,
    Training,
    VariationalDropout,
)
from caveat.engine.sparse.substitute import SparseLayer


def task(norm: bool = True) -> caveat.Task:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.BatchNorm2d(8) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 3),
    )
    x = torch.randn(40, 2, 6, 6)
    return caveat.Task(module, (x, torch.arange(40) % 3), caveat.Categorical())


SHORT = Training(epochs=3, batch_size=10)
METHODS = {
    "ssvi": SSVI(density=0.2, interval=4, training=SHORT),
    "channel": SSVI(structure="channel", density=0.3, interval=4, training=SHORT),
    "dense": MeanFieldVI(training=SHORT),
    "rigl": RigL(density=0.2, interval=4, training=SHORT),
    "dropout": VariationalDropout(threshold=-9.0, training=SHORT),
    "group dropout": GroupVariationalDropout(threshold=-9.9, training=SHORT),
    "pruning": StructuredBayesianPruning(threshold=180.0, training=SHORT),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("norm", [True, False])
def test_a_draw_is_the_posteriors_own(name: str, norm: bool) -> None:
    posterior = caveat.fit(task(norm), METHODS[name], progress=False)
    x = torch.randn(5, 2, 6, 6)
    (params,) = posterior.predictor.draws(1, torch.Generator().manual_seed(7))
    module = caveat.deploy(posterior, seed=7)
    assert not module.training
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())
    with torch.no_grad():
        torch.testing.assert_close(module(x), posterior.network(params, x), atol=1e-5, rtol=1e-5)


def test_without_a_seed_the_weights_are_at_their_means() -> None:
    posterior = caveat.fit(task(), METHODS["dense"], progress=False)
    x = torch.randn(5, 2, 6, 6)
    first, second = caveat.deploy(posterior)(x), caveat.deploy(posterior)(x)
    assert torch.equal(first, second)
    assert not torch.equal(first, caveat.deploy(posterior, seed=0)(x))
    many = torch.stack([caveat.deploy(posterior, seed=seed)(x) for seed in range(40)])
    assert (many.mean(0) - first).abs().max() < 5 * many.std(0).max()


def test_it_is_as_small_as_the_posterior() -> None:
    narrow = caveat.deploy(caveat.fit(task(), METHODS["channel"], progress=False))
    assert sum(p.numel() for p in narrow.parameters() if p.ndim > 1) < 0.45 * 840
    assert not any(isinstance(layer, SparseLayer) for layer in narrow.modules())  # plain ones, only smaller
    sparse = caveat.deploy(caveat.fit(task(), METHODS["ssvi"], progress=False))
    layers = [layer for layer in sparse.modules() if isinstance(layer, SparseLayer)]
    assert [layer.values.numel() for layer in layers] == [115, 19]  # the first convolution keeps all weights


def test_places_are_held_once() -> None:
    module = caveat.deploy(caveat.fit(task(), METHODS["ssvi"], progress=False))
    sparse = [layer for layer in module.modules() if isinstance(layer, SparseLayer) and layer.pattern is not None]
    assert sparse
    for layer in sparse:
        assert layer.indices.data_ptr() == layer.pattern.indices.data_ptr()  # type: ignore[union-attr]


def test_a_method_without_active_weights_is_refused() -> None:
    posterior = caveat.fit(task(), MAP(training=SHORT), progress=False)
    with pytest.raises(TypeError, match=r"MAP has no active weights to deploy.*posterior.sample"):
        caveat.deploy(posterior)


@pytest.mark.parametrize("name", METHODS)
def test_it_moves_and_is_saved_like_any_module(name: str) -> None:
    module = caveat.deploy(caveat.fit(task(), METHODS[name], progress=False))
    x = torch.randn(5, 2, 6, 6)
    with torch.no_grad():
        outputs = module(x)
        torch.testing.assert_close(module.double()(x.double()).float(), outputs, atol=1e-5, rtol=1e-5)
        module.float()
        content = {name: value.clone() for name, value in module.state_dict().items()}
        for value in module.state_dict().values():
            if value.is_floating_point():
                value.zero_()
        assert not torch.allclose(module(x), outputs)
        module.load_state_dict(content)
        torch.testing.assert_close(module(x), outputs)


def test_what_could_not_be_folded_is_said() -> None:
    class Untraceable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.layer(x if bool(x.sum() < 1e9) else -x))

    data = (torch.randn(20, 4), torch.arange(20) % 3)
    posterior = caveat.fit(caveat.Task(Untraceable(), data, caveat.Categorical()), METHODS["rigl"], progress=False)
    with pytest.warns(UserWarning, match=r"no BatchNorm was folded.*torch.fx cannot trace"):
        assert isinstance(caveat.deploy(posterior).norm, nn.BatchNorm1d)


def test_a_folder_is_no_posterior() -> None:
    with pytest.raises(TypeError, match=r"deploy takes a posterior, not 'posteriors/mine': load a folder"):
        caveat.deploy("posteriors/mine")  # type: ignore[arg-type]
