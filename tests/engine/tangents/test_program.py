"""Products with a network's Jacobian by its traced program, against autograd's in float64."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.tangents import Program, image_layouts, lazy_sums, product_rules, tracing
from caveat.engine.tangents.tracing import NotTraceableError
from caveat.engine.torch_settings import full_precision
from caveat.network import Network
from tests.engine.tangents.program_reference import CASES, K, N, assert_products, doubled, network_of, program_of


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_jacobian(name: str) -> None:
    module, x = CASES[name]()
    assert_products(module, x)


@pytest.mark.parametrize("name", ["groups", "one place, strides", "residual"])
def test_convolutions_one_weight_at_a_time_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_rules, "ALONE_FROM", 1)
    module, x = CASES[name]()
    assert_products(module, x)


def test_few_channels_that_are_read_at_every_second_place() -> None:
    """Where oneDNN's own gradient of the weight overruns its memory: two threads, an odd number of rows."""
    module, x = nn.Sequential(nn.Conv2d(8, 16, 1, 2), nn.Flatten(), nn.Linear(1024, 2)), torch.randn(99, 8, 16, 16)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        network = Network(module, caveat.Categorical())
        program = Program(network, network.params(), network.names, x)
        saved, _ = program.run(x)
        v = torch.randn(1, 99, 2)
        pulled = [program.pull(saved, v) for _ in range(20)]
    finally:
        torch.set_num_threads(threads)
    _, exact = program_of(module, x)
    expected = exact.pull(exact.run(x.double())[0], v.double())
    torch.testing.assert_close(pulled[-1].double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "ROWS") for name in ("groups", "residual", "pools and norms", "views")]
    + [(name, "DEPTH") for name in ("groups", "residual", "pools and norms", "views")],
)
def test_products_of_a_gpu_are_those_of_the_jacobian(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_rules, "GPU_LAYOUT", getattr(image_layouts, layout))
    module, x = CASES[name]()
    assert_products(module, x)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_on_a_gpu_what_follows_a_convolution_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_rules, "GPU_LAYOUT", image_layouts.ROWS)  # a CPU's 3-D ones leave channels first
    sums: list[tuple[Any, ...]] = []
    monkeypatch.setattr(lazy_sums, "_fused", lambda *kind: (sums.append(kind), lazy_sums._sum)[1])
    module, x = CASES["residual"]()
    _, program = program_of(module, x)
    saved, _ = program.run(doubled(x))
    sums.clear()
    program.push(saved, torch.randn(K, sum(program.sizes)).double())
    # Inputs, weight and shift of the second convolution, weight and shift of the shortcut's, and the slope.
    assert sums[-1][:2] == (5, True)
    assert all(with_slope for _, with_slope, *_ in sums)  # nothing is added on its own


def test_an_operation_without_forward_mode_is_named_with_its_layer() -> None:
    module = nn.Sequential(nn.EmbeddingBag(7, 4, mode="max"), nn.Linear(4, 3))
    network, program = program_of(module, x := torch.randint(7, (N, 3)))
    saved, _ = program.run(x)
    with pytest.raises(ValueError, match=r"cannot linearise aten._embedding_bag.*which 0 uses.*several vectors"):
        program.push(saved, torch.randn(K, sum(program.sizes)).double())
    rest = Program(network, network.params(), ["1.weight", "1.bias"], x)
    assert rest.push(rest.run(x)[0], torch.randn(K, 15).double()).shape == (K, N, 3)


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


def test_a_network_that_looks_at_its_numbers_is_refused() -> None:
    with pytest.raises(NotTraceableError, match=r"depends on the numbers that aten._local_scalar_dense"):
        program_of(Branching(4, 3), torch.randn(N, 4))


class Masked(nn.Linear):
    """How many rows it takes is a number that Python never looks at, and the trace would hold for good."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        h = x.new_zeros(len(x), self.out_features)
        h[chosen] = super().forward(x[chosen])
        return h


class Counted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len((x > 0).nonzero())


class OfNumpy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.detach().numpy().sum())


class Compared(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.equal(x, x.abs()) else super().forward(-x)


@pytest.mark.parametrize("layer", [Masked, Counted, OfNumpy, Compared])
def test_what_a_trace_would_hold_for_good_is_refused(layer: type[nn.Linear]) -> None:
    with pytest.raises(NotTraceableError, match=r"depends on the numbers that|reads numbers outside of torch"):
        program_of(layer(4, 3), torch.randn(N, 4))


def test_tracing_ends_in_time() -> None:
    network = network_of(nn.Linear(4, 3))
    with pytest.raises(NotTraceableError, match="takes too long"):
        Program(network, network.params(), network.names, torch.randn(N, 4).double(), until=time.monotonic() - 1)


class Spectrum(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(super().forward(x)).abs()


def test_complex_numbers_are_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Spectrum(4, 4))
    with pytest.raises(ValueError, match=r"aten._fft_r2c.default, which 1 uses, gives complex numbers"):
        program_of(module, torch.randn(N, 4))


def test_a_network_is_traced_whatever_a_program_has_set_for_tf32() -> None:
    module, x = CASES["perceptron"]()
    with full_precision(torch.device("cuda")):  # the settings of a GPU, which are there without one
        program_of(module, x)
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    assert torch.backends.cudnn.enabled
    assert_products(module, x)


def test_a_graph_is_traced_again_only_where_something_writes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[int] = []
    once_more = tracing._without_writing_in_place
    monkeypatch.setattr(tracing, "_without_writing_in_place", lambda *a: (again.append(1), once_more(*a))[1])
    x = torch.randn(20, 4)
    for in_place in (False, True):
        module = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=in_place), nn.Linear(5, 3)).eval()
        network = Network(module, caveat.Categorical(), caveat.GaussianPrior())
        graph = tracing.traced(network, network.params() | network.buffers(), x, False)
        assert not any(tracing._writes(node) for node in graph.graph.nodes)
        assert len(again) == in_place
