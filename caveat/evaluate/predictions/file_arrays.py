"""The arrays of a prediction file: what a posterior says about every row of a data set, and images worth looking at."""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from caveat.batches import Inputs, tensors
from caveat.evaluate.predictions.blocks_of_rows import row_blocks
from caveat.posterior import Posterior
from caveat.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    Predictive,
    RegressionPredictive,
    percent,
)
from caveat.rows import Rows, evenly_spread

__all__ = ["by_row", "file_stem", "predict_rows", "prediction_arrays", "row_uncertainty"]

_BLOCK_ROWS = 4096  # predicted at once
_JOINT_ROWS = 1000  # whose log probability under every draw is kept, to score several rows at once
_THUMBNAILS = 24  # images that are kept of a data set: rows that went wrong, then the least certain


def predict_rows(
    posterior: Posterior,
    rows: Rows,
    *,
    draws: int | None = None,
    seed: int = 0,
    levels: Sequence[float] = (),
    progress: bool = True,
) -> dict[str, np.ndarray]:
    """Predict rows without targets, and return the arrays of a prediction file, [N, ...] each.

    Predictions of numbers have intervals of these levels beside that of 0.9.
    """
    with tqdm(total=len(rows), unit="row", desc="predict", delay=1.0, disable=not progress, leave=False) as bar:
        return prediction_arrays(posterior, rows, bar, has_targets=False, draws=draws, seed=seed, levels=levels)


def prediction_arrays(
    posterior: Posterior,
    rows: Rows,
    bar: tqdm,
    *,
    has_targets: bool,
    draws: int | None = None,
    seed: int = 0,
    keep_samples: bool = False,
    levels: Sequence[float] = (),
    of_rows: Callable[[Inputs], dict[str, Tensor]] | None = None,
) -> dict[str, np.ndarray]:
    """Predict rows, and return their columns [N, ...] and numbers, thumbnails of images, and samples on request.

    Of classes with targets, the log probability of some rows' targets under each draw is there too: [n, S].

    Args:
        posterior: what predicts.
        rows: what it predicts.
        bar: the progress bar, which counts rows.
        has_targets: whether the rows' targets are real ones, to be scored; else they are not read.
        draws: posterior draws a prediction; the method's default unless given.
        seed: of the draws.
        keep_samples: also return every draw's prediction, [S, N, ...].
        levels: of intervals of numbers beside that of 0.9, each `lower_<percent>` and `upper_<percent>`.
        of_rows: gives further columns, one number a row of the inputs.
    """
    pieces: list[dict[str, Tensor]] = []
    samples: list[Tensor] = []
    by_draw: list[Tensor] = []
    images: list[Tensor] = []
    rows_done = 0
    for x, y in row_blocks(rows, _BLOCK_ROWS):
        prediction = posterior.predict(x, draws=draws, seed=seed)
        targets = None
        if has_targets:
            posterior.network.likelihood.check_targets(y)
            targets = y.to(posterior.network.device)
        columns_here = prediction.columns(targets) | _intervals(prediction, levels)
        piece = {name: _plain_type(column) for name, column in columns_here.items()}
        if of_rows is not None:  # a row may hold several decisions
            piece |= {name: _plain_type(column)[piece["rows"]] for name, column in of_rows(x).items()}
        piece["rows"] = rows.indices.cpu()[piece["rows"] + rows_done]
        pieces.append(piece)
        if targets is not None and isinstance(prediction, CategoricalPredictive | BernoulliPredictive):
            by_draw.append(_plain_type(prediction.log_prob_by_draw(targets)))
        if keep_samples:
            samples.append(_plain_type(prediction.samples))
        images += [t.cpu() for t in tensors(x)[:1] if t.ndim == 4 and t.shape[1] in (1, 3)]
        rows_done += len(y)
        bar.update(len(y))
    columns = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    arrays: dict[str, np.ndarray] = {name: column.numpy() for name, column in columns.items()}
    if images and len(columns["rows"]) == len(rows):
        flagged = _flagged(columns)
        arrays |= {"thumbnails": _thumbnails(torch.cat(images), flagged), "thumbnail_rows": flagged.numpy()}
    if by_draw:
        drawn = torch.cat(by_draw)  # [N, S]
        arrays["joint_log_prob"] = drawn[evenly_spread(len(drawn), _JOINT_ROWS)].numpy()
    if samples:
        arrays["samples"] = torch.cat(samples, 1).numpy()
    return arrays


def _intervals(prediction: Predictive, levels: Sequence[float]) -> dict[str, Tensor]:
    """The ends of the central intervals of these levels, one row a decision."""
    columns: dict[str, Tensor] = {}
    if not levels:
        return columns
    if not isinstance(prediction, RegressionPredictive):
        raise ValueError(f"levels={list(levels)}: intervals are of numbers, and this posterior predicts classes")
    for level in levels:
        lower, upper = prediction.interval(level)
        columns[f"lower_{percent(level)}"] = lower.flatten(0, -2)
        columns[f"upper_{percent(level)}"] = upper.flatten(0, -2)
    return columns


def by_row(name: str) -> bool:
    """Whether an array of a prediction file has an entry for each row, in their order."""
    return name not in ("joint_log_prob", "samples", "thumbnails", "thumbnail_rows")


def row_uncertainty(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return one number a row, [N], that is high where it is unsure: the entropy, or the summed variance of numbers."""
    if "entropy" in arrays:
        return arrays["entropy"].astype(np.float64)
    return arrays["variance"].astype(np.float64).reshape(len(arrays["variance"]), -1).sum(axis=1)


def file_stem(name: str) -> str:
    """Turn the name of a data set into that of its file, without an ending."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "data"


def _plain_type(column: Tensor) -> Tensor:
    """The same numbers on the CPU, as float32 or int64."""
    return column.cpu().to(torch.float32 if column.is_floating_point() else torch.int64)


def _flagged(columns: Mapping[str, Tensor]) -> Tensor:
    """Numbers of the rows worth looking at: wrong ones, surest first, then the least certain."""
    if "probs" not in columns:
        return columns["variance"].sum(-1).argsort(descending=True)[:_THUMBNAILS]
    if "targets" not in columns:
        return columns["entropy"].argsort()[:_THUMBNAILS]
    wrong = columns["probs"].argmax(-1) != columns["targets"]
    rank = torch.where(wrong, -10 + columns["entropy"], -columns["entropy"])
    return rank.argsort(stable=True)[:_THUMBNAILS]


def _thumbnails(images: Tensor, flagged: Tensor) -> np.ndarray:
    """Some of the images [N, C, H, W], of any scale, as bytes: [K, H, W] or [K, H, W, 3]."""
    low, high = images.amin((0, 2, 3), keepdim=True), images.amax((0, 2, 3), keepdim=True)
    scaled = (images[flagged] - low) / (high - low).clamp_min(1e-12) * 255
    array = scaled.round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return array[..., 0] if array.shape[-1] == 1 else array
