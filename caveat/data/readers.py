"""Readers of the file formats data sets come in: idx, CIFAR binary, webp mosaics, mat, npz, folders of images.

Each returns raw arrays, images as bytes [N, C, H, W], and refuses a broken file with one ValueError that names it.
"""

from __future__ import annotations

import gzip
import io
import itertools
import lzma
import math
import struct
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from caveat.data.dataset import Array, import_extra
from caveat.files import regular_file

IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".pgm", ".ppm"})
CIFAR_SIDE = 32
LARGE_BYTES, LARGE_RATIO = 2**29, 100  # what unpacks to more, in all and for each byte, is taken for a trap
LARGE_IMAGE = 50_000_000  # pixels


class PartArrays(NamedTuple):
    """Inputs and targets of one part of a data set."""

    x: Array
    y: Array


class Labelled(NamedTuple):
    """Inputs, targets and, where the targets are class indices, the names of the classes."""

    x: Array
    y: Array
    class_names: tuple[str, ...]


def read_idx(path: Path) -> Array:
    """An idx file, gzipped or not: two zero bytes, type, rank, big-endian sizes, then the values."""
    content = _unpacked(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in IDX_TYPES:
        raise ValueError(f"{path} is not an idx file: it starts with {content[:4].hex(' ') or 'nothing'}")
    dtype, rank = np.dtype(IDX_TYPES[content[2]]), content[3]
    start = 4 + 4 * rank
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4")) if len(content) >= start else ()
    expected = start + math.prod(shape) * dtype.itemsize
    if len(content) != expected or len(shape) != rank:
        raise ValueError(f"{path} is cut off or too long: {len(content)} bytes, {expected} expected for shape {shape}")
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def _unpacked(path: Path) -> bytes:
    """The bytes of a file, unzipped where it is gzipped."""
    with regular_file(path).open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        if not packed:
            return file.read()
        most = max(LARGE_BYTES, LARGE_RATIO * path.stat().st_size)
        try:
            content = gzip.GzipFile(fileobj=file).read(most + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path} is not a whole gzip file: {error}") from error
    if len(content) > most:
        raise _trap(str(path), path.stat().st_size, len(content))
    return content


def _trap(which: str, packed: int, unpacked: int) -> ValueError:
    return ValueError(
        f"{which} holds {packed:,} bytes that unpack to {unpacked:,}, so it is not read: store it uncompressed if you "
        "trust it"
    )


def read_idx_pair(paths: Sequence[Path]) -> PartArrays:
    """Images [N, 1, H, W] and labels [N] from an image file and a label file."""
    images, labels = (read_idx(path) for path in paths)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ValueError(f"{paths[0]} {images.shape} and {paths[1]} {labels.shape} are not images and their labels")
    return PartArrays(images[:, None], labels)


def read_cifar_binary(paths: Sequence[Path], label_bytes: int) -> PartArrays:
    """CIFAR records, gzipped or not: `label_bytes` labels (the last is the finest), then 3 x 32 x 32 pixels."""
    record = label_bytes + 3 * CIFAR_SIDE**2
    parts = []
    for path in paths:
        content = np.frombuffer(_unpacked(path), dtype=np.uint8)
        if len(content) == 0 or len(content) % record:
            raise ValueError(f"{path} is not a whole CIFAR batch: {len(content)} bytes, not a multiple of {record}")
        parts.append(content.reshape(-1, record))
    records = np.concatenate(parts)  # [N, record]
    return PartArrays(records[:, label_bytes:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE), records[:, label_bytes - 1])


def read_webp_mosaics(paths: Sequence[Path]) -> PartArrays:
    """32 x 32 RGB images stored as lossless webp mosaics, tiled row by row: npz keys `webp`, `offsets`, `y`."""
    images, labels = [], []
    for path in paths:
        npz = read_npz(path, ("webp", "offsets", "y"))
        stored, offsets = npz["webp"], npz["offsets"]
        encoded = [stored[start:stop].tobytes() for start, stop in itertools.pairwise(offsets)]
        try:
            with ThreadPoolExecutor() as pool:  # Pillow decodes outside the interpreter lock
                tiles = np.concatenate(list(pool.map(_tiles, encoded)))  # [N, 3, 32, 32]
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} holds a mosaic that cannot be decoded: {error}") from error
        if len(tiles) != len(npz["y"]):
            raise ValueError(f"{path} holds {len(tiles)} images but {len(npz['y'])} labels")
        images.append(tiles)
        labels.append(npz["y"])
    return PartArrays(np.concatenate(images), np.concatenate(labels))


def _tiles(encoded: bytes) -> Array:
    mosaic = np.asarray(import_extra("PIL.Image").open(io.BytesIO(encoded)).convert("RGB"))
    rows, columns = mosaic.shape[0] // CIFAR_SIDE, mosaic.shape[1] // CIFAR_SIDE
    grid = mosaic.reshape(rows, CIFAR_SIDE, columns, CIFAR_SIDE, 3)
    return grid.transpose(0, 2, 4, 1, 3).reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE)


def read_svhn_mat(paths: Sequence[Path]) -> PartArrays:
    """SVHN cropped digits: `X` [32, 32, 3, N], `y` [N, 1], where the label 10 means the digit 0."""
    (path,) = paths
    matlab = import_extra("scipy.io")
    try:
        content = matlab.loadmat(path, variable_names=("X", "y"))
        images, labels = content["X"], content["y"]
    except (ValueError, TypeError, KeyError, NotImplementedError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is not an SVHN file with X and y: {error!r}") from error
    return PartArrays(images.transpose(3, 2, 0, 1), labels.ravel() % 10)


def read_npz(path: Path, keys: Collection[str]) -> dict[str, Array]:
    """The arrays `keys` of an npz file, without unpickling anything."""
    with _opened(path) as npz:
        missing = [key for key in keys if key not in npz]
        held = ", ".join(npz)
        content = {} if missing else {key: npz[key] for key in keys}
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it holds {held or 'nothing'}")
    return content


@contextmanager
def _opened(path: Path) -> Iterator[Mapping[str, Array]]:
    try:
        with regular_file(path).open("rb") as file, np.load(file, allow_pickle=False) as npz:
            _check_sizes(npz)
            yield npz
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{path} cannot be read as an npz file without pickled objects: {error}") from error


def _check_sizes(npz: Any) -> None:
    """Refuse arrays that unpack to far more than the file holds, or that claim more than they unpack to."""
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    for member in npz.zip.infolist():
        name, size = member.filename, member.file_size
        if size > max(LARGE_BYTES, LARGE_RATIO * member.compress_size):
            raise _trap(name, member.compress_size, size)
        if not name.endswith(".npy"):
            continue
        with npz.zip.open(member) as file:
            version = np.lib.format.read_magic(file)
            if version not in headers:
                raise ValueError(f"{name} is of version {version} of the format, which is for records")
            shape, _, dtype = headers[version](file)
            claimed, held = math.prod(shape) * dtype.itemsize, size - file.tell()
        if not dtype.hasobject and claimed != held:
            raise ValueError(f"{name} is to have shape {shape}, {claimed:,} bytes, but holds {held:,}")


def read_npz_pair(paths: Sequence[Path], part: str) -> PartArrays:
    """`x_PART` and `y_PART` of an npz file; inputs as columns [N, D] or images [N, C, H, W].

    Rank 3 is one-channel images; rank 4 is channel first, unless only the last axis can be channels (1 or 3 of them).
    """
    (path,) = paths
    npz = read_npz(path, (f"x_{part}", f"y_{part}"))
    return PartArrays(_columns_or_images(path, f"x_{part}", npz[f"x_{part}"]), npz[f"y_{part}"])


def read_npz_inputs(path: Path) -> Array:
    """Inputs without targets: `x` of an npz file, or `x_test` where there is no `x`; shaped as `read_npz_pair` does."""
    with _opened(path) as npz:
        held = list(npz)
    for key in ("x", "x_test"):
        if key in held:
            return _columns_or_images(path, key, read_npz(path, (key,))[key])
    raise ValueError(f"{path} has neither x nor x_test; it holds {', '.join(held) or 'nothing'}")


def _columns_or_images(path: Path, key: str, x: Array) -> Array:
    if x.ndim in (1, 3):
        x = x[:, None]
    elif x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.ndim not in (2, 4):
        raise ValueError(f"{path}: {key} has shape {x.shape}; tables [N, D] or images [N, C, H, W] can be read")
    return x


def read_image_folder(folder: Path) -> Labelled:
    """Images of one size from one folder a class; the classes are the folder names in alphabetical order.

    Grey images give one channel; if any image has colour, all become RGB.
    """
    class_names = tuple(path.name for path in _folders(folder))
    files = [_image_files(folder / name) for name in class_names]
    for name, images in zip(class_names, files, strict=True):
        if not images:
            raise ValueError(f"{folder / name} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    if not files:
        raise ValueError(f"{folder} is empty: it needs one folder of images for each class")
    labels = np.repeat(np.arange(len(files)), [len(images) for images in files])
    return Labelled(_images([path for images in files for path in images]), labels, class_names)


def read_images(folder: Path) -> tuple[Array, list[Path]]:
    """All images of a folder and of the folders in it, with or without classes, and their files."""
    files = [*_image_files(folder), *(path for inner in _folders(folder) for path in _image_files(inner))]
    if not files:
        raise ValueError(f"{folder} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return _images(files), files


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def _image_files(folder: Path) -> list[Path]:
    files = (path for path in folder.iterdir() if path.name[0] != ".")
    return sorted(path for path in files if path.suffix.lower() in IMAGE_SUFFIXES)


def _images(files: Sequence[Path]) -> Array:
    sizes = [_size(path) for path in files]  # of all before any is decoded
    for path, (width, height) in zip(files, sizes, strict=True):
        if (width, height) != sizes[0]:
            expected = f"{files[0]} has {sizes[0][0]}x{sizes[0][1]}"
            raise ValueError(
                f"images of unequal size: {path} has {width}x{height} pixels, {expected}; resize them first"
            )
    images = [_image(path) for path in files]  # [H, W] or [H, W, 3]
    if len({image.ndim for image in images}) > 1:
        images = [image if image.ndim == 3 else np.stack([image] * 3, axis=-1) for image in images]
    stacked = np.stack(images)
    return stacked[:, None] if stacked.ndim == 3 else stacked.transpose(0, 3, 1, 2)


def _size(path: Path) -> tuple[int, int]:
    """Width and height, which say how much memory the pixels take."""
    with _opened_image(path) as image:
        return image.size


def _image(path: Path) -> Array:
    with _opened_image(path) as image:
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"pixels of mode {image.mode} are not 8 bit")
        return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))


@contextmanager
def _opened_image(path: Path) -> Iterator[Any]:
    pillow = import_extra("PIL.Image")
    try:
        # Pillow warns of some sizes and refuses others: here there is one bound, and one error.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pillow.DecompressionBombWarning)
            opened = pillow.open(regular_file(path))
        with opened as image:
            if image.width * image.height > LARGE_IMAGE:
                size = f"{image.width}x{image.height} pixels"
                raise ValueError(f"{size} are more than {LARGE_IMAGE:,}: resize it first")
            yield image
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, pillow.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
