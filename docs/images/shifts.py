"""Makes shifts.png, the picture of docs/shifts.md: one image under every corruption, at every severity.

Run with `python docs/images/shifts.py`. The image is a piece of a photograph that comes with scikit-learn.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from sklearn.datasets import load_sample_image
from torch.nn import functional as F

from caveat.data import SHIFTS, shift

SIDE, SCALE, GAP, LABEL, COLUMNS = 32, 2, 4, 118, 3
SHOWN = {name: found.severities for name, found in SHIFTS.items() if found.group != "rows"}
SHOWN["rotation"] = (15, 45, 90, 135, 180)


def photograph() -> np.ndarray:
    """[1, 32, 32, 3] bytes."""
    pixels = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)[None].float()
    piece = pixels[..., 60:400, 150:490]
    small = F.interpolate(piece, (SIDE, SIDE), mode="bilinear", antialias=True)
    return small.round().to(torch.uint8)[0].permute(1, 2, 0).numpy()[None]


def main() -> None:
    """Draw the sheet."""
    clean = photograph()
    cell = SIDE * SCALE + GAP
    rows = -(-len(SHOWN) // COLUMNS)
    width = COLUMNS * (LABEL + 6 * cell + 3 * GAP)
    sheet = Image.new("RGB", (width, rows * cell + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for index, (name, severities) in enumerate(SHOWN.items()):
        left, top = (index // rows) * (width // COLUMNS) + GAP, (index % rows) * cell + GAP
        draw.text((left, top + cell // 2 - 8), name.replace("_", " "), fill="black")
        for place, severity in enumerate((None, *severities)):
            image = clean if severity is None else shift(clean, name, severity)
            large = Image.fromarray(image[0]).resize((SIDE * SCALE, SIDE * SCALE), Image.NEAREST)
            sheet.paste(large, (left + LABEL + place * cell, top))
    target = Path(__file__).with_name("shifts.png")
    sheet.save(target, optimize=True)
    print(f"{target}: {sheet.size[0]} x {sheet.size[1]}, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
