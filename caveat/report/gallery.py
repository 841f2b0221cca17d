"""A gallery of images that the networks get wrong, with what each run said of them.

Images come from the `thumbnails` of any run's prediction file; what a run said comes from its own predictions at the
same position, so a run that kept no image of a row, or other ones, is shown as well. PNG files are written here:
signature, header, zlib-packed rows.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from caveat.report.compare import matched
from caveat.report.drawing import Style, styles
from caveat.report.markup import breakable, fold, plural, section, swatch
from caveat.report.runs import Arrays, Run

WRONG_SHOWN = 12
OUTSIDE_SHOWN = 6


@dataclass(frozen=True)
class Exhibit:
    """Images of one data set, chosen: `positions` index its rows, each image is [H, W] or [H, W, 3]."""

    name: str
    positions: np.ndarray
    images: list[np.ndarray]
    said: dict[str, Arrays]  # by run label
    targets: np.ndarray | None


def exhibits(runs: Sequence[Run]) -> list[Exhibit]:
    """One exhibit for clean data, for the middle severity of each family, and for each out-of-distribution set."""
    names = [run.clean.name for run in runs if run.clean]
    for run in runs:
        with_images = [[s.name for s in family if _has_images(runs, s.name)] for family in run.shifts.values()]
        names += [family[len(family) // 2] for family in with_images if family]
        names += [scored.name for scored in run.outside]
    found = (_exhibit(runs, name) for name in dict.fromkeys(names) if _has_images(runs, name))
    return [exhibit for exhibit in found if len(exhibit.positions)]


def _has_images(runs: Sequence[Run], name: str) -> bool:
    return any(name in run.by_name and "thumbnails" in run.by_name[name].predictions for run in runs)


def _exhibit(runs: Sequence[Run], name: str) -> Exhibit:
    scored = {run.label: run.by_name[name] for run in runs if name in run.by_name}
    first = next(iter(scored.values()))
    said = {label: matched(one, first)[0] for label, one in scored.items()}
    images: dict[int, np.ndarray] = {}  # by position; runs may have kept different rows
    for arrays in said.values():
        for position, image in zip(arrays.get("thumbnail_rows", ()), arrays.get("thumbnails", ()), strict=True):
            images.setdefault(int(position), image)
    positions = np.array(sorted(images))
    probs = np.stack([arrays["probs"][positions] for arrays in said.values()])  # [R, K, C]
    targets = first.predictions.get("targets")
    if targets is None:
        order = np.argsort(-probs.max(axis=2).mean(axis=0), kind="stable")[:OUTSIDE_SHOWN]  # the most sure first
    else:
        wrong = probs.argmax(axis=2) != targets[positions]  # [R, K]
        sure = (probs.max(axis=2) * wrong).sum(axis=0)  # [K], how surely the runs are wrong, summed
        order = np.argsort(-sure, kind="stable")[: min(WRONG_SHOWN, int(wrong.any(axis=0).sum()))]
    return Exhibit(name, positions[order], [images[int(position)] for position in positions[order]], said, targets)


def gallery_section(runs: Sequence[Run]) -> str:
    """Every exhibit as cards; the first is open."""
    body = "".join(exhibit_fold(runs, exhibit, index == 0) for index, exhibit in enumerate(exhibits(runs)))
    lead = (
        "Images that at least one run gets wrong, the most surely wrong first; of data from elsewhere, those that the "
        "runs are most sure of. Entropy is in nats."
    )
    return section("gallery", "Where they go wrong", lead, body)


def exhibit_fold(runs: Sequence[Run], exhibit: Exhibit, is_open: bool) -> str:
    """One exhibit as cards that open and close."""
    shown = range(len(exhibit.positions))
    classes = next(iter(exhibit.said.values()))["probs"].shape[1]
    names = runs[0].class_names if len(runs[0].class_names) == classes else [str(i) for i in range(classes)]
    cards = "".join(_card(exhibit, which, styles(runs), names) for which in shown)
    return fold(exhibit.name, plural(len(shown), "image"), f'<div class="cards">{cards}</div>', is_open)


def _card(exhibit: Exhibit, which: int, style: dict[str, Style], class_names: Sequence[str]) -> str:
    """One image with its true label and, for each run, the label it gave, how probable, and the entropy."""
    position = int(exhibit.positions[which])
    target = None if exhibit.targets is None else int(exhibit.targets[position])
    truth = "no known class" if target is None else f"true label {class_names[target]}"
    row = int(next(iter(exhibit.said.values()))["rows"][position])
    source = base64.b64encode(png(exhibit.images[which])).decode()
    lines = "".join(
        _said(label, style[label], arrays, position, target, class_names) for label, arrays in exhibit.said.items()
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("Run", "says", "probability", "entropy"))
    return (
        f'<article class="card"><div class="picture"><img src="data:image/png;base64,{source}" '
        f'alt="Row {row} of {escape(exhibit.name)}, {escape(truth)}">'
        f'<p><b>{escape(truth)}</b><br><span class="quiet">row {row}</span></p></div>'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></article>"
    )


def _said(
    label: str, style: Style, arrays: Arrays, position: int, target: int | None, class_names: Sequence[str]
) -> str:
    probs, entropy = arrays["probs"][position], float(arrays["entropy"][position])
    answer = int(probs.argmax())
    state, mark = ("", "") if target is None else ("right", "✓ ") if answer == target else ("wrong", "✗ ")
    return (
        f'<tr data-run="{style.index}"><th scope="row">{swatch(style)}{breakable(label)}</th>'
        f'<td class="{state}">{mark}{breakable(class_names[answer])}</td>'
        f'<td><span class="bar" style="--share:{probs[answer]:.3f}">{probs[answer]:.0%}</span></td>'
        f"<td>{entropy:.2f}</td></tr>"
    )


def png(image: np.ndarray) -> bytes:
    """A PNG file of a uint8 image, [H, W] grey or [H, W, 3] colour."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = image.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if image.ndim == 3 else 0, 0, 0, 0)  # 8 bits; grey 0, colour 2
    filtered = np.pad(image.reshape(height, -1), ((0, 0), (1, 0)))  # filter 0 before each row
    packed = zlib.compress(filtered.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
