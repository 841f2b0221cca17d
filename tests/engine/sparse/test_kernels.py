"""A layer given by few weights does what the layer with the whole weight does, to float32's accuracy, whichever way."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from caveat import native
from caveat.engine.sparse import kernels as sparse
from caveat.engine.sparse.kernels import LayerGeometry, Pattern, apply, apply_pair

native_only = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


def conv(*shape: int, **settings: Any) -> nn.Module:
    return (nn.Conv1d if len(shape) == 3 else nn.Conv2d)(shape[0], shape[1], shape[2:], bias=False, **settings)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(7, 5), (3, 7)),
    "linear, one row": (lambda: nn.Linear(40, 33), (1, 40)),
    "linear, many rows": (lambda: nn.Linear(19, 35), (301, 19)),
    "linear on sequences": (lambda: nn.Linear(17, 3), (2, 5, 17)),
    "linear on one vector": (lambda: nn.Linear(17, 3), (17,)),
    "1-D": (lambda: conv(3, 4, 3, padding=1), (2, 3, 11)),
    "1-D, stride, dilation": (lambda: conv(3, 4, 4, padding=5, stride=3, dilation=2), (5, 3, 23)),
    "3x3": (lambda: conv(4, 6, 3, 3, padding=1), (3, 4, 8, 8)),
    "3x3, one image of 32x32": (lambda: conv(3, 5, 3, 3, padding=1), (1, 3, 32, 32)),
    "3x3, many images of 4x4": (lambda: conv(20, 9, 3, 3, padding=1), (37, 20, 4, 4)),
    "3x3, many large": (lambda: conv(64, 3, 3, 3, padding=1), (18, 64, 15, 17)),
    "3x3, many chunks": (lambda: conv(64, 3, 3, 3, padding=1), (19, 64, 33, 31)),
    "linear, many chunks": (lambda: nn.Linear(19, 35), (2100, 19)),
    "no padding": (lambda: conv(2, 3, 3, 2), (4, 2, 7, 5)),
    "more padding than reach": (lambda: conv(2, 3, 2, 1, padding=(3, 2)), (4, 2, 5, 3)),
    "less padding than reach": (lambda: conv(2, 3, 5, 5, padding=(1, 2)), (4, 2, 9, 6)),
    "1x1": (lambda: conv(5, 3, 1, 1), (2, 5, 3, 3)),
    "1x1, stride 2": (lambda: conv(5, 3, 1, 1, stride=2), (19, 5, 7, 8)),
    "1x1, padded, stride 3": (lambda: conv(5, 3, 1, 1, stride=3, padding=2), (3, 5, 7, 8)),
    "stride 2": (lambda: conv(3, 4, 3, 3, stride=2, padding=1), (3, 3, 9, 8)),
    "stride 2 in one axis": (lambda: conv(3, 4, 3, 2, stride=(2, 1), padding=(0, 1)), (20, 3, 9, 8)),
    "stride 3, dilation 2": (lambda: conv(3, 4, 3, 3, stride=3, padding=4, dilation=2), (3, 3, 10, 11)),
    "stride beyond kernel": (lambda: conv(3, 4, 2, 2, stride=4), (17, 3, 13, 14)),
    "dilation": (lambda: conv(3, 4, 3, 3, padding=2, dilation=(2, 3)), (3, 3, 9, 10)),
    "asymmetric": (lambda: conv(3, 4, 1, 7, padding=(0, 3)), (2, 3, 5, 9)),
    "groups": (lambda: conv(6, 8, 3, 3, padding=1, groups=2), (3, 6, 5, 5)),
    "depthwise": (lambda: conv(6, 6, 5, 5, padding=2, groups=6), (3, 6, 7, 5)),
    "depthwise, stride 2": (lambda: conv(6, 12, 3, 3, padding=1, groups=6, stride=2), (17, 6, 7, 5)),
    "kernel larger than input": (lambda: conv(2, 3, 7, 7, padding=3), (3, 2, 2, 3)),
}  # fmt: skip


def pattern_of(geometry: LayerGeometry, density: float, seed: int = 0) -> Pattern:
    count = max(1, round(density * geometry.size))
    chosen = torch.randperm(geometry.size, generator=torch.Generator().manual_seed(seed))[:count]
    return Pattern(geometry, chosen.sort().values.int())


def outcomes(run: Callable[[], tuple[Tensor, ...]], leaves: list[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of a sum of them with fixed coefficients."""
    outputs = run()
    noise = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=noise, dtype=torch.float64).to(y.dtype) for y in outputs]
    total = sum((w * y).sum() for w, y in zip(weights, outputs, strict=True))
    return [*outputs, *torch.autograd.grad(total, leaves)]


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5 * max(1.0, b.abs().max().item()))


def given(case: str, density: float) -> tuple[Pattern, Tensor, Tensor, Tensor, Tensor]:
    make, shape = CASES[case]
    geometry = LayerGeometry.of(make())
    assert geometry is not None
    pattern = pattern_of(geometry, density)
    noise = torch.Generator().manual_seed(2)
    x, mean = torch.randn(shape, generator=noise), torch.randn(len(pattern.indices), generator=noise)
    variance, bias = torch.rand(mean.shape, generator=noise), torch.randn(geometry.shape[0], generator=noise)
    return pattern, *(t.requires_grad_() for t in (x, mean, variance, bias))  # type: ignore[return-value]


def doubled(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


@native_only
@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("case", CASES)
def test_native_kernels_agree_with_the_whole_weight(case: str, density: float, monkeypatch: Any) -> None:
    monkeypatch.setattr(sparse, "runs_sparse", lambda *_: True)
    pattern, x, mean, variance, bias = given(case, density)
    x64, mean64, variance64, bias64 = doubled(x, mean, variance, bias)

    found = outcomes(lambda: (apply(x, mean, pattern, bias),), [x, mean, bias])
    assert pattern.ran == "sparse"
    close(found, outcomes(lambda: (apply(x64, mean64, pattern, bias64),), [x64, mean64, bias64]))
    assert pattern.ran == "dense"
    close(
        outcomes(lambda: apply_pair(x, mean, variance, pattern), [x, mean, variance]),
        outcomes(lambda: apply_pair(x64, mean64, variance64, pattern), [x64, mean64, variance64]),
    )


@native_only
@pytest.mark.parametrize("rows", [1, 5, 16, 40])
def test_native_kernels_over_many_odd_sizes(rows: int, monkeypatch: Any) -> None:
    """Wrapped reads, which must find zeros, are where sizes, padding and kernel are all about equal."""
    monkeypatch.setattr(sparse, "runs_sparse", lambda *_: True)
    noise = torch.Generator().manual_seed(rows)

    def draw(low: int, high: int) -> tuple[int, int]:
        return tuple(torch.randint(low, high + 1, (2,), generator=noise).tolist())

    tried = 0
    while tried < 40:
        kernel, stride, padding, dilation, size = draw(1, 4), draw(1, 3), draw(0, 4), draw(1, 3), draw(1, 7)
        if any(n + 2 * p <= d * (k - 1) for n, p, d, k in zip(size, padding, dilation, kernel, strict=True)):
            continue
        tried += 1
        pattern = pattern_of(LayerGeometry((3, 2, *kernel), stride, padding, dilation), 0.6, seed=tried)
        x = torch.randn(rows, 2, *size, generator=noise).requires_grad_()
        mean = torch.randn(len(pattern.indices), generator=noise).requires_grad_()
        variance = torch.rand(mean.shape, generator=noise).requires_grad_()
        x64, mean64, variance64 = doubled(x, mean, variance)
        close(
            outcomes(lambda: apply_pair(x, mean, variance, pattern), [x, mean, variance]),  # noqa: B023
            outcomes(lambda: apply_pair(x64, mean64, variance64, pattern), [x64, mean64, variance64]),  # noqa: B023
        )


@native_only
@pytest.mark.parametrize("case", ["linear, many chunks", "3x3", "3x3, many images of 4x4", "3x3, many chunks"])
def test_results_do_not_depend_on_the_number_of_threads(case: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(sparse, "runs_sparse", lambda *_: True)
    pattern, x, mean, variance, _ = given(case, 0.3)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(outcomes(lambda: apply_pair(x, mean, variance, pattern), [x, mean, variance]))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("sparsely", [pytest.param(True, marks=native_only), False])
@pytest.mark.parametrize("case", ["linear on sequences", "groups", "stride 2"])
def test_the_whole_gradient_is_collected_on_the_way_back(case: str, sparsely: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(sparse, "runs_sparse", lambda *_: sparsely)
    pattern, x, mean, variance, bias = given(case, 0.3)
    whole = pattern.whole(mean.detach()).requires_grad_()
    (wanted,) = torch.autograd.grad(pattern.geometry.dense(x, whole).sum(), whole)

    for run in (
        lambda collect: apply(x, mean, pattern, bias, collect),
        lambda collect: sum(apply_pair(x, mean, variance, pattern, collect)),
    ):
        collected: list[Tensor] = []
        run(collected.append).sum().backward()
        torch.testing.assert_close(collected, [wanted])
    torch.testing.assert_close(mean.grad, 2 * pattern.at(wanted))


@native_only
def test_only_what_is_asked_for_is_made(monkeypatch: Any) -> None:
    monkeypatch.setattr(sparse, "runs_sparse", lambda *_: True)
    pattern, x, mean, variance, _ = given("3x3", 0.3)
    all_of = outcomes(lambda: apply_pair(x, mean, variance, pattern), [x, mean, variance])
    for leaf, (tensor, name) in enumerate(((x, "x"), (mean, "mean"), (variance, "variance"))):
        alone = {"x": x.detach(), "mean": mean.detach(), "variance": variance.detach(), name: tensor}
        found = outcomes(lambda: apply_pair(pattern=pattern, **alone), [tensor])  # noqa: B023
        torch.testing.assert_close(found[2], all_of[2 + leaf])


@native_only
def test_inputs_in_any_layout(monkeypatch: Any) -> None:
    monkeypatch.setattr(sparse, "runs_sparse", lambda *_: True)
    pattern, x, mean, _, bias = given("3x3", 0.3)
    wanted = apply(x, mean, pattern, bias)
    torch.testing.assert_close(apply(x.to(memory_format=torch.channels_last), mean, pattern, bias), wanted)
    spread = torch.stack([mean, mean], 1)[:, 0]
    torch.testing.assert_close(apply(x, spread, pattern, bias), wanted)


def test_what_the_kernels_do_not_take_goes_through_the_whole_weight(monkeypatch: Any) -> None:
    monkeypatch.setattr(sparse, "runs_sparse", lambda *_: True)
    pattern, x, mean, _, _ = given("3x3", 0.3)
    with torch.no_grad():
        wanted = apply(x.double(), mean.double(), pattern)
        assert pattern.ran == "dense"
        torch.testing.assert_close(apply(x[0], mean, pattern).double(), wanted[0], rtol=1e-4, atol=1e-5)
        assert pattern.ran == "dense"
        assert apply(x[:0], mean, pattern).shape == (0, *wanted.shape[1:])
        assert apply(x.bfloat16(), mean.bfloat16(), pattern).dtype == torch.bfloat16


@pytest.mark.parametrize("count", [3, 4])
def test_nothing_of_another_type_or_length_reaches_the_kernels(count: int, monkeypatch: Any) -> None:
    """Also where there are as many weights as outputs."""
    monkeypatch.setattr(sparse, "runs_sparse", lambda *_: True)
    pattern = Pattern(LayerGeometry((4, 5)), torch.arange(count, dtype=torch.int32))
    x, bias = torch.ones(2, 5), torch.ones(4)
    with pytest.raises(RuntimeError):
        apply(x, torch.ones(count, dtype=torch.float64), pattern, bias)
    with pytest.raises((RuntimeError, IndexError)):
        apply(x, torch.ones(count - 1), pattern, bias)
    with pytest.raises(RuntimeError):
        apply(x, torch.ones(count), pattern, torch.ones(3))
    assert pattern.ran == "dense"


def test_a_wrong_input_is_refused_as_torch_refuses_it() -> None:
    pattern, x, mean, _, _ = given("3x3", 0.1)
    with pytest.raises(RuntimeError, match="channels"):
        apply(x[:, :3], mean, pattern)


def test_under_transforms_of_torch_func(monkeypatch: Any) -> None:
    monkeypatch.setattr(sparse, "runs_sparse", lambda *_: True)
    pattern, x, mean, _, bias = given("3x3", 0.3)
    found = torch.func.vmap(lambda v: apply(x.detach(), v, pattern, bias))(torch.stack([mean, 2 * mean]).detach())
    torch.testing.assert_close(found[0], apply(x, mean, pattern, bias), rtol=1e-4, atol=1e-5)
    (wanted,) = torch.autograd.grad(apply(x, mean, pattern).sum(), mean)
    found = torch.func.grad(lambda v: apply(x.detach(), v, pattern).sum())(mean.detach())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["1-D, stride, dilation", "3x3"])
def test_one_image_without_an_axis_of_rows(case: str) -> None:
    pattern, x, mean, variance, _ = given(case, 0.3)
    one = x.detach()[0].requires_grad_()
    alone = outcomes(lambda: apply_pair(one, mean, variance, pattern), [one, mean, variance])
    row = one.detach().unsqueeze(0).requires_grad_()
    first = outcomes(lambda: apply_pair(row, mean, variance, pattern), [row, mean, variance])
    for found, wanted in zip(alone, first, strict=True):
        torch.testing.assert_close(found, wanted.reshape(found.shape), rtol=1e-4, atol=1e-5)


@native_only
def test_structures_of_many_sizes_are_not_kept_for_ever(monkeypatch: Any) -> None:
    monkeypatch.setattr(sparse, "runs_sparse", lambda *_: True)
    pattern, x, mean, _, _ = given("1-D", 0.5)
    for length in range(11, 11 + 3 * sparse._STRUCTURES):
        longer = torch.nn.functional.pad(x.detach(), (0, length - 11)).requires_grad_()
        apply(longer, mean, pattern).sum().backward()
        assert len(pattern._structures) <= sparse._STRUCTURES
    x64, mean64 = doubled(x, mean)
    close(
        outcomes(lambda: (apply(x, mean, pattern),), [x, mean]),
        outcomes(lambda: (apply(x64, mean64, pattern),), [x64, mean64]),
    )


@native_only
def test_copies_of_a_pattern_make_structures_of_their_own(monkeypatch: Any) -> None:
    monkeypatch.setattr(sparse, "runs_sparse", lambda *_: True)
    pattern, x, mean, _, bias = given("3x3", 0.3)
    with torch.no_grad():
        wanted = apply(x, mean, pattern, bias)
        for twin in (copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
            assert not twin._structures
            torch.testing.assert_close(apply(x, mean, twin, bias), wanted, rtol=0, atol=0)


def test_few_weights_run_sparse_and_many_do_not() -> None:
    geometry = LayerGeometry((64, 64, 3, 3), (1, 1), (1, 1), (1, 1))
    for rows in (1, 128):
        assert sparse.runs_sparse(geometry, geometry.size // 20, (rows, 64, 32, 32))
        assert not sparse.runs_sparse(geometry, geometry.size // 2, (rows, 64, 32, 32))
    assert sparse.runs_sparse(LayerGeometry((300, 784)), 11_760, (1, 784))


@pytest.mark.parametrize("case", ["linear on sequences", "3x3", "stride 2", "groups"])
def test_no_whole_weight_and_no_square_is_kept_for_the_way_back(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every device without native kernels, of which this CPU is one here; gradients are those of float64."""
    monkeypatch.setattr(sparse, "_grid", lambda *given: None)
    layer, shape = CASES[case][0](), CASES[case][1]
    geometry = LayerGeometry.of(layer)
    assert geometry is not None
    pattern = pattern_of(geometry, 0.1)
    x = torch.randn(shape, requires_grad=True)
    mean, variance = (torch.randn(len(pattern.indices)).abs().requires_grad_() for _ in range(2))
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for way, given in (
        (lambda: apply_pair(x, mean, variance, pattern), [x, mean, variance]),
        (lambda: (apply(x, mean, pattern),), [x, mean]),
    ):
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            outputs = way()
        assert saved.keys() == {t.untyped_storage().data_ptr() for t in given}
        weights = [torch.randn_like(y) for y in outputs]
        found = torch.autograd.grad(outputs, given, weights)
        exact = [t.detach().double().requires_grad_() for t in given]
        whole = [pattern.whole(values) for values in exact[1:]]
        doubles = [geometry.dense(exact[0] if i == 0 else exact[0].square(), w) for i, w in enumerate(whole)]
        expected = torch.autograd.grad(doubles, exact, [w.double() for w in weights])
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def test_pairs_under_autocast_have_gradients_of_their_own_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_grid", lambda *given: None)
    geometry = LayerGeometry.of(nn.Linear(40, 33))
    assert geometry is not None
    pattern = pattern_of(geometry, 0.2)
    x, mean = torch.randn(6, 40, requires_grad=True), torch.randn(len(pattern.indices), requires_grad=True)
    variance = torch.rand(len(pattern.indices), requires_grad=True)
    full = torch.autograd.grad([y.sum() for y in apply_pair(x, mean, variance, pattern)], [x, mean, variance])
    with torch.autocast("cpu", torch.bfloat16):
        outputs = apply_pair(x, mean, variance, pattern)
    assert all(y.dtype == torch.bfloat16 for y in outputs)
    for mine, theirs in zip(
        torch.autograd.grad([y.float().sum() for y in outputs], [x, mean, variance]), full, strict=True
    ):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.1)
