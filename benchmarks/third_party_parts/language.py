"""Language models of transformers and x-transformers, and their adapters by peft."""

from typing import Any

import torch
from torch import Tensor, nn

import caveat

from .cases import LENGTH, PADDING, VOCABULARY, Case, case, text

WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
COMMON = {"vocab_size": VOCABULARY, "pad_token_id": PADDING, "num_labels": 2, "max_position_embeddings": 32}
DECODER = {**WIDE, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}


def of(kind: str, **settings: Any) -> nn.Module:
    """A transformers classifier of a family, such as Bert, from a configuration."""
    return _language_model(f"{kind}ForSequenceClassification", f"{kind}Config", settings)


def classifier(kind: str, **settings: Any) -> Case:
    """A model with a head for sentences."""
    inputs, targets = text()
    return Case(of(kind, **settings), inputs, targets)


@case("BERT", "transformers")
def bert() -> Case:
    return classifier("Bert", **WIDE)


@case("RoBERTa", "transformers")
def roberta() -> Case:
    return classifier("Roberta", **WIDE)


@case("ELECTRA", "transformers")
def electra() -> Case:
    return classifier("Electra", **WIDE, embedding_size=16)


@case("ALBERT, tied layers", "transformers")
def albert() -> Case:
    return classifier("Albert", **WIDE, embedding_size=8)


@case("DeBERTa", "transformers")
def deberta() -> Case:
    return classifier("DebertaV2", **WIDE, relative_attention=True, pos_att_type=["c2p", "p2c"])


@case("DistilBERT", "transformers")
def distilbert() -> Case:
    return classifier("DistilBert", dim=16, n_layers=2, n_heads=2, hidden_dim=32)


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}


@case("GPT-2", "transformers")
def gpt2() -> Case:
    return classifier("GPT2", **GPT2)


@case("GPT-2, tied language model, every token", "transformers")
def gpt2_language_model() -> Case:
    # Without dropout: the next token is the one after this in a cycle, which a few rows teach.
    start = torch.arange(40)[:, None]
    tokens = 4 + (start + torch.arange(LENGTH)) % 6
    settings = GPT2 | {"vocab_size": 12, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    module = _language_model("GPT2LMHeadModel", "GPT2Config", settings)
    return Case(module, {"input_ids": tokens}, tokens, caveat.Categorical(class_axis=-1), learning_rate=1e-2)


def _language_model(model: str, config: str, settings: dict[str, Any]) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**{**COMMON, **settings}))


def answers(kind: str, **settings: Any) -> Case:
    """A causal language model that answers with one of two tokens."""
    inputs, targets = text()
    module = _language_model(f"{kind}ForCausalLM", f"{kind}Config", {**DECODER, **settings})
    return Case(module, inputs, targets, caveat.Categorical(classes=[5, 9]))


@case("Llama, answer tokens", "transformers")
def llama() -> Case:
    return answers("Llama")


@case("Mistral, sliding window", "transformers")
def mistral() -> Case:
    return answers("Mistral", sliding_window=4)


@case("Qwen2", "transformers")
def qwen() -> Case:
    return answers("Qwen2")


@case("Gemma", "transformers")
def gemma() -> Case:
    return answers("Gemma", head_dim=8)


@case("Mixtral, routed experts", "transformers")
def mixtral() -> Case:
    return answers("Mixtral", num_local_experts=3, num_experts_per_tok=2)


@case("Mamba", "transformers")
def mamba() -> Case:
    inputs, targets = text()
    settings = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "bos_token_id": 1, "eos_token_id": 2}
    module = _language_model("MambaForCausalLM", "MambaConfig", settings)
    return Case(module, inputs, targets, caveat.Categorical(classes=[5, 9]))


class Encoder(nn.Module):
    """The encoder of a T5, and a head on the mean of its states."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5EncoderModel

        settings = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
        self.body = T5EncoderModel(T5Config(**settings, pad_token_id=PADDING))
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.head((states * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True))


@case("T5 encoder", "transformers")
def t5() -> Case:
    inputs, targets = text()
    return Case(Encoder(), inputs, targets)


def adapted(module: nn.Module, task: str | None, **settings: Any) -> nn.Module:
    """A module with LoRA of rank 2 in it, and weights beside zero in the second factor."""
    import peft

    return peft.get_peft_model(module, peft.LoraConfig(r=2, lora_alpha=8, task_type=task, **settings))


@case("BERT with LoRA", "transformers", "peft")
def bert_lora() -> Case:
    inputs, targets = text()
    module = adapted(of("Bert", **WIDE), "SEQ_CLS", target_modules=["query", "value"])
    return Case(module, inputs, targets, learning_rate=1e-2)


@case("GPT-2 with LoRA (Conv1D)", "transformers", "peft")
def gpt2_lora() -> Case:
    inputs, targets = text()
    module = adapted(of("GPT2", **GPT2), "SEQ_CLS", target_modules=["c_attn"], fan_in_fan_out=True)
    return Case(module, inputs, targets, learning_rate=1e-2)


@case("Llama with LoRA, bfloat16 base", "transformers", "peft")
def llama_lora() -> Case:
    inputs, targets = text()
    base = _language_model("LlamaForCausalLM", "LlamaConfig", DECODER).to(torch.bfloat16)
    module = adapted(base, "CAUSAL_LM", target_modules=["q_proj", "v_proj", "down_proj"])
    return Case(module, inputs, targets, caveat.Categorical(classes=[5, 9]), "*lora_*", 2e-2)


@case("Llama with DoRA", "transformers", "peft")
def llama_dora() -> Case:
    inputs, targets = text()
    base = _language_model("LlamaForCausalLM", "LlamaConfig", DECODER)
    module = adapted(base, "CAUSAL_LM", target_modules=["q_proj", "v_proj"], use_dora=True)
    return Case(module, inputs, targets, caveat.Categorical(classes=[5, 9]), learning_rate=2e-2)


@case("Mixtral with LoRA", "transformers", "peft")
def mixtral_lora() -> Case:
    inputs, targets = text()
    settings = {**DECODER, "num_local_experts": 3, "num_experts_per_tok": 2}
    base = _language_model("MixtralForCausalLM", "MixtralConfig", settings)
    module = adapted(base, "CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    return Case(module, inputs, targets, caveat.Categorical(classes=[5, 9]), learning_rate=2e-2)


@case("BERT with IA3", "transformers", "peft")
def bert_ia3() -> Case:
    import peft

    inputs, targets = text()
    config = peft.IA3Config(
        task_type="SEQ_CLS", target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]
    )
    return Case(peft.get_peft_model(of("Bert", **WIDE), config), inputs, targets, learning_rate=2e-2)


@case("BERT with prompt tuning", "transformers", "peft")
def bert_prompts() -> Case:
    import peft

    inputs, targets = text()
    config = peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)
    return Case(peft.get_peft_model(of("Bert", **WIDE), config), inputs, targets, learning_rate=2e-2)


class WithMask(nn.Module):
    """An x-transformers encoder with the mean of its states as the features of a head."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        from x_transformers import Encoder as Layers
        from x_transformers import TransformerWrapper

        layers = Layers(dim=16, depth=2, heads=2, attn_dim_head=8, **settings)
        self.body = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.body(input_ids, mask=attention_mask.bool(), return_embeddings=True)
        return self.head(states.mean(1))


@case("x-transformers", "x_transformers")
def x_transformer() -> Case:
    inputs, targets = text()
    return Case(WithMask(), inputs, targets)


@case("x-transformers, rotary and gated", "x_transformers")
def x_rotary() -> Case:
    inputs, targets = text()
    return Case(WithMask(rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True), inputs, targets)
