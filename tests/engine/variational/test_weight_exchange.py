"""The exchange of weights against its definition: what goes, what comes, and what stays with the weights that do."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import caveat
from caveat import Network
from caveat.engine.sparse import (
    ActiveWeights,
    Schedule,
    Scheme,
    StepBatch,
    Substitute,
    WeightLayout,
    exchange_count,
    network_account,
    replacement_rate,
    sparse_layers,
)
from caveat.engine.variational.weight_exchange import Scope, WeightExchange

SHAPES = {"0": (4, 2, 3, 3), "3": (6, 36), "5": (3, 6)}
COUNTS = {"0": 20, "3": 40, "5": 18}  # the last is dense


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 6), nn.Tanh(), nn.Linear(6, 3)
    ).double()  # fmt: skip


NO_BATCH = StepBatch(None, lambda outputs: outputs, lambda: None)  # exchanges by the step's own gradients need none


def points_exchange(
    substitute: Substitute, values: Tensor, schedule: Schedule, scope: Scope, batches: int
) -> WeightExchange:
    return WeightExchange(
        substitute, ActiveWeights(values), lambda: values.detach().abs(), schedule, scope=scope, addition="batches",
        batches=batches,
    )  # fmt: skip


class Problem:
    """A network with few weights, a batch, and its dense gradients by autograd on whole weights."""

    def __init__(
        self,
        scope: Scope = "layer",
        steps: int = 100,
        interval: int = 10,
        batches: int = 1,
        initial: float = 0.5,
        new_std: float | None = math.exp(-7.0),
    ) -> None:
        self.module = build()
        network = Network(self.module, caveat.Categorical())
        rng = torch.Generator().manual_seed(1)
        self.rng = rng
        places = [
            torch.randperm(math.prod(SHAPES[name]), generator=rng)[: COUNTS[name]].sort().values for name in ("0", "3")
        ]
        layout = WeightLayout(sparse_layers(network), dict(COUNTS), torch.cat(places).int())
        self.substitute = Substitute(network, layout, {})
        self.mean = torch.randn(layout.size, generator=rng, dtype=torch.float64).requires_grad_()
        self.log_std = torch.randn(layout.size, generator=rng, dtype=torch.float64).requires_grad_()
        self.scores = torch.rand(layout.size, generator=rng, dtype=torch.float64)
        self.weights = ActiveWeights(self.mean, self.log_std)
        self.exchange = WeightExchange(
            self.substitute, self.weights, lambda: self.scores, Schedule(interval, initial, 0.75, steps),
            scope=scope, addition="batches", batches=batches, new_std=new_std,
        )  # fmt: skip
        self.kept_moments = {id(t): [torch.rand_like(t), torch.rand_like(t)] for t in (self.mean, self.log_std)}

    def moments(self, tensor: Tensor) -> list[Tensor]:
        return self.kept_moments[id(tensor)]

    def batch(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(7, 2, 5, 5, generator=self.rng, dtype=torch.float64)
        return x, torch.randint(3, (7,), generator=self.rng)

    def noise(self) -> dict[str, Tensor]:
        sizes = {"0": (7, 4, 3, 3), "3": (7, 6), "5": (7, 3)}
        return {n: torch.randn(s, generator=self.rng, dtype=torch.float64) for n, s in sizes.items()}

    def look(self, x: Tensor, y: Tensor, noise: dict[str, Tensor] | None) -> None:
        """A pass and its way back through the sparse layers."""
        for name, layer in self.substitute.layers.items():
            layer.noise = None if noise is None else lambda like, own=noise[name]: own
        self.substitute.use(self.mean, None if noise is None else (2 * self.log_std).exp())
        F.cross_entropy(self.substitute.network.training_pass(x), y).backward()

    def dense_gradients(self, x: Tensor, y: Tensor, noise: dict[str, Tensor] | None) -> dict[str, Tensor]:
        """The same from whole weights."""
        means = [w.detach().requires_grad_() for w in self.substitute.layout.whole(self.mean).values()]
        variances = [w.detach() for w in self.substitute.layout.whole((2 * self.log_std).exp()).values()]
        h = x
        for name, mean, variance in zip(SHAPES, means, variances, strict=True):
            layer = self.module[int(name)]
            apply = F.conv2d if mean.ndim == 4 else F.linear
            h = F.relu(h).flatten(1) if name == "3" else torch.tanh(h) if name == "5" else h
            spread = 0.0 if noise is None else (apply(h.square(), variance) + 1e-16).sqrt() * noise[name]
            h = apply(h, mean, layer.bias) + spread
        return dict(zip(SHAPES, torch.autograd.grad(F.cross_entropy(h, y), means), strict=True))

    def places(self) -> dict[str, set[int]]:
        return {n: set(own.tolist()) for n, own in self.substitute.layout.indices_of().items() if own is not None}

    def expected(self, sizes: dict[str, Tensor], rate: float) -> dict[str, set[int]]:
        """Places after an update, written as plainly as can be."""
        layout = self.substitute.layout
        at = {name: own.tolist() for name, own in layout.indices_of().items() if own is not None}
        scores = dict(layout.split(self.scores))
        weights = sorted(
            (float(s), name, place) for name in at for s, place in zip(scores[name], at[name], strict=True)
        )
        best = {name: max(w for w in weights if w[1] == name) for name in at}
        if self.exchange.scope == "global":
            goes = [w for w in weights if w not in best.values()][: round(rate * len(weights))]
        else:
            shares = {n: exchange_count(len(at[n]), sizes[n].numel(), rate) for n in at}
            goes = [w for n in at for w in [w for w in weights if w[1] == n][: shares[n]]]
        kept = {name: set(at[name]) - {place for _, n, place in goes if n == name} for name in at}
        comes = sorted(
            ((float(s), n, i) for n in at for i, s in enumerate(sizes[n].flatten()) if i not in kept[n]), reverse=True
        )
        if self.exchange.scope == "global":
            chosen = comes[: len(goes)]
        else:
            chosen = [c for n in at for c in [c for c in comes if c[1] == n][: len(at[n]) - len(kept[n])]]
        return {name: kept[name] | {place for _, n, place in chosen if n == name} for name in at}

    def begin(self, step: int) -> None:
        self.exchange.begin(step, NO_BATCH)

    def update(self) -> bool:
        return self.exchange.finish(self.moments)


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("noisy", [True, False])
def test_the_lowest_go_and_the_largest_gradients_come(scope: Scope, noisy: bool) -> None:
    problem = Problem(scope)
    x, y = problem.batch()
    noise = problem.noise() if noisy else None
    gradients = problem.dense_gradients(x, y, noise)
    step = 19
    before = problem.places()
    expected = problem.expected({n: g.abs() for n, g in gradients.items()}, replacement_rate(0.2, 0.5, 0.75))
    problem.begin(step)
    problem.look(x, y, noise)
    assert problem.mean.grad is not None
    torch.testing.assert_close(problem.mean.grad, problem.substitute.layout.gathered(gradients))
    assert problem.update()
    assert problem.places() == expected
    changed = sum(len(before[n] - expected[n]) for n in before)
    assert 10 < changed <= problem.exchange.replaced, "a weight that goes may come back at once, from 0"
    if scope == "global":
        assert problem.substitute.layout.counts["0"] != COUNTS["0"]
    else:
        assert problem.substitute.layout.counts == COUNTS
    assert sum(problem.substitute.layout.counts.values()) == sum(COUNTS.values())
    assert problem.substitute.layout.counts["5"] == 18


def test_whole_gradients_are_let_go_at_once() -> None:
    problem = Problem()
    problem.begin(19)
    problem.look(*problem.batch(), problem.noise())
    largest = max(len(values) for values, _ in problem.exchange._candidates.values())
    assert largest < max(COUNTS.values())
    assert not problem.exchange.sums


class Largest(TorchDispatchMode):
    """The most bytes of large tensors that operations gave, or views of, and that were there at once."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.most = least, 0
        self.seen: dict[int, weakref.ref[Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= self.least:
                self.seen[id(tensor)] = weakref.ref(tensor)
        alive = [t for own in self.seen.values() if (t := own()) is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
        self.most = max(self.most, sum(storages.values()))
        return found


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_an_exchange_holds_one_whole_gradient_and_no_more(
    scope: Scope, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As is accounted: `update_bytes`. Averages over batches have the sums of all layers beside it."""
    monkeypatch.setattr("caveat.engine.variational.weight_exchange.PIECE", 2**16)
    torch.manual_seed(0)
    network = Network(nn.Sequential(nn.Linear(600, 700), nn.ReLU(), nn.Linear(700, 600)), caveat.Categorical())
    layers, count = sparse_layers(network), 21_000
    places = [torch.randperm(geometry.size)[:count].sort().values for geometry in layers.values()]
    layout = WeightLayout(layers, dict.fromkeys(layers, count), torch.cat(places).int())
    substitute = Substitute(network, layout, {})
    mean = (0.01 * torch.randn(2 * count)).requires_grad_()
    exchange = points_exchange(substitute, mean, Schedule(3, 0.3, 1.0, 300), scope, batches)
    whole = network_account(network, torch.zeros(2, 600), Scheme(interval=3), layout.counts).update_bytes
    assert whole == 4 * 600 * 700
    given = torch.randn(700, 600)
    gradient = given.clone()
    for step in range(3):
        exchange.begin(step, NO_BATCH)
        substitute.use(mean)
        F.cross_entropy(substitute.network.training_pass(torch.randn(8, 600)), torch.randint(600, (8,))).backward()
        collect = substitute.layers["0"].collect
        assert (collect is not None) == (step >= 3 - batches)
        if collect is not None:
            with Largest(whole // 4) as watched:
                collect(gradient)
            assert watched.most == whole * (1 if batches == 1 else 2)
            assert torch.equal(gradient, given), "a layer may take its own from it afterwards"
        exchange.finish(lambda tensor: [])
    assert exchange.updates == 1
    assert not exchange.sums


@pytest.mark.parametrize(("batches", "averaged"), [(4, 4), (5, 5), (6, 5)])
def test_no_batch_before_the_last_exchange_is_averaged(batches: int, averaged: int) -> None:
    """Where more are asked for than there are steps, those are all."""
    problem = Problem(interval=5, batches=batches)
    looked = []
    for step in range(15):
        problem.begin(step)
        looked += [step] if problem.substitute.layers["0"].collect is not None else []
        problem.look(*problem.batch(), problem.noise())
        problem.update()
    assert looked == [step for step in range(15) if step % 5 >= 5 - averaged]
    assert problem.exchange.updates == 3
    assert problem.exchange.between_looks == 1


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_the_largest_of_a_gradient_in_pieces_are_those_of_the_whole(
    scope: Scope, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for piece in (2**16, 1, 7, 36, 80):
        monkeypatch.setattr("caveat.engine.variational.weight_exchange.PIECE", piece)
        problem = Problem(scope, batches=batches)
        for step in range(10 - batches, 10):
            problem.begin(step)
            problem.look(*problem.batch(), problem.noise())
        problem.update()
        found.append(problem.places())
    assert all(places == found[0] for places in found[1:])


@pytest.mark.parametrize("piece", [2**16, 18])
def test_a_gradient_with_channels_last_is_read_by_its_places(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caveat.engine.variational.weight_exchange.PIECE", piece)
    gradient = torch.randn(4, 2, 3, 3, dtype=torch.float64)
    found = []
    for own in (gradient, gradient.to(memory_format=torch.channels_last)):
        problem = Problem()
        problem.begin(9)
        problem.substitute.layers["0"].collect(own)  # type: ignore[misc]
        found.append(problem.exchange._candidates["0"][1].tolist())
    assert found[0] == found[1]
    assert len(found[0]) > 5


def test_absolute_gradients_of_batches_are_averaged() -> None:
    problem = Problem(interval=10, batches=3)
    total: dict[str, Tensor] = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
    signed = {n: torch.zeros_like(t) for n, t in total.items()}
    looked = []
    for step in range(5, 20):
        x, y = problem.batch()
        noise = problem.noise()
        gradients = problem.dense_gradients(x, y, noise)
        if step in (7, 8, 9):
            total = {n: t + gradients[n].abs() for n, t in total.items()}
            signed = {n: t + gradients[n] for n, t in signed.items()}
        if step == 9:
            rate = replacement_rate(0.1, 0.5, 0.75)
            expected = problem.expected(total, rate)
            other = problem.expected({n: t.abs() for n, t in signed.items()}, rate)
        problem.begin(step)
        looked += [step] if problem.substitute.layers["0"].collect is not None else []
        problem.look(x, y, noise)
        if problem.update():
            break
    assert step == 9
    assert looked == [7, 8, 9]
    assert problem.places() == expected
    assert expected != other, "the two orders differ here"


@pytest.mark.parametrize("fill", ["number", "layer"])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_weights_that_stay_keep_what_they_have_and_others_begin_anew(fill: str, scope: Scope) -> None:
    problem = Problem(scope, new_std=math.exp(-7.0) if fill == "number" else None)
    layout = problem.substitute.layout
    layer_means = {n: float(part.detach().exp().mean().log()) for n, part in layout.split(problem.log_std)}

    def by_place(flat: Tensor, layout: WeightLayout) -> dict[tuple[str, int], float]:
        found = {}
        for name, part in layout.split(flat.detach()):
            own = layout.indices_of()[name]
            places = range(len(part)) if own is None else own.tolist()
            found |= {(name, place): float(v) for place, v in zip(places, part, strict=True)}
        return found

    tensors = [problem.mean, problem.log_std, *problem.moments(problem.mean), *problem.moments(problem.log_std)]
    before = [by_place(t, layout) for t in tensors]
    lowest = problem.scores.argsort()
    problem.begin(9)
    removed = problem.exchange._removed
    assert removed is not None
    gone = {key for key, r in by_place(removed.double(), layout).items() if r}
    assert gone, lowest
    problem.look(*problem.batch(), problem.noise())
    assert problem.update()
    after = [by_place(t, problem.substitute.layout) for t in tensors]
    stayed = before[0].keys() - gone
    assert stayed <= after[0].keys()
    new = after[0].keys() - stayed
    assert len(new) == len(gone)
    for tensor, (old, now) in enumerate(zip(before, after, strict=True)):
        assert all(now[key] == old[key] for key in stayed)
        for key in new:
            expected = (-7.0 if fill == "number" else layer_means[key[0]]) if tensor == 1 else 0.0
            assert now[key] == pytest.approx(expected, rel=1e-12)


def test_the_schedule() -> None:
    problem = Problem(steps=40, interval=5)
    due = [step for step in range(40) if problem.exchange.schedule.due(step)]
    assert due == [4, 9, 14, 19, 24], "every five steps, before three quarters of forty"
    counts = []
    for step in range(40):
        problem.begin(step)
        looking = any(layer.collect is not None for layer in problem.substitute.layers.values())
        assert looking == (step in due)
        assert (problem.exchange._removed is not None) == (step in due)
        problem.look(*problem.batch(), problem.noise())
        before = problem.exchange.replaced
        assert problem.update() == (step in due)
        if step in due:
            counts.append(problem.exchange.replaced - before)
    rates = [0.25 * (1 + math.cos(math.pi * (step + 1) / 30)) for step in due]
    assert counts == [math.floor(20 * rate) + math.floor(40 * rate) for rate in rates]
    assert problem.exchange.updates == 5
    assert not any(Problem(interval=200).exchange.schedule.due(step) for step in range(100))


def test_at_the_highest_rate_every_layer_keeps_its_best_weight() -> None:
    for scope in ("layer", "global"):
        problem = Problem(scope, initial=0.999999)  # type: ignore[arg-type]
        scores = dict(problem.substitute.layout.split(problem.scores))
        problem.scores[:20] -= 10  # globally, all of the first layer's are the lowest
        best = {n: int(problem.substitute.layout.indices_of()[n][scores[n].argmax()]) for n in ("0", "3")}  # type: ignore[index]
        problem.begin(9)
        problem.look(*problem.batch(), problem.noise())
        problem.update()
        assert all(best[name] in places for name, places in problem.places().items())


class Unused(nn.Module):
    """Has a layer that the outputs do not depend on, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.unused = nn.Linear(4, 6)
        self.twice = nn.Linear(6, 6)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.twice(self.twice(self.a(x).tanh()).tanh()).tanh())


def searched(scope: Scope, batches: int, passes: int) -> tuple[Substitute, Callable[[], dict[str, Tensor]]]:
    torch.manual_seed(0)
    module = Unused().double()
    network = Network(module, caveat.Categorical())
    counts = {"a": 8, "unused": 8, "twice": 12, "out": 6}
    layers = sparse_layers(network)
    places = [torch.randperm(layers[n].size)[:c].sort().values for n, c in counts.items()]
    substitute = Substitute(network, WeightLayout(layers, counts, torch.cat(places).int()), {})
    mean = torch.randn(34, dtype=torch.float64).requires_grad_()
    exchange = points_exchange(substitute, mean, Schedule(passes, 0.6, 1.0, 100), scope, batches)
    sums: dict[str, Tensor] = {}
    whole = substitute.layout.whole(mean.detach())
    for step in range(passes):
        x, y = torch.randn(9, 4, dtype=torch.float64), torch.randint(2, (9,))
        weights = {name: w.clone().requires_grad_() for name, w in whole.items()}
        loss = F.cross_entropy(network(weights, x), y)
        found = torch.autograd.grad(loss, [*weights.values()], allow_unused=True)
        for name, gradient in zip(weights, found, strict=True):
            if gradient is not None:
                sums[name] = sums.get(name, torch.zeros_like(gradient)) + gradient.abs()
        exchange.begin(step, NO_BATCH)
        substitute.use(mean)
        F.cross_entropy(substitute.network.training_pass(x), y).backward()
    kept = {n: own.tolist() for n, own in exchange._remaining.items()}
    exchange.finish(lambda tensor: [])

    def largest() -> dict[str, Tensor]:
        found = {}
        for name, count in counts.items():
            if name == "unused":
                continue
            size = sums[f"{name}.weight"].flatten().clone()
            size[kept[name]] = -1
            new = size.topk(count - len(kept[name])).indices
            found[name] = torch.cat([torch.tensor(kept[name]), new]).sort().values
        return found

    return substitute, largest


@pytest.mark.parametrize("batches", [1, 3])
def test_a_layer_called_twice_is_searched_by_the_sum_of_its_gradients(batches: int) -> None:
    substitute, largest = searched("layer", batches, passes=batches)
    for name, places in largest().items():
        assert torch.equal(substitute.layout.indices_of()[name].long(), places), name  # type: ignore[union-attr]


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_layer_without_a_gradient_stays_as_it_is(scope: Scope) -> None:
    torch.manual_seed(0)
    substitute, _ = searched(scope, 1, 1)
    assert substitute.layout.counts["unused"] == 8
    assert sum(substitute.layout.counts.values()) == 34
