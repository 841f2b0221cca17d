"""evaluate: the files it writes are what it scores, in the order and shapes that the report reads."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import caveat
from caveat import Training, report
from caveat.evaluate.metrics import joint_nll


def classifier(n_classes: int = 3) -> tuple[caveat.Posterior, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(50, 1, 4, 4, generator=rng)
    y = torch.randint(0, n_classes, (50,), generator=rng)
    torch.manual_seed(0)
    task = caveat.Task(nn.Sequential(nn.Flatten(), nn.Linear(16, n_classes)), (x, y), caveat.Categorical())
    return caveat.fit(task, caveat.DeepEnsemble(members=2, training=Training(epochs=2)), progress=False), x, y


def test_scores_are_those_of_the_predictions_by_hand_and_on_disk(tmp_path: Path) -> None:
    posterior, x, y = classifier()
    shifted = {1.0: (x + 1, y), 2.0: (x + 2, y)}
    scores = caveat.evaluate(
        posterior,
        {"clean": DataLoader(TensorDataset(x, y), 7), "shifted by": shifted},
        ood={"noise": TensorDataset(torch.rand(30, 1, 4, 4))},
        folder=tmp_path,
        class_names=("a", "b", "c"),
        keep_samples=True,
        progress=False,
    )
    prediction = posterior.predict(x)
    assert scores["clean"]["nll"].mean == pytest.approx(-float(prediction.log_prob(y).mean()), rel=1e-5)
    right = (prediction.label == y).double()
    assert scores["clean"]["accuracy"].mean == pytest.approx(float(right.mean()))
    assert scores["clean"]["accuracy"].stderr == pytest.approx(float(right.std() / 50**0.5))
    with np.load(tmp_path / "predictions" / "clean.npz") as file:
        assert list(file["rows"]) == list(range(50))
        np.testing.assert_allclose(file["probs"], prediction.probs, rtol=1e-5)
        np.testing.assert_allclose(file["samples"], prediction.samples, rtol=1e-5)
        wrong = set(np.flatnonzero(file["probs"].argmax(1) != file["targets"]))
        assert file["thumbnails"].shape == (24, 4, 4)
        assert set(file["thumbnail_rows"]) <= wrong or wrong <= set(file["thumbnail_rows"])
    with np.load(tmp_path / "predictions" / "noise.npz") as file:
        assert "targets" not in file.files
    content = json.loads((tmp_path / "metrics.json").read_text())
    names = [(d["name"], d["family"], d["severity"], d["role"]) for d in content["data"]]
    assert names == [
        ("clean", "clean", None, "test"),
        ("shifted by 1", "shifted by", 1.0, "test"),
        ("shifted by 2", "shifted by", 2.0, "test"),
        ("noise", "noise", None, "ood"),
    ]
    assert content["method"] == {"name": "deep_ensemble", "fields": content["method"]["fields"]}
    assert content["method"]["fields"]["training"]["epochs"] == 2
    assert "auroc_epistemic" in scores["noise"].metrics
    assert "clean" in str(scores)
    with pytest.raises(KeyError, match="there are clean, shifted by 1"):
        scores["nowhere"]
    with pytest.raises(KeyError, match="no metric 'f1'"):
        scores["clean"]["f1"]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    posterior, x, y = classifier()
    caveat.evaluate(posterior, {"clean": (x, y)}, progress=False)
    assert not list(tmp_path.iterdir())


def test_regression_and_counts_and_labels(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=rng)
    cases = {
        "Gaussian": (nn.Linear(3, 2), x[:, :2] + 0.1 * torch.randn(40, 2, generator=rng)),
        "HeteroscedasticGaussian": (nn.Linear(3, 2), x[:, :1]),
        "Poisson": (nn.Linear(3, 1), torch.poisson(x[:, :1].exp(), generator=rng)),
        "Bernoulli": (nn.Linear(3, 4), torch.randint(0, 2, (40, 4), generator=rng).float()),
    }
    for name, (module, y) in cases.items():
        task = caveat.Task(module, (x, y), getattr(caveat, name)())
        posterior = caveat.fit(task, caveat.MAP(training=Training(epochs=2)), progress=False)
        scores = caveat.evaluate(
            posterior,
            {"clean": (x, y)},
            ood={"far": TensorDataset(x + 9)},
            folder=tmp_path / name / "run",
            progress=False,
        )
        assert all(np.isfinite(score.mean) for score in scores["clean"].metrics.values()), name
        assert scores["clean"].rows == (160 if name == "Bernoulli" else 40)
        wanted = {"accuracy", "ece"} if name == "Bernoulli" else {"rmse", "crps", "coverage_90"}
        assert wanted <= scores["clean"].metrics.keys()
        assert len(report.read(tmp_path / name)) == 1
        report.write(tmp_path / name)
        with np.load(tmp_path / name / "run" / "predictions" / "clean.npz") as file:
            assert np.array_equal(np.unique(file["rows"]), np.arange(40))


def test_bad_calls_say_what_to_do() -> None:
    posterior, x, y = classifier()
    with pytest.raises(ValueError, match="at least one data set"):
        caveat.evaluate(posterior, {})
    with pytest.raises(ValueError, match="must differ in letters and digits"):
        caveat.evaluate(posterior, {"a b": (x, y), "a-b": (x, y)})
    with pytest.raises(ValueError, match="without targets"):
        caveat.evaluate(posterior, {"clean": DataLoader(TensorDataset(x), 5)}, progress=False)
    with pytest.raises(ValueError, match=r"a label is 7, but there are 3 classes"):
        caveat.evaluate(posterior, {"clean": (x, torch.full_like(y, 7))}, progress=False)
    with pytest.raises(ValueError, match="needs integer class labels"):
        caveat.evaluate(posterior, {"clean": (x, y.float())}, progress=False)
    with pytest.raises(ValueError, match="NaN or infinity"):
        caveat.evaluate(posterior, {"clean": (x * float("nan"), y)}, progress=False)
    with pytest.raises(ValueError, match=r"class_names has 2 names \(a, b\), but the posterior tells 3 classes apart"):
        caveat.evaluate(posterior, {"clean": (x, y)}, class_names=("a", "b"), progress=False)


def test_class_names_of_labels_and_of_numbers() -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    for likelihood, names, refused in (
        (caveat.Bernoulli(), ("no", "yes"), False),
        (caveat.Bernoulli(), ("a", "b", "c"), False),
        (caveat.Bernoulli(), ("a", "b", "c", "d"), True),
        (caveat.Gaussian(), ("a",), False),  # of no use, and no harm
    ):
        task = caveat.Task(nn.Linear(3, 3), (x, (x > 0).float()), likelihood)
        posterior = caveat.fit(task, caveat.MAP(training=Training(epochs=1)), progress=False)
        if not refused:
            caveat.evaluate(posterior, {"clean": (x, (x > 0).float())}, class_names=names, progress=False)
            continue
        with pytest.raises(ValueError, match=f"class_names has {len(names)} name"):
            caveat.evaluate(posterior, {"clean": (x, (x > 0).float())}, class_names=names, progress=False)


def test_a_failure_leaves_earlier_results_as_they_are(tmp_path: Path) -> None:
    posterior, x, y = classifier()
    caveat.evaluate(posterior, {"clean": (x, y)}, folder=tmp_path, progress=False)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="a label is 9"):
        caveat.evaluate(
            posterior, {"clean": (x + 1, y), "b": (x, torch.full_like(y, 9))}, folder=tmp_path, progress=False
        )
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_bfloat16_network_can_be_scored(tmp_path: Path) -> None:
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    task = caveat.Task(nn.Linear(3, 2).bfloat16(), (x, (x[:, 0] > 0).long()), caveat.Categorical())
    posterior = caveat.fit(task, caveat.MAP(training=Training(epochs=2)), progress=False)
    scores = caveat.evaluate(posterior, {"clean": task.train.dataset}, folder=tmp_path, progress=False)
    assert scores["clean"]["nll"].mean > 0


def test_an_earlier_evaluation_is_replaced_whole(tmp_path: Path) -> None:
    posterior, x, y = classifier()
    caveat.evaluate(posterior, {"clean": (x, y), "other": (x, y)}, folder=tmp_path, progress=False)
    caveat.evaluate(posterior, {"clean": (x, y)}, folder=tmp_path, progress=False)
    assert [path.name for path in (tmp_path / "predictions").iterdir()] == ["clean.npz"]


def test_several_rows_are_scored_at_once_from_what_the_file_holds(tmp_path: Path) -> None:
    posterior, _, _ = classifier()
    rng = torch.Generator().manual_seed(1)
    x, y = torch.randn(1500, 1, 4, 4, generator=rng), torch.randint(3, (1500,), generator=rng)
    scores = caveat.evaluate(posterior, {"clean": (x, y)}, folder=tmp_path, progress=False)
    with np.load(tmp_path / "predictions" / "clean.npz") as file:
        kept = torch.from_numpy(file["joint_log_prob"])  # of a thousand rows, spread over all
    every_draw = posterior.predict(x).log_samples
    chosen = torch.linspace(0, 1499, 1000, dtype=torch.float64).long()
    expected = every_draw.gather(-1, y.expand(2, -1).unsqueeze(-1)).squeeze(-1).T[chosen]
    torch.testing.assert_close(kept, expected)
    assert scores["clean"]["joint_nll"].mean == pytest.approx(joint_nll(kept), rel=1e-6)
