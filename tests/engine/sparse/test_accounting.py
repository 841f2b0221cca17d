"""Operations, parameters and bytes are those that can be counted by hand, and by torch."""

import json

import pytest
import torch
from torch import Tensor, nn

from caveat.engine.cost import forward_flops
from caveat.engine.sparse.accounting import Account, Cost, Scheme, flops_by_counts, network_account
from caveat.engine.sparse.densities import active_counts
from caveat.engine.sparse.kernels import LayerGeometry
from caveat.likelihoods import Categorical
from caveat.models import resnet18
from caveat.network import Network

MIB = 2**20
POINTS, GAUSSIAN = Scheme(gaussian=False), Scheme(scale_optimizer="sgd")


def small(parameters: str = "*", dtype: torch.dtype = torch.float32) -> Network:
    """A convolution (36 weights, 36 positions), its normalisation, and a linear layer (144 to 5)."""
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    return Network(nn.Sequential(*layers).to(dtype), Categorical(5), parameters=parameters)


IMAGES = torch.zeros(3, 1, 8, 8)
CONV, LINEAR = 2 * 36 * 36, 2 * 144 * 5  # operations of a forward pass of an example


def by_name(found: Account) -> dict[str, Cost]:
    return {row.name: row.cost for row in found.rows}


def test_point_weights_take_three_products_and_the_first_layer_two() -> None:
    found = by_name(network_account(small(), IMAGES, POINTS))
    assert (found["0"].inference_flops, found["0"].training_flops) == (CONV, 2 * CONV)
    assert (found["4"].inference_flops, found["4"].training_flops) == (LINEAR, 3 * LINEAR)


def test_gaussian_weights_take_twice_as_many() -> None:
    found = by_name(network_account(small(), IMAGES, GAUSSIAN))
    assert (found["0"].inference_flops, found["0"].training_flops) == (CONV, 4 * CONV)
    assert (found["4"].inference_flops, found["4"].training_flops) == (LINEAR, 6 * LINEAR)


def test_few_weights_take_their_share_and_update_steps_the_whole_gradient() -> None:
    active = {"0": 9, "4": 72}
    found = by_name(network_account(small(), IMAGES, Scheme(interval=10), active))
    assert (found["0"].inference_flops, found["4"].inference_flops) == (CONV / 4, LINEAR / 10)
    assert found["0"].training_flops == pytest.approx(4 * CONV / 4 + (CONV - CONV / 4) / 10)
    assert found["4"].training_flops == pytest.approx(6 * LINEAR / 10 + (LINEAR - LINEAR / 10) / 10)
    without = by_name(network_account(small(), IMAGES, Scheme(), active))
    assert without["4"].training_flops == pytest.approx(6 * LINEAR / 10)


def test_bytes_by_hand() -> None:
    found = network_account(
        small(), IMAGES, Scheme(gaussian=True, interval=10, optimizer="sgd", scale_optimizer="adam"), {"4": 72}
    )
    conv, linear, rest = (by_name(found)[name] for name in ("0", "4", "everything else"))
    # All of 36 weights: mean and log standard deviation and no index; 4 biases. Value, gradient, one or two moments.
    assert (conv.parameters, conv.stored_bytes) == (36 * 2 + 4, 4 * (36 * 2 + 4))
    assert conv.training_bytes == 4 * (36 * 3 + 36 * 4 + 4 * 3)
    # 72 of 720 weights, with an index each; 5 biases.
    assert (linear.parameters, linear.stored_bytes) == (72 * 2 + 5, 4 * (72 * 3 + 5))
    assert linear.training_bytes == 4 * (72 * 3 + 72 * 4 + 72 + 5 * 3)
    # BatchNorm: 8 parameters, 8 running statistics and a counter of 8 bytes.
    assert (rest.parameters, rest.stored_bytes, rest.training_bytes) == (8, 4 * 16 + 8, 4 * (8 * 3 + 8) + 8)
    assert found.update_bytes == 4 * 720
    assert network_account(small(), IMAGES, Scheme(), {"4": 72}).update_bytes == 0


def test_adam_keeps_two_moments_and_points_have_no_deviation() -> None:
    points = by_name(network_account(small(), IMAGES, Scheme(gaussian=False, optimizer="adam")))["4"]
    assert (points.parameters, points.stored_bytes, points.training_bytes) == (725, 4 * 725, 4 * 4 * 725)
    assert (
        by_name(network_account(small(dtype=torch.float64), IMAGES.double(), POINTS))["4"].training_bytes == 8 * 3 * 725
    )


def test_what_is_not_inferred_has_one_value_and_no_gradient() -> None:
    found = by_name(network_account(small("4.*"), IMAGES, GAUSSIAN))
    assert found["0"] == Cost(CONV, CONV, 0, 4 * 40, 4 * 40)
    assert found["4"].training_flops == 4 * LINEAR  # nothing before it waits for a gradient
    assert found["everything else"].parameters == 0


class Odd(nn.Module):
    """A layer used twice, a weight that two layers share, a layer of another kind, and a product of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Conv1d(2, 2, 3, padding=1, groups=2)
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight
        self.up = nn.ConvTranspose1d(2, 2, 2)

    def forward(self, x: Tensor) -> Tensor:  # [B, 2, 6]
        x = self.other(self.one(self.twice(self.twice(x))))
        return self.up(x @ x.mT @ x).flatten(1)


ODD = torch.zeros(4, 2, 6)


def test_layers_used_twice_weights_shared_and_other_products() -> None:
    network = Network(Odd(), Categorical(14))
    x = ODD
    found = network_account(network, x, POINTS)
    rows, costs = {row.name: row for row in found.rows}, by_name(found)
    once = 2 * 6 * 6
    assert costs["twice"].inference_flops == 2 * once
    assert costs["twice"].training_flops == 2 * 3 * once - once  # the first of its uses has no gradient to its inputs
    assert (rows["one"].weights, rows["other"].weights) == (36, 0)
    assert (costs["one"].parameters, costs["other"].parameters) == (42, 6)
    assert costs["one"].training_flops == costs["other"].training_flops == 3 * 2 * 36 * 2
    assert found.total.parameters == sum(p.numel() for p in network.module.parameters())
    assert found.total.inference_flops == forward_flops(network, network.params(), x) / 4
    rest = costs["everything else"]
    assert rest.inference_flops > 0
    assert rest.training_flops == 3 * rest.inference_flops


@pytest.fixture(scope="module")
def deep() -> Network:
    return Network(resnet18(), Categorical(10))


@pytest.fixture(scope="module")
def sparse(deep: Network) -> dict[float, dict[str, int]]:
    found = {name: LayerGeometry.of(module) for name, module in deep.module.named_modules()}
    layers = {name: geometry for name, geometry in found.items() if geometry is not None}
    return {density: active_counts(layers, density, "uniform", {"stem.0"}) for density in (0.1, 0.05, 0.01)}


IMAGE = torch.zeros(1, 3, 32, 32)


def test_dense_counts_are_those_of_torch(deep: Network) -> None:
    found = network_account(deep, IMAGE, POINTS)
    assert found.total.inference_flops == forward_flops(deep, deep.params(), IMAGE)
    assert found.total == found.dense
    assert found.total.parameters == deep.n_parameters
    assert set(found.ratio.values()) == {1.0}


@pytest.mark.parametrize(("density", "rough"), [(0.1, 0.106), (0.05, 0.056), (0.01, 0.016)])
def test_resnet18_trains_at_about_its_density(deep: Network, sparse, density: float, rough: float) -> None:
    # The rough figure is density + (1 - density) stem + 1/300: every layer three products, the search one more every
    # 100 steps. Fewer are needed: the stem has no gradient to its inputs; the search's gradient holds that of the
    # active weights too; and of a Gaussian's six products the search makes one whole, that of the means.
    points = network_account(deep, IMAGE, Scheme(gaussian=False, interval=100), sparse[density]).ratio["training_flops"]
    gaussian = network_account(deep, IMAGE, Scheme(interval=100), sparse[density]).ratio["training_flops"]
    stem = 2 * 1728 * 1024 / forward_flops(deep, deep.params(), IMAGE)
    assert rough == pytest.approx(density + (1 - density) * stem + 1 / 300, abs=0.0006)
    assert points == pytest.approx(rough, abs=0.0014)
    assert density < gaussian < points < rough
    assert gaussian == pytest.approx(rough, abs=0.0028)


@pytest.mark.parametrize(("density", "training", "stored"), [(0.1, 30, 12.8), (0.05, 15, 6.4), (0.01, 3, 1.3)])
def test_resnet18_in_mebibytes(deep: Network, sparse, density: float, training: float, stored: float) -> None:
    found = network_account(deep, IMAGE, Scheme(interval=100, optimizer="sgd", scale_optimizer="sgd"), sparse[density])
    assert found.dense.training_bytes / MIB == pytest.approx(255, abs=1)
    assert found.dense.stored_bytes / MIB == pytest.approx(85, abs=0.3)
    # The rough figures leave out normalisation (0.15 in training, 0.07 stored) and the dense stem's weights (0.04).
    assert found.total.training_bytes / MIB == pytest.approx(training, abs=0.2)
    assert found.total.stored_bytes / MIB == pytest.approx(stored, abs=0.1)
    assert found.update_bytes == 4 * 512 * 512 * 9


def test_resnet18_at_a_twentieth_trains_in_under_20_mebibytes_with_adam_for_the_deviations(deep, sparse) -> None:
    found = network_account(deep, IMAGE, Scheme(interval=100), sparse[0.05])
    assert found.total.training_bytes < 20 * MIB
    assert found.total.stored_bytes < 0.08 * found.dense.stored_bytes


def test_json_and_table() -> None:
    found = network_account(small(), IMAGES, Scheme(interval=10), {"0": 9, "4": 72})
    said = json.loads(json.dumps(found.as_json()))
    assert said["density"] == pytest.approx(81 / 756)
    assert said["total"]["inference_flops"] == CONV / 4 + LINEAR / 10
    assert said["ratio"]["inference_flops"] == said["total"]["inference_flops"] / said["dense"]["inference_flops"]
    assert [layer["layer"] for layer in said["layers"]] == ["0", "4", "everything else"]
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["0", "4", "everything", "total", "with", "ratio"]
    assert len({len(line) for line in lines}) == 1
    assert lines[-1].split()[1] == f"{found.ratio['inference_flops']:.4f}"


@pytest.mark.parametrize("scheme", [POINTS, GAUSSIAN, Scheme(interval=7)], ids=["points", "Gaussian", "searching"])
def test_operations_by_counts_are_those_of_the_account(scheme: Scheme) -> None:
    cases = ((small(), IMAGES, [{"0": 9, "4": 72}, {"4": 1}, {}]), (Network(Odd(), Categorical(14)), ODD, [{"one": 5}]))
    for network, x, counted in cases:
        inference, training = flops_by_counts(network, x, scheme)
        for active in counted:
            total = network_account(network, x, scheme, active).total
            assert inference(active) == pytest.approx(total.inference_flops, rel=1e-12)
            assert training(active) == pytest.approx(total.training_flops, rel=1e-12)


def test_the_network_is_left_as_it_was() -> None:
    network = small()
    before = {name: value.clone() for name, value in network.module.state_dict().items()}
    network_account(network, torch.randn(3, 1, 8, 8), GAUSSIAN)
    assert all(torch.equal(value, before[name]) for name, value in network.module.state_dict().items())
    assert not any(module._forward_hooks for module in network.module.modules())
    assert not any(p.requires_grad for p in network.module.parameters())


def test_bad_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="active names '1', which is no linear or convolutional layer: there are 0, 4"):
        network_account(small(), IMAGES, POINTS, {"1": 3})
    for n in (0, 721):
        with pytest.raises(ValueError, match="must be between 1 and the layer's 720 weights"):
            network_account(small(), IMAGES, POINTS, {"4": n})
    with pytest.raises(ValueError, match="interval=0 must be at least 1 step"):
        Scheme(interval=0)
