"""Whether labels are the tokens that the network was given, and whether its outputs look ahead.

Data for language models name the tokens themselves as labels, and leave it to the loss to compare the outputs at
position t with the token at t + 1. Compared at t, a network that sees token t need only repeat it: it is right on
random tokens. Both signs are looked for where they can be seen: in the first rows, and in what the network does when a
token is exchanged, which holds for any module and whatever wraps it.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from caveat.batches import Inputs, map_tensors, tensors
from caveat.likelihoods.classification import Categorical

__all__ = ["read_labels"]


def read_labels(
    likelihood: Categorical, outputs_of: Callable[[Inputs], Tensor], x: Inputs, labels: Tensor
) -> tuple[Categorical, str]:
    """How labels of some rows are to be read, and what a person should be told of it (nothing: "").

    Args:
        likelihood: of the outputs; where its `next_token` is None, this is found out.
        outputs_of: the network, from inputs to outputs.
        x: inputs of the rows, tokens [B, T] among them or not.
        labels: of the same rows.
    """
    ignored = likelihood.ignore_index
    if labels.ndim != 2 or labels.shape[1] < 2 or likelihood.next_token is False:
        return likelihood, ""
    if likelihood.next_token:
        # Labels [:, :-1] beside tokens [:, 1:]: what stands at the last position has no token to be compared with.
        moved = torch.cat([torch.full_like(labels[:, :1].long(), ignored), labels[:, :-1].long()], 1)
        if _equal_tokens(x, moved, ignored) is not None and _equal_tokens(x, labels.long(), ignored) is None:
            raise ValueError(
                "Categorical(next_token=True) scores each position by the label of the next one, but these labels are "
                "the next tokens already: leave next_token out"
            )
        return likelihood, ""
    tokens = _equal_tokens(x, labels.long(), ignored)
    if tokens is None:
        return likelihood, ""
    if (change := _changes(outputs_of, likelihood.class_axis, x, tokens, labels)) is None:
        return likelihood, ""
    if _looks_ahead(*change):
        return likelihood, (
            "the labels are the input tokens, and the outputs at a position depend on later tokens: they are taken as "
            "a reconstruction, position by position; say Categorical(next_token=True) for the next token, or "
            "next_token=False for this"
        )
    return dataclasses.replace(likelihood, next_token=True), (
        "the labels are the input tokens, and no output depends on a later token: the network is taken as a language "
        "model, whose outputs at a position are scored by the label of the next one (logits[:, :-1] against "
        "labels[:, 1:]); say Categorical(next_token=True) for this, or next_token=False for labels as they stand"
    )


def _equal_tokens(x: Inputs, labels: Tensor, ignore_index: int) -> Tensor | None:
    """The tokens [B, T] among the inputs that labels [B, T] repeat wherever a label counts; None without such."""
    counted = labels != ignore_index
    if not bool(counted.any()):
        return None
    for tokens in tensors(x):
        whole = not tokens.is_floating_point() and tokens.dtype != torch.bool and tokens.shape == labels.shape
        # A mask of ones is equal to labels that are all 1, and says nothing.
        if whole and torch.equal(tokens.long()[counted], labels[counted]) and len(tokens.unique()) > 1:
            return tokens
    return None


def _changes(
    outputs_of: Callable[[Inputs], Tensor], class_axis: int, x: Inputs, tokens: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor] | None:
    """How far outputs move, [B, T], and the place [B, 1] of the token that is exchanged: the last that has a label.

    None where outputs are not of one vector of logits a token.
    """
    counted = labels.long() >= 0
    positions = torch.arange(tokens.shape[1])
    place = torch.where(counted, positions, -1).amax(1, keepdim=True)
    other = tokens.flatten().unique()  # ids that the network is known to take
    exchanged = torch.where(positions == place, torch.where(tokens == other[0], other[-1], other[0]), tokens)
    x_exchanged = map_tensors(lambda tensor: exchanged if tensor is tokens else tensor, x)
    with torch.no_grad():
        change = (outputs_of(x_exchanged).double().cpu() - outputs_of(x).double().cpu()).abs()
    if not -change.ndim <= class_axis < change.ndim or (change := change.amax(class_axis)).shape != labels.shape:
        return None
    return change, place


def _looks_ahead(change: Tensor, place: Tensor) -> bool:
    """Whether outputs before a token depend on it."""
    earlier = torch.arange(change.shape[1]) < place
    return bool(change[earlier].amax() > 1e-3 * change[~earlier].amax()) if bool(earlier.any()) else False
