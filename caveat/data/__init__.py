"""Data sets by name or path, shifts of them, and out-of-distribution inputs."""

from caveat.data.augment import crop_and_flip
from caveat.data.condition_sets import Conditions, conditions
from caveat.data.dataset import DataSet, prepare
from caveat.data.download import download
from caveat.data.ood import ood_pairs, out_of_distribution
from caveat.data.own_tables import from_frame, prepare_table
from caveat.data.sets import load, names
from caveat.data.shifts import CORRUPTIONS, SHIFTS, Shift, gap_mask, gap_split, rotate, shift, shifted

__all__ = [
    "CORRUPTIONS",
    "SHIFTS",
    "Conditions",
    "DataSet",
    "Shift",
    "conditions",
    "crop_and_flip",
    "download",
    "from_frame",
    "gap_mask",
    "gap_split",
    "load",
    "names",
    "ood_pairs",
    "out_of_distribution",
    "prepare",
    "prepare_table",
    "rotate",
    "shift",
    "shifted",
]
