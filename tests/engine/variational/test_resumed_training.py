"""Training of layers that is interrupted, stops early, or runs on two ranks: the same as one whole run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import caveat
from caveat.engine.distributed import Ranks
from caveat.engine.run import Run
from caveat.engine.variational.layer_training import LayerTraining
from tests.engine.variational import training_cases
from tests.engine.variational.training_cases import (
    EACH,
    RESUMED,
    interrupted,
    network,
    places_found,
    rows,
    same,
    short,
    ssvi,
    task,
    watch,
)


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


def test_two_ranks_have_the_same_places_as_one(tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    script.write_text(RANKS.format(file=training_cases.__file__, out=str(tmp_path)))
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
