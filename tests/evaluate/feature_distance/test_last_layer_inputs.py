import pytest
import torch
from torch import nn

import caveat
from caveat.evaluate.feature_distance import LastLayerInputs


def posterior_of(module, x):
    y = torch.arange(len(x)) % 3
    task = caveat.Task(module, (x, y), caveat.Categorical())
    return caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=1)), progress=False)


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_features_are_what_the_last_layer_takes_in_at_the_point():
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    posterior = posterior_of(module, normal(700, 4))
    point = next(posterior.sample())
    network = posterior.network.replica()
    with torch.no_grad():
        network(point, normal(1, 4))
        module.load_state_dict(posterior.network.module.state_dict() | point)
        expected = module.eval()[:3](normal(700, 4))
    found = LastLayerInputs(posterior)(normal(700, 4))  # more rows than go through at once
    torch.testing.assert_close(found, expected.double())
    assert not any(m._forward_pre_hooks for m in posterior.network.module.modules())


def test_positions_are_averaged():
    head = nn.Conv2d(5, 3, 1)
    module = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), head, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    x = normal(6, 1, 8, 8)
    posterior = posterior_of(module, x)
    inputs = LastLayerInputs(posterior)
    assert inputs(x).shape == (6, 5)

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(9, 7), nn.LayerNorm(7), nn.Linear(7, 3)

        def forward(self, ids):
            return self.head(self.norm(self.embed(ids))).mean(1)

    ids = torch.randint(0, 9, (6, 5), generator=torch.Generator().manual_seed(1))
    assert LastLayerInputs(posterior_of(Tokens(), ids))(ids).shape == (6, 7)


def test_a_network_without_layers_is_refused():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.scale

    posterior = posterior_of(Scale(), normal(6, 3))
    with pytest.raises(ValueError, match="Scale calls no layer with a weight"):
        LastLayerInputs(posterior)(normal(2, 3))
