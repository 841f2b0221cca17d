"""Products with a network's Jacobian, against autograd's in float64."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import caveat
from caveat.batches import Inputs
from caveat.engine.linear_model import LinearModel, RowNoise
from caveat.engine.linearised import jacobian_features
from caveat.engine.linearised.jacobian_features import NetworkFeatures
from caveat.engine.tangents import image_layouts, lazy_sums, product_rules
from caveat.engine.torch_settings import full_precision
from caveat.network import Network
from caveat.rows import Rows

N, K = 5, 3


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))[:, :3]


class Residual(nn.Module):
    """Two convolutions, each with a normalisation, beside a shortcut that has one too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, 2, 1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.shortcut, self.head = nn.Conv2d(1, 4, 1, 2, bias=False), nn.Linear(4, 3)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norms[0](self.first(x)), inplace=True)
        h = self.norms[1](self.second(h)) + self.norms[2](self.shortcut(x))
        return self.head(F.relu(h).mean((2, 3)))


class Masks(nn.Module):
    """Comparisons and places have no slopes, and what they choose has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = torch.where(h > 0, h * (h < 1), 0.1 * h)
        return self.second(h) * (1 + h.argmax(1, keepdim=True))


class NormalisedOverThePlaces(nn.Module):
    """The channels of the normalisation are not the outputs of the linear layer, though as many."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, outputs), nn.BatchNorm1d(3), nn.Linear(3 * outputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)).flatten(1))


class CalledByName(nn.Module):
    """Arguments of a convolution by place and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(3, affine=False)
        self.last = nn.Conv2d(4, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(F.conv2d(x, self.first.weight, self.first.bias, 2, padding=1))
        h = F.conv2d(input=h, weight=self.last.weight, stride=3)
        return self.second(h).flatten(1)


class Views(nn.Module):
    """Looks at the numbers of an image in the order of its axes, however they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(2, 4, 3), nn.Conv2d(1, 2, 3, stride=2), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x)).view(len(x), 1, 4, 4)
        shifted = torch.cat([h, -h], 3)
        return self.head(self.second(shifted).view(len(x), -1).repeat(1, 2))


class OwnSettings(nn.Linear):
    """Asks for settings of a GPU by their older names."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            return super().forward(x)


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))
        self.first.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sin()) * self.scale / (1 + self.scale**2) + self.scale.detach() * self.scale


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(3, 4, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, activation="gelu")
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(self.recurrent(x)[0]).mean(1))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.queries, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        q, k, v = self.queries(self.norm(h)).chunk(3, -1)
        return self.head(h + F.scaled_dot_product_attention(q, k, v, is_causal=True))  # [B, 3, 3]


def images(*layers: nn.Module, channels: int = 2, side: int = 5) -> tuple[nn.Module, Tensor]:
    body = nn.Sequential(*layers, nn.Flatten())
    x = torch.randn(N, channels, side, side)
    features = body.eval()(x).shape[1]
    return nn.Sequential(*body, nn.Linear(features, 3)), x


CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "perceptron": lambda: (
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Softplus(), nn.Linear(6, 3)),
        torch.randn(N, 4),
    ),
    "in place": lambda: images(nn.Conv2d(2, 4, 3), nn.ReLU(True), nn.BatchNorm2d(4), nn.SiLU(True), nn.Dropout(0.5)),
    "groups": lambda: images(
        nn.Conv2d(4, 6, 3, 2, 1, groups=2),
        nn.BatchNorm2d(6),
        nn.GELU(),
        nn.Conv2d(6, 6, 3, 1, 2, dilation=2, groups=6, bias=False),
        nn.BatchNorm2d(6, affine=False),
        nn.MaxPool2d(2),
        channels=4,
        side=8,
    ),
    "pools and norms": lambda: images(
        nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular"),
        nn.GroupNorm(2, 4),
        nn.LeakyReLU(),
        nn.AvgPool2d(2),
        nn.PReLU(4),
        nn.ConvTranspose2d(4, 3, 3, 2),
        nn.MaxPool2d(3, 2, 1),
    ),
    "one place, strides": lambda: images(
        nn.Conv2d(2, 4, 1, (2, 3)), nn.Tanh(), nn.Conv2d(4, 6, 1, 2, groups=2), side=7
    ),
    "residual": lambda: (Residual(), torch.randn(N, 1, 4, 4)),
    "one dimension": lambda: (
        nn.Sequential(nn.Conv1d(2, 4, 3, 2), nn.BatchNorm1d(4), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(8, 3)),
        torch.randn(N, 2, 10),
    ),
    "tied": lambda: (Tied(), torch.randn(N, 4)),
    "partly frozen": lambda: (PartlyFrozen(), torch.randn(N, 4)),
    "recurrent and attention": lambda: (Recurrent(), torch.randn(N, 3, 3)),
    "tokens": lambda: (Tokens(), torch.randint(7, (N, 3))),
    "masks": lambda: (Masks(), torch.randn(N, 4)),
    "normalised over as many places": lambda: (NormalisedOverThePlaces(3), torch.randn(N, 3, 4)),
    "normalised over places": lambda: (NormalisedOverThePlaces(2), torch.randn(N, 3, 4)),
    "views": lambda: (Views(), torch.randn(N, 2, 4, 4)),
    "called by name": lambda: (CalledByName(), torch.randn(N, 2, 5, 5)),
    "settings of its own": lambda: (OwnSettings(4, 3), torch.randn(N, 4)),
}


def network_of(module: nn.Module) -> Network:
    """In float64, with statistics of BatchNorm that matter."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
            for parameter in layer.parameters():
                nn.init.normal_(parameter)
    return Network(module.double(), caveat.Categorical())


def doubled(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def features_of(module: nn.Module, x: Tensor, **options: Any) -> NetworkFeatures:
    network = network_of(module)
    rows = Rows((doubled(x), torch.zeros(len(x), dtype=torch.long)))
    return NetworkFeatures(network, network.params(), rows, **options)


def dense(features: NetworkFeatures, x: Inputs) -> Tensor:
    """J by autograd, one output after the other, [n, m, d]."""
    own = {name: value.requires_grad_() for name, value in features.network.params().items()}
    wanted = [own[name] for name in features.names]
    outputs = features.network(own, x).flatten(1)
    rows = [
        torch.autograd.grad(output, wanted, retain_graph=True, allow_unused=True, materialize_grads=True)
        for output in outputs.flatten()
    ]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).unflatten(0, outputs.shape)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def assert_products(features: NetworkFeatures, x: Inputs) -> None:
    J = dense(features, x)
    assert (features.rows, features.outputs, features.size) == J.shape
    z, v = torch.randn(K, features.size).double(), torch.randn(K, N, features.outputs).double()
    found, pulled, outputs = [], torch.zeros_like(z), []
    for block in features.blocks():
        found.append(block.forward(z))
        pulled += block.backward(v[:, block.index])
        outputs.append(block.outputs)
    torch.testing.assert_close(torch.cat(found, 1), torch.einsum("bmd,kd->kbm", J, z), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(pulled, torch.einsum("bmd,kbm->kd", J, v), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close((torch.cat(found, 1) * v).sum((1, 2)), (z * pulled).sum(1), rtol=1e-10, atol=1e-10)
    expected = features.network(features.params, x).flatten(1)
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_jacobian(name: str) -> None:
    module, x = CASES[name]()
    assert_products(features_of(module, x, block_rows=3), doubled(x))


@pytest.mark.parametrize("name", ["groups", "one place, strides", "residual"])
def test_convolutions_one_weight_at_a_time_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_rules, "ALONE_FROM", 1)
    module, x = CASES[name]()
    assert_products(features_of(module, x), doubled(x))


def test_few_channels_that_are_read_at_every_second_place() -> None:
    """Where oneDNN's own gradient of the weight overruns its memory: two threads, an odd number of rows."""
    module, x = nn.Sequential(nn.Conv2d(8, 16, 1, 2), nn.Flatten(), nn.Linear(1024, 2)), torch.randn(99, 8, 16, 16)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        network = Network(module, caveat.Categorical())
        rows = Rows((x, torch.zeros(99, dtype=torch.long)))
        (block,) = NetworkFeatures(network, network.params(), rows, block_rows=99).blocks()
        v = torch.randn(1, 99, 2)
        pulled = [block.backward(v) for _ in range(20)]
    finally:
        torch.set_num_threads(threads)
    (block,) = features_of(module, x, block_rows=99).blocks()
    torch.testing.assert_close(pulled[-1].double(), block.backward(v.double()), rtol=1e-3, atol=1e-3)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, on a CPU, without compiling."""
    monkeypatch.setattr(lazy_sums, "FUSING", ("cpu",))
    monkeypatch.setattr(lazy_sums, "_fused", lambda *_: lazy_sums._sum)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "ROWS") for name in ("groups", "residual", "pools and norms", "views")]
    + [(name, "DEPTH") for name in ("groups", "residual", "pools and norms", "views")],
)
def test_products_of_a_gpu_are_those_of_the_jacobian(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_rules, "GPU_LAYOUT", getattr(image_layouts, layout))
    module, x = CASES[name]()
    assert_products(features_of(module, x, block_rows=3), doubled(x))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_on_a_gpu_what_follows_a_convolution_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_rules, "GPU_LAYOUT", image_layouts.ROWS)  # a CPU's 3-D ones leave channels first
    sums: list[tuple[Any, ...]] = []
    monkeypatch.setattr(lazy_sums, "_fused", lambda *kind: (sums.append(kind), lazy_sums._sum)[1])
    module, x = CASES["residual"]()
    block = next(features_of(module, x).blocks())
    sums.clear()
    block.forward(torch.randn(K, sum(block.program.sizes)).double())
    # Inputs, weight and shift of the second convolution, weight and shift of the shortcut's, and the slope.
    assert sums[-1][:2] == (5, True)
    assert all(with_slope for _, with_slope, *_ in sums)  # nothing is added on its own


@pytest.mark.usefixtures("as_on_a_gpu")
def test_numbers_of_vectors_that_solvers_come_to_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[tuple[Any, ...]] = []
    monkeypatch.setattr(lazy_sums, "_fused", lambda *kind: (kinds.append(kind), lazy_sums._sum)[1])
    slope = torch.randn(2, 4, 4, 3).permute(0, 3, 1, 2)
    for k in (8, 7, 3, 16, 1):
        first, second, shift = (torch.randn(*shape, k, 3) for shape in ((2, 4, 4), (2, 4, 4), (1, 1, 1)))
        terms = [term.permute(3, 0, 4, 1, 2) for term in (first, second, shift)]
        torch.testing.assert_close(lazy_sums.Terms(*terms).times(slope), sum(terms) * slope)
    assert [kind[3:] for kind in kinds] == [(8, 3), (None, 3), (None, 3), (16, 3)]


def test_without_a_compiler_for_gpus_it_is_said_and_done_without() -> None:
    tried: list[int] = []

    def broken(terms: list[Tensor], slope: Tensor) -> Tensor:
        tried.append(1)
        raise RuntimeError("no compiler\nand so on")

    kernel, terms, slope = lazy_sums._FusedSum(broken), [torch.ones(2, 3), torch.ones(2, 3)], torch.full((3,), 2.0)
    with pytest.warns(UserWarning, match=r"torch.compile failed \(no compiler\): install triton and a C compiler"):
        assert torch.equal(kernel(terms, slope), torch.full((2, 3), 4.0))
    assert torch.equal(kernel(terms, slope), torch.full((2, 3), 4.0))
    assert tried == [1]


def test_many_vectors_go_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacobian_features, "_CPU_NUMBERS", 32)
    module, x = CASES["in place"]()
    features = features_of(module, x)
    assert features.at_once < K
    assert_products(features, doubled(x))


def test_some_parameters_in_an_order_of_their_own() -> None:
    features = features_of(PartlyFrozen(), x := torch.randn(N, 4), names=["scale", "second.bias"])
    assert features.size == 6
    assert_products(features, x.double())


def test_chosen_rows_are_those_of_the_data() -> None:
    module, x = CASES["perceptron"]()
    features = features_of(module, x)
    J, order = dense(features, x.double()), [torch.tensor([4, 0]), torch.tensor([2])]
    z = torch.randn(K, features.size).double()
    for index, block in zip(order, features.blocks(order), strict=True):
        assert torch.equal(block.index, index)
        expected = torch.einsum("bmd,kd->kbm", J[index], z)
        torch.testing.assert_close(block.forward(z), expected, rtol=1e-10, atol=1e-10)


class Pairs(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x = torch.linspace(0, 1, 3).double() + i
        return {"left": x, "right": x.cos(), "label": torch.tensor(0)}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.left(left) * self.right(right)


def test_inputs_of_several_tensors() -> None:
    network = network_of(TwoInputs())
    rows = Rows(DataLoader(Pairs(), batch_size=2))
    x = next(rows.batches([torch.arange(N)]))[0]
    assert_products(NetworkFeatures(network, network.params(), rows, block_rows=2), x)


def test_the_diagonal_of_the_curvature_is_exact() -> None:
    module, x = CASES["in place"]()
    features = features_of(module, x, names=None)
    J = dense(features, x.double())
    full, diagonal = torch.randn(N, 3, 2).double(), torch.rand(N, 3).double()
    expected = torch.einsum("bmd,bmr->brd", J, full).square().sum((0, 1))
    torch.testing.assert_close(features.curvature_diagonal(RowNoise(full)), expected, rtol=1e-10, atol=1e-12)
    expected = (J * diagonal.unsqueeze(2)).square().sum((0, 1))
    torch.testing.assert_close(features.curvature_diagonal(RowNoise(diagonal)), expected, rtol=1e-10, atol=1e-12)


def unfolded() -> nn.Module:
    """A norm that cannot be folded: its weights are in single precision, what it takes is not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 2), nn.Flatten())


@pytest.mark.parametrize("make", [Residual, unfolded])
def test_float16_is_near_and_gives_single_precision(make: Callable[[], nn.Module]) -> None:
    module, x = make(), torch.randn(N, 1, 4, 4)
    network = Network(module, caveat.Categorical())
    rows = Rows((x, torch.zeros(N, dtype=torch.long)))
    exact, rough = (NetworkFeatures(network, network.params(), rows, float16=b) for b in (False, True))
    z, v = torch.randn(K, exact.size), torch.randn(K, N, 3)
    a, b = next(exact.blocks()), next(rough.blocks())
    for precise, short in ((a.forward(z), b.forward(z)), (a.backward(v), b.backward(v)), (a.outputs, b.outputs)):
        assert short.dtype == torch.float32
        assert 1e-5 < float((short - precise).norm() / precise.norm()) < 2e-3


@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e6, 1e12])
def test_float16_takes_vectors_of_any_size(size: float) -> None:
    """Whose products are beyond its range, but for their scale; and beside others of another size."""
    network = Network(Residual(), caveat.Categorical())
    rows = Rows((torch.randn(N, 1, 4, 4), torch.zeros(N, dtype=torch.long)))
    block = next(NetworkFeatures(network, network.params(), rows, float16=True).blocks())
    z, v = torch.randn(K, block.features.size), torch.randn(K, N, 3)
    sizes = torch.tensor([1.0, size, 0.0])[:K]
    for product, given in ((block.forward, z), (block.backward, v)):
        scaled = product(given * sizes.view(-1, *[1] * (given.ndim - 1)))
        for one, plain, factor in zip(scaled, product(given), sizes, strict=True):
            torch.testing.assert_close(
                one / (factor or 1), plain * (factor > 0), rtol=0.1, atol=2e-3 * float(plain.norm())
            )


def test_float16_makes_room_where_a_product_is_too_large() -> None:
    network = Network(nn.Sequential(nn.Linear(4, 64, bias=False), nn.Linear(64, 3, bias=False)), caveat.Categorical())
    for parameter, value in zip(network.module.parameters(), (20.0, 0.001), strict=True):
        nn.init.constant_(parameter, value)
    rows = Rows((torch.full((N, 4), 200.0), torch.zeros(N, dtype=torch.long)))
    exact, short = (NetworkFeatures(network, network.params(), rows, float16=f) for f in (False, True))
    v = torch.ones(1, N, 3)
    found, expected = (next(f.blocks()).backward(v) for f in (short, exact))
    assert float(expected.max()) > torch.finfo(torch.float16).max
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=0)


def test_a_network_whose_numbers_leave_the_range_of_float16_is_refused() -> None:
    network, x = Network(nn.Linear(4, 3), caveat.Categorical()), torch.randn(N, 4)
    x[3] = 1e6
    rows = Rows((x, torch.zeros(N, dtype=torch.long)))
    assert next(NetworkFeatures(network, network.params(), rows).blocks()).outputs.isfinite().all()
    with pytest.raises(ValueError, match=r"numbers at row 3 leave the range of float16.*arithmetic='full'"):
        next(NetworkFeatures(network, network.params(), rows, float16=True).blocks())


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


class Signs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Straight.apply(self.first(x)))


class OverTheBatch(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(("module", "named"), [(Signs(), "first.weight"), (OverTheBatch(4, 3), "weight")])
def test_derivatives_that_are_not_autograds_are_refused(module: nn.Module, named: str) -> None:
    network = network_of(module)
    params, rows = network.params(), Rows((torch.randn(N, 4).double(), torch.zeros(N, dtype=torch.long)))
    for _ in range(2):  # what the network keeps does not make it pass
        with pytest.raises(ValueError, match=rf"derivatives of {named}.*row alone.*leave those parameters out"):
            NetworkFeatures(network, params, rows)


def test_an_operation_without_forward_mode_is_named_with_its_layer() -> None:
    module = nn.Sequential(nn.EmbeddingBag(7, 4, mode="max"), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"cannot linearise aten._embedding_bag.*which 0 uses.*leave the param"):
        features_of(module, torch.randint(7, (N, 3)))
    assert features_of(module, torch.randint(7, (N, 3)), names=["1.weight", "1.bias"]).size == 15


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def test_a_network_that_looks_at_its_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot be traced.*without branches that depend on numbers"):
        features_of(Branching(4, 3), torch.randn(N, 4))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"names=\['other'\] must be among the parameters"):
        features_of(nn.Linear(4, 3), torch.randn(N, 4), names=["other"])


class Spectrum(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(super().forward(x)).abs()


def test_complex_numbers_are_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Spectrum(4, 4))
    with pytest.raises(
        ValueError, match=r"aten._fft_r2c.default, which 1 uses, gives complex numbers.*replace the layer"
    ):
        features_of(module, torch.randn(N, 4))


class Root(nn.Linear):
    """Finite at zero, but its slope is not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs().sqrt()


@pytest.mark.parametrize("row", [0, 1])
def test_the_first_rows_without_finite_derivatives_are_named(row: int) -> None:
    x = torch.ones(N, 2)
    x[row] = 0
    with pytest.raises(
        ValueError, match=f"derivatives of row {row} by 1.weight hold NaN or infinity: look at that row"
    ):
        features_of(nn.Sequential(nn.Identity(), Root(2, 2, bias=False)), x)


def test_rows_without_finite_derivatives_are_named() -> None:
    x = torch.ones(N, 2)
    x[3] = 0
    features = features_of(Root(2, 2, bias=False), x, block_rows=2)
    model = LinearModel(features, RowNoise(torch.ones(N, 2).double()), torch.ones(1).double())
    with pytest.raises(ValueError, match="the features of row 3 give products that hold NaN"):
        model.check_finite()


def test_a_network_is_traced_whatever_a_program_has_set_for_tf32() -> None:
    module, x = CASES["perceptron"]()
    with full_precision(torch.device("cuda")):  # the settings of a GPU, which are there without one
        features = features_of(module, x)
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    assert torch.backends.cudnn.enabled
    assert_products(features, doubled(x))


def test_a_network_is_traced_once_for_each_shape_and_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    real = jacobian_features.Program
    monkeypatch.setattr(jacobian_features, "Program", lambda *a: (traced.append(1), real(*a))[1])
    network, x = network_of(nn.Linear(4, 3)), torch.randn(N, 4).double()
    params, programs = network.params(), jacobian_features.Programs()

    def outputs(params: dict[str, Tensor], count: int) -> Tensor:
        rows = Rows((x[:count], torch.zeros(count, dtype=torch.long)))
        features = NetworkFeatures(network, params, rows, programs=programs)
        return torch.cat([block.outputs for block in features.blocks()])

    first = outputs(params, N)
    assert len(traced) == 2  # two rows to check, and all
    assert torch.equal(outputs(params, N), first)
    assert len(traced) == 2
    params["bias"] += 1  # in place
    torch.testing.assert_close(outputs(params, N), first + 1)
    other = network.params()
    torch.testing.assert_close(outputs(other, N), first)
    assert len(traced) == 6
    for count in range(3, N + 1):
        outputs(other, count)
    monkeypatch.setattr(jacobian_features, "_PROGRAMS", 1)
    outputs(other, N)
    assert len(programs._kept) == 1
