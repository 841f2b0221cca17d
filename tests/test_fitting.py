"""What a fit starts from, and how it goes on after a kill."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import caveat
from caveat import Training


def task(precision: float = 1.0, seed: int = 0) -> caveat.Task:
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    return caveat.Task(network, (x, (x[:, 0] > 0).long()), caveat.Categorical(), caveat.GaussianPrior(precision))


POINT = caveat.MAP(training=Training(epochs=40))
PATH = caveat.SWAG(rank=0, training=Training(epochs=2, optimizer="sgd", learning_rate=0.1))


def test_starting_from_a_method_is_starting_from_its_posterior(tmp_path: Path) -> None:
    point = caveat.fit(task(), POINT, progress=False)
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(1))
    ways = [
        caveat.fit(task(), PATH, start=point, progress=False),
        caveat.fit(task(), PATH, start=POINT, progress=False),
        caveat.fit(task(), PATH, start=POINT, folder=tmp_path / "p", progress=False),
    ]
    for way in ways[1:]:
        assert torch.equal(way.predict(x).samples, ways[0].predict(x).samples)
    assert [path.name for path in tmp_path.iterdir()] == ["p"], "nothing is left beside the posterior"


def test_a_start_that_was_fitted_is_kept_after_a_kill_and_bound_to_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from caveat.methods import swag

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(swag, "train_point", killed)
        with pytest.raises(KeyboardInterrupt):
            caveat.fit(task(), PATH, start=POINT, folder=tmp_path / "p", progress=False)
    assert (tmp_path / "p.partial" / "start" / "posterior.json").exists()
    for other in (
        lambda: caveat.fit(task(), PATH, start=caveat.MAP(training=Training(epochs=41)), folder=tmp_path / "p"),
        lambda: caveat.fit(task(precision=2.0), PATH, start=POINT, folder=tmp_path / "p"),
        lambda: caveat.fit(task(), PATH, start=POINT, seed=1, folder=tmp_path / "p"),
    ):
        with pytest.raises(ValueError, match=r"unfinished fit with another (start|prior|seed)"):
            other()
    trained: list[str] = []
    fit_map = caveat.MAP.fit
    monkeypatch.setattr(caveat.MAP, "fit", lambda *a: trained.append("map") or fit_map(*a))
    caveat.fit(task(), PATH, start=POINT, folder=tmp_path / "p", progress=False)
    assert not trained, "the start is not trained again"


def test_a_start_must_be_one_point_of_the_same_network() -> None:
    ensemble = caveat.fit(task(), caveat.DeepEnsemble(members=2, training=Training(epochs=1)), progress=False)
    with pytest.raises(ValueError, match="this DeepEnsemble is not one"):
        caveat.fit(task(), PATH, start=ensemble, progress=False)


def test_a_compiled_model_can_be_loaded_into(tmp_path: Path) -> None:
    point = caveat.fit(task(), POINT, folder=tmp_path / "p", progress=False)
    model = nn.DataParallel(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)))
    x = torch.randn(5, 2)
    assert torch.equal(caveat.load(tmp_path / "p", model).predict(x).samples, point.predict(x).samples)


def test_only_a_posterior_is_overwritten(tmp_path: Path) -> None:
    point = caveat.fit(task(), POINT, progress=False)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("years of work")
    with pytest.raises(FileExistsError, match="not a posterior"):
        point.save(tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "text").read_text() == "years of work"
    point.save(tmp_path / "p")
    point.save(tmp_path / "p", overwrite=True)


def test_seconds_count_from_before_the_kill(tmp_path: Path) -> None:
    from caveat.engine.run import Run

    first = Run(folder=tmp_path / "r")
    first._started_at -= 100
    first.checkpoint({}, {})
    again = Run(folder=tmp_path / "r")
    assert again.seconds() < 50
    again.resume()
    assert again.seconds() > 99


def test_what_is_not_inferred_is_taken_from_the_start() -> None:
    """A MAP over all weights as the start of a fit over the last layer: the first layer is the trained one."""
    point = caveat.fit(task(), POINT, progress=False)
    x, y = task().train.everything()
    whole = task()
    last = caveat.Task(whole.network.module.requires_grad_(True), (x, y), caveat.Categorical(), parameters="2.*")
    still = Training(epochs=3, optimizer="sgd", learning_rate=1e-9)
    trained = float(point.predict(x).log_prob(y).mean())
    for method in (caveat.SWAG(training=still, rank=0), caveat.MAP(training=still), caveat.MCDropout(rate=1e-9)):
        posterior = caveat.fit(last, method, start=point, progress=False)
        assert float(posterior.predict(x).log_prob(y).mean()) == pytest.approx(trained, abs=1e-5)
        assert posterior.network.names == ("2.weight", "2.bias")


def test_costs_of_the_start_count() -> None:
    posterior = caveat.fit(task(), PATH, start=POINT, progress=False)
    assert posterior.info.gradient_evaluations == 40 + 2


def test_other_labels_batch_sizes_and_augmentation_are_another_task() -> None:
    x, y = task().train.everything()
    changed = y.clone()
    changed[37] = 1 - changed[37]

    def fingerprint(targets: torch.Tensor, batch_size: int = 8, augment: object = None) -> dict[str, str]:
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, targets), batch_size)
        return caveat.Task(
            task().network.module.requires_grad_(True), loader, caveat.Categorical(), augment=augment
        ).fingerprint()  # type: ignore[arg-type]

    same = fingerprint(y)
    assert fingerprint(y) == same
    for other in (fingerprint(changed), fingerprint(y, 9), fingerprint(y, augment=lambda x, rng: x)):
        assert other != same


@pytest.mark.parametrize(
    ("slip", "complaint"),
    [
        (lambda t: caveat.fit(t, caveat.MAP), "method=.*is not a method.*caveat.MAP()"),
        (lambda t: caveat.fit(t, "map"), "method='map' is not a method"),
        (lambda t: caveat.fit(t, PATH, start="posteriors/map"), "caveat.load"),
        (lambda t: caveat.fit(t.network.module, caveat.MAP()), "fit takes a task first, not a Sequential"),
        (
            lambda t: caveat.Task(
                nn.Linear(2, 2), t.train.dataset, caveat.Categorical(), parameters=nn.Linear(2, 2).parameters()
            ),
            "takes patterns of names, such as 'head",
        ),
        (
            lambda t: caveat.fit(t, POINT, progress=False).predict(torch.ones(3, 5)),
            r"fitted to rows of shape \(2,\) and float32: [^;]*$",
        ),
        (lambda t: caveat.fit(t, caveat.DeepEnsemble(), start=POINT), "draws its own starting weights"),
        (lambda t: caveat.Task(nn.Linear, t.train.dataset, caveat.Categorical()), "must be a torch module"),
        (lambda t: caveat.Task(nn.Linear(2, 2), t.train.dataset, caveat.Categorical), "likelihood must be an instance"),
        (lambda t: caveat.Task(nn.Linear(2, 2), t.train.dataset, "categorical"), "likelihood must be an instance"),
        (
            lambda t: caveat.Task(nn.Linear(2, 2), t.train.dataset, caveat.Categorical(), 1.0),
            "prior must be an instance",
        ),
        (
            lambda t: caveat.Task(
                nn.Linear(2, 2), t.train.dataset, caveat.Categorical(), caveat.GaussianPrior({"z": 1.0})
            ),
            "no precision for 'weight'",
        ),
        (
            lambda t: caveat.Task(nn.Linear(2, 2), (np.ones((3, 2)), np.ones(3)), caveat.Categorical()),
            "needs integer class labels",
        ),
        (lambda t: caveat.Task(nn.Linear(2, 2), t.train.dataset, caveat.Categorical(), validation=2.0), "below 1"),
        (lambda t: caveat.fit(t, POINT, progress=False).predict("a text"), r"not a str: give what the tokenizer makes"),
        (lambda t: caveat.fit(t, POINT, progress=False).predict(torch.ones(3, 2), draws=2.5), "whole number"),
    ],
)
def test_the_usual_slips_are_answered_with_a_sentence(slip, complaint: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises((TypeError, ValueError), match=complaint):
        slip(task())


def test_things_show_what_they_are() -> None:
    posterior = caveat.fit(task(), POINT, progress=False)
    assert repr(task()) == "Task(Sequential, Categorical, 42 weights, 60 rows)"
    assert repr(posterior).startswith("Posterior(MAP(")
    assert repr(posterior.predict(torch.ones(3, 2))) == "CategoricalPredictive(1 draws of shape [3, 2])"


def test_training_that_learns_nothing_and_paths_that_stray_are_warned_about() -> None:
    x = torch.linspace(0, 100, 60)[:, None]
    far = caveat.Task(nn.Linear(1, 1), (x, x + 1000), caveat.Gaussian())
    posterior = caveat.fit(far, caveat.MAP(training=Training(epochs=1)), progress=False)
    assert any("no better than the label marginals" in w and "standardise=True" in w for w in posterior.info.warnings)
    wild = Training(epochs=4, optimizer="sgd", learning_rate=50.0, schedule="constant", warmup=0.0, clip=1.0)
    strayed = caveat.fit(task(), caveat.SWAG(rank=0, training=wild), start=POINT, progress=False)
    assert any("lower training.learning_rate (now 50)" in warning for warning in strayed.info.warnings)


def test_a_refused_fit_leaves_nothing_that_blocks_the_corrected_one(tmp_path: Path) -> None:
    point = caveat.fit(task(), POINT, progress=False)
    with pytest.raises(ValueError, match="matches no parameter"):
        caveat.fit(task(), caveat.SubnetworkLaplace("fc"), start=point, folder=tmp_path / "posterior", progress=False)
    assert not list(tmp_path.iterdir())
    caveat.fit(task(), caveat.SubnetworkLaplace("2"), start=point, folder=tmp_path / "posterior", progress=False)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, FloatingPointError, RuntimeError])
def test_a_fit_that_kept_nothing_leaves_nothing_that_blocks_another(
    stop: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise stop

    with monkeypatch.context() as patched:
        patched.setattr("caveat.engine.training.loop.Loop.run_epoch", stopped)
        for method, start in ((POINT, None), (PATH, POINT)):
            with pytest.raises(stop):
                caveat.fit(task(), method, start=start, folder=tmp_path / "posterior", progress=False)
            assert not list(tmp_path.iterdir())
    other = caveat.MAP(training=Training(epochs=2))
    caveat.fit(task(), other, folder=tmp_path / "posterior", progress=False)


def test_the_first_fit_of_a_process_does_not_count_what_torch_imports_late(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, caveat\n"
        "x = torch.randn(60, 2)\n"
        "method = caveat.MAP(training=caveat.Training(epochs=100))\n"
        "for _ in range(2):\n"
        "    task = caveat.Task(torch.nn.Linear(2, 2), (x, (x[:, 0] > 0).long()), caveat.Categorical())\n"
        "    print(caveat.fit(task, method, progress=False).info.seconds)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    first, second = map(float, done.stdout.split())
    assert first < 3 * second + 0.3, "torch's own imports take more than a second"


@pytest.mark.parametrize(
    ("method", "prior", "complaint"),
    [
        (caveat.SubnetworkLaplace(weights=1000), caveat.GaussianPrior(), "more than the network has"),
        (caveat.SubnetworkLaplace(weights="head"), caveat.GaussianPrior(), "matches no parameter"),
        (caveat.SubnetworkLaplace(weights=5, score=torch.ones(3)), caveat.GaussianPrior(), "score has 3 numbers"),
        (caveat.SubnetworkLaplace(weights=5), caveat.LaplacePrior(), "needs a Gaussian prior"),
        (caveat.LastLayerLaplace(layer="head"), caveat.GaussianPrior(), "the layers are"),
        (caveat.LastLayerLaplace(), caveat.LaplacePrior(), "needs a Gaussian prior"),
        (caveat.Laplace(), caveat.LaplacePrior(), "needs a Gaussian prior"),
        (caveat.Laplace(precision="validation"), caveat.GaussianPrior(), "needs validation rows"),
        (caveat.Laplace(structure="full"), caveat.GaussianPrior(), "over 42 weights .* needs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_be_refused_is_refused_before_the_start_is_trained(
    method: Any, prior: Any, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(*_: object) -> None:
        raise AssertionError("trained first")

    monkeypatch.setattr(caveat.MAP, "fit", trained)
    monkeypatch.setattr("caveat.engine.cost.free_bytes", lambda device: 15_000)
    module = task().network.module.requires_grad_(True)
    own = caveat.Task(module, task().train.everything(), caveat.Categorical(), prior)
    with pytest.raises((ValueError, MemoryError), match=complaint):
        caveat.fit(own, method, start=POINT, progress=False)


def test_answers_too_large_for_the_memory_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = caveat.fit(task(), caveat.Laplace(precision="given"), start=POINT, progress=False)
    x = torch.randn(1024, 2, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("caveat.engine.cost.free_bytes", lambda device: 20_000_000)
    with pytest.raises(MemoryError, match=r"joint covariance of 1,024 rows needs 50\.3 MB.*fewer rows, or joint=False"):
        posterior.moments(x, joint=True)
    with pytest.raises(MemoryError, match=r"1,024 draws for 1,024 rows needs 25\.2 MB.*take fewer draws"):
        posterior.predict(x, draws=1024)
    assert len(posterior.predict(x, draws=100).samples) == 100

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(type(posterior.predictor), "moments", full)
    with pytest.raises(MemoryError, match=r"too little memory for inputs of shapes \[\(1024, 2\)\]: take fewer"):
        posterior.moments(x)


def test_a_folder_that_is_no_unfinished_fit_is_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "out.partial" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(FileExistsError, match="is not an unfinished fit"):
        caveat.fit(task(), caveat.MAP(training=caveat.Training(epochs=1)), folder=tmp_path / "out", progress=False)
    assert notes.read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_process_predicts_while_its_parent_does() -> None:
    posterior = caveat.fit(task(), caveat.MAP(training=caveat.Training(epochs=1)), progress=False)
    x = torch.zeros(2, 2)
    alone = posterior.predict(x).samples
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with posterior.predictor._networks.lent():  # type: ignore[attr-defined]
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            torch.set_num_threads(1)
            os._exit(0 if torch.equal(posterior.predict(x).samples, alone) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    done.set()
    thread.join()
