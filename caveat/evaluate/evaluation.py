"""Predict every data set, write the predictions, score them: `predictions/*.npz` and `metrics.json`."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from caveat.batches import tensors
from caveat.evaluate.blocks import blocks
from caveat.evaluate.fidelity import fidelity_on
from caveat.evaluate.reference_set import ReferenceSet
from caveat.evaluate.scores import Columns, Scored, Scores, score, score_outside
from caveat.methods import method_name
from caveat.posterior import Posterior
from caveat.predictive import BernoulliPredictive
from caveat.rows import Data, Rows
from caveat.storage import FORMAT, encode, write_arrays, write_json

__all__ = ["evaluate", "predict_rows", "slug"]

_BLOCK_ROWS = 4096  # predicted at once
_THUMBNAILS = 24  # images kept of a data set: rows that went wrong, then the least certain


def evaluate(
    posterior: Posterior,
    data: Mapping[str, Data | Mapping[float, Data]],
    *,
    ood: Mapping[str, Data] | None = None,
    reference: Posterior | ReferenceSet | None = None,
    folder: str | Path | None = None,
    label: str | None = None,
    class_names: tuple[str, ...] = (),
    draws: int | None = None,
    seed: int = 0,
    keep_samples: bool = False,
    progress: bool = True,
) -> Scores:
    """Score a posterior.

    Args:
        posterior: what to score.
        data: data with targets by name; a mapping of severity to data makes a family of shifts, as in
            `{"clean": test, "rotated": {15: rotated_15, 30: rotated_30}}`. The first is what `ood` is told apart from.
        ood: data from outside, whose targets (if any) are not read.
        reference: also score fidelity to it, see `caveat.fidelity`; a stored set, on those data whose rows it has.
        folder: where to write `predictions/*.npz` and `metrics.json`; nothing is written without it.
        label: what to call the run; the method's class name unless given.
        class_names: of the classes, one for each, for the report.
        draws: posterior draws a prediction; the method's default unless given.
        seed: of the draws.
        keep_samples: also write every draw's prediction.
        progress: show progress of anything over a second on standard error.
    """
    parts = _parts(data, ood or {})
    _check_class_names(posterior, parts[0].rows, class_names)
    compared = [] if reference is None else _known_to(reference, parts)
    place = None if folder is None else Path(folder)
    kind = posterior.network.likelihood.kind
    inside: Columns = {}
    found: list[Scored] = []
    against: dict[str, Any] = {}
    written: dict[str, dict[str, np.ndarray]] = {}
    total = sum(len(part.rows) for part in parts)
    name = label or type(posterior.method).__name__
    with tqdm(total=total, unit="row", desc=f"{name}: predict", delay=1.0, disable=not progress, leave=False) as bar:
        for part in parts:
            arrays = _predict(posterior, part, draws, seed, keep_samples, bar)
            file = f"predictions/{slug(part.name)}.npz"
            written[file] = arrays
            columns = {name: torch.from_numpy(array) for name, array in arrays.items()}  # what is kept is scored
            inside = inside or columns
            metrics = score(kind, columns) if part.role == "test" else score_outside(kind, inside, columns)
            if reference is not None and part in compared:
                closeness = fidelity_on(posterior, reference, part.rows, draws, seed)
                metrics |= closeness.scores
                against = {"chains": closeness.chains, "draws": closeness.draws, "notes": list(closeness.notes)}
            found.append(Scored(part.name, part.family, part.severity, part.role, len(arrays["rows"]), metrics, file))
    content = _content(posterior, name, class_names, found)
    if against:
        content["reference"] = against
    if place is not None:  # once everything has been scored, so that a failure leaves earlier results as they are
        for file, arrays in written.items():
            write_arrays(place / file, arrays)
        write_json(place / "metrics.json", content)
        for stale in set((place / "predictions").glob("*.npz")) - {place / file for file in written}:
            stale.unlink()  # of an earlier evaluation, which this one replaces
    return Scores(name, kind, found, content, tuple(against.get("notes", ())))


def predict_rows(
    posterior: Posterior, rows: Rows, *, draws: int | None = None, seed: int = 0, progress: bool = True
) -> dict[str, np.ndarray]:
    """What a posterior says about rows without targets, as the arrays of a prediction file."""
    with tqdm(total=len(rows), unit="row", desc="predict", delay=1.0, disable=not progress, leave=False) as bar:
        return _predict(posterior, _Part("", "", None, "ood", rows), draws, seed, False, bar)


@dataclass(frozen=True)
class _Part:
    name: str
    family: str
    severity: float | None
    role: Literal["test", "ood"]
    rows: Rows


def _parts(data: Mapping[str, Any], ood: Mapping[str, Data]) -> list[_Part]:
    """Every data set in the order given, families unfolded."""
    if not isinstance(data, Mapping) or not data:
        raise ValueError("evaluate needs at least one data set with targets, as in {'clean': test_loader}")
    parts: list[_Part] = []
    for name, value in data.items():
        if isinstance(value, Mapping):
            parts += [
                _Part(f"{name} {severity:g}", name, float(severity), "test", Rows(d)) for severity, d in value.items()
            ]
        else:
            parts.append(_Part(name, name, None, "test", Rows(value)))
    parts += [_Part(name, name, None, "ood", Rows(value, needs_targets=False)) for name, value in ood.items()]
    slugs = [slug(part.name) for part in parts]
    for part, file in zip(parts, slugs, strict=True):
        if slugs.count(file) > 1:
            raise ValueError(f"data set names must differ in letters and digits, {part.name!r} does not")
    return parts


def _check_class_names(posterior: Posterior, rows: Rows, names: Sequence[str]) -> None:
    """Refuse names that are not one for each class; independent labels may be named, or their no and yes."""
    if not names or posterior.network.likelihood.kind != "classification":
        return
    x, _ = next(iter(blocks(rows, 1)))
    prediction = posterior.predict(x, draws=1)
    count = prediction.samples.shape[-1]
    fitting = {count, 2} if isinstance(prediction, BernoulliPredictive) else {count}
    if len(names) not in fitting:
        given = f"{len(names)} name{'' if len(names) == 1 else 's'} ({', '.join(map(str, names))})"
        raise ValueError(f"class_names has {given}, but the posterior tells {count} classes apart")


def _known_to(reference: Posterior | ReferenceSet, parts: list[_Part]) -> list[_Part]:
    """The data with targets that a reference can be asked about: of a stored set those whose rows it has."""
    tests = [part for part in parts if part.role == "test"]
    if not isinstance(reference, ReferenceSet):
        return tests
    found = [part for part in tests if reference.find(part.rows) is not None]
    if not found:
        reference.part_of(tests[0].rows)  # says what it has
    return found


def slug(name: str) -> str:
    """A data set's name as that of its file."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "data"


def _predict(
    posterior: Posterior, part: _Part, draws: int | None, seed: int, keep_samples: bool, bar: tqdm
) -> dict[str, np.ndarray]:
    """What to write of a data set: columns and row numbers, thumbnails of images, samples on request."""
    pieces: list[Columns] = []
    samples: list[Tensor] = []
    images: list[Tensor] = []
    done = 0
    for x, y in blocks(part.rows, _BLOCK_ROWS):
        prediction = posterior.predict(x, draws=draws, seed=seed)
        targets = None
        if part.role == "test":
            posterior.network.likelihood.check_targets(y)
            targets = y.to(posterior.network.device)
        piece = {name: _plain_type(column) for name, column in prediction.columns(targets).items()}
        piece["rows"] = part.rows.indices.cpu()[piece["rows"] + done]
        pieces.append(piece)
        if keep_samples:
            samples.append(_plain_type(prediction.samples))
        images += [t.cpu() for t in tensors(x)[:1] if t.ndim == 4 and t.shape[1] in (1, 3)]
        done += len(y)
        bar.update(len(y))
    columns = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    arrays: dict[str, np.ndarray] = {name: column.numpy() for name, column in columns.items()}
    if images and len(columns["rows"]) == len(part.rows):
        flagged = _flagged(columns)
        arrays |= {"thumbnails": _thumbnails(torch.cat(images), flagged), "thumbnail_rows": flagged.numpy()}
    if samples:
        arrays["samples"] = torch.cat(samples, 1).numpy()
    return arrays


def _plain_type(column: Tensor) -> Tensor:
    """On the CPU, as float32 or int64."""
    return column.cpu().to(torch.float32 if column.is_floating_point() else torch.int64)


def _flagged(columns: Columns) -> Tensor:
    """Rows worth looking at: wrong ones, surest first, then the least certain."""
    if "probs" not in columns:
        return columns["variance"].sum(-1).argsort(descending=True)[:_THUMBNAILS]
    if "targets" not in columns:
        return columns["entropy"].argsort()[:_THUMBNAILS]
    wrong = columns["probs"].argmax(-1) != columns["targets"]
    rank = torch.where(wrong, -10 + columns["entropy"], -columns["entropy"])
    return rank.argsort(stable=True)[:_THUMBNAILS]


def _thumbnails(images: Tensor, flagged: Tensor) -> np.ndarray:
    """Images [N, C, H, W] of any scale as bytes, [K, H, W] or [K, H, W, 3]."""
    low, high = images.amin((0, 2, 3), keepdim=True), images.amax((0, 2, 3), keepdim=True)
    scaled = (images[flagged] - low) / (high - low).clamp_min(1e-12) * 255
    array = scaled.round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    return array[..., 0] if array.shape[-1] == 1 else array


def _content(posterior: Posterior, label: str, class_names: tuple[str, ...], found: list[Scored]) -> dict[str, Any]:
    """What metrics.json holds."""
    return {
        "format": FORMAT,
        "label": label,
        "method": {"name": method_name(posterior.method), "fields": _plain(encode(posterior.method, {}, "method"))},
        "kind": posterior.network.likelihood.kind,
        "class_names": list(class_names),
        "info": dataclasses.asdict(posterior.info),
        "data": [
            dataclasses.asdict(scored)
            | {
                "metrics": {
                    k: {"mean": _number(v.mean), "stderr": _number(v.stderr)} for k, v in scored.metrics.items()
                }
            }
            for scored in found
        ],
    }


def _plain(value: Any) -> Any:
    """An encoded dataclass as a plain nested mapping, for people."""
    if isinstance(value, dict) and "fields" in value:
        return {name: _plain(item) for name, item in value["fields"].items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _number(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None
