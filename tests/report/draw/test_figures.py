import itertools
from dataclasses import replace

import numpy as np
import pytest

from caveat.report import read
from caveat.report.draw.figures import BASELINE_COLOUR, COLOURS, SYMBOLS, styles
from caveat.report.draw.html_pieces import CHARACTERS

# Machado, Oliveira and Fernandes (2009): linear RGB as seen without red, green or blue cones.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    values = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    xyz = TO_XYZ @ rgb.clip(0, 1) / [0.9505, 1.0, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_colours_can_be_told_apart(vision):
    seen = [lab(np.asarray(VISION[vision]) @ linear(colour)) for colour in (BASELINE_COLOUR, *COLOURS)]
    assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > 20


def test_colours_hold_on_white_and_on_near_black():
    light = np.array([TO_XYZ[1] @ linear(colour) for colour in (BASELINE_COLOUR, *COLOURS)]) + 0.05
    assert (1.05 / light).min() > 2.3
    assert (light / (TO_XYZ[1] @ linear("#14171b") + 0.05)).min() > 2.7


def test_a_run_looks_the_same_everywhere_and_unlike_the_others(classification):
    runs = read(classification)
    found = styles(runs)
    assert found["MAP"].colour == BASELINE_COLOUR
    looks = {(style.colour, style.dash, style.symbol) for style in found.values()}
    assert len(looks) == 3
    assert set(CHARACTERS) == set(SYMBOLS)


def test_many_runs_still_differ(classification):
    base = read(classification)[0]
    many = [replace(base, label=str(number), method=f"method {number}") for number in range(40)]
    assert len({(style.colour, style.dash, style.symbol) for style in styles(many).values()}) == 40
