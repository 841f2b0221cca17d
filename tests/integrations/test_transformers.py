"""Hugging Face's trainer trains, and a posterior is what it leaves."""

import pytest
import torch
from torch.utils.data import Dataset

import caveat

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate, without which transformers has no trainer")

from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from caveat.integrations.transformers import PosteriorCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of loaders and of pinned memory


class Sentences(Dataset):
    """Token ids whose first says the label."""

    def __init__(self, n: int = 64) -> None:
        rng = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, 30, (n, 6), generator=rng)
        self.labels = (self.ids[:, 0] > 15).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict:
        return {"input_ids": self.ids[i], "attention_mask": torch.ones(6).long(), "labels": self.labels[i]}


def model(seed: int = 0) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    return BertForSequenceClassification(config)


def train(callback, network, folder, epochs: int = 12) -> None:
    arguments = TrainingArguments(
        str(folder), num_train_epochs=epochs, per_device_train_batch_size=16, learning_rate=5e-3, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    Trainer(model=network, args=arguments, train_dataset=Sentences(), callbacks=[callback]).train()


def inputs() -> dict:
    rows = Sentences()
    return {"input_ids": rows.ids, "attention_mask": torch.ones(64, 6).long()}


def test_a_fine_tuned_model_becomes_a_posterior(tmp_path) -> None:
    network = model()
    callback = PosteriorCallback(caveat.LastLayerLaplace(), folder=tmp_path / "posterior")
    train(callback, network, tmp_path)
    prediction = callback.posterior.predict(inputs())
    assert (prediction.label == Sentences().labels).double().mean() > 0.8
    assert float(prediction.epistemic.mean()) > 0
    loaded = caveat.load(tmp_path / "posterior", model(5))
    torch.testing.assert_close(loaded.predict(inputs()).probs, prediction.probs)


def test_swag_and_an_ensemble_are_collected(tmp_path) -> None:
    callback = PosteriorCallback(caveat.SWAG(rank=2, scale=1.0, default_draws=4))
    network = model()
    train(callback, network, tmp_path)
    assert callback.posterior.method.training.epochs == 12
    means = callback.posterior.state["mean"]
    assert means.keys() == {name for name, _ in network.named_parameters()}
    ensemble = PosteriorCallback(caveat.DeepEnsemble(members=2))
    networks = [model(0), model(1)]
    for network in networks:
        train(ensemble, network, tmp_path, 1)
    with torch.no_grad():
        expected = torch.stack([network.eval()(**inputs()).logits.softmax(-1) for network in networks])
    torch.testing.assert_close(ensemble.posterior.predict(inputs()).samples, expected)
