"""Training of layers: the KL and its weight, exact density at every step, exchanges, costs, refusals."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import GaussianPrior, native
from caveat.engine.run import Run
from caveat.engine.sparse import Scheme, WeightLayout, sparse_layers
from caveat.engine.sparse.accounting import training_account
from caveat.engine.training import BatchPart, Moments
from caveat.engine.variational.bound import gaussian_kl, noise_of_batch, precisions, warm_up
from caveat.engine.variational.layer_training import LayerTraining
from caveat.engine.variational.weight_exchange import WeightExchange
from tests.engine.variational.training_cases import SIZES, network, rows, short, ssvi, task, watch


@pytest.mark.parametrize("precision", [torch.tensor(3.0), torch.rand(7) + 0.1], ids=["one", "each"])
def test_the_kl_is_that_of_torch(precision: Tensor) -> None:
    mean, log_std = torch.randn(7).double(), torch.randn(7).double()
    q = torch.distributions.Normal(mean, log_std.exp())
    p = torch.distributions.Normal(torch.zeros(7).double(), precision.double().rsqrt().expand(7))
    torch.testing.assert_close(
        gaussian_kl(mean, log_std, precision.double()), torch.distributions.kl_divergence(q, p).sum()
    )


def test_precisions_follow_the_places() -> None:
    each = torch.rand(10, 24) + 1
    prior = GaussianPrior({"6.weight": each, "8.*": 7.0, "*": 2.0})
    whole = task(prior).network
    layers = sparse_layers(whole)
    indices = torch.tensor([3, 5, 0, 215, 9, 100, 239], dtype=torch.int32)
    layout = WeightLayout(layers, {"0": 2, "3": 2, "6": 3, "8": 20}, indices)
    found = precisions(whole, layout)
    assert torch.equal(found, torch.cat([torch.full((4,), 2.0), each.flatten()[[9, 100, 239]], torch.full((20,), 7.0)]))
    assert precisions(task(GaussianPrior(2.0)).network, layout).ndim == 0
    with pytest.raises(ValueError, match="this one is LaplacePrior"):
        precisions(caveat.Task(network(), rows(), caveat.Categorical(), caveat.LaplacePrior()).network, layout)


def test_the_loss_is_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """At almost no spread: the likelihood at the means plus beta_t KL / N, with biases under weight decay."""
    seen: list[tuple[float, float]] = []
    loss = LayerTraining._loss

    def spied(
        self: LayerTraining, x: Tensor, y: Tensor, part: BatchPart, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        value, outputs = loss(self, x, y, part, rng)
        assert self.log_std is not None
        assert self.precision is not None
        likelihood = nn.functional.cross_entropy(outputs, y)
        kl = gaussian_kl(self.mean, self.log_std, self.precision) / 48
        seen.append((self.step / self.steps, float((value - likelihood).detach() / kl.detach())))
        return value, outputs

    monkeypatch.setattr(LayerTraining, "_loss", spied)
    fitted = caveat.fit(task(GaussianPrior(3.0)), ssvi(kl_weight=0.4, kl_warmup=0.25), progress=False)
    assert len(seen) == 32
    for progress, weight in seen:
        assert weight == pytest.approx(0.4 * min(1, progress / 0.25), rel=1e-3, abs=1e-5)
    assert fitted.info.diagnostics["exchanges"] == 7


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("allocation", ["uniform", "erk"])
@pytest.mark.parametrize("dense", ["first", (), ("0", "8")], ids=str)
@pytest.mark.parametrize("kind", [caveat.SSVI, caveat.RigL])
def test_density_is_exact_at_every_step(
    scope: str, allocation: str, dense: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = kind(density=0.3, interval=3, scope=scope, allocation=allocation, dense=dense, training=short())
    wanted = made.active_counts(sparse_layers(task().network))
    kept = ("0",) if dense == "first" else dense
    sparse = sum(size for name, size in SIZES.items() if name not in kept)
    assert abs(sum(n for name, n in wanted.items() if name not in kept) - 0.3 * sparse) <= 2
    steps, places = 0, set()

    def look(trainer: LayerTraining) -> None:
        nonlocal steps
        steps += 1
        layout = trainer.substitute.layout
        assert layout.size == sum(wanted.values())
        assert scope == "global" or layout.counts == wanted
        assert all(1 <= n <= SIZES[name] for name, n in layout.counts.items())
        assert all(layout.counts[name] == SIZES[name] for name in kept)
        assert all(layout.is_dense(name) == (n == SIZES[name]) for name, n in wanted.items())
        for name, own in layout.indices_of().items():
            if own is not None:
                assert own.dtype == torch.int32
                assert len(own) == layout.counts[name]
                assert bool((own.diff() > 0).all()), "sorted, each once"
                assert int(own[0]) >= 0
                assert int(own[-1]) < SIZES[name]
                assert trainer.substitute.layers[name].pattern.indices.equal(own)  # type: ignore[union-attr]
        for tensor in (*trainer.variables.scales.values(), trainer.mean, trainer.variables.weights["active.mean"]):
            assert tensor.shape == (layout.size,)
            assert bool(tensor.isfinite().all())
        places.add(tuple(layout.indices.tolist()))

    watch(monkeypatch, look)
    posterior = caveat.fit(task(), made, progress=False)
    assert steps == 32
    assert 7 <= len(places) <= 8, "seven exchanges, the last of which may be of less than one weight"
    counts = {k: int(n) for k, n in zip(SIZES, posterior.state["active"]["counts"], strict=True)}
    assert sum(counts.values()) == sum(wanted.values())
    draw = next(posterior.sample(1))
    assert {name: int((draw[f"{name}.weight"] != 0).sum()) for name in SIZES} == counts or kind is caveat.RigL
    assert posterior.info.diagnostics["density"] == pytest.approx(sum(wanted.values()) / sum(SIZES.values()))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("new_std", [None, 0.05])
def test_an_exchange_keeps_values_and_moments(
    optimizer: str, new_std: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real optimisers: weights that stay keep their moments, the others begin with none."""
    after_step = LayerTraining._after_step
    exchanged = 0

    def by_place(trainer: LayerTraining, flat: Tensor) -> dict[tuple[str, int], float]:
        layout = trainer.substitute.layout
        found = {}
        for name, part in layout.split(flat.detach()):
            own = layout.indices_of()[name]
            keys = range(len(part)) if own is None else own.tolist()
            found |= {(name, k): v for k, v in zip(keys, part.tolist(), strict=True)}
        return found

    def spied(self: LayerTraining, moments: Moments) -> None:
        nonlocal exchanged
        assert self.log_std is not None
        tensors = [self.mean, self.log_std, *moments(self.mean), *moments(self.log_std)]
        assert len(tensors) == 2 + (1 if optimizer == "sgd" else 2) + 2
        before = [by_place(self, t) for t in tensors]
        stds = {n: float(part.detach().exp().mean()) for n, part in self.substitute.layout.split(self.log_std)}
        assert isinstance(self.exchange, WeightExchange)
        removed = self.exchange._removed
        gone = set() if removed is None else {k for k, v in by_place(self, removed.double()).items() if v}
        after_step(self, moments)
        after = [by_place(self, t) for t in tensors]
        stayed = before[0].keys() - gone
        new = after[0].keys() - stayed
        assert len(new) == len(gone)
        exchanged += len(new)
        for i, (old, now) in enumerate(zip(before, after, strict=True)):
            assert all(now[k] == old[k] for k in stayed)
            for k in new:
                expected = torch.tensor(new_std or stds[k[0]]).log() if i == 1 else 0.0
                assert now[k] == pytest.approx(float(expected), rel=1e-5)

    monkeypatch.setattr(LayerTraining, "_after_step", spied)
    made = ssvi(new_std=new_std, training=short(optimizer=optimizer), scope="global")
    posterior = caveat.fit(task(), made, progress=False)
    assert exchanged == posterior.info.diagnostics["exchanged"] > 100


COUNTED: dict[str, Any] = {
    "noisy": ssvi(),
    "mean": ssvi(addition="mean"),
    "batches": ssvi(interval=4, addition="batches", addition_batches=2),
    "points": caveat.RigL(density=0.3, interval=3, training=short()),
}


@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_operations_are_those_of_every_steps_places(kind: str, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all layers, weights move from those where one costs little to those where it costs much."""
    made = replace(COUNTED[kind], scope=scope)
    own = caveat.Task(network(), rows(47), caveat.Categorical())  # in batches of 12, 12, 12 and 11 rows
    scheme = Scheme(gaussian=kind != "points", interval=made.interval // (2 if kind == "batches" else 1))
    total, counts, loss = 0.0, set(), LayerTraining._loss

    def spied(
        self: LayerTraining, x: Tensor, y: Tensor, part: BatchPart, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        nonlocal total
        found = loss(self, x, y, part, rng)
        counts.add(tuple(self.substitute.layout.counts.values()))
        cost = training_account(own, self.substitute.layout, self.run, scheme).total
        extra = 3 * cost.inference_flops / made.interval if kind == "mean" else 0.0
        total += len(y) * (cost.training_flops + extra)
        return found

    monkeypatch.setattr(LayerTraining, "_loss", spied)
    posterior = caveat.fit(own, made, progress=False)
    assert posterior.info.flops == pytest.approx(total, rel=1e-12)
    assert len(counts) == 1 if scope == "layer" else len(counts) > 4


@pytest.mark.parametrize(("batch_size", "interval", "epochs"), [(48, 10, 40), (12, 10, 12), (12, 5, 8), (4, 7, 4)])
def test_as_many_batches_are_averaged_as_are_asked_for(
    batch_size: int, interval: int, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many steps an epoch has: none, some or all of the batches may be of an earlier one."""
    sizes: list[Tensor] = []
    averaged: list[int] = []
    collector = WeightExchange._collector

    def spied(self: WeightExchange, name: str, last: bool) -> Callable[[Tensor], None]:
        own = collector(self, name, last)

        def collect(gradient: Tensor) -> None:
            if name == "6":
                sizes.append(gradient.abs().flatten())
            own(gradient)
            if last and name == "6":
                total = torch.stack(sizes).sum(0)
                total[self._remaining[name]] = -1
                values, places = self._candidates[name]
                torch.testing.assert_close(values, total.topk(len(values)).values)
                torch.testing.assert_close(total[places], values)
                averaged.append(len(sizes))
                sizes.clear()

        return collect

    monkeypatch.setattr(WeightExchange, "_collector", spied)
    training = short(epochs=epochs, batch_size=batch_size)
    caveat.fit(task(), ssvi(interval=interval, addition="batches", training=training), progress=False)
    assert averaged
    assert set(averaged) == {5}


def test_sums_of_gradients_last_from_the_first_batch_to_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    watch(monkeypatch, lambda trainer: held.append(sum(t.numel() for t in trainer.variables.groups()["sums"].values())))
    made = ssvi(interval=6, addition="batches", addition_batches=3, stop=0.5)
    posterior = caveat.fit(task(), made, progress=False)
    every = sum(SIZES.values()) - SIZES["0"]  # the first is dense
    assert held == [0, 0, 0, every, every, 0] * 2 + [0] * 20
    assert posterior.info.diagnostics["exchanges"] == 2
    held.clear()
    caveat.fit(task(), ssvi(addition="mean"), progress=False)
    assert set(held) == {0}


def test_noise_of_a_part_is_that_of_the_whole_batch() -> None:
    def drawn(part: BatchPart, count: int, shape: tuple[int, ...]) -> Tensor:
        noise = noise_of_batch(count, part, torch.Generator().manual_seed(3))
        noise(torch.zeros(count, 2))
        return noise(torch.zeros(shape))

    whole = drawn(BatchPart(0, 7, 1.0), 7, (7, 5))
    parts = [drawn(BatchPart(0, 7, 0.5), 4, (4, 5)), drawn(BatchPart(4, 7, 0.5), 3, (3, 5))]
    assert torch.equal(torch.cat(parts), whole)
    tokens = drawn(BatchPart(0, 7, 1.0), 7, (21, 5))
    parts = [drawn(BatchPart(0, 7, 0.5), 4, (12, 5)), drawn(BatchPart(4, 7, 0.5), 3, (9, 5))]
    assert torch.equal(torch.cat(parts), tokens), "with another axis folded into the rows"
    assert drawn(BatchPart(4, 7, 0.5), 3, (10, 5)).shape == (10, 5)


def test_the_divergence_warms_up_over_a_share_of_training_or_is_there_from_the_first_step() -> None:
    assert [warm_up(2.0, 0.5)(progress) for progress in (0.0, 0.25, 0.5, 1.0)] == [0.0, 1.0, 2.0, 2.0]
    assert warm_up(2.0, 0.0)(0.0) == 2.0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", [caveat.SSVI, caveat.MeanFieldVI, caveat.VariationalDropout])
def test_noise_that_would_be_drawn_again_is_refused(method: Any, reentrant: bool) -> None:
    """A checkpointed layer's second pass would have other noise, and the gradient of log sigma be about zero."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(36, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.utils.checkpoint.checkpoint(self.first, x.flatten(1), use_reentrant=reentrant)
            return self.second(hidden.relu())

    x, y = rows()
    own = caveat.Task(Again(), (x.requires_grad_() if reentrant else x, y), caveat.Categorical())
    with pytest.raises(ValueError, match="switch gradient checkpointing off"):
        caveat.fit(own, method(training=short(epochs=1)), progress=False)


@pytest.mark.parametrize("method", [caveat.SSVI, caveat.MeanFieldVI, caveat.VariationalDropout])
def test_half_precision_in_which_sigma_cannot_move_is_refused(method: Any) -> None:
    x, y = rows()
    own = caveat.Task(network().bfloat16(), (x.bfloat16(), y), caveat.Categorical())
    with pytest.raises(ValueError, match="log sigma are lost in bfloat16"):
        caveat.fit(own, method(training=short(epochs=1)), progress=False)


def test_whole_weights_are_let_go_when_training_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, train = caveat.SSVI.fit, LayerTraining.train
    whole: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def spied(self: caveat.SSVI, task: caveat.Task, start: Any, run: Run) -> Any:
        whole[:] = [weakref.ref(weight) for weight in start["params"].values()]
        return fit(self, task, start, run)

    def watched(self: LayerTraining, training_flops: float | None = None) -> Any:
        alive.append(sum(weight() is not None for weight in whole))
        return train(self, training_flops)

    monkeypatch.setattr(caveat.SSVI, "fit", spied)
    monkeypatch.setattr(LayerTraining, "train", watched)
    for structure in ("unstructured", "channel"):
        caveat.fit(task(), ssvi(structure=structure, training=short(epochs=1)), progress=False)
        assert whole
    assert alive == [0, 0]


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_the_share_that_ran_sparse_is_that_of_training() -> None:
    """Under autocast layers take whole weights; passes at the end of training, in float32, do not count."""
    plain = caveat.fit(task(validation=0.2), ssvi(density=0.1), progress=False)
    rounded = caveat.fit(task(validation=0.2), ssvi(density=0.1, training=short(precision="bfloat16")), progress=False)
    assert plain.info.diagnostics["ran_sparse"] == 1
    assert rounded.info.diagnostics["ran_sparse"] < 1
