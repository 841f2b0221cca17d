"""Kernels in C++, compiled once by the machine's own compiler; everything runs without them, only slower."""

from caveat.native.build import library
from caveat.native.grids import Grid, Structure

__all__ = ["Grid", "Structure", "library"]
