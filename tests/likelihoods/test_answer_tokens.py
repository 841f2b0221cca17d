"""A language model's logits of the answer tokens, where each row's text ends, are logits of classes."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import caveat
from caveat.likelihoods import answer_logits

WORDS, LENGTH, ANSWERS = 11, 5, (7, 3, 9)


class LanguageModel(nn.Module):
    """A causal model of tokens [B, T], padded on either side, with logits [B, T, V] in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, WORDS)
        self.tokens.requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        h = self.tokens(input_ids)
        h = h if attention_mask is None else h * attention_mask.unsqueeze(-1)
        return {"logits": self.head(torch.tanh(self.mix(h.cumsum(1))))}


class Answers(LanguageModel):
    """The same, read by hand: what a row's own tokens alone give for the three answers."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        last = LENGTH - 1 - attention_mask.flip(1).argmax(1)
        logits = super().forward(input_ids, attention_mask)["logits"]
        return logits.gather(1, last.view(-1, 1, 1).expand(-1, 1, WORDS))[:, 0, list(ANSWERS)]


class Questions(Dataset):
    """Rows of two to five tokens, padded on one side."""

    def __init__(self, side: str) -> None:
        rng = torch.Generator().manual_seed(0)
        self.ids = torch.randint(WORDS, (40, LENGTH), generator=rng)
        lengths = torch.randint(2, LENGTH + 1, (40, 1), generator=rng)
        self.mask = (torch.arange(LENGTH) < lengths).long()
        self.mask = self.mask if side == "right" else self.mask.flip(1)
        self.labels = (self.ids * self.mask).sum(1) % 3

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[row], "attention_mask": self.mask[row], "labels": self.labels[row]}

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"input_ids": self.ids, "attention_mask": self.mask}


def build(kind: type[LanguageModel] = LanguageModel) -> LanguageModel:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_answer_is_read_where_a_row_ends(side: str) -> None:
    data, model = Questions(side), build()
    logits = model(**data.inputs)["logits"]
    found = answer_logits(logits, data.inputs, ANSWERS)
    for row in range(40):
        ids = data.ids[row][data.mask[row] > 0]
        alone = model(ids[None])["logits"][0, -1]
        torch.testing.assert_close(found[row], alone[list(ANSWERS)])


def test_without_a_mask_or_positions_the_last_logits_count() -> None:
    model, ids = build(), Questions("left").ids
    logits = model(ids)["logits"]
    wanted = logits[:, -1, list(ANSWERS)]
    assert torch.equal(answer_logits(logits, ids, ANSWERS), wanted)
    assert torch.equal(answer_logits(logits[:, -1], {"input_ids": ids}, ANSWERS), wanted)


@pytest.mark.parametrize(
    "method", [caveat.Laplace(), caveat.SubnetworkLaplace(weights=30), caveat.SampledLaplace(samples=2), caveat.SWAG()]
)
def test_posteriors_are_those_of_a_module_that_gives_the_answers_logits(method: caveat.Method, tmp_path) -> None:
    data = Questions("left")
    point = caveat.MAP(training=caveat.Training(epochs=3, learning_rate=0.05))
    by_hand = caveat.Task(build(Answers), data, caveat.Categorical())
    task = caveat.Task(build(), data, caveat.Categorical(classes=[*ANSWERS]))
    wanted = caveat.fit(by_hand, method, start=point, progress=False).predict(data.inputs).probs
    posterior = caveat.fit(task, method, start=point, progress=False)
    found = posterior.predict(data.inputs).probs
    assert found.shape == (40, 3)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    posterior.save(tmp_path / "posterior")
    assert torch.equal(caveat.load(tmp_path / "posterior", build()).predict(data.inputs).probs, found)


def test_what_does_not_go_together_is_refused() -> None:
    data = Questions("right")
    with pytest.raises(ValueError, match="two different tokens or more"):
        caveat.Categorical(classes=(4, 4))
    with pytest.raises(ValueError, match="leave class_axis and next_token out"):
        caveat.Categorical(classes=(4, 5), class_axis=-1)
    with pytest.raises(ValueError, match=r"needs logits of tokens.*ids of its own tokenizer"):
        caveat.Task(build(), data, caveat.Categorical(classes=(4, WORDS)))
    data.labels = torch.tensor(ANSWERS)[data.labels]
    with pytest.raises(ValueError, match=r"labels are the tokens \[7, 3, 9\] themselves.*classes\.index\(label\)"):
        caveat.Task(build(), data, caveat.Categorical(classes=ANSWERS))
    with pytest.raises(ValueError, match=r"attention_mask, which is \(40, 4\)"):
        answer_logits(torch.zeros(40, 5, 11), {"attention_mask": data.mask[:, 1:]}, ANSWERS)


def test_a_model_of_transformers_answers() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=WORDS, n_positions=LENGTH)
    torch.manual_seed(0)
    model, data = transformers.GPT2LMHeadModel(config).eval(), Questions("left")
    task = caveat.Task(model, data, caveat.Categorical(classes=ANSWERS))
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=0)), progress=False)
    found = posterior.predict(transformers.BatchEncoding(data.inputs)).probs
    wanted = model(**data.inputs).logits[:, -1, list(ANSWERS)].softmax(-1)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_before_the_text_are_no_part_of_it(side: str) -> None:
    data, model = Questions(side), build()
    logits = model(**data.inputs)["logits"]
    prompted = torch.cat([torch.randn(40, 3, WORDS), logits], 1)
    assert torch.equal(answer_logits(prompted, data.inputs, ANSWERS), answer_logits(logits, data.inputs, ANSWERS))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_tuned_prompts_of_a_language_model_answer() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    peft = pytest.importorskip("peft", reason="needs peft")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=WORDS, n_positions=2 * LENGTH)
    torch.manual_seed(0)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, data = peft.get_peft_model(transformers.GPT2LMHeadModel(config), prompts).eval(), Questions("left")
    task = caveat.Task(model, data, caveat.Categorical(classes=ANSWERS))
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=0)), progress=False)
    wanted = model(**data.inputs).logits[:, -1, list(ANSWERS)].softmax(-1)
    torch.testing.assert_close(posterior.predict(data.inputs).probs, wanted)
