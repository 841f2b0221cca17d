"""Every shift by its name: `shift(x, "fog", 3)`.

The nineteen corruptions are those of Hendrycks and Dietterich (2019) with the constants of their CIFAR-10-C: five
severities each. They see pixels from 0 to 1. Constants that are lengths are pixels of a 32 x 32 image and stay so for
other sizes, but for `elastic_transform`, whose lengths are shares of the side.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from caveat.data.dataset import Array, DataSet
from caveat.data.shifts import rows as of_rows
from caveat.data.shifts.blur import BLUR
from caveat.data.shifts.digital import DIGITAL
from caveat.data.shifts.draws import Corruptions, RowDraws
from caveat.data.shifts.geometry import rotation, translation
from caveat.data.shifts.noise import NOISE
from caveat.data.shifts.operators import CLOSE, cut_bytes
from caveat.data.shifts.spatter import SPATTER
from caveat.data.shifts.weather import WEATHER

__all__ = ["CORRUPTIONS", "SHIFTS", "Shift", "known_shift", "shift", "shifted"]

AT_ONCE = 1 << 20  # values changed at a time, so that working memory stays small: 340 colour images of 32 x 32
Group = Literal["noise", "blur", "weather", "digital", "geometry", "rows"]
AnyArray = TypeVar("AnyArray", Array, Tensor)


@dataclass(frozen=True)
class Shift:
    """A kind of shift: what it takes, and its severities from mild to hard."""

    name: str
    group: Group
    severities: tuple[float, ...]
    unit: str  # of the severity
    change: Callable[[Tensor, Any, RowDraws], Tensor]
    lowest: float | None = None  # any severity from here on will do; without it only the listed ones

    def check(self, severity: float) -> None:
        """Refuse a severity that the shift does not have."""
        if severity not in self.severities and (self.lowest is None or not self.lowest <= severity < math.inf):
            known = ", ".join(f"{s:g}" for s in self.severities)
            raise ValueError(f"{self.name} has no severity {severity}: it has {known} ({self.unit})")


def _suite(group: Group, corruptions: Corruptions) -> dict[str, Shift]:
    def at(
        change: Callable[..., Tensor], constants: tuple[Any, ...], x: Tensor, severity: float, draws: RowDraws
    ) -> Tensor:
        return change(x, constants[int(severity) - 1], draws)

    return {
        change.__name__: Shift(change.__name__, group, (1, 2, 3, 4, 5), "of five", partial(at, change, constants))
        for change, constants in corruptions.items()
    }


CORRUPTIONS = (
    _suite("noise", NOISE) | _suite("blur", BLUR) | _suite("weather", WEATHER) | _suite("digital", DIGITAL | SPATTER)
)
SHIFTS = CORRUPTIONS | {
    found.name: found
    for found in (
        Shift("rotation", "geometry", tuple(range(15, 181, 15)), "degrees", rotation, -360),
        Shift("translation", "geometry", (0.05, 0.1, 0.15, 0.2, 0.25), "of the shorter side", translation, 0),
        Shift("feature_shift", "rows", (0.5, 1, 1.5, 2, 3), "standard deviations", of_rows.feature_shift, 0),
        Shift("signal_noise", "rows", (0.1, 0.2, 0.4, 0.6, 1), "standard deviations", of_rows.signal_noise, 0),
        Shift("signal_shift", "rows", (0.025, 0.05, 0.1, 0.2, 0.4), "of the length", of_rows.signal_shift, 0),
        Shift("signal_scale", "rows", (0.25, 0.5, 1, 1.5, 2), "more or less", of_rows.signal_scale, 0),
    )
}


def shift(x: AnyArray, name: str, severity: float, seed: int = 0) -> AnyArray:
    """Inputs under a shift; type, dtype, shape, layout and range stay.

    Args:
        x: images as bytes or as floats in [0, 1], [N, C, H, W] or [N, H, W, C] with one or three channels, or
            [N, H, W]; rows [N, D] of standardised floats for `feature_shift` and the `signal_` shifts. A numpy array or
            a tensor.
        name: one of `SHIFTS`.
        severity: 1 to 5 for the corruptions, degrees for `rotation`, see `SHIFTS[name].severities`.
        seed: draws whatever is random. An image's draws follow from the seed and from its own pixels, so it comes out
            the same in any batch.
    """
    kind = known_shift(name)
    kind.check(severity)
    tensor = torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x
    if not isinstance(tensor, Tensor):
        raise TypeError(f"shift takes a numpy array or a tensor, not a {type(x).__name__}")
    tensor = tensor.detach()
    if kind.group == "rows":
        out = _change_rows(tensor, kind, severity, seed)
    else:
        out = _change_images(tensor, kind, severity, seed)
    return out.numpy() if isinstance(x, np.ndarray) else out


def known_shift(name: str) -> Shift:
    """The shift of that name; a ValueError says what was probably meant."""
    if name in SHIFTS:
        return SHIFTS[name]
    close = [known for known in SHIFTS if name in known] or difflib.get_close_matches(name, SHIFTS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(SHIFTS)}"
    raise ValueError(f"there is no shift {name!r}: {hint}")


def _change_images(x: Tensor, kind: Shift, severity: float, seed: int) -> Tensor:
    axis = _channel_axis(x, kind.name)
    images = x.unsqueeze(1) if axis is None else x.movedim(axis, 1)  # [N, C, H, W]
    if not images.is_floating_point() and images.dtype != torch.uint8:
        raise ValueError(f"{kind.name} takes bytes or floats in [0, 1], not {images.dtype}")
    low, high = (float(end) for end in images.aminmax()) if images.numel() else (0.0, 1.0)
    if images.is_floating_point() and not -CLOSE <= low <= high <= 1 + CLOSE:
        raise ValueError(
            f"{kind.name} takes floats in [0, 1], but these run from {low:.3g} to {high:.3g}: give pixels, or let "
            "`shifted` take a data set's own standardisation back"
        )
    out = torch.empty(images.shape, dtype=images.dtype)
    length = max(1, AT_ONCE // max(images[:1].numel(), 1))
    for part, into in zip(images.split(length), out.split(length), strict=True) if len(images) else ():
        pixels = (
            part.cpu().float() / 255 if part.dtype == torch.uint8 else part.cpu().float().clamp(0, 1)
        ).contiguous()
        content = (pixels * 255).round().to(torch.uint8)
        changed = kind.change(pixels, severity, RowDraws(content, seed, kind.name)).clamp(0, 1)
        # bytes are cut and not rounded, as in the published sets
        into.copy_((cut_bytes(changed) * 255).round() if part.dtype == torch.uint8 else changed)
    out = out.squeeze(1) if axis is None else out.movedim(1, axis)
    return out.to(x.device).contiguous()


def _channel_axis(x: Tensor, name: str) -> int | None:
    if x.ndim == 4 and x.shape[1] in (1, 3):
        axis: int | None = 1
    elif x.ndim == 4 and x.shape[3] in (1, 3):
        axis = 3
    elif x.ndim == 3:
        axis = None
    else:
        raise ValueError(
            f"{name} takes images [N, C, H, W] or [N, H, W, C] with 1 or 3 channels, or [N, H, W], not {tuple(x.shape)}"
        )
    sides = [side for place, side in enumerate(x.shape[1:], start=1) if place != axis]
    if min(sides) < 4:
        raise ValueError(f"{name} takes images of at least 4 x 4 pixels, not {sides[0]} x {sides[1]}")
    return axis


def _change_rows(x: Tensor, kind: Shift, severity: float, seed: int) -> Tensor:
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"{kind.name} takes rows of floats [N, D], not {x.dtype} {tuple(x.shape)}")
    rows = x.cpu().float()
    return kind.change(rows, severity, RowDraws(rows, seed, kind.name)).to(x.device, x.dtype)


def shifted(
    data: DataSet, name: str, severities: tuple[float, ...] | None = None, seed: int = 0
) -> dict[float, ShiftedRows]:
    """A data set's test rows at every severity of a shift, in its own standardisation: a family for `evaluate`."""
    kind_of_shift = known_shift(name)
    for severity in severities or kind_of_shift.severities:
        kind_of_shift.check(severity)
    x = data.test.tensors[0]
    if (x.ndim == 2) != (kind_of_shift.group == "rows"):
        kind = "images" if x.ndim == 4 else "rows"
        fitting = [other.name for other in SHIFTS.values() if (other.group == "rows") == (x.ndim == 2)]
        raise ValueError(f"{name} is no shift for {data.name}, which has {kind}; these are: {', '.join(fitting)}")
    return {severity: ShiftedRows(data, name, severity, seed) for severity in severities or kind_of_shift.severities}


class ShiftedRows(Dataset):
    """Test rows under a shift, made when they are read: nothing is kept, and a row is the same each time."""

    def __init__(self, data: DataSet, name: str, severity: float, seed: int) -> None:
        self.x, self.y = data.test.tensors
        self.name, self.severity, self.seed = name, severity, seed
        self._is_image = self.x.ndim == 4
        shape = [1, -1] + [1] * (self.x.ndim - 2)
        self._mean, self._std = (torch.tensor(data.preprocessing[key]).view(shape) for key in ("mean", "std"))

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Many rows at once, which is much faster than one by one."""
        x = self.x[indices]
        if self._is_image:
            pixels = (x * self._std + self._mean).clamp(0, 1)
            x = (shift(pixels, self.name, self.severity, self.seed) - self._mean) / self._std
        else:
            x = shift(x, self.name, self.severity, self.seed)
        return list(zip(x, self.y[indices], strict=True))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]
