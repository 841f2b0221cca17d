"""Labels of language models: what stands at a position is what the outputs one position before it are to say."""

import torch
from torch import Tensor

__all__ = ["next_labels"]


def next_labels(labels: Tensor, ignore_index: int) -> Tensor:
    """For each position the label of the next one, [B, T]; the last has none and is left out by `ignore_index`.

    Scoring all positions of logits [B, T, C] by these is the same as scoring logits[:, :-1] by labels[:, 1:].
    """
    if labels.ndim < 2:
        raise ValueError(
            f"Categorical(next_token=True) needs labels [batch, positions], got {tuple(labels.shape)}: "
            "give one label a token, or leave next_token out"
        )
    labels = labels.long()  # -100 as a uint8 is the label 156
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], ignore_index)], 1)
