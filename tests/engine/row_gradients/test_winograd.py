"""Convolutions by Winograd's way agree with float64, there and back, and are taken where they are faster alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from caveat import Categorical, Network, native
from caveat.engine.row_gradients import winograd
from caveat.engine.row_gradients.jacobian import Jacobian
from caveat.engine.row_gradients.winograd import Winograd, suits
from caveat.models.resnet18 import Residual

native_only = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def apart(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact).norm() / exact.norm())


@native_only
@pytest.mark.parametrize("size", [(1, 5, 9), (1, 3, 3), (3, 7, 7), (2, 8, 4)])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 128), (192, 64)])
def test_there_and_back(
    monkeypatch: Any, size: tuple[int, int, int], stride: int, padding: int, inputs: int, outputs: int
) -> None:
    monkeypatch.setattr(winograd, "WORTH", 0)
    x, w = normal(size[0], inputs, *size[1:]), normal(outputs, inputs, 3, 3, seed=1)
    exact = F.conv2d(x.double(), w.double(), stride=stride, padding=padding)
    g = normal(*exact.shape, seed=2)
    back = conv2d_input(list(x.shape), w.double(), g.double(), stride=stride, padding=padding)
    x.requires_grad_()
    with Winograd([w]) as mode:
        y = F.conv2d(x, w, None, stride, padding)
    (found,) = torch.autograd.grad(y, x, g)
    assert apart(y, exact) < 1e-5
    assert apart(found, back) < 1e-5
    (kernel,) = mode.kernels.values()
    assert set(kernel.transformed) == ({False, True} if stride == 1 else {True})


@native_only
def test_large_kernels_whose_work_is_shared(monkeypatch: Any) -> None:
    """More numbers than the caches hold: threads then take panels of one block."""
    monkeypatch.setattr(winograd, "WORTH", 0)
    w = normal(384, 384, 3, 3, seed=1)
    for stride in (1, 2):
        g = normal(2, 384, 4, 4, seed=2)
        shape = [2, 384, 4 * stride, 4 * stride]
        kernel = winograd._WinogradKernel(w, stride, 1)
        exact = conv2d_input(shape, w.double(), g.double(), stride=stride, padding=1)
        assert apart(kernel.backward(g, shape), exact) < 1e-5


@native_only
def test_a_kernel_is_transformed_once_it_has_met_enough_positions() -> None:
    x, w = normal(4, 64, 8, 8).requires_grad_(), normal(64, 64, 3, 3, seed=1)
    mode = Winograd([w])
    met = []
    for _ in range(5):
        with mode:
            y = F.conv2d(x, w, padding=1)
        torch.autograd.grad(y.sum(), x)
        (kernel,) = mode.kernels.values()
        met.append(set(kernel.transformed))
    assert met == [set(), set(), set(), {False, True}, {False, True}]  # 256 positions a time


@pytest.mark.parametrize(
    ("weight", "options"),
    [
        (normal(64, 48, 3, 3), {}),
        (normal(70, 64, 3, 3), {}),
        (normal(64, 64, 1, 1), {}),
        (normal(64, 64, 5, 5), {}),
        (normal(64, 64, 3, 3).double(), {}),
        (normal(64, 64, 3, 3), {"dilation": 2}),
        (normal(64, 64, 3, 3), {"stride": 3}),
        (normal(64, 64, 3, 3), {"stride": (1, 2), "padding": 1}),
        (normal(64, 64, 3, 3), {"padding": 3}),
        (normal(128, 64, 3, 3), {"groups": 2}),
    ],
)
def test_others_go_the_direct_way(monkeypatch: Any, weight: Tensor, options: dict[str, Any]) -> None:
    monkeypatch.setattr(winograd, "WORTH", 0)
    x = normal(2, weight.shape[1] * options.get("groups", 1), 9, 9).to(weight.dtype)
    with Winograd([weight]) as mode:
        y = F.conv2d(x, weight, **options)
    assert not mode.kernels
    assert apart(y, F.conv2d(x.double(), weight.double(), **options)) < 1e-6


def test_a_weight_that_is_made_anew_is_left_alone() -> None:
    w = normal(64, 64, 3, 3)
    with Winograd([w]) as mode:
        F.conv2d(normal(2, 64, 9, 9), w.clone())
    assert not mode.kernels


def test_without_native_kernels_nothing_suits(monkeypatch: Any) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    assert not suits(normal(64, 64, 3, 3))


def block(stride: int, inplace: bool = False) -> nn.Module:
    def layers(inputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, 64, 3, padding=1), nn.BatchNorm2d(64)]

    body = nn.Sequential(*layers(64), nn.ReLU(inplace), nn.Conv2d(64, 64, 3, stride, 1, bias=False), nn.BatchNorm2d(64))
    shortcut = nn.Identity() if stride == 1 else nn.Conv2d(64, 64, 1, 2)
    return nn.Sequential(*layers(3), nn.ReLU(), Residual(body, shortcut, nn.ReLU()), nn.Flatten(), nn.LazyLinear(3))


class Viewed(nn.Module):
    """Takes images as they lie with channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(64, 64, 3, padding=1), nn.Linear(64 * 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu().view(len(x), -1))


class Written(nn.Module):
    """Writes into what a relu made before a convolution reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(64), nn.Linear(64 * 64, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.first(x)).clone())
        z = self.norm(h)
        z.mul_(2)
        return self.head(self.second(F.relu(z)).flatten(1))


@native_only
@pytest.mark.parametrize("build", [lambda: block(1), lambda: block(2), lambda: block(1, True), Viewed, Written])
def test_jacobians_agree_with_float64(monkeypatch: Any, build: Any) -> None:
    """Through BatchNorm, relu and sums, in one piece or in steps, in place or not: chosen weights of every layer."""
    monkeypatch.setattr(winograd, "WORTH", 0)
    torch.manual_seed(3)
    module, channels = build(), 64 if build in (Viewed, Written) else 3
    x = normal(5, channels, 8, 8)
    module(x)  # shapes of lazy layers, and statistics
    for norm in (m for m in module.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    index = torch.arange(0, sum(p.numel() for p in module.parameters()), 997)
    found = []
    for dtype in (torch.float32, torch.float64):
        network = Network(module.to(dtype), Categorical())
        jacobian = Jacobian(network, network.params(), x.to(dtype), index)
        found.append(jacobian.at(x.to(dtype)).rows())
        ran = [] if jacobian.winograd is None else list(jacobian.winograd.kernels.values())
        expected = dtype == torch.float32 and build is not Viewed
        assert any(True in kernel.transformed for kernel in ran) == expected
    assert apart(found[0], found[1]) < 1e-5
