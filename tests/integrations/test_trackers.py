"""What is logged to MLflow and to Weights & Biases, in a local folder and offline."""

import json

import pytest
import torch
from torch import nn

import caveat
from caveat.integrations.logged import flat_knobs, flat_scores


@pytest.fixture(scope="module")
def scored():
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 3, generator=rng), torch.randint(0, 2, (60,), generator=rng)
    torch.manual_seed(0)
    task = caveat.Task(nn.Linear(3, 2), (x, y), caveat.Categorical())
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=4)), progress=False)
    return posterior, caveat.evaluate(posterior, {"clean": (x, y), "noisy": {0.5: (x + 1, y)}}, progress=False)


def test_names_are_flat(scored):
    posterior, scores = scored
    knobs = flat_knobs(posterior)
    assert (knobs["method"], knobs["training.epochs"], knobs["likelihood"]) == ("map", 4, "Categorical")
    flat = flat_scores(scores)
    assert flat["clean/nll"] == scores["clean"]["nll"].mean
    assert "noisy_0_5/accuracy" in flat


@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_scores_and_the_posterior(scored, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow-skinny")
    from caveat.integrations.mlflow import log_posterior

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path / 'runs'}")
    posterior, scores = scored
    with mlflow.start_run() as run:
        log_posterior(posterior, scores)
    kept = mlflow.get_run(run.info.run_id)
    assert kept.data.metrics["clean/nll"] == pytest.approx(scores["clean"]["nll"].mean)
    assert kept.data.params["training.epochs"] == "4"
    folder = mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path="posterior")
    x = torch.ones(2, 3)
    assert torch.equal(caveat.load(folder, nn.Linear(3, 2)).predict(x).probs, posterior.predict(x).probs)


@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_scores_and_the_posterior(scored, tmp_path):
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    from caveat.integrations.wandb import log_posterior

    settings = wandb.Settings(silent=True, console="off")
    with wandb.init(mode="offline", dir=tmp_path, project="test", settings=settings) as run:
        log_posterior(run, *scored)
        assert run.config["training.epochs"] == 4
        assert run.summary["clean/nll"] == pytest.approx(scored[1]["clean"]["nll"].mean)
    assert json.dumps(dict(run.config))
    log = next(tmp_path.rglob("*.wandb")).read_bytes()
    assert b"state.safetensors" in log
