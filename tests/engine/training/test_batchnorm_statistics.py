"""Refreshed statistics are the averages over all rows, and nothing else changes."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from caveat import Categorical, Network
from caveat.engine.fresh_weights import FreshWeights
from caveat.engine.training.batchnorm_statistics import has_batchnorm, refreshed_statistics
from caveat.rows import Rows

N = 11


def inputs() -> Tensor:
    return 3 + 2 * torch.randn(N, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def rows(batch_size: int) -> Rows:
    return Rows(DataLoader(TensorDataset(inputs(), torch.zeros(N, dtype=torch.long)), batch_size))


def network(*layers: nn.Module) -> Network:
    return Network(nn.Sequential(*layers).double(), Categorical())


def test_one_batch_gives_the_plain_mean_and_variance() -> None:
    net = network(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    params = FreshWeights(net)(torch.Generator().manual_seed(1))
    found = refreshed_statistics(net, params, rows(N))
    activations = nn.functional.linear(inputs(), params["0.weight"], params["0.bias"])
    torch.testing.assert_close(found["1.running_mean"], activations.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["1.running_var"], activations.var(0), rtol=1e-12, atol=0)
    assert set(found) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@pytest.mark.parametrize("batch_size", [2, 3, 4, 5, 10])
def test_batches_count_by_their_rows_and_none_has_a_single_row(batch_size: int) -> None:
    net = network(nn.BatchNorm1d(4), nn.Linear(4, 2))
    found = refreshed_statistics(net, net.params(), rows(batch_size))
    parts = inputs().tensor_split(N // batch_size)
    assert min(len(part) for part in parts) >= 2
    variance = sum(len(part) * part.var(0) for part in parts) / N
    torch.testing.assert_close(found["0.running_mean"], inputs().mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(found["0.running_var"], variance, rtol=1e-12, atol=0)
    assert int(found["0.num_batches_tracked"]) == len(parts)


def test_later_layers_see_normalised_activations_without_dropout() -> None:
    net = network(nn.BatchNorm1d(4, affine=False), nn.Dropout(0.9), nn.BatchNorm1d(4, momentum=None))
    found = refreshed_statistics(net, net.params(), rows(N))
    torch.testing.assert_close(found["2.running_mean"], torch.zeros(4).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found["2.running_var"], torch.full((4,), N / (N - 1)).double(), rtol=1e-4, atol=0)


def test_images_are_averaged_over_their_pixels() -> None:
    images = torch.randn(6, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = network(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    data = Rows(DataLoader(TensorDataset(images, torch.zeros(6, dtype=torch.long)), 6))
    found = refreshed_statistics(net, net.params(), data)
    torch.testing.assert_close(found["0.running_mean"], images.mean((0, 2, 3)), rtol=1e-12, atol=1e-12)
    pixels = images.movedim(1, -1).reshape(-1, 3)
    torch.testing.assert_close(found["0.running_var"], pixels.var(0), rtol=1e-12, atol=0)


def test_network_and_parameters_stay_as_they_were() -> None:
    net = network(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=0.3), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 2))
    params = net.params() | net.buffers() | {"hyper/log_noise": torch.zeros(2)}
    before = {name: value.clone() for name, value in params.items()}
    own, outputs = net.buffers(), net(net.params(), inputs())
    found = refreshed_statistics(net, params, rows(4))
    assert all(torch.equal(params[name], before[name]) for name in params)
    assert all(torch.equal(value, own[name]) for name, value in net.buffers().items())
    assert torch.equal(net(net.params(), inputs()), outputs)
    assert not torch.equal(net(net.params() | found, inputs()), outputs)
    assert [net.module[i].momentum for i in (1, 2)] == [0.3, None]
    assert not any(child.training for child in net.module.modules())


def test_a_pass_that_fails_leaves_the_network_as_it_was() -> None:
    net = network(nn.BatchNorm1d(4, momentum=0.3), nn.Linear(4, 2))
    wrong = Rows((inputs()[:, :3], torch.zeros(N, dtype=torch.long)))
    with pytest.raises(RuntimeError):
        refreshed_statistics(net, net.params(), wrong)
    assert net.module[0].momentum == 0.3
    assert not any(child.training for child in net.module.modules())


def test_only_layers_that_keep_statistics_count() -> None:
    assert has_batchnorm(network(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    assert not has_batchnorm(network(nn.Linear(4, 3), nn.LayerNorm(3)))
    untracked = network(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    assert not has_batchnorm(untracked)
    assert refreshed_statistics(untracked, untracked.params(), rows(4)) == {}
    root = Network(nn.BatchNorm1d(4).double(), Categorical())
    assert set(refreshed_statistics(root, root.params(), rows(4))) == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }


def test_instance_norm_statistics_are_refreshed_too() -> None:
    sequences = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = network(nn.InstanceNorm1d(3, track_running_stats=True), nn.Flatten(), nn.Linear(15, 2))
    data = Rows(DataLoader(TensorDataset(sequences, torch.zeros(6, dtype=torch.long)), 2))
    found = refreshed_statistics(net, net.params(), data)
    torch.testing.assert_close(found["0.running_mean"], sequences.mean((0, 2)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["0.running_var"], sequences.var(2).mean(0), rtol=1e-12, atol=0)
