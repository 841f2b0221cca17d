"""Shifts of the inputs: the same rows, made harder.

noise.py  blur.py  weather.py  digital.py  spatter.py    the nineteen common corruptions, a function each
geometry.py                                              rotation and translation
rows.py                                                  tables and signals; splits that leave a gap
draws.py  operators.py                                   random numbers of an image's own; linear maps
registry.py                                              every shift by its name
"""

from caveat.data.shifts.geometry import rotate
from caveat.data.shifts.registry import CORRUPTIONS, SHIFTS, Shift, known_shift, shift, shifted
from caveat.data.shifts.rows import gap_mask, gap_split

__all__ = ["CORRUPTIONS", "SHIFTS", "Shift", "gap_mask", "gap_split", "known_shift", "rotate", "shift", "shifted"]
