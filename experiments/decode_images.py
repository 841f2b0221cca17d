"""Image sets as plain files that need nothing but numpy to be read.

    python experiments/decode_images.py cifar10 cifar100 --out decoded      # then CAVEAT_DATA=decoded

Reads the sets as they lie in CAVEAT_DATA (lossless webp mosaics need Pillow) and writes CIFAR in the binary layout of
its first release, gzipped: a row of a file is the label (of CIFAR-100 two, the first of which is 0 here), then 3 x 32 x
32 bytes. What was read back is compared with what was written.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np

from caveat.data.images import IMAGE_SETS, read_part

PARTS = ("train", "test")


def files_of(name: str, part: str) -> tuple[str, ...]:
    """The files of the binary layout."""
    binary = IMAGE_SETS[name].layouts[-1]
    return (binary.train if part == "train" else binary.test).files


def write(name: str, part: str, data_dir: Path | None, out: Path) -> None:
    """All files of one part, and a check that they read as what they are."""
    (x, y), _ = read_part(name, part, data_dir)  # type: ignore[arg-type]
    labels = np.stack([np.zeros_like(y), y], 1) if name == "cifar100" else y[:, None]
    rows = np.concatenate([labels.astype(np.uint8), x.reshape(len(x), -1)], 1)
    files = files_of(name, part)
    for file, piece in zip(files, np.array_split(rows, len(files)), strict=True):
        path = out / f"{file}.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(piece.tobytes(), compresslevel=6, mtime=0))
        print(path, f"{path.stat().st_size:,} bytes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=("cifar10", "cifar100"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    for name in given.names:
        for part in PARTS:
            write(name, part, given.data_dir, given.out)
        for part in PARTS:
            before, after = (read_part(name, part, place)[0] for place in (given.data_dir, given.out))
            assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)), f"{name}, {part}"


if __name__ == "__main__":
    main()
