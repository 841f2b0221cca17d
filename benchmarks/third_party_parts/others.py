"""Tables, graphs, sequences, and networks that people write themselves."""

import torch
from torch import Tensor, nn

import caveat

from .cases import VOCABULARY, Case, case, table, text


class FirstOf(nn.Module):
    """A module that gives several things, of which the first are the logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


@case("TabNet", "pytorch_tabnet")
def tabnet() -> Case:
    from pytorch_tabnet.tab_network import TabNet

    x, y = table()
    module = TabNet(6, 3, n_d=4, n_a=4, n_steps=2, group_attention_matrix=torch.eye(6), virtual_batch_size=16)
    return Case(FirstOf(module), x, y, learning_rate=1e-2)


class Columns(nn.Module):
    """An FT-Transformer of columns without categories."""

    def __init__(self) -> None:
        super().__init__()
        from rtdl_revisiting_models import FTTransformer

        self.inner = FTTransformer(
            n_cont_features=6, cat_cardinalities=[], d_out=3, n_blocks=2, d_block=16, attention_n_heads=2,
            attention_dropout=0.1, ffn_d_hidden_multiplier=2, ffn_dropout=0.1, residual_dropout=0.0,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, None)


@case("FT-Transformer", "rtdl_revisiting_models")
def ft_transformer() -> Case:
    x, y = table()
    return Case(Columns(), x, y)


class Graph(nn.Module):
    """Two graph layers over one fixed graph, and the mean of its nodes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        from torch_geometric import nn as graphs

        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]]))
        if kind == "GIN":
            self.first = graphs.GINConv(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 8)))
            self.second = graphs.GINConv(nn.Linear(8, 8))
        else:
            self.first, self.second = getattr(graphs, kind)(1, 8), getattr(graphs, kind)(8, 8)
        self.head = nn.Linear(8 * 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = self.second(self.first(x[..., None], self.edges).relu(), self.edges).relu()  # [B, nodes, 8]
        return self.head(states.flatten(1))


@case("Graph convolutions", "torch_geometric")
def gcn() -> Case:
    x, y = table()
    return Case(Graph("GCNConv"), x, y)


@case("GraphSAGE", "torch_geometric")
def sage() -> Case:
    x, y = table()
    return Case(Graph("SAGEConv"), x, y)


@case("GIN", "torch_geometric")
def gin() -> Case:
    x, y = table()
    return Case(Graph("GIN"), x, y)


class Attending(nn.Module):
    """Graph attention over batches of graphs whose nodes lie one after the other."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv

        self.conv = GATConv(1, 4, heads=2)
        self.head = nn.Linear(8 * 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        ring = torch.stack([torch.arange(6), (torch.arange(6) + 1) % 6])
        first = 6 * torch.arange(len(x))
        edges = (ring[:, None] + first[:, None]).flatten(1)
        return self.head(self.conv(x.reshape(-1, 1), edges).relu().reshape(len(x), -1))


@case("Graph attention", "torch_geometric")
def gat() -> Case:
    x, y = table()
    return Case(Attending(), x, y)


@case("Lightning module", "lightning")
def lightning() -> Case:
    from lightning import LightningModule

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 16})
            self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

    x, y = table()
    return Case(Lit(), x, y)


class Mixture(nn.Module):
    """Linear experts; each row goes to the one that its gate says."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        states = torch.zeros(len(x), 8, dtype=x.dtype)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                states = states.index_add(0, rows, expert(x[rows]).tanh())
        return self.head(states * weights[:, None])


@case("Mixture of linear experts")
def mixture() -> Case:
    x, y = table()
    return Case(Mixture(), x, y, learning_rate=1e-2)


class Packed(nn.Module):
    """An LSTM over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        lengths = attention_mask.sum(1).cpu()
        states = self.embedding(input_ids)
        packed = nn.utils.rnn.pack_padded_sequence(states, lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        return self.head(last.movedim(0, 1).flatten(1))


@case("Packed LSTM")
def packed() -> Case:
    inputs, targets = text()
    return Case(Packed(), inputs, targets, learning_rate=1e-2)


class Torchs(nn.Module):
    """Torch's own encoder with a padding mask; in evaluation mode it takes a fused path."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)[:, 0])


@case("nn.TransformerEncoder")
def torchs() -> Case:
    inputs, targets = text()
    return Case(Torchs(), inputs, targets)


class Thinking(nn.Module):
    """As many steps as the data ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.step, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = self.first(x).tanh()
        steps = 0
        while steps < 4 and bool((state.abs() < 0.9).all(-1).any()):
            state = state + self.step(state).tanh() * (state.abs() < 0.9).all(-1, keepdim=True)
            steps += 1
        return self.head(state)


@case("Control flow that depends on data")
def thinking() -> Case:
    x, y = table()
    return Case(Thinking(), x, y, learning_rate=1e-2)


class Positioned(nn.Module):
    """A token and positions of its own beside multi-head attention: bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.positions = nn.Parameter(torch.randn(8) * 0.02), nn.Parameter(torch.randn(7, 8) * 0.02)
        self.embed = nn.Linear(1, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        states = torch.cat([self.token.expand(len(x), 1, 8), self.embed(x[..., None])], 1) + self.positions
        return self.head(self.attention(states, states, states, need_weights=False)[0][:, 0])


@case("Attention for regression, bare parameters")
def regression() -> Case:
    x, _ = table()
    return Case(Positioned(), x, x[:, :1] * 0.5 + 0.1, caveat.Gaussian(), learning_rate=1e-2)
