"""CNN-LSTM for text, the network of the IMDB experiments of Izmailov et al. (2021).

Embedding, convolution over five words, ReLU, max pooling by four, an LSTM over what is left, and a linear layer on its
last state. 2,700,098 parameters at the defaults. The last state is what counts: pad short texts on the left.
"""

import torch
from torch import Tensor, nn

POOL = 4


def cnn_lstm(
    vocabulary: int = 20_000,
    embedding: int = 128,
    channels: int = 64,
    kernel: int = 5,
    hidden: int = 128,
    out_features: int = 2,
) -> nn.Module:
    """Build the network; its input is int64 tokens [B, T] with T at least kernel + 3 (8 at the defaults).

    Args:
        vocabulary: tokens run from 0 to vocabulary - 1
        embedding: numbers a token
        channels: filters of the convolution
        kernel: words each filter sees
        hidden: size of the LSTM's state
        out_features: classes
    """
    return CNNLSTM(
        nn.Embedding(vocabulary, embedding),
        nn.Conv1d(embedding, channels, kernel),
        LastStateLSTM(channels, hidden),
        nn.Linear(hidden, out_features),
    )


class CNNLSTM(nn.Module):
    """The four trained parts in a row, with ReLU and pooling after the convolution."""

    def __init__(self, embedding: nn.Embedding, convolution: nn.Conv1d, lstm: "LastStateLSTM", head: nn.Linear):
        super().__init__()
        self.embedding = embedding
        self.convolution = convolution
        self.lstm = lstm
        self.head = head

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        shortest = self.convolution.kernel_size[0] + POOL - 1
        if tokens.shape[1] < shortest:
            raise ValueError(f"texts of {tokens.shape[1]} tokens are too short: pad them on the left to {shortest}")
        words = self.embedding(tokens).transpose(1, 2)  # [B, embedding, T]
        phrases = nn.functional.max_pool1d(torch.relu(self.convolution(words)), POOL)  # [B, channels, (T - 4) // 4]
        return self.head(self.lstm(phrases.transpose(1, 2)))


class LastStateLSTM(nn.Module):
    """The last hidden state of an LSTM, [B, T, in_features] -> [B, hidden].

    With i, f, g, o the four parts of W x_t + U h_{t-1} + b,
        c_t = sigmoid(f + 1) c_{t-1} + sigmoid(i) tanh(g),    h_t = sigmoid(o) tanh(c_t).
    Unlike `nn.LSTM` it is made of `nn.Linear` layers, so it works under vmap and forward-mode differentiation and every
    method treats it like any other linear layer; it has one bias, not two that only ever act as their sum; and the
    forget gate is shifted by one, so that weights at zero, where priors are centred, remember.
    """

    def __init__(self, in_features: int, hidden: int):
        super().__init__()
        self.input = nn.Linear(in_features, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        from_input = self.input(x)  # [B, T, 4 hidden]
        state = memory = from_input.new_zeros(len(x), self.recurrent.in_features)  # [B, hidden]
        for step in from_input.unbind(dim=1):
            write, forget, candidate, read = (step + self.recurrent(state)).chunk(4, dim=-1)
            memory = torch.sigmoid(forget + 1) * memory + torch.sigmoid(write) * torch.tanh(candidate)
            state = torch.sigmoid(read) * torch.tanh(memory)
        return state
