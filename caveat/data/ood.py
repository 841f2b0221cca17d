"""Out-of-distribution inputs, in the shape and preprocessing of a data set at hand.

Images are made or read with pixels in [0, 1], resized, matched in channels, and standardised as the data set was:
x -> (x - mean) / std. They come without targets: the classes of the data set do not apply to them.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from caveat.data.dataset import DataSet, import_extra
from caveat.data.images import IMAGE_SETS, read_part

PHOTOGRAPH_HEIGHTS = (2, 4, 8)  # a photograph is shrunk to these multiples of the image height before it is cut
LUMINANCE = (0.299, 0.587, 0.114)
MADE_FOR_TABLES = ("permuted", "noise")
MADE_FOR_IMAGES = ("photographs", "permuted", "constant", "noise")
OTHER_IMAGES = ("digits", *IMAGE_SETS)
PARTNERS = {  # what a set is usually told apart from
    "digits": ("mnist", "fashion_mnist"),
    "mnist": ("fashion_mnist", "digits"),
    "fashion_mnist": ("mnist", "digits"),
    "cifar10": ("cifar100", "svhn"),
    "cifar100": ("cifar10", "svhn"),
    "svhn": ("cifar10", "cifar100"),
}


def out_of_distribution(
    name: str, like: DataSet, data_dir: str | Path | None = None, seed: int = 0, n: int | None = None
) -> TensorDataset:
    """Inputs that `like` was not drawn from, shaped and standardised as its own: a data set of one tensor.

    For images: `photographs` (patches of scikit-learn's two sample photographs), `permuted` (the test images, pixels
    shuffled by one permutation), `constant` (one colour an image), `noise` (uniform), or another image set by name
    (its test images; all of `digits`). For tables: `permuted` (each column of the test rows shuffled on its own) and
    `noise` (uniform over the range of each training column).

    Args:
        name: which set.
        like: the data set whose shape and preprocessing to take.
        data_dir: where to look for image sets, as for `load`.
        seed: draws whatever is random, also which `n` rows are taken.
        n: how many; all there are by default, or as many as `like.test` has where they are made up.
    """
    test = like.test.tensors[0]
    is_image = test.ndim == 4
    others = (other for other in OTHER_IMAGES if other != like.name)
    known = (*MADE_FOR_IMAGES, *others) if is_image else MADE_FOR_TABLES
    if name not in known:
        raise ValueError(f"{name!r} is no out-of-distribution set for {like.name}; these are: {', '.join(known)}")
    generator = torch.Generator().manual_seed(seed)
    count = len(test) if n is None else n
    if name == "permuted":
        rows = _choose(test, n, name, generator)
        return TensorDataset(_permute_pixels(rows, generator) if is_image else _permute_columns(rows, generator))
    if not is_image:
        train = like.train.tensors[0]
        low, high = train.amin(0), train.amax(0)  # [D]
        return TensorDataset(low + (high - low) * torch.rand(count, *test.shape[1:], generator=generator))
    channels, height, width = test.shape[1:]
    if name == "photographs":
        images = _photographs(count, height, width, generator)
    elif name == "noise":
        images = torch.rand(count, channels, height, width, generator=generator)
    elif name == "constant":
        images = torch.rand(count, channels, 1, 1, generator=generator).expand(-1, -1, height, width)
    elif name == "digits":
        pixels = import_extra("sklearn.datasets").load_digits().images / 16  # [N, 8, 8]
        images = _choose(torch.from_numpy(pixels).float().unsqueeze(1), n, name, generator)
    else:
        pair, _ = read_part(name, "test", data_dir)
        images = _choose(torch.from_numpy(pair.x.copy()), n, name, generator) / 255
    return TensorDataset(_fit(images, like))


def ood_pairs(
    like: DataSet, data_dir: str | Path | None = None, seed: int = 0, n: int | None = None
) -> dict[str, TensorDataset]:
    """What a data set is usually told apart from, by name: its partners that are on disk, permuted and constant inputs.

    Digits and MNIST go with each other and with Fashion-MNIST, CIFAR-10, CIFAR-100 and SVHN with one another; every
    set goes with its own inputs permuted, images also with constant ones, tables with noise. The arguments are those
    of `out_of_distribution`; of a partner with fewer than `n` rows all are taken.
    """
    is_image = like.test.tensors[0].ndim == 4
    pairs = {}
    for name in (*PARTNERS.get(like.name, ()), "permuted", "constant" if is_image else "noise"):
        with contextlib.suppress(FileNotFoundError):
            whole = out_of_distribution(name, like, data_dir, seed)
            few = n is not None and n < len(whole)
            pairs[name] = out_of_distribution(name, like, data_dir, seed, n) if few else whole
    return pairs


def _fit(images: Tensor, like: DataSet) -> Tensor:
    """Pixels in [0, 1] -> the size, channels and standardisation of `like`."""
    channels, height, width = like.test.tensors[0].shape[1:]
    if images.shape[-2:] != (height, width):
        images = F.interpolate(images, (height, width), mode="bilinear", align_corners=False, antialias=True)
    if images.shape[1] == 3 and channels == 1:
        images = (images * torch.tensor(LUMINANCE).view(1, 3, 1, 1)).sum(1, keepdim=True)
    elif images.shape[1] != channels:
        images = images[:, :1].expand(-1, channels, -1, -1)
    mean, std = (torch.tensor(like.preprocessing[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    return (images - mean) / std


def _choose(rows: Tensor, n: int | None, name: str, generator: torch.Generator) -> Tensor:
    if n is None:
        return rows
    if n > len(rows):
        raise ValueError(f"n={n} is more than {name!r} has ({len(rows)})")
    return rows[torch.randperm(len(rows), generator=generator)[:n]]


def _permute_pixels(images: Tensor, generator: torch.Generator) -> Tensor:
    pixels = images.flatten(2)  # [N, C, H*W]
    return pixels[:, :, torch.randperm(pixels.shape[2], generator=generator)].view_as(images)


def _permute_columns(rows: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.stack([torch.randperm(len(rows), generator=generator) for _ in range(rows.shape[1])], dim=1)
    return rows.gather(0, order)  # [N, D]


def _photographs(count: int, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Patches [N, 3, H, W] at random places and scales of the sample photographs."""
    scaled = []
    for photograph in import_extra("sklearn.datasets").load_sample_images().images:
        pixels = torch.from_numpy(photograph.copy()).permute(2, 0, 1)[None] / 255  # [1, 3, H', W']
        for multiple in PHOTOGRAPH_HEIGHTS:
            factor = multiple * max(height, width) / min(pixels.shape[-2:])
            size = [round(factor * side) for side in pixels.shape[-2:]]
            scaled.append(F.interpolate(pixels, size, mode="bilinear", align_corners=False, antialias=True)[0])
    patches = torch.empty(count, 3, height, width)
    which = torch.randint(len(scaled), (count,), generator=generator)
    for index, photograph in enumerate(scaled):
        rows = (which == index).nonzero().flatten()
        top, left = (
            torch.randint(side - cut + 1, (len(rows), 1, 1), generator=generator)
            for side, cut in zip(photograph.shape[1:], (height, width), strict=True)
        )
        patch_rows, patch_columns = top + torch.arange(height).view(-1, 1), left + torch.arange(width)
        patches[rows] = photograph[:, patch_rows, patch_columns].transpose(0, 1)  # [n, 3, H, W]
    return patches
