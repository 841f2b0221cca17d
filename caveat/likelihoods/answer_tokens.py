"""Answers of a language model: its logits for the tokens that stand for the classes, where a row's text ends.

Such a model gives logits of every token of its vocabulary at every position, [B, T, V]. Of a question whose answers are
single tokens, the row's last token is asked for the next one: logits [B, C] of the C answers. Text may be padded on
either side; the attention mask says where it ends.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from caveat.batches import Inputs

__all__ = ["answer_logits"]


def answer_logits(outputs: Tensor, x: Inputs, classes: Sequence[int]) -> Tensor:
    """Logits [B, C] of the tokens `classes`, at each row's last position.

    That is the last one which `x["attention_mask"]` counts, or the last of all where there is no such mask; prompts
    that the model puts before its inputs have no part in it. Outputs [B, V] are those of the last position already.
    """
    if outputs.ndim not in (2, 3) or outputs.shape[-1] <= max(classes):
        raise ValueError(
            f"Categorical(classes={list(classes)}) needs logits of tokens, [batch, positions, vocabulary], got "
            f"{tuple(outputs.shape)}: give a causal language model, and ids of its own tokenizer"
        )
    if outputs.ndim == 3:
        outputs = outputs[torch.arange(len(outputs), device=outputs.device), _last_positions(outputs, x)]
    return outputs[:, torch.tensor(classes, device=outputs.device)]


def _last_positions(outputs: Tensor, x: Inputs) -> Tensor:
    """Where each row's text ends, [B]."""
    rows, length = outputs.shape[:2]
    mask = x.get("attention_mask") if isinstance(x, Mapping) else None
    if mask is None:
        return torch.full((rows,), length - 1, device=outputs.device)
    # Tuned prompts stand before the text, among the logits alone: the ids are as many as the mask's entries.
    ids = [entry for entry in x.values() if isinstance(entry, Tensor) and entry is not mask]
    before = length - mask.shape[-1] if any(entry.shape == mask.shape for entry in ids) else 0
    if before < 0 or mask.shape != (rows, length - before):
        raise ValueError(
            f"Categorical(classes=...) reads where a row ends from attention_mask, which is {tuple(mask.shape)} beside "
            f"logits {tuple(outputs.shape)}: it needs one entry a position"
        )
    positions = torch.arange(length - before, device=outputs.device)
    return before + torch.where(mask.to(outputs.device) != 0, positions, 0).amax(1)
