"""Per-row gradients agree with autograd's of each row alone, whichever way a layer's are made, and within memory."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from caveat import Gaussian, Network
from caveat.batches import Inputs, map_tensors
from caveat.engine import cost
from caveat.engine.row_gradients import product_uses
from caveat.engine.row_gradients.jacobian import Jacobian, RowPass
from caveat.engine.row_gradients.uses import ChosenEntries
from caveat.models import cnn_lstm, lenet5, resnet18
from tests.engine.row_gradients.row_reference import (
    RNG,
    ROWS,
    TWO,
    Custom,
    assert_close,
    assert_right,
    chain,
    frames,
    network,
    normal,
    reference,
    swapped,
    tokens,
)


def attention(cross: bool = False, masked: bool = False, **options: Any) -> nn.Module:
    def run(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        masks = {}
        if masked:
            padding = torch.arange(key.shape[1]) > key[:, :, 0] + 1.5
            padding[:, 0] = False
            causal = torch.ones(query.shape[1], key.shape[1]).triu(1).bool()
            masks = {"key_padding_mask": padding, "attn_mask": causal}
        if not self.layer.batch_first:
            query, key, value = swapped(query), swapped(key), swapped(value)
        found = self.layer(query, *((key, value) if cross else (query, query)), **masks)[0]
        return found if self.layer.batch_first else swapped(found)

    return Custom(run, layer=nn.MultiheadAttention(4, 2, **options))


def tied() -> nn.Module:
    module = Custom(lambda s, t: s.out(torch.tanh(s.embed(t))), embed=nn.Embedding(7, 3), out=nn.Linear(3, 7))
    module.out.weight = module.embed.weight
    return module


def inputs_change_later(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    moved = h + self.shift
    h.mul_(2)
    return moved.relu_() + self.b(h.relu_())


def sequence_first(self: Any, x: Tensor) -> Tensor:
    h = self.norm(self.a(swapped(x)))
    return self.b(h + self.attention(h, h, h)[0]).mean(0)


def clips(self: Any, x: Tensor) -> Tensor:  # rows x frames
    h = self.norm(self.conv(x.flatten(0, 1)))
    return self.head(h.square().mean((2, 3))).unflatten(0, (len(x), -1)).sum(1)


def mixed(self: Any, x: Tensor, tokens: Tensor, scale: float, mode: str, shift: Tensor) -> Tensor:
    assert (mode, shift.ndim) == ("sum", 0)
    return scale * self.linear(x) @ self.matrix + self.embed(tokens).sum(1) + shift


def bias_first(self: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x.tanh(), self.weight, self.bias)


def bare(self: Any, x: Tensor) -> Tensor:
    return (self.row * x + self.table * torch.tanh(x + self.shift)) * self.gain


QUERY, KEY, VALUE, IMAGES, SERIES = normal(3, 4), normal(5, 4), normal(5, 4), normal(4, 6, 6), normal(4, 7)
OWN_SIZES = (normal(2, 4), normal(5, 3), normal(5, 2))
OPTIONS: dict[str, Any] = {"x": normal(3), "tokens": tokens(5), "scale": 2.0, "mode": "sum", "shift": torch.tensor(0.5)}
MORE = {"norm": nn.LayerNorm(3), "attention": nn.MultiheadAttention(3, 1)}
SEQUENCE = Custom(sequence_first, **TWO, **MORE)
UNSEEN = Custom(lambda s, x: s.a(swapped(x.unflatten(1, (3, 4)))).sin().sum(0), **TWO)
CLIPS = Custom(clips, conv=nn.Conv2d(3, 3, 2), norm=nn.GroupNorm(1, 3), head=nn.Linear(3, 2))
MIXED = Custom(mixed, linear=nn.Linear(3, 4), matrix=(4, 2), embed=nn.Embedding(7, 2))
DECODER = nn.TransformerDecoderLayer(4, 2, 5, 0.1, norm_first=True, batch_first=True)

KNOWN: dict[str, tuple[nn.Module, Inputs]] = {
    "linear": (chain(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), normal(4)),
    "linear on positions": (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), normal(2, 3, 4)),
    "linear without output axis": (Custom(lambda s, x: s.a(x).squeeze(-1), a=nn.Linear(4, 1)), normal(4)),
    "conv1d": (chain(nn.Conv1d(4, 3, 3, stride=2, padding=1)), SERIES),
    "conv1d same": (chain(nn.Conv1d(4, 6, 4, padding="same", groups=2)), SERIES),
    "conv2d": (chain(nn.Conv2d(4, 3, (3, 2), (2, 1), (1, 0), (1, 2))), IMAGES),
    "conv2d same": (chain(nn.Conv2d(4, 6, (2, 3), padding="same", dilation=(1, 2), groups=2)), IMAGES),
    "conv2d asymmetric": (chain(nn.ZeroPad2d((0, 2, 1, 0)), nn.Conv2d(4, 3, 3, bias=False)), IMAGES),
    "conv2d circular": (chain(nn.Conv2d(4, 3, 3, padding=(1, 2), padding_mode="circular")), IMAGES),
    "conv2d depthwise": (chain(nn.Conv2d(4, 8, 3, padding=1, groups=4)), IMAGES),
    "conv3d": (chain(nn.Conv3d(2, 4, (1, 2, 3), (1, 2, 1), (0, 1, 1), groups=2)), normal(2, 3, 4, 4)),
    "batch norm": (chain(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)), IMAGES),
    "batch norm of features": (chain(nn.Linear(4, 5), nn.BatchNorm1d(5)), normal(4)),
    "group norm": (chain(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)), IMAGES),
    "layer norm": (chain(nn.LayerNorm(7), nn.Linear(7, 4), nn.LayerNorm((4, 4), bias=False)), SERIES),
    "instance norm": (chain(nn.Conv1d(4, 3, 2), nn.InstanceNorm1d(3, affine=True)), SERIES),
    "rms norm": (chain(nn.Linear(7, 4), nn.RMSNorm((4, 4))), SERIES),
    "embedding": (chain(nn.Embedding(7, 3, padding_idx=2)), tokens(6)),
    "embedding of one token": (chain(nn.Embedding(7, 3)), tokens(1).squeeze(1)),
    "attention": (attention(batch_first=True), (QUERY, QUERY, QUERY)),
    "attention masked": (attention(masked=True), (KEY, KEY, KEY)),
    "attention cross": (attention(cross=True, masked=True), (normal(2, 4), KEY, VALUE)),
    "attention key is value": (attention(cross=True, bias=False, batch_first=True), (QUERY, KEY, KEY)),
    "attention own sizes": (attention(cross=True, kdim=3, vdim=2, batch_first=True), OWN_SIZES),
    "attention own sizes, no bias": (attention(cross=True, kdim=3, vdim=2, bias=False), OWN_SIZES),
    "encoder": (chain(nn.TransformerEncoderLayer(4, 2, 5, 0.1, batch_first=True)), QUERY),
    "decoder": (DECODER, (QUERY, KEY)),
    "tied": (tied(), tokens(3)),
    "called twice": (Custom(lambda s, x: s.a(s.a(x).tanh()) + s.a(2 * x), a=nn.Linear(3, 3)), normal(3)),
    "inputs change later": (Custom(inputs_change_later, shift=(3,), **TWO), normal(4)),
    "bare parameters": (Custom(bare, row=(4,), table=(3, 4), shift=(1, 3, 1), gain=()), QUERY),
    "never used": (Custom(lambda s, x: s.a(x), **TWO), normal(4)),
    "no gradient": (Custom(lambda s, x: s.a(x) + s.b(s.a(x)).detach() + 0 * s.b(s.a(x)), **TWO), normal(4)),
    "sequence first": (SEQUENCE, normal(5, 4)),
    "sequence first, three positions": (SEQUENCE, normal(3, 4)),
    "sequence first, six positions": (SEQUENCE, normal(6, 4)),
    "tokens, sequence first": (Custom(lambda s, t: s.a(t.T).sin().mean(0), a=nn.Embedding(7, 3)), tokens(6)),
    "rows by time": (CLIPS, normal(2, 3, 4, 4)),
    "resnet18": (resnet18(2, 3, width=2), normal(2, 8, 8, rows=3)),
    "lenet5": (lenet5(1, 2, 12), normal(1, 12, 12, rows=2)),
    "cnn_lstm": (cnn_lstm(7, 4, 3, 2, 3), tokens(16)),
}
# Also the parameters that take the general way, by their prefix.
GENERAL: dict[str, tuple[nn.Module, Inputs, tuple[str, ...]]] = {
    "lstm": (Custom(lambda s, x: s.a(x)[0][:, -1], a=nn.LSTM(7, 2, batch_first=True)), SERIES, ("a.",)),
    "weight norm": (chain(weight_norm(nn.Linear(4, 3))), normal(4), ("body.0.parametrizations",)),
    "transposed": (chain(nn.ConvTranspose2d(4, 2, 2), nn.BatchNorm2d(2)), IMAGES, ("body.0.",)),
    "learned keys": (attention(add_bias_kv=True), (QUERY, KEY, VALUE), ("layer.",)),
    "bare parameters": (
        Custom(lambda s, x: (x @ s.matrix - s.row) / s.gain, matrix=(4, 2), row=(2,), gain=()),
        normal(4),
        ("matrix", "row", "gain"),
    ),
    "dict": (MIXED, OPTIONS, ("matrix",)),
    "tuple": (MIXED, tuple(OPTIONS.values()), ("matrix",)),
    "time by rows": (Custom(frames, **TWO), KEY, ("a.",)),
    "three positions, unseen": (UNSEEN, normal(12), ("a.",)),
    "bias with an axis for rows": (Custom(bias_first, bias=(1, 2), weight=(2, 4)), normal(4), ("weight", "bias")),
    "one bias for all outputs": (Custom(bias_first, bias=(1,), weight=(2, 4)), normal(4), ("weight", "bias")),
    "not of the rows": (Custom(lambda s, x: s.a(x) * s.b(torch.ones(3).double()), **TWO), normal(4), ("b.",)),
}
CASES: dict[str, Any] = {k: (*v, ()) for k, v in KNOWN.items()} | {f"general {k}": v for k, v in GENERAL.items()}


def some_of(count: int, size: int) -> Tensor:
    return torch.randperm(size, generator=RNG)[:count].sort().values


def test_many_entries_of_a_table_cost_no_comparison_with_every_token() -> None:
    class Written(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **kwargs or {})
            self.numbers += result.numel() if isinstance(result, Tensor) else 0
            return result

    x = torch.randint(0, 500, (3, 40), generator=RNG)
    net = network(Custom(lambda s, t: s.embed(t).tanh().mean(1), embed=nn.Embedding(500, 4)))
    chosen = torch.arange(300, 1800)
    row_pass = Jacobian(net, net.params(), x, chosen).at(x)
    v = torch.zeros_like(row_pass.outputs)
    v[:, 1] = 1
    with Written() as written:
        columns = row_pass.columns(v)
    assert_close(columns, reference(net, x)[:, 1, chosen])
    assert written.numbers < 10 * (columns.numel() + x.numel() * 4)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's own, of an even kernel
@pytest.mark.parametrize("case", CASES)
def test_every_gradient_is_that_of_the_row_alone(case: str) -> None:
    module, x, general = CASES[case]
    net = network(module)
    wanted = reference(net, x)
    jacobian = Jacobian(net, net.params(), x)
    assert jacobian.plan.general == tuple(name for name in net.names if general and name.startswith(general))
    assert jacobian.plan.vectorised == (bool(general) and case != "general lstm")  # which torch.func cannot run
    assert_right(jacobian, x, wanted)
    for rows in (1, 2):
        first = map_tensors(lambda t, rows=rows: t[:rows] if t.ndim else t, x)
        assert_close(jacobian.at(first).rows(), wanted[:rows])
    in_first, in_all = net.params()[net.names[0]].numel(), net.n_parameters
    for chosen in (some_of(in_all // 3, in_all), some_of(1 + in_first // 2, in_first), some_of(1, in_all)):
        assert_close(Jacobian(net, net.params(), x, chosen).at(x).rows(), wanted[..., chosen])


@pytest.mark.parametrize("pattern", ["*.weight", "*.bias", "body.2.*", "body.0.weight"])
def test_only_the_selected_parameters_count(pattern: str) -> None:
    net = network(chain(nn.Conv1d(4, 3, 2), nn.InstanceNorm1d(3, affine=True), nn.Linear(6, 3)), pattern)
    jacobian = Jacobian(net, net.params(), SERIES)
    assert jacobian.plan.general == ()
    assert_right(jacobian, SERIES, reference(net, SERIES))


@pytest.mark.parametrize("case", ["conv2d", "conv2d depthwise", "attention cross", "linear on positions", "embedding"])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("numbers", [1, 100, 2**24])
def test_either_product_in_pieces_of_any_size(
    monkeypatch: pytest.MonkeyPatch, case: str, dense: bool, numbers: int
) -> None:
    module, x = KNOWN[case]
    net = network(module)
    wanted, chosen = reference(net, x), some_of(net.n_parameters // 2, net.n_parameters)
    every, some = Jacobian(net, net.params(), x), Jacobian(net, net.params(), x, chosen)
    monkeypatch.setitem(product_uses.BYTES_PER_PRODUCT, "cpu", -math.inf if dense else math.inf)
    monkeypatch.setitem(cost.WORKING_NUMBERS, "cpu", numbers)
    assert_right(every, x, wanted)
    if case != "conv2d depthwise":  # which always gathers
        monkeypatch.delattr(product_uses.ProductUse, "_gather" if dense else "patches")
    assert_close(some.at(x).rows(), wanted[..., chosen])


def test_other_weights_may_be_asked_of_the_same_pass() -> None:
    net = network(KNOWN["conv2d depthwise"][0])
    row_pass = Jacobian(net, net.params(), IMAGES).at(IMAGES)
    v = torch.ones_like(row_pass.outputs)
    (use, point), wanted = row_pass.passed.uses[0], reference(net, IMAGES).sum(1)
    for chosen in (torch.tensor([4, 14]), torch.tensor([31, 50])):  # the same places in the kernels of other channels
        assert_close(use.columns(row_pass.gradients(v)[point], ChosenEntries(chosen)), wanted[:, chosen])


@pytest.mark.parametrize("case", ["batch norm", "encoder", "embedding", "cnn_lstm", "general lstm", "general dict"])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_single_and_half_precision(case: str, bfloat16: bool) -> None:
    module, x, general = CASES[case]
    wanted = reference(network(module), x)
    net, x = network(module, dtype=torch.float32), map_tensors(lambda t: t.float() if t.is_floating_point() else t, x)
    jacobian = Jacobian(net, net.params(), x, bfloat16=bfloat16)
    assert bool(jacobian.plan.general) == bool(general)
    assert_right(jacobian, x, wanted, tolerance=0.05 if bfloat16 else 1e-4)
    row_pass = jacobian.at(x)
    assert row_pass.outputs.dtype == torch.float32
    assert row_pass.columns(torch.ones_like(row_pass.outputs)).dtype == (torch.bfloat16 if bfloat16 else torch.float32)


@pytest.mark.parametrize("case", ["encoder", "batch norm", "general lstm", "general weight norm"])
def test_products_alone_in_half_precision(case: str) -> None:
    module, x = CASES[case][0], CASES[case][1]
    net, x = network(module, dtype=torch.float32), map_tensors(lambda t: t.float() if t.is_floating_point() else t, x)
    row_pass = Jacobian(net, net.params(), x).at(x)
    v = torch.randn(row_pass.outputs.shape, generator=torch.Generator().manual_seed(0))
    exact, short = row_pass.squares(v), row_pass.squares(v, dtype=torch.bfloat16)
    products = row_pass.products()
    for name, value in exact.items():
        assert short[name].dtype == value.dtype
        if name in products:
            assert 0 < float((short[name] - value).norm()) < 0.01 * float(value.norm()), name
        else:
            assert torch.equal(short[name], value), name
    columns = row_pass.columns(v)
    total = torch.ones(columns.shape, dtype=torch.bfloat16)
    row_pass.add_columns(v, total)
    assert float((total.float() - 1 - columns).norm()) < 0.02 * float((columns + 1).norm())


def test_no_rows_and_no_weights() -> None:
    x, net = normal(4), network(Custom(lambda s, x: s.a(x) @ s.b, a=nn.Linear(4, 3), b=(3, 2)))
    row_pass = Jacobian(net, net.params(), x).at(x[:0])
    assert row_pass.rows().shape == (0, 2, net.n_parameters)
    assert list(row_pass.blocks([row_pass.outputs])) == []
    assert not any(value.any() for value in row_pass.squares(row_pass.outputs).values())
    assert Jacobian(net, net.params(), x, torch.arange(0)).at(x).rows().shape == (ROWS, 2, 0)


def last(run: Callable[..., Tensor] = lambda s, h: s.out(h)) -> nn.Module:
    return Custom(lambda s, x: run(s, s.body(x).tanh()), body=nn.Linear(4, 5), out=nn.Linear(5, 3))


LAST: dict[str, tuple[nn.Module, str, bool]] = {  # the parameters, and whether J is made of features
    "weight and bias": (last(), "out.*", True),
    "bias first": (Custom(bias_first, bias=(3,), weight=(3, 4)), "*", True),
    "no bias": (Custom(lambda s, x: s.out(x), out=nn.Linear(4, 3, bias=False)), "*", True),
    "weight alone": (last(), "out.weight", True),
    "bias alone": (last(), "out.bias", False),
    "all layers": (last(), "*", False),
    "changed in place": (last(lambda s, h: s.out(h).relu_()), "out.*", False),
    "scaled": (last(lambda s, h: 2 * s.out(h)), "out.*", False),
    "another shape": (last(lambda s, h: s.out(h).unflatten(1, (1, 3))), "out.*", False),
    "positions": (last(lambda s, h: s.out(h.unsqueeze(1))), "out.*", False),
    "twice": (Custom(lambda s, x: s.out(s.out(x).tanh()), out=nn.Linear(4, 4)), "*", False),
    "beside a layer that is never used": (Custom(lambda s, x: s.a(x), **TWO), "*", False),
    "with a weight that is never used": (Custom(bias_first, bias=(3,), weight=(3, 4), scale=()), "*", False),
}


@pytest.mark.parametrize("case", LAST)
def test_products_with_a_last_layers_gradients(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    module, pattern, made_of_features = LAST[case]
    net, x = network(module, pattern), normal(4)
    wanted = reference(net, x)
    matrix = torch.randn(net.n_parameters, 6, generator=RNG, dtype=torch.float64)
    some = torch.arange(1, net.n_parameters)
    assert_close(Jacobian(net, net.params(), x, some).at(x).times(matrix[1:]), wanted[..., 1:] @ matrix[1:])
    row_pass = Jacobian(net, net.params(), x).at(x)
    assert (row_pass.features() is not None) == made_of_features
    if made_of_features:
        monkeypatch.delattr(RowPass, "rows")
    assert_close(row_pass.times(matrix), wanted @ matrix)


def test_a_pass_through_wide_layers_takes_fewer_rows() -> None:
    wide, narrow = (
        network(nn.Sequential(nn.Linear(4, n), nn.Linear(n, 2)), "1.bias", dtype=torch.float32) for n in (2**16, 2)
    )
    x = normal(4).float()
    assert Jacobian(narrow, narrow.params(), x).rows_at_once() == 1024
    assert Jacobian(wide, wide.params(), x).rows_at_once() == 64  # 16 MiB in the wide layer
    large = network(Custom(lambda s, x: x @ s.a.t()[:, :2] + s.b, a=(2**16, 4), b=(2,)), "b", dtype=torch.float32)
    assert Jacobian(large, large.params(), x).rows_at_once() == 1024  # weights are there once, not for each row
    over_time = Custom(
        lambda s, x: s.b(s.a(x.flatten(0, 1))).unflatten(0, (len(x), -1)).sum(1),
        a=nn.Linear(4, 2**14),
        b=nn.Linear(2**14, 2),
    )
    folded = network(over_time, "b.bias", dtype=torch.float32)
    assert Jacobian(folded, folded.params(), normal(4, 4).float()).rows_at_once() == 64  # rows x time, as wide together


@pytest.mark.parametrize("case", ["cnn_lstm", "sequence first", "linear on positions"])
def test_sequences_may_be_of_other_lengths_than_those_seen_first(case: str) -> None:
    def make(length: int) -> Tensor:
        return tokens(length) if case == "cnn_lstm" else normal(length, 4)

    net = network(KNOWN[case][0])
    jacobian = Jacobian(net, net.params(), make(16))
    for x in (make(24), make(9)):
        assert_right(jacobian, x, reference(net, x))


def backward_convolutions(row_pass: RowPass) -> int:
    seen, todo = set(), [row_pass.passed.results[0].grad_fn]
    while todo:
        if (node := todo.pop()) is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return sum("Convolution" in node.name() for node in seen)


def test_the_graph_stops_at_the_first_chosen_layer() -> None:
    module, x = KNOWN["resnet18"]
    net = network(module)
    sizes = Jacobian(net, net.params(), x).sizes
    middle = sum(size for name, size in sizes.items() if name < "stages.2")
    places = (net.n_parameters - 1, middle, 0)
    heres = [Jacobian(net, net.params(), x, torch.tensor([place])).at(x) for place in places]
    assert [len(row_pass.passed.points) for row_pass in heres] == [1, 1, 1]
    in_head, in_middle, in_stem = (backward_convolutions(row_pass) for row_pass in heres)
    assert in_head == 0 < in_middle < in_stem == 19
    assert len(Jacobian(net, net.params(), x).at(x).passed.points) == 41  # 20 convolutions, 20 norms and the head


class Largest(TorchDispatchMode):
    """The most numbers in a tensor made while it is active, views left out."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor) and not func.is_view]
        self.numbers = max([self.numbers, *made])
        return result


@pytest.mark.parametrize("case", ["resnet18", "cnn_lstm"])
def test_no_tensor_holds_the_rows_times_all_weights(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    images = (resnet18(width=8), normal(3, 8, 8, rows=16).float())
    module, x = images if case == "resnet18" else (cnn_lstm(50, 8, 8, 2, 32), tokens(64).repeat(4, 1))
    net = network(module, dtype=torch.float32)
    every = Jacobian(net, net.params(), x)
    some = Jacobian(net, net.params(), x, some_of(100, net.n_parameters))
    in_a_layer = max(every.sizes.values())
    monkeypatch.setitem(cost.WORKING_NUMBERS, "cpu", in_a_layer)
    with Largest() as plain:
        net(net.params(), x)
    with Largest() as jacobians:
        some.at(x).rows()
        row_pass = every.at(x)
        row_pass.squares(torch.ones_like(row_pass.outputs))
        assert all(block.numel() <= 2 * in_a_layer for *_, block in row_pass.blocks([row_pass.outputs] * 2))
    assert jacobians.numbers <= max(2 * in_a_layer, plain.numbers)


@pytest.mark.parametrize("fastpath", [True, False])
@pytest.mark.parametrize("case", ["encoder", "batch norm", "general lstm", "general weight norm"])
def test_nothing_else_changes(case: str, fastpath: bool) -> None:
    module, x = copy.deepcopy(CASES[case][0]).double(), CASES[case][1]
    net = Network(module, Gaussian())
    params, set_fastpath = net.params(), torch.backends.mha.set_fastpath_enabled
    kept = [x, *params.values(), *module.state_dict().values()]
    before, enabled, rng = [t.clone() for t in kept], torch.backends.mha.get_fastpath_enabled(), torch.get_rng_state()
    set_fastpath(fastpath)
    try:
        with torch.no_grad():
            row_pass = Jacobian(net, params, x).at(x)
            row_pass.rows()
            row_pass.squares(torch.ones_like(row_pass.outputs))
            assert not torch.is_grad_enabled()
        assert torch.backends.mha.get_fastpath_enabled() == fastpath
    finally:
        set_fastpath(enabled)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(now, then) for now, then in zip(kept, before, strict=True))
    assert all(p.requires_grad and p.grad is None for p in module.parameters())
    assert all(child.training for child in module.modules())
    assert not any(p.requires_grad for p in (*params.values(), *net.module.parameters()))
