"""A module's own initialisers are found, and called in the order in which building it called them."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.fresh_weights import FreshWeights
from caveat.priors import Params
from tests.network_modules import network


def fresh(module: nn.Module, **options) -> Params:
    return FreshWeights(network(module, **options))(torch.Generator().manual_seed(0))


def about(values: Tensor, std: float) -> bool:
    return abs(float(values.std()) / std - 1) < 0.2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(40, 30), nn.Linear(30, 30)
        self.token = nn.Parameter(torch.ones(300))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.embedding(tokens)) + self.token.mean()


class ByLayer(Block):
    """Draws for each of its layers, as models of transformers do, which also have what must not be called."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if module is self:
            nn.init.normal_(module.token, std=0.5)

    def init_weights(self) -> None:
        raise AssertionError("it leaves alone what was loaded, and ties weights anew")

    def tie_weights(self) -> None:
        raise AssertionError("weights are tied as they are")


class Wider(nn.Module):
    """A model that holds a model with an initialiser of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = ByLayer(), nn.Linear(30, 30)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(tokens))


class AsAWhole(Block):
    """Draws for itself as a whole, as models of timm do."""

    def init_weights(self, mode: str = "") -> None:
        for value in self.parameters():
            nn.init.normal_(value, std=0.02)


def test_a_model_draws_for_its_layers() -> None:
    values = fresh(ByLayer())
    assert about(values["embedding.weight"], 0.02)  # torch's own would be 1
    assert about(values["layer.weight"], 0.02)
    assert about(values["token"], 0.5)


def test_each_layer_belongs_to_the_nearest_model_that_holds_it() -> None:
    values = fresh(Wider())
    assert about(values["inner.layer.weight"], 0.02)
    assert about(values["head.weight"], 0.1)


def test_a_model_draws_for_itself_as_a_whole() -> None:
    values = fresh(AsAWhole())
    assert all(about(values[name], 0.02) for name in ("embedding.weight", "layer.weight", "token"))


def test_what_a_module_draws_for_its_layers_comes_after_their_own_draws() -> None:
    attention = nn.MultiheadAttention(8, 2)
    nn.init.normal_(attention.out_proj.bias)
    assert torch.equal(fresh(attention)["out_proj.bias"], torch.zeros(8))


def test_an_initialiser_that_fails_is_named() -> None:
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            if hasattr(self, "built"):
                raise RuntimeError("no file")
            super().reset_parameters()

    module = Broken(2, 2)
    module.built = True
    with pytest.raises(ValueError, match=r"Broken.reset_parameters could not draw fresh weights: no file; pass init"):
        fresh(module)


class Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it, as peft builds it: A drawn, B zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(30, 30).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"mine": nn.Linear(30, 20, bias=False)})
        self.lora_B = nn.ModuleDict({"mine": nn.Linear(20, 30, bias=False)})
        self.active_adapters = ["mine"]

    def reset_lora_parameters(self, adapter_name: str, init_lora_weights: bool | str) -> None:
        draw = nn.init.xavier_uniform_ if init_lora_weights is True else partial(nn.init.normal_, std=0.05)
        draw(self.lora_A[adapter_name].weight)
        nn.init.zeros_(self.lora_B[adapter_name].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B["mine"](self.lora_A["mine"](x))


class Settings:
    init_lora_weights = "gaussian"


class AdaptedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.classifier = Adapted(), nn.Linear(30, 3)
        self.peft_config = {"mine": Settings()}

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.layer(x))


def test_adapters_begin_without_effect() -> None:
    module = AdaptedModel()
    for value in module.parameters():
        nn.init.normal_(value)  # trained
    values = fresh(module)
    assert torch.equal(values["layer.lora_B.mine.weight"], torch.zeros(30, 20))
    assert about(values["layer.lora_A.mine.weight"], 0.05)  # as the adapter's settings say
    assert about(values["classifier.weight"], 0.02)
    assert "layer.base_layer.weight" not in values


def test_an_ensemble_of_fine_tunings_keeps_the_trunk_and_says_so(tmp_path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(20, 30), torch.arange(20) % 3
    module = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3))
    task = caveat.Task(module, (x, y), caveat.Categorical(), initialise="2.*")
    method = caveat.DeepEnsemble(members=2, training=caveat.Training(epochs=0))
    posterior = caveat.fit(task, method, progress=False)
    weights = posterior.state["params"]
    assert torch.equal(weights["0.weight"], module[0].weight.expand(2, 30, 30))
    assert not torch.equal(weights["2.weight"][0], weights["2.weight"][1])
    assert any("leaves 0.weight, 0.bias at the module's own values" in note for note in posterior.info.warnings)
    chains = caveat.SGMCMC(chains=2, length=2, burn_in=0)
    posterior = caveat.fit(task, chains, progress=False)
    assert any("at the module's own values" in note for note in posterior.info.warnings)


def test_models_of_transformers_are_drawn_as_they_were_built() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **small))
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=4, **small))
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=50))
    for model in (bert, vit, gpt2):
        built = {name: value.detach().clone() for name, value in model.named_parameters()}
        with torch.no_grad():
            for value in model.parameters():
                value.add_(torch.randn_like(value))  # trained
                value._is_hf_initialized = True  # and loaded from a file
        for name, value in fresh(model).items():
            if name in built and value.numel() >= 200 and built[name].std() > 0:
                assert about(value, float(built[name].std())), name
            elif name in built and built[name].std() == 0:
                assert torch.equal(value, built[name]), name


def test_adapters_of_peft_are_drawn_as_they_were_put_in() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    peft = pytest.importorskip("peft", reason="needs peft")
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=50, **small))
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"])
    model = peft.get_peft_model(bert, settings)
    built = {name: value.detach().clone() for name, value in model.named_parameters()}
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value))
    values = fresh(model)
    assert {name.rpartition(".")[0].rpartition(".")[0].rpartition(".")[2] for name in values} == {
        "lora_A", "lora_B", "modules_to_save",
    }  # fmt: skip
    for name, value in values.items():
        if "lora_B" in name:
            assert not value.any()
        elif value.numel() > 200:
            assert about(value, float(built[name].std())), name
