"""Where data sets lie on disk, and how public ones get there.

Nothing is fetched unless `download` is called. Every file is checked against its published checksum before it takes
its place, so that a broken download leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from caveat.data import uci
from caveat.data.dataset import Array, import_extra
from caveat.files import whole_file

RETRIES = 2
SYSTEM_FOLDER = Path("/usr/share/datasets")  # where Debian's dataset-* packages install


@dataclass(frozen=True)
class PublicFiles:
    """Public files of one data set."""

    base_url: str
    checksums: Mapping[str, str]  # file below base_url -> "md5:..."
    folder: str = ""  # where they go below the data folder
    members: tuple[str, ...] = ()  # what to take out of an archive, which is then dropped


SOURCES = {
    "mnist": PublicFiles(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        {
            "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
        },
        folder="mnist",
    ),
    "fashion_mnist": PublicFiles(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        {
            "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
        },
        folder="fashion_mnist",
    ),
    "cifar10": PublicFiles(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530"},
        members=(
            *(f"cifar-10-batches-bin/data_batch_{batch}.bin" for batch in range(1, 6)),
            "cifar-10-batches-bin/test_batch.bin",
        ),
    ),
    "cifar100": PublicFiles(
        "https://www.cs.toronto.edu/~kriz/",
        {"cifar-100-binary.tar.gz": "md5:03b5dce01913d631647c71ecec9e9cb8"},
        members=("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
    ),
    "svhn": PublicFiles(
        "http://ufldl.stanford.edu/housenumbers/",
        {
            "train_32x32.mat": "md5:e26dedcc434d2e4c54c9b2d4a06d8373",
            "test_32x32.mat": "md5:eb5a983be6a315427106f1b164d9cef3",
        },
        folder="svhn",
    ),
}


def download(name: str, data_dir: str | Path | None = None, *, base_url: str | None = None) -> Path:
    """Fetch a public data set into `data_dir` (else CAVEAT_DATA, else the user's cache) and return that folder.

    `base_url` points at a mirror with the same file names. Files that are there and whole are not fetched again.
    """
    root = next(search_folders(data_dir))
    prefix, _, table = name.partition("/")
    if prefix == "uci" and table in uci.TABLES:
        _download_uci(table, root, base_url or uci.BASE_URL)
    elif name in SOURCES:
        _download_source(SOURCES[name], root, base_url or SOURCES[name].base_url)
    else:
        known = [*SOURCES, *(f"uci/{table}" for table in uci.TABLES)]
        raise ValueError(f"{name!r} cannot be downloaded; these can: {', '.join(known)}")
    return root


def _download_source(source: PublicFiles, root: Path, base_url: str) -> None:
    if source.members and all((root / member).is_file() for member in source.members):
        return
    fetch(base_url, source.checksums, root / source.folder)
    if source.members:
        (archive,) = (root / source.folder / file for file in source.checksums)
        with tarfile.open(archive) as tar:
            for member in source.members:
                with whole_file(root / member) as temporary, temporary.open("wb") as file:
                    _extract(tar, member, file)
        archive.unlink()


def _extract(tar: tarfile.TarFile, member: str, file: BinaryIO) -> None:
    content = tar.extractfile(member)
    if content is None:
        raise ValueError(f"{member} in the archive is not a file")
    shutil.copyfileobj(content, file)


def _download_uci(table: str, root: Path, base_url: str) -> None:
    with tempfile.TemporaryDirectory(prefix="caveat-") as folder:
        # no checksums of the single text files are published: the arrays they hold are checked instead
        fetch(base_url, dict.fromkeys(uci.remote_files(table)), Path(folder))
        arrays = uci.from_text_files(Path(folder), table)
    write_npz(root / f"uci_{table}.npz", arrays)


def fetch(base_url: str, checksums: Mapping[str, str | None], folder: Path) -> None:
    """Download files into `folder`, each only once its checksum is right."""
    pooch = import_extra("pooch")
    base_url = base_url.rstrip("/") + "/"
    folder.mkdir(parents=True, exist_ok=True)
    store = pooch.create(path=folder, base_url=base_url, registry=dict(checksums), retry_if_failed=RETRIES)
    try:
        for file in checksums:
            store.fetch(file, progressbar=True)
    except ValueError as error:
        raise ValueError(
            f"{base_url}{file} does not have the published checksum {checksums[file]}; it was not kept. "
            "Try again, or give the base_url of a mirror"
        ) from error
    except OSError as error:  # those of requests are OSErrors too
        raise OSError(f"{base_url}{file} could not be downloaded in {RETRIES + 1} attempts: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # only where nothing arrived


def search_folders(data_dir: str | Path | None) -> Iterator[Path]:
    """Where data sets are looked for, in this order; the first is where downloads go."""
    if data_dir is not None:
        yield Path(data_dir)
    if os.environ.get("CAVEAT_DATA"):
        yield Path(os.environ["CAVEAT_DATA"])
    with contextlib.suppress(ImportError):  # without the extra for data nothing was fetched there
        yield cache_folder()
    yield SYSTEM_FOLDER


def cache_folder() -> Path:
    """The user's cache folder, as the operating system has it."""
    return Path(import_extra("pooch").os_cache("caveat"))


def locate(name: str, layouts: Sequence[Sequence[str]], data_dir: str | Path | None) -> tuple[int, dict[str, Path]]:
    """The first of `layouts` (files, each as it is or with .gz) that some folder holds: its index and the paths."""
    looked = []
    for folder in search_folders(data_dir):
        for index, files in enumerate(layouts):
            candidates = {file: (folder / file, folder / f"{file}.gz") for file in files}
            present = {file: path for file, paths in candidates.items() for path in reversed(paths) if path.is_file()}
            if len(present) == len(candidates):
                return index, present
            missing = [file for file in candidates if file not in present]
            looked.append(f"  {folder / missing[0]}" + (f" (and {len(missing) - 1} more)" if missing[1:] else ""))
    is_public = name in SOURCES or name.startswith("uci/")
    fetching = f'get it with caveat.data.download("{name}"), or ' if is_public else ""
    raise FileNotFoundError(
        f"the data set {name} was not found. Looked for:\n" + "\n".join(looked) + f"\nTo mend this, {fetching}"
        "give the folder that holds it as data_dir or in the environment variable CAVEAT_DATA"
    )


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """A compressed npz file, written whole or not at all."""
    with whole_file(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
