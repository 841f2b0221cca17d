"""Image sets known by name: their classes, and the forms in which they may lie on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from caveat.data.dataset import Arrays, DataSet, assemble
from caveat.data.download import locate
from caveat.data.embedded import DIGITS
from caveat.data.readers import (
    PartArrays,
    read_cifar_binary,
    read_idx_pair,
    read_npz_pair,
    read_svhn_mat,
    read_webp_mosaics,
)

FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100 = tuple(
    """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
    caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
    flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
    poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm""".split()  # noqa: SIM905
)


class Part(NamedTuple):
    """The training or the test part of a layout: its files below a data folder, and their reader."""

    read: Callable[[Sequence[Path]], PartArrays]
    files: tuple[str, ...]


class FileLayout(NamedTuple):
    """One form of a data set on disk."""

    train: Part
    test: Part


class ImageSet(NamedTuple):
    """An image set: what it is, its classes, and the layouts it is looked for in."""

    description: str
    class_names: tuple[str, ...]
    layouts: tuple[FileLayout, ...]


def _npz(file: str) -> FileLayout:
    return FileLayout(*(Part(partial(read_npz_pair, part=part), (file,)) for part in ("train", "test")))


def _idx(folder: str) -> FileLayout:
    parts = ((f"{folder}/{part}-images-idx3-ubyte", f"{folder}/{part}-labels-idx1-ubyte") for part in ("train", "t10k"))
    return FileLayout(*(Part(read_idx_pair, files) for files in parts))


def _webp(name: str) -> FileLayout:
    train = tuple(f"{name}_webp_train{batch}.npz" for batch in range(1, 6))
    return FileLayout(Part(read_webp_mosaics, train), Part(read_webp_mosaics, (f"{name}_webp_test.npz",)))


def _binary(train: tuple[str, ...], test: str, label_bytes: int) -> FileLayout:
    read = partial(read_cifar_binary, label_bytes=label_bytes)
    return FileLayout(Part(read, train), Part(read, (test,)))


def _mat(folder: str) -> FileLayout:
    return FileLayout(*(Part(read_svhn_mat, (f"{folder}/{part}_32x32.mat",)) for part in ("train", "test")))


IMAGE_SETS = {
    "mnist": ImageSet(
        "handwritten digits, 60000 + 10000 grey 28 x 28, 10 classes",
        DIGITS,
        (_npz("mnist.npz"), _idx("mnist"), _idx("MNIST/raw")),
    ),
    "fashion_mnist": ImageSet(
        "articles of clothing, 60000 + 10000 grey 28 x 28, 10 classes",
        FASHION,
        (_npz("fashion_mnist.npz"), _idx("fashion_mnist"), _idx("fashion-mnist"), _idx("FashionMNIST/raw")),
    ),
    "cifar10": ImageSet(
        "photographs, 50000 + 10000 RGB 32 x 32, 10 classes",
        CIFAR10,
        (
            _webp("cifar10"),
            _binary(
                tuple(f"cifar-10-batches-bin/data_batch_{batch}.bin" for batch in range(1, 6)),
                "cifar-10-batches-bin/test_batch.bin",
                label_bytes=1,
            ),
        ),
    ),
    "cifar100": ImageSet(
        "photographs, 50000 + 10000 RGB 32 x 32, 100 classes",
        CIFAR100,
        (_webp("cifar100"), _binary(("cifar-100-binary/train.bin",), "cifar-100-binary/test.bin", label_bytes=2)),
    ),
    "svhn": ImageSet(
        "house numbers, 73257 + 26032 RGB 32 x 32, 10 classes",
        DIGITS,
        (_mat("svhn"),),
    ),
}


def load_images(name: str, data_dir: str | Path | None) -> DataSet:
    """A named image set with its published split."""
    (x_train, y_train), _ = read_part(name, "train", data_dir)
    (x_test, y_test), source = read_part(name, "test", data_dir)
    provenance = {"source": str(source.parent), "split": "published"}
    arrays = Arrays(x_train, y_train, x_test, y_test)
    return assemble(name, arrays, "categorical", IMAGE_SETS[name].class_names, provenance)


def read_part(name: str, part: Literal["train", "test"], data_dir: str | Path | None) -> tuple[PartArrays, Path]:
    """Bytes [N, C, H, W] and labels [N] of one part, and one of the files they came from."""
    layouts = IMAGE_SETS[name].layouts
    files = [tuple(dict.fromkeys(layout.train.files + layout.test.files)) for layout in layouts]
    index, paths = locate(name, files, data_dir)
    chosen = layouts[index].train if part == "train" else layouts[index].test
    files_of_part = [paths[file] for file in chosen.files]
    return chosen.read(files_of_part), files_of_part[0]
