"""Variational training: the KL and its weight, exact density at every step, resuming, early stopping, ranks."""

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import GaussianPrior, Training, native
from caveat.engine import run as run_module
from caveat.engine.distributed import Ranks
from caveat.engine.run import Run
from caveat.engine.sparse import Scheme, WeightLayout, sparse_layers
from caveat.engine.training import BatchPart, Moments
from caveat.engine.variational.layer_info import training_account
from caveat.engine.variational.layer_training import LayerTraining, gaussian_kl, noise_of_batch, precisions, warm_up
from caveat.engine.variational.weight_exchange import WeightExchange


def rows(n: int = 48) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    return x, (x.mean((1, 2, 3)) > 0).long()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(24, 10), nn.ReLU(), nn.Linear(10, 2),
    )  # fmt: skip


SIZES = {"0": 36, "3": 216, "6": 240, "8": 20}


def task(prior: GaussianPrior | None = None, validation: float | None = None) -> caveat.Task:
    return caveat.Task(network(), rows(), caveat.Categorical(), prior, validation=validation)


def short(**knobs: Any) -> Training:
    return Training(**{"epochs": 8, "batch_size": 12, "learning_rate": 0.01} | knobs)


def ssvi(**knobs: Any) -> caveat.SSVI:
    return caveat.SSVI(**{"density": 0.3, "interval": 3, "training": short()} | knobs)


def watch(monkeypatch: pytest.MonkeyPatch, look: Callable[[LayerTraining], None]) -> None:
    """Call a function after every step of training."""
    after_step = LayerTraining._after_step

    def spied(self: LayerTraining, moments: Moments) -> None:
        after_step(self, moments)
        look(self)

    monkeypatch.setattr(LayerTraining, "_after_step", spied)


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


def interrupted(
    make_task: Callable[[], caveat.Task], made: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> caveat.Posterior:
    """A fit that is killed after some epochs and goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(run_module.Run, "checkpoint_due", lambda self: self.folder is not None)
        checkpoint, kept = run_module.Run.checkpoint, 0

        def killed(self: run_module.Run, carry: Any, note: dict[str, object]) -> None:
            nonlocal kept
            checkpoint(self, carry, note)
            kept += 1
            if kept == after:
                raise KeyboardInterrupt

        patch.setattr(run_module.Run, "checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            caveat.fit(make_task(), made, folder=folder, progress=False)
    return caveat.fit(make_task(), made, folder=folder, progress=False)


def same(one: caveat.Posterior, other: caveat.Posterior) -> None:
    for group, tensors in one.state.items():
        for name, value in tensors.items():
            assert torch.equal(value, other.state[group][name]), f"{group}/{name}"


EACH = GaussianPrior({"0.weight": torch.linspace(1, 5, 36).view(4, 1, 3, 3), "3.*": 40.0, "*": 1.0})
RESUMED = {
    "layer": (ssvi(), None),
    "global": (ssvi(scope="global"), None),
    "global, precisions": (ssvi(scope="global", dense=()), EACH),
    "across epochs": (ssvi(interval=5, addition="batches", addition_batches=4), None),
    "over epochs": (ssvi(interval=5, addition="batches", training=short(epochs=32, batch_size=48)), None),
    "at the mean": (ssvi(addition="mean", training=short(optimizer="sgd")), None),
    "mean field": (caveat.MeanFieldVI(training=short()), None),
    "channels": (ssvi(structure="channel"), None),
    "points": (caveat.RigL(density=0.3, interval=3, scope="global", training=short(optimizer="sgd")), EACH),
}


@pytest.mark.parametrize(("kind", "after"), [*((kind, 3) for kind in RESUMED), ("global", 8)])
def test_resuming_gives_exactly_the_uninterrupted_run(
    kind: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, prior = RESUMED[kind]
    counts: list[int] = []
    watch(monkeypatch, lambda trainer: counts.append(trainer.substitute.layout.size))
    whole = caveat.fit(task(prior), made, progress=False)
    resumed = interrupted(lambda: task(prior), made, tmp_path / "p", monkeypatch, after)
    same(whole, resumed)
    assert len(set(counts)) == 1
    assert len(counts) == 64
    x, _ = rows()
    assert torch.equal(whole.predict(x).samples, resumed.predict(x).samples)
    for key in ("exchanges", "exchanged"):
        assert whole.info.diagnostics.get(key) == resumed.info.diagnostics.get(key)
    assert whole.info.flops == resumed.info.flops > 0


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


def test_early_stopping_between_batches_that_are_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best epoch may have ended with sums and the last one without, or the other way round."""
    x, _ = rows()
    noise = torch.randint(2, (48,), generator=torch.Generator().manual_seed(2))

    def noisy() -> caveat.Task:
        return caveat.Task(network(), (x, noise), caveat.Categorical(), validation=0.25)

    for interval in (5, 7):
        training = short(epochs=60, patience=4, learning_rate=0.03, schedule="constant")
        made = ssvi(interval=interval, addition="batches", addition_batches=4, stop=1.0, training=training)
        whole = caveat.fit(noisy(), made, progress=False)
        history = [record["validation"] for record in whole.info.diagnostics["history"]]
        best = history.index(min(history)) + 1
        assert len(history) < 60
        for after in (best, best + 2):
            folder = tmp_path / f"{interval}-{after}"
            same(whole, interrupted(noisy, made, folder, monkeypatch, after))


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_early_stopping_puts_the_best_epochs_places_back(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = rows()
    noise = torch.randint(2, (48,), generator=torch.Generator().manual_seed(2))
    training = short(epochs=60, patience=4, learning_rate=0.03, schedule="constant")
    made = ssvi(scope=scope, interval=2, stop=1.0, training=training)
    noisy = caveat.Task(network(), (x, noise), caveat.Categorical(), validation=0.25)
    epochs: list[tuple[Tensor, Tensor, dict[str, int]]] = []
    validate = LayerTraining._validate

    def spied(self: LayerTraining) -> float:
        layout = self.substitute.layout
        epochs.append((self.mean.detach().clone(), layout.indices.clone(), dict(layout.counts)))
        return validate(self)

    monkeypatch.setattr(LayerTraining, "_validate", spied)
    posterior = caveat.fit(noisy, made, progress=False)
    history = [record["validation"] for record in posterior.info.diagnostics["history"]]
    best = history.index(min(history))
    assert len(history) < 60
    mean, indices, counts = epochs[best]
    assert not torch.equal(indices, epochs[-1][1]), "places have changed since"
    active = posterior.state["active"]
    assert torch.equal(active["mean"], mean)
    assert torch.equal(active["indices"], indices)
    assert active["counts"].tolist() == [*counts.values()]


def test_early_stopping_resumes_with_its_best_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = rows()
    noise = torch.randint(2, (48,), generator=torch.Generator().manual_seed(2))
    training = short(epochs=60, patience=4, learning_rate=0.03, schedule="constant")
    made = ssvi(scope="global", interval=2, stop=1.0, training=training)

    def noisy() -> caveat.Task:
        return caveat.Task(network(), (x, noise), caveat.Categorical(), EACH, validation=0.25)

    whole = caveat.fit(noisy(), made, progress=False)
    history = [record["validation"] for record in whole.info.diagnostics["history"]]
    best = history.index(min(history)) + 1
    same(whole, interrupted(noisy, made, tmp_path / "p", monkeypatch, best + 2))


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


RANKS = """
import importlib.util, json
spec = importlib.util.spec_from_file_location("cases", {file!r})
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)
found = cases.places_found()
import torch
from caveat.engine.distributed import current_ranks
rank = current_ranks(torch.device("cpu")).rank
open({out!r} + f"/{{rank}}.json", "w").write(json.dumps(found))
"""


def plain_task(prior: GaussianPrior | None) -> caveat.Task:
    """In float64, without BatchNorm, whose statistics are of a rank's own rows, and without ties among gradients.

    These would come of dead units, and of two classes, whose gradients differ in sign alone.
    """
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Identity(), nn.Conv2d(4, 6, 3), nn.Tanh(), nn.Flatten(),
        nn.Linear(24, 10), nn.Tanh(), nn.Linear(10, 3),
    )  # fmt: skip
    x, y = rows()
    return caveat.Task(module.double(), (x.double(), y), caveat.Categorical(), prior)


def places_found() -> dict[str, list[Any]]:
    found = {}
    for kind in ("layer", "global, precisions", "across epochs", "at the mean", "points", "channels"):
        made, prior = RESUMED[kind]
        state = caveat.fit(plain_task(prior), made, progress=False).state
        kept = [own.tolist() for own in state.get("slices", {}).values()]
        active = state["active"]
        found[kind] = [active["indices"].tolist() + kept, active["counts"].tolist(), active["mean"].tolist()]
    return found


def test_two_ranks_have_the_same_places_as_one(tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    script.write_text(RANKS.format(file=__file__, out=str(tmp_path)))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [sys.executable, *launcher, *meeting, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    for kind, (indices, counts, mean) in places_found().items():
        assert first[kind][:2] == [indices, counts], kind
        assert first[kind][2] == pytest.approx(mean, abs=1e-8), kind


@pytest.mark.parametrize("structure", ["unstructured", "channel"])
def test_more_ranks_than_rows_of_a_batch_are_refused_before_training(structure: str) -> None:
    made, own = ssvi(structure=structure, training=short(batch_size=2)), task(None)
    start: caveat.State = {"params": own.network.params(), "hyper": own.hyper}
    with pytest.raises(ValueError, match=r"3 ranks share batches of 2 rows.*use a batch_size of at least 3"):
        made.fit(own, start, Run(ranks=Ranks(0, 3)))


def test_the_divergence_warms_up_over_a_share_of_training_or_is_there_from_the_first_step() -> None:
    assert [warm_up(2.0, 0.5)(progress) for progress in (0.0, 0.25, 0.5, 1.0)] == [0.0, 1.0, 2.0, 2.0]
    assert warm_up(2.0, 0.0)(0.0) == 2.0


@pytest.mark.filterwarnings("ignore")  # torch's tracer calls what torch warns of
def test_a_compiled_pass_returns_outputs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers keep of it would be outputs too, and zeros be made for the gradients of each at every step."""
    compiled, found = torch.compile, []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append(len(graph.graph.output_node().args[0]))  # type: ignore[arg-type]
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, mode: compiled(function, backend=backend))
    caveat.fit(task(), ssvi(structure="channel", training=short(epochs=2, compile=True)), progress=False)
    assert found == [1]


@pytest.mark.filterwarnings("ignore")  # torch's tracer calls what torch warns of
@pytest.mark.parametrize("batches", [{}, {"addition": "batches", "addition_batches": 2}, {"addition": "mean"}])
def test_one_graph_is_compiled_wherever_weights_are(batches: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges neither compile anew nor take a pass of their own; another density has the same graph."""
    compiled, found = torch.compile, []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append((graph.code, [tuple(t.shape) for t in inputs if isinstance(t, Tensor)]))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, mode: compiled(function, backend=backend))
    for density in (0.3, 0.5):
        torch._dynamo.reset()  # what it has seen of other sizes
        method = ssvi(density=density, training=short(epochs=4, compile=True), **batches)
        posterior = caveat.fit(task(), method, progress=False)
        assert posterior.info.diagnostics["exchanged"] > 10
    assert len(found) == 2
    assert found[0] == found[1]


@pytest.mark.parametrize("knobs", [{}, {"scope": "global"}, {"allocation": "erk"}], ids=str)
def test_whole_weights_written_out_first_give_the_same_training(
    knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Point weights, which have no noise: the places, and the values but for rounding."""
    monkeypatch.setattr(torch, "compile", lambda function, mode: function)
    method = caveat.RigL(density=0.3, interval=3, **knobs)
    plain, written = (
        caveat.fit(task(), replace(method, training=short(compile=compiled)), progress=False)
        for compiled in (False, True)
    )
    assert plain.info.diagnostics["exchanged"] == written.info.diagnostics["exchanged"] > 10
    assert plain.state["active"]["indices"].equal(written.state["active"]["indices"])
    torch.testing.assert_close(written.state["active"]["mean"], plain.state["active"]["mean"], rtol=1e-4, atol=1e-5)


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
