"""Images as cards: each with its true label and what every run said of it.

A PNG file is a signature, a header, and rows packed by zlib; that is little enough to be written here.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from caveat.report.draw.figures import Style, styles
from caveat.report.draw.html_pieces import breakable, fold, swatch
from caveat.report.saved import Arrays, SavedRun
from caveat.report.wording import plural

__all__ = ["Exhibit", "exhibit_fold"]


@dataclass(frozen=True)
class Exhibit:
    """Images that were chosen from one data set, with what every run said of the whole set."""

    name: str
    positions: np.ndarray  # [K] where the images are among the rows of the set
    images: list[np.ndarray]  # K images, each [H, W] or [H, W, 3]
    predictions: dict[str, Arrays]  # by the label of the run
    targets: np.ndarray | None


def exhibit_fold(runs: Sequence[SavedRun], exhibit: Exhibit, is_open: bool) -> str:
    """Show an exhibit as cards, in a part that opens and closes."""
    shown = range(len(exhibit.positions))
    classes = next(iter(exhibit.predictions.values()))["probs"].shape[1]
    names = runs[0].class_names if len(runs[0].class_names) == classes else [str(i) for i in range(classes)]
    cards = "".join(_card(exhibit, which, styles(runs), names) for which in shown)
    return fold(exhibit.name, plural(len(shown), "image"), f'<div class="cards">{cards}</div>', is_open)


def _card(exhibit: Exhibit, which: int, style: dict[str, Style], class_names: Sequence[str]) -> str:
    """One image with its true label and, for each run, the label it gave, how probable, and the entropy."""
    position = int(exhibit.positions[which])
    target = None if exhibit.targets is None else int(exhibit.targets[position])
    truth = "no known class" if target is None else f"true label {class_names[target]}"
    row = int(next(iter(exhibit.predictions.values()))["rows"][position])
    source = base64.b64encode(png(exhibit.images[which])).decode()
    lines = "".join(
        _run_line(label, style[label], arrays, position, target, class_names)
        for label, arrays in exhibit.predictions.items()
    )
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("Run", "says", "sure", "entropy"))
    return (
        f'<article class="card"><div class="picture"><img src="data:image/png;base64,{source}" '
        f'alt="Row {row} of {escape(exhibit.name)}, {escape(truth)}">'
        f'<p><b>{escape(truth)}</b><br><span class="quiet">row {row}</span></p></div>'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></article>"
    )


def _run_line(
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
    """The bytes of a PNG file of a uint8 image, [H, W] grey or [H, W, 3] colour."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width = image.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if image.ndim == 3 else 0, 0, 0, 0)  # 8 bits; grey 0, colour 2
    filtered = np.pad(image.reshape(height, -1), ((0, 0), (1, 0)))  # filter 0 before each row
    packed = zlib.compress(filtered.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
