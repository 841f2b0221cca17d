"""Labels that are the input tokens: a language model is scored by the next one, and this is said."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import caveat
from caveat.likelihoods import Categorical
from caveat.predictive import CategoricalPredictive
from caveat.rows import Rows

WORDS, LENGTH = 7, 6


class Tokens(Dataset):
    """Rows as Hugging Face's collators give them: tokens, a mask, and the tokens again as labels."""

    def __init__(self, tokens: Tensor, labels: Tensor | None = None) -> None:
        self.tokens, self.labels = tokens, tokens if labels is None else labels

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        tokens = self.tokens[row]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": self.labels[row]}


class Transformer(nn.Module):
    """One layer of attention over tokens [B, T], with logits [B, T, C] in a dict."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.embedding, self.mix, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 24), nn.Linear(8, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        h = self.embedding(input_ids)
        q, k, v = self.mix(h).chunk(3, -1)
        return {"logits": self.head(h + F.scaled_dot_product_attention(q, k, v, is_causal=self.causal))}


def tokens(rows: int = 24) -> Tensor:
    return torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(0))


def build(causal: bool = True) -> Transformer:
    torch.manual_seed(0)
    return Transformer(causal)


def test_random_tokens_cannot_be_foretold_by_a_causal_model() -> None:
    data = Tokens(tokens())
    task = caveat.Task(build(), data, Categorical(class_axis=-1))
    assert task.network.likelihood == Categorical(class_axis=-1, next_token=True)
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=60, learning_rate=0.02)), progress=False)
    assert any("language model" in warning for warning in posterior.info.warnings)
    fresh = Tokens(torch.randint(WORDS, (200, LENGTH), generator=torch.Generator().manual_seed(1)))
    scores = caveat.evaluate(posterior, {"random": fresh}, progress=False)
    assert scores["random"]["accuracy"].mean < 0.3  # unshifted it repeats what it sees: 1.0
    assert scores["random"]["nll"].mean > 1.5


def test_the_log_likelihood_is_that_of_logits_against_the_next_labels(tmp_path) -> None:
    labels = tokens()
    labels[:, :2] = -100  # a prompt
    task = caveat.Task(build(), Tokens(tokens(), labels), Categorical(class_axis=-1))
    network = task.network
    inputs = {"input_ids": tokens(), "attention_mask": torch.ones_like(tokens())}
    logits = network(network.params(), inputs)
    field = -F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(network.likelihood.log_prob(logits, labels, {}).sum(), field)
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=0)), progress=False)
    posterior.save(tmp_path / "posterior")
    posterior = caveat.load(tmp_path / "posterior", build())
    prediction = posterior.predict(inputs)
    torch.testing.assert_close(prediction.log_prob(labels).sum(), field)
    assert isinstance(prediction, CategoricalPredictive)
    assert len(prediction.columns(labels)["targets"]) == (LENGTH - 2) * len(labels)
    p, weight = logits.softmax(-1), (labels[:, 1:] != -100).float()
    trace = ((1 - p.square().sum(-1))[:, :-1] * weight).sum(1)
    torch.testing.assert_close(network.likelihood.fisher_trace(logits, labels, {}), trace)


def test_who_says_it_gets_no_note_and_who_denies_it_gets_labels_as_they_stand() -> None:
    for said in (True, False):
        task = caveat.Task(build(), Tokens(tokens()), Categorical(class_axis=-1, next_token=said))
        assert task.network.likelihood.next_token is said  # type: ignore[attr-defined]
        assert not task.warnings


def test_a_network_that_sees_all_tokens_is_a_reconstruction_and_says_so() -> None:
    task = caveat.Task(build(causal=False), Tokens(tokens()), Categorical(class_axis=-1))
    assert task.network.likelihood == Categorical(class_axis=-1)
    assert ["reconstruction" in warning for warning in task.warnings] == [True]


def test_other_labels_are_taken_as_they_stand() -> None:
    shifted = tokens().roll(-1, 1)
    shifted[:, -1] = -100
    task = caveat.Task(build(), Tokens(tokens(), shifted), Categorical(class_axis=-1))
    assert task.network.likelihood == Categorical(class_axis=-1)
    assert not task.warnings
    with pytest.raises(ValueError, match="next tokens already: leave next_token out"):
        caveat.Task(build(), Tokens(tokens(), shifted), Categorical(class_axis=-1, next_token=True))


def test_classes_on_another_axis_than_said_are_refused_with_the_axis() -> None:
    with pytest.raises(ValueError, match=r"with class_axis=1 need labels of shape \(24, 7\), .*say class_axis=-1"):
        caveat.Task(build(), Tokens(tokens()), Categorical())


def test_one_label_a_row_has_no_next_one() -> None:
    with pytest.raises(ValueError, match=r"needs labels \[batch, positions\]"):
        caveat.Task(nn.Linear(3, 2), (torch.randn(6, 3), torch.arange(6) % 2), Categorical(next_token=True))


def test_hugging_face_s_own_loss_is_ours() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=WORDS, n_positions=LENGTH)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    labels = tokens()
    labels[:, :2] = -100
    task = caveat.Task(model, Tokens(tokens(), labels), Categorical(class_axis=-1))
    assert task.network.likelihood == Categorical(class_axis=-1, next_token=True)
    with torch.no_grad():
        loss = model(input_ids=tokens(), labels=labels).loss
    x, y = Rows(Tokens(tokens(), labels)).everything()
    ours = task.network.likelihood.log_prob(task.network(task.network.params(), x), y, {}).sum()
    torch.testing.assert_close(-ours / (labels[:, 1:] != -100).sum(), loss)
