"""Networks of other packages, tiny and in float64, and dense posteriors over their weights to compare with."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence

import caveat
from caveat.batches import Inputs, map_tensors
from caveat.network import Network

N, CLASSES, TOKENS, LENGTH = 8, 3, 24, 6
Made = tuple[nn.Module, Inputs]


def _tokens() -> dict[str, Tensor]:
    mask = torch.ones(N, LENGTH, dtype=torch.long)
    mask[1, 4:], mask[3, 3:] = 0, 0
    return {"input_ids": torch.randint(3, TOKENS, (N, LENGTH)), "attention_mask": mask}


def _transformer(kind: str, **more: Any) -> Made:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")
    if kind in ("GPT2", "DistilBert"):
        sizes = {"GPT2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}}.get(
            kind, {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12, "max_position_embeddings": 8}
        )
        more |= {"bos_token_id": 1, "eos_token_id": 2} if kind == "GPT2" else {}
    else:
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
        sizes |= {} if kind == "ViT" else {"max_position_embeddings": 8}
    if kind != "ViT":
        more |= {"vocab_size": TOKENS, "pad_token_id": 0}
    task = "ForImageClassification" if kind == "ViT" else "ForSequenceClassification"
    module = getattr(transformers, kind + task)(config(num_labels=CLASSES, **sizes, **more))
    return module, {"pixel_values": torch.randn(N, 3, 8, 8)} if kind == "ViT" else _tokens()


def _mixtral() -> Made:
    module, x = _transformer("Mixtral", num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2)
    module.set_experts_implementation("eager")  # the other one takes no float64
    return module, x


def _tied() -> Made:
    """A language model whose embedding is its head, asked for three tokens."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), _tokens()


def _adapters(kind: str, targets: list[str]) -> Made:
    peft = pytest.importorskip("peft")
    module, x = _transformer(kind, **({"num_key_value_heads": 1} if kind == "Llama" else {}))
    config = peft.LoraConfig(r=2, target_modules=targets, task_type="SEQ_CLS", lora_dropout=0.1)
    module = peft.get_peft_model(module, config)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return module, x


class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.CLIPVisionConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, image_size=8, patch_size=4
        )
        self.body, self.head = transformers.CLIPVisionModel(config), nn.Linear(8, CLASSES)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(nn.functional.normalize(self.body(pixel_values=pixel_values).pooler_output, dim=-1))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        package = pytest.importorskip("x_transformers")
        layers = package.Decoder(dim=8, depth=1, heads=2, attn_dim_head=4, attn_qk_norm=True)
        self.body = package.TransformerWrapper(num_tokens=TOKENS, max_seq_len=8, attn_layers=layers)
        self.head = nn.Linear(TOKENS, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(tokens)[:, -1])


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        package = pytest.importorskip("torch_geometric.nn")
        self.first, self.second = package.DenseGCNConv(4, 8), package.DenseSAGEConv(8, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, adj: Tensor, mask: Tensor) -> Tensor:
        h = self.second(self.first(x, adj, mask).relu(), adj, mask).relu()
        return self.head((h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))


def _graphs() -> Made:
    edges = (torch.rand(N, 5, 5) < 0.5).double()
    mask = torch.ones(N, 5, dtype=torch.bool)
    mask[1, 3:] = False
    return Graphs(), {"x": torch.randn(N, 5, 4), "adj": (edges + edges.mT).clamp(max=1), "mask": mask}


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(3, 5, batch_first=True, bidirectional=True), nn.Linear(10, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.recurrent(packed)[1][0].transpose(0, 1).flatten(1))


class UNet(nn.Module):
    """Down and up again, with what was there beside what comes back; averaged for a class of the image."""

    def __init__(self) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            norm = nn.InstanceNorm2d(after, affine=True)
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), norm, nn.LeakyReLU(0.1, inplace=True))

        self.down, self.bottom, self.beside = block(1, 3), block(3, 4), block(6, 3)
        self.up, self.head = nn.ConvTranspose2d(4, 3, 2, 2), nn.Conv2d(3, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(x)
        up = self.up(self.bottom(nn.functional.max_pool2d(h, 2)))
        return self.head(self.beside(torch.cat([up, h], 1))).amax((2, 3))


NETWORKS: dict[str, Callable[[], Made]] = {
    "packed LSTM": lambda: (Packed(), {"x": torch.randn(N, 4, 3), "lengths": torch.tensor([4, 1, 3, 2, 4, 3, 2, 1])}),
    "weight norm": lambda: (
        nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), weight_norm(nn.Linear(5, CLASSES))),
        torch.randn(N, 4),
    ),
    "U-Net": lambda: (UNet(), torch.randn(N, 1, 6, 6)),
    "BERT with LoRA": lambda: _adapters("Bert", ["query", "value"]),
    "GPT-2, tied": _tied,
    "BERT": lambda: _transformer("Bert"),
    "DistilBERT": lambda: _transformer("DistilBert"),
    "GPT-2": lambda: _transformer("GPT2"),
    "Llama": lambda: _transformer("Llama", num_key_value_heads=1),
    "Llama with LoRA": lambda: _adapters("Llama", ["q_proj", "v_proj"]),
    "Mixtral": _mixtral,
    "ViT": lambda: _transformer("ViT", image_size=8, patch_size=4),
    "CLIP": lambda: (Clip(), {"pixel_values": torch.randn(N, 3, 8, 8)}),
    "x-transformers": lambda: (Decoder(), torch.randint(3, TOKENS, (N, LENGTH))),
    "graphs": _graphs,
}
QUICK = ("packed LSTM", "weight norm", "U-Net", "BERT with LoRA", "GPT-2, tied")


@functools.cache
def trained(name: str) -> tuple[caveat.Task, Inputs, caveat.Posterior]:
    """A task, its inputs, and a point that has learned its rows."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, x = NETWORKS[name]()
        module, x = module.double().eval(), map_tensors(lambda t: t.double() if t.is_floating_point() else t, x)
        likelihood = caveat.Categorical(classes=[5, 9, 11] if name == "GPT-2, tied" else None)
    loader: Any = torch.utils.data.DataLoader(_Rows(x, torch.arange(N) % CLASSES), batch_size=4)
    task = caveat.Task(module, loader, likelihood, parameters="*lora_*" if "LoRA" in name else "*")
    point = caveat.MAP(training=caveat.Training(epochs=40, learning_rate=0.02, batch_size=N))
    return task, x, caveat.fit(task, point, progress=False)


class _Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, x: Inputs, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        if isinstance(self.x, dict):
            return {name: value[i] for name, value in self.x.items()} | {"labels": self.y[i]}
        return self.x[i], self.y[i]


class DensePosterior:
    """The posterior of the linearised network under one prior precision, by autograd and matrices."""

    def __init__(
        self, network: Network, point: caveat.Posterior, x: Inputs, precision: float, chosen: Tensor | None = None
    ) -> None:
        params = point.state["params"]
        own = {name: params[name].detach().clone().requires_grad_() for name in network.names}
        self.f = network(params | own, x)
        rows = [
            torch.autograd.grad(f, list(own.values()), retain_graph=True, allow_unused=True, materialize_grads=True)
            for f in self.f.flatten()
        ]
        J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).unflatten(0, self.f.shape)
        self.f = self.f.detach()
        self.J = J if chosen is None else J[..., chosen]  # [N, C, d]
        self.factor = network.likelihood.fisher_factor(self.f, torch.zeros(N, dtype=torch.long), {})  # R
        p = self.f.softmax(1)
        torch.testing.assert_close(self.factor @ self.factor.mT, p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1))
        self.rows = torch.einsum("ncr,ncd->nrd", self.factor, self.J).flatten(0, 1)  # Phi
        eye = torch.eye(self.J.shape[2], dtype=torch.float64)
        self.H = self.rows.T @ self.rows + precision * eye

    def covariance(self) -> Tensor:
        """J H^-1 J^T of each row, [N, C, C]."""
        return torch.einsum("ncd,nde->nce", self.J, torch.linalg.solve(self.H, self.J.mT))
