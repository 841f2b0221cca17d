"""Data sets by name or path, shifts of them, and inputs from outside of them."""

from caveat.data.augment import crop_and_flip
from caveat.data.dataset import DataSet, prepare
from caveat.data.download import download
from caveat.data.ood import out_of_distribution
from caveat.data.sets import load, names
from caveat.data.shifts import rotate

__all__ = ["DataSet", "crop_and_flip", "download", "load", "names", "out_of_distribution", "prepare", "rotate"]
