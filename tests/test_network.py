"""A network is a pure function of its parameters, and the user's module never changes."""

import copy
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caveat import GaussianPrior
from caveat.engine.fresh_weights import FreshWeights
from tests.network_modules import Everything, Moving, Tied, assert_same, network, rows, snapshot


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def test_users_module_is_never_touched() -> None:
    module = Everything()
    module.norm.eval()  # a mode of its own
    seen: list[Tensor] = []
    handle = module.head.register_forward_hook(lambda m, inputs, output: seen.append(output.detach()))
    F.cross_entropy(module(rows(5, 4)), torch.tensor([0, 1, 2, 0, 1])).backward()
    before, random_state = snapshot(module), torch.get_rng_state()
    net = network(module)
    assert torch.equal(torch.get_rng_state(), random_state)
    params = net.params() | net.buffers()
    net(params, rows(5, 4))
    with torch.random.fork_rng(devices=[]):
        net(params, rows(5, 4), train=True)
    FreshWeights(net)(torch.Generator().manual_seed(0))
    net.with_fixed(net.fixed())
    net.layers()
    net.fingerprint()
    assert torch.equal(torch.get_rng_state(), random_state)
    for value in params.values():
        value.zero_()
    assert_same(before, snapshot(module))
    assert module.head.weight.grad is not None
    assert all(p.grad is None and not p.requires_grad for p in net.module.parameters())
    handle.remove()


def test_calls_equal_the_module_in_both_modes() -> None:
    module, x = Everything(), rows(5, 4)
    module.drop.p = 0.0
    net = network(module)
    assert torch.equal(net(net.params(), x), module.eval()(x))
    params = net.params() | net.buffers()
    copied = copy.deepcopy(module).train()
    assert torch.equal(net(params, x, train=True), copied(x))
    for name, buffer in copied.named_buffers():
        assert torch.equal(params[name], buffer)


def test_training_pass_writes_only_buffers_it_was_given() -> None:
    module, x = Everything(), rows(5, 4)
    net = network(module)
    own = net.buffers()
    with torch.random.fork_rng(devices=[]):
        net(net.params(), x, train=True)
    assert all(torch.equal(own[name], value) for name, value in net.buffers().items())
    given = {"norm.running_mean": own["norm.running_mean"].clone()}
    with torch.random.fork_rng(devices=[]):
        net(net.params() | given, x, train=True)
    features = module.stem(x)
    torch.testing.assert_close(given["norm.running_mean"], 0.1 * features.mean(0))
    assert torch.equal(net.buffers()["norm.running_mean"], own["norm.running_mean"])


def test_replaced_buffer_is_written_back_without_its_graph() -> None:
    net, x = network(Moving()), rows(8, 2)
    params = {name: p.requires_grad_() for name, p in net.params().items()} | net.buffers()
    expected = torch.zeros(2)
    for _ in range(3):  # a graph kept from one step would break the next backward pass
        net(params, x, train=True).square().sum().backward()
        with torch.no_grad():
            expected = 0.5 * expected + 0.5 * net.module.layer(x).mean(0)
        torch.testing.assert_close(params["mean"], expected)
        assert params["mean"].is_leaf
        assert not params["mean"].requires_grad
    assert torch.equal(net.buffers()["mean"], torch.zeros(2))
    net(net.params(), x, train=True)
    assert torch.equal(net.module.mean, torch.zeros(2))


def test_own_training_pass_writes_its_buffers_as_a_given_one_does() -> None:
    x = rows(8, 2)
    for module in (Moving(), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))):
        net = network(module)
        trainee = net.with_fixed({})
        kept, params = dict(trainee.module.named_buffers()), net.params() | net.buffers()
        trainee.module.requires_grad_(True)
        for _ in range(3):
            outputs = trainee.training_pass(x)
            assert torch.equal(outputs, net(params, x, train=True))
            outputs.square().sum().backward()
        for name, buffer in trainee.module.named_buffers():
            assert buffer is kept[name]
            assert torch.equal(buffer, params[name])
        assert all(torch.equal(value, dict(module.named_buffers())[name]) for name, value in net.buffers().items())
    counted = trainee.module[1].num_batches_tracked
    assert int(counted) == 3


def test_gradients_reach_the_given_parameters_only() -> None:
    net, x = network(Everything()), rows(5, 4)
    params = {name: p.requires_grad_() for name, p in net.params().items()}
    net(params, x).sum().backward()
    assert all(p.grad is not None for p in params.values())
    assert all(p.grad is None for p in net.module.parameters())


def test_tied_weights_are_one_parameter() -> None:
    net, tokens = network(Tied()), torch.tensor([0, 3, 4])
    assert net.names == ("embed.weight",)
    weight = rows(5, 3)
    torch.testing.assert_close(net({"embed.weight": weight}, tokens), weight[tokens] @ weight.T)
    fresh = FreshWeights(net)(torch.Generator().manual_seed(0))
    torch.testing.assert_close(net(fresh, tokens), fresh["embed.weight"][tokens] @ fresh["embed.weight"].T)
    assert [(layer.name, layer.parameters, layer.selected) for layer in net.layers()] == [("embed", 15, 15)]


def test_a_layer_of_two_names_keeps_its_own_weights_after_a_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.rest = nn.Sequential(nn.Tanh(), self.first, nn.BatchNorm1d(4))
            self.again = self.rest[2]

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.rest(self.first(x)))

    net, x = network(Twice()), rows(5, 4)
    params = net.params() | net.buffers()
    given = {name: value + 1 if value.is_floating_point() else value.clone() for name, value in params.items()}
    for train in (False, True):
        expected = Twice()
        expected.load_state_dict(given, strict=False)
        expected.train(train)
        torch.testing.assert_close(net(given, x, train=train), expected(x))
        own = net.params() | net.buffers()
        assert all(torch.equal(params[name], own[name]) for name in params)
        for name, buffer in expected.named_buffers():
            torch.testing.assert_close(given[name], buffer)


def test_weights_that_no_posterior_can_be_about_are_refused() -> None:
    class Complex(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x * self.phase).abs())

    with pytest.raises(ValueError, match=r"'phase' is torch\.complex64.*view_as_real"):
        network(Complex())
    assert network(Complex(), parameters=["weight", "bias"]).n_parameters == 10

    with pytest.raises(ValueError, match=r"'0\.weight' has no values \(it is on the meta device\)"):
        network(nn.Sequential(nn.Linear(4, 2, device="meta")))

    adapted = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3))
    adapted[1].merged = True
    with pytest.raises(ValueError, match=r"adapters in '1' are merged.*no output depends on '1\.weight': unmerge"):
        network(adapted)
    assert network(adapted, parameters="0.*").n_parameters == 10


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # of peft's own calls
def test_merged_adapters_of_peft_are_refused_until_they_are_unmerged() -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    settings = peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(nn.Linear(4, 2)), settings)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"merged into their base.*unmerge_adapter\(\)"):
        network(model)
    model.unmerge_adapter()
    assert network(model).n_parameters == 2 * 4 + 2 * 2


def test_frozen_parameters_are_fixed() -> None:
    net = network(Everything())
    assert net.names == ("norm.weight", "norm.bias", "head.weight", "head.bias")
    assert net.n_parameters == 6 + 6 + 18 + 3
    assert set(net.fixed()) == {
        "stem.weight",
        "stem.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "scale",
    }
    frozen = Everything().requires_grad_(False)
    with pytest.raises(ValueError, match=r"every parameter is frozen: call requires_grad_\(True\)"):
        network(frozen)
    adapted = nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)
    adapted[0].lora_A = nn.Parameter(torch.zeros(1, 2), requires_grad=False)
    with pytest.raises(ValueError, match=r"inference is about, or load adapters with .*is_trainable=True"):
        network(adapted)


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ("*", ["norm.weight", "norm.bias", "head.weight", "head.bias"]),
        ("head.*", ["head.weight", "head.bias"]),
        (["head.bias", "norm.*"], ["norm.weight", "norm.bias", "head.bias"]),
        (("*.weight",), ["norm.weight", "head.weight"]),
        (lambda name, p: p.ndim == 2, ["head.weight"]),
        ((pattern for pattern in ["norm.b*"]), ["norm.bias"]),
    ],
)
def test_parameters_selects(parameters, names) -> None:
    assert list(network(Everything(), parameters=parameters).names) == names


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ("tail.*", "'tail.*' matches none"),
        ("stem.*", r"'stem.\*' matches none"),  # frozen
        (["head.*", "hed.*"], r"'hed.\*' matches none"),  # a slip in one of several
        (lambda name, p: False, "matches none"),
        ([], "is empty"),
    ],
)
def test_a_filter_that_selects_nothing_is_refused(parameters, said) -> None:
    with pytest.raises(ValueError, match=said):
        network(Everything(), parameters=parameters)


def test_predicate_sees_the_parameter() -> None:
    seen = {}
    network(Everything(), parameters=lambda name, p: seen.setdefault(name, tuple(p.shape)) is not None)
    assert seen["head.weight"] == (3, 6)
    assert "stem.weight" not in seen


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.layer(left - 2 * right)


def test_inputs_may_be_a_tuple_or_a_dict() -> None:
    module, left, right = Two(), rows(3, 2), rows(3, 2, seed=1)
    net = network(module)
    expected = module(left, right)
    assert torch.equal(net(net.params(), (left, right)), expected)
    assert torch.equal(net(net.params(), {"right": right, "left": left}), expected)


class Output(dict):
    """As transformers' outputs: a dict with attributes."""


class Wrapped(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(2, 2), make

    def forward(self, x: Tensor):
        return self.make(self.layer(x))


def test_logits_are_taken_out_of_a_dict_and_anything_else_is_refused() -> None:
    module, x = Wrapped(lambda y: Output(loss=None, logits=y)), rows(3, 2)
    net = network(module)
    assert torch.equal(net(net.params(), x), module.layer(x))
    for make in (lambda y: (y,), lambda y: {"scores": y}, lambda y: None):
        net = network(Wrapped(make))
        with pytest.raises(TypeError, match="must return one tensor"):
            net(net.params(), x)


def test_wrappers_are_taken_off_in_any_order() -> None:
    module = Tied()
    for wrapped in (
        torch.compile(module, backend="eager"),
        nn.DataParallel(module),
        nn.DataParallel(torch.compile(module, backend="eager")),
        torch.compile(nn.DataParallel(module), backend="eager"),
    ):
        net = network(wrapped)
        assert type(net.module) is Tied
        assert net.module is not module
        assert net.fingerprint() == network(module).fingerprint()


def test_modules_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0.weight has no values yet \(a lazy layer\): run one batch"):
        network(nn.Sequential(nn.LazyLinear(3)))
    lazy_buffers = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(ValueError, match=r"1\.running_mean has no values yet"):
        network(lazy_buffers)
    locked = nn.Linear(2, 2)
    locked.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot be copied.*lock"):
        network(locked)
    with pytest.raises(ValueError, match="no floating-point parameters"):
        network(nn.ReLU())


class Keeps(nn.Module):
    """Keeps its last activations, which have a graph after training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        return self.last


def test_modules_that_keep_activations_are_copied_even_after_training() -> None:
    module, x = Keeps(), rows(3, 2)
    module(x).sum().backward()
    kept = module.last
    net = network(module)
    assert module.last is kept
    assert net.module.last is not kept
    net({name: p.requires_grad_() for name, p in net.params().items()}, x, train=True).sum().backward()
    first = FreshWeights(net)(torch.Generator().manual_seed(0))
    assert torch.equal(first["layer.weight"], FreshWeights(net)(torch.Generator().manual_seed(0))["layer.weight"])
    assert torch.equal(net.with_fixed({})(net.params(), x), net(net.params(), x))


def test_fingerprint_tells_architectures_and_selections_apart() -> None:
    def made(features: int = 3, dtype: torch.dtype = torch.float32, **options) -> str:
        return network(
            nn.Sequential(nn.Linear(2, features), nn.BatchNorm1d(features)).to(dtype), **options
        ).fingerprint()

    same, prints = (
        made(),
        [
            made(features=4),
            made(dtype=torch.float64),
            made(parameters="0.*"),
            network(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False))).fingerprint(),
            network(nn.Sequential(nn.Linear(2, 3), nn.Identity(), nn.BatchNorm1d(3))).fingerprint(),
        ],
    )
    assert made() == same
    assert len({same, *prints}) == 6


def test_layers_cover_every_parameter_and_say_why() -> None:
    net = network(Everything(), parameters=lambda name, p: name != "head.bias")
    layers = {layer.name: layer for layer in net.layers()}
    assert list(layers) == ["stem", "norm", "head"]
    assert (layers["stem"].selected, layers["stem"].why) == (0, "frozen (requires_grad=False)")
    assert (layers["norm"].selected, layers["norm"].why) == (12, "")
    assert (layers["head"].parameters, layers["head"].selected) == (21, 18)
    assert layers["head"].why == "left out by parameters="
    assert layers["norm"].kind == "BatchNorm1d"
    assert sum(layer.parameters for layer in net.layers()) == sum(p.numel() for p in net.module.parameters())
    assert sum(layer.selected for layer in net.layers()) == net.n_parameters
    half_frozen = nn.Linear(2, 2)
    half_frozen.weight.requires_grad_(False)
    (layer,) = network(half_frozen).layers()
    assert (layer.name, layer.selected, layer.why) == ("", 2, "frozen (requires_grad=False)")
    both = nn.MultiheadAttention(2, 1)
    both.in_proj_weight.requires_grad_(False)
    layer = network(both, parameters="out_proj.*").layers()[0]
    assert layer.why == "frozen (requires_grad=False) and left out by parameters="


def test_with_fixed_moves_everything_but_the_selected_parameters() -> None:
    source, target, x = Everything(), Everything(), rows(5, 4)
    with torch.no_grad():
        source.scale += 1
        source.norm.running_mean += 0.5
    trained, blank = network(source), network(target)
    moved = blank.with_fixed(trained.fixed())
    assert torch.equal(moved(trained.params(), x), source.eval()(x))
    assert not torch.equal(blank(trained.params(), x), source(x))
    assert torch.equal(blank.buffers()["scale"], torch.tensor([2.0]))


def test_check_inputs_names_both_types() -> None:
    net = network(nn.Linear(2, 2))
    net.check_inputs({"x": rows(1, 2), "tokens": torch.zeros(1, dtype=torch.long)})
    with pytest.raises(ValueError, match=r"inputs are torch.float64 but the network's weights are torch.float32"):
        net.check_inputs((rows(1, 2), rows(1, 2).double()))
    assert network(nn.Linear(2, 2).double()).dtype == torch.float64


def test_moving_to_the_same_device_is_free() -> None:
    net = network(nn.Linear(2, 2))
    assert net.to("cpu") is net
    assert net.device == torch.device("cpu")
    assert net.prior == GaussianPrior(1.0)


def test_hyper_entries_ride_along_unseen() -> None:
    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert not [name for name in vars(self) if name.startswith("hyper/")]
            return super().forward(x)

    net, x = network(Looks(2, 2)), rows(3, 2)
    params = net.params()
    noise = torch.zeros(2)
    assert torch.equal(net(params | {"hyper/log_noise": noise}, x, train=True), net(params, x))
    assert torch.equal(noise, torch.zeros(2))


def test_draws_can_be_mapped_over() -> None:
    net, x = network(Everything()), rows(5, 4)
    draws = [net.params() | {"head.bias": rows(3, seed=s)} for s in range(3)]
    stacked = {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
    mapped = torch.func.vmap(lambda params: net(params, x))(stacked)
    torch.testing.assert_close(mapped, torch.stack([net(draw, x) for draw in draws]))
