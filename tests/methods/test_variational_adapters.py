"""Variational and sparse methods on adapters and on transformers of the Hugging Face library."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import caveat
from caveat.engine.sparse import Substitute, WeightLayout, sparse_layers

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12, "num_labels": 3}
METHODS = [
    caveat.MeanFieldVI,
    caveat.SSVI,
    caveat.RigL,
    caveat.VariationalDropout,
    caveat.GroupVariationalDropout,
    caveat.StructuredBayesianPruning,
    caveat.AEB,
    caveat.MaskedBNN,
    caveat.IVON,
]


class Rows(Dataset):
    """Rows as dicts with their labels, as tokenizers and image processors make them."""

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        self.inputs = inputs
        self.labels = torch.arange(len(self)) % 3

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {name: value[i] for name, value in self.inputs.items()} | {"labels": self.labels[i]}


def images(n: int = 24) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(0))}


def tokens(n: int = 24) -> dict[str, Tensor]:
    ids = torch.randint(1, 30, (n, 6), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": (torch.arange(6) < 3 + torch.arange(n)[:, None] % 4).long()}


def vit() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, **SMALL)
    return transformers.ViTForImageClassification(config)


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=8, **SMALL)
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=8, n_embd=8, n_layer=1, n_head=2, num_labels=3, pad_token_id=0
    )
    return transformers.GPT2ForSequenceClassification(config)


NETWORKS = {
    "vit": (vit, images, ["q_proj", "v_proj"]),
    "bert": (bert, tokens, ["query", "value"]),
    "gpt2": (gpt2, tokens, ["c_attn"]),
}


def adapted(name: str) -> nn.Module:
    base, _, targets = NETWORKS[name]
    with warnings.catch_warnings():  # of what peft reads of transformers
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=targets, r=2, lora_dropout=0.1, fan_in_fan_out=name == "gpt2")
        return peft.get_peft_model(base(), config)


def short(method: type) -> caveat.Method:
    quick = method.quick
    if hasattr(quick, "training"):
        return replace(quick, training=replace(quick.training, epochs=2))
    return replace(quick, learning_rate=0.01, length=2, burn_in=2)


def fitted(module: nn.Module, inputs: dict[str, Tensor], method: type, parameters: str = "*") -> caveat.Posterior:
    task = caveat.Task(
        module, torch.utils.data.DataLoader(Rows(inputs), 8), caveat.Categorical(), parameters=parameters
    )
    start = caveat.MAP(training=caveat.Training(epochs=1)) if method.starts_from == "trained" else None
    return caveat.fit(task, short(method), start=start, progress=False)


def each_method() -> list[object]:
    """Every method on one network, and a few on the others; the rest is as much work again."""
    quick = (caveat.SSVI, caveat.GroupVariationalDropout)
    pairs = [(name, method) for name in NETWORKS for method in METHODS]
    slow = [name != "vit" and method not in quick for name, method in pairs]
    return [
        pytest.param(*pair, marks=[pytest.mark.slow] if is_slow else [])
        for pair, is_slow in zip(pairs, slow, strict=True)
    ]


@pytest.mark.parametrize(("name", "method"), each_method())
def test_a_posterior_over_adapters_alone(name: str, method: type, tmp_path: Path) -> None:
    module, inputs = adapted(name), NETWORKS[name][1]()
    base = {key: value.clone() for key, value in module.state_dict().items()}
    posterior = fitted(module, inputs, method, "*lora_*")
    assert all("lora_" in key for key in posterior.network.names)
    assert {entry["treatment"] for entry in posterior.info.coverage if "lora_" not in entry["layer"]} == {"fixed"}
    assert not any("stay without a posterior" in warning for warning in posterior.info.warnings)
    first, second = posterior.sample(2)
    assert first.keys() & base.keys() == set(posterior.network.names), "the base is in no draw"
    points = method in (caveat.RigL,)
    assert all(torch.equal(first[key], second[key]) for key in first) == points
    prediction = posterior.predict(inputs)
    assert prediction.probs.shape == (24, 3)
    posterior.save(tmp_path / "posterior")
    loaded = caveat.load(tmp_path / "posterior", adapted(name))
    assert torch.equal(loaded.predict(inputs).samples, prediction.samples)
    assert all(torch.equal(value, base[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("method", [caveat.MeanFieldVI, caveat.SSVI, caveat.GroupVariationalDropout, caveat.RigL])
def test_a_head_in_the_type_of_its_base_beside_finer_adapters_is_left_out_or_refused(method: type) -> None:
    base = bert().to(torch.bfloat16)
    settings = peft.LoraConfig(target_modules=["query"], r=2, task_type="SEQ_CLS")  # trains the head too
    module = peft.get_peft_model(base, settings)
    with pytest.raises(ValueError, match=r"lora_A.* is torch.float32, .*classifier.* torch.bfloat16: leave those of"):
        fitted(module, tokens(), method)
    posterior = fitted(module, tokens(), method, "*lora_*")
    assert bool(posterior.predict(tokens()).probs.isfinite().all())


def test_the_bound_over_adapters_has_the_gradients_of_a_dense_reference() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(5, 3))
    config = peft.LoraConfig(target_modules=["0"], r=2, lora_alpha=6)
    module = peft.get_peft_model(base, config).double()
    network = caveat.Network(module, caveat.Categorical(), parameters="*lora_*")
    layers = sparse_layers(network)
    counts = {name: geometry.size for name, geometry in layers.items()}
    layout = WeightLayout(layers, counts, torch.zeros(0, dtype=torch.int32))
    assert [*counts.values()] == [10, 6]
    substitute = Substitute(network, layout, network.params())
    rng = torch.Generator().manual_seed(0)
    mean, std = (torch.randn(16, generator=rng).double().requires_grad_() for _ in range(2))
    x, of_a, of_b = (torch.randn(7, width, generator=rng).double() for width in (5, 2, 3))
    noise = {2: of_a, 3: of_b}
    substitute.draw_noise(lambda like: noise[like.shape[1]])
    substitute.use(mean, (2 * std).exp())
    found = torch.autograd.grad(substitute.network.module(x).square().sum(), (mean, std))
    a, b, c, d = mean[:10].view(2, 5), mean[10:].view(3, 2), (2 * std[:10]).exp(), (2 * std[10:]).exp()
    inner = x @ a.T + (x.square() @ c.view(2, 5).T).sqrt() * of_a
    change = inner @ b.T + (inner.square() @ d.view(3, 2).T).sqrt() * of_b
    layer = module.base_model.model[0].base_layer
    outputs = x @ layer.weight.T + layer.bias + 3 * change
    torch.testing.assert_close(found, torch.autograd.grad(outputs.square().sum(), (mean, std)))


@pytest.mark.parametrize("method", [caveat.MeanFieldVI, caveat.SSVI, caveat.GroupVariationalDropout])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_posterior_over_a_whole_transformer(name: str, method: type) -> None:
    make, inputs, _ = NETWORKS[name]
    posterior = fitted(make(), inputs(), method)
    assert float(posterior.predict(inputs()).epistemic.min()) > 0
    draw = next(posterior.sample(1, seed=3))
    expected = posterior.network(draw, inputs()).softmax(-1)
    samples = posterior.predict(inputs(), draws=1, seed=3).samples[0]
    torch.testing.assert_close(samples, expected, msg="predictions are of the draws that sample() gives")
