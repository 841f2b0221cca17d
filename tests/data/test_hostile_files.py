"""Files that are meant to hang a reader or to fill the memory are refused from what they say of their size."""

import gzip
import io
import os
import struct
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from caveat.data import load, readers, tables

FIFO = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")


def peak_of(function, *arguments, match):
    """The memory that Python asked for until a ValueError of that text came."""
    tracemalloc.start()
    with pytest.raises(ValueError, match=match):
        function(*arguments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_a_table_of_30_000_columns_takes_seconds(tmp_path):
    width = 30_000
    names = ",".join(f"c{column}" for column in range(width))
    row = ",".join(["1.5"] * (width - 1))
    (tmp_path / "wide.csv").write_text("\n".join([names, *(f"{row},{label}.5" for label in range(3))]))
    began = time.process_time()
    table = tables.read_table(tmp_path / "wide.csv")
    encoding = tables.learn_encoding(table, table.header[:-1])
    x = encoding.encode(table).x
    assert x.shape == (3, width - 1)
    inputs = tables.plain_numbers(table.header[:-1]).encode(table).x
    assert time.process_time() - began < 10  # over a minute where every name is looked for in all of the header
    np.testing.assert_array_equal(inputs, x)


def test_a_file_without_line_ends_is_no_table(tmp_path):
    (tmp_path / "line.csv").write_bytes(b"1," * 2**26)
    peak = peak_of(tables.read_table, tmp_path / "line.csv", match=r"line.csv is not a text file .*: line 1 has more")
    assert peak < 2**27  # it was held four bytes a character, and once more for each separator that was tried


@pytest.mark.parametrize("value", ["1e300", "-4e38", "inf"])
@pytest.mark.parametrize("column", ["a", "y"])
def test_values_that_single_precision_cannot_hold_are_named(tmp_path, value, column):
    """They became zeros, all but one, or infinite targets."""
    cells = [{"a": f"{row}.5", "y": f"{row}.25"} for row in range(60)]
    cells[43][column] = value
    lines = ["a,y", *(f"{cell['a']},{cell['y']}" for cell in cells)]
    (tmp_path / "large.csv").write_text("\n".join(lines))
    reason = "beyond single precision" if "e" in value else "missing or infinite"
    with pytest.raises(ValueError, match=rf"large.csv, row 44, column '{column}': '{value}' is .*{reason}"):
        load(str(tmp_path / "large.csv"))


@pytest.mark.parametrize(("value", "reason"), [(1e300, "beyond single precision"), (np.nan, "missing or infinite")])
@pytest.mark.parametrize("key", ["x_train", "y_test"])
def test_values_of_an_npz_are_named_too(tmp_path, value, reason, key):
    rng = np.random.default_rng(0)
    arrays = {f"{name}_{part}": rng.normal(size=(20, 1)) for name in "xy" for part in ("train", "test")}
    arrays[key][7] = value
    np.savez(tmp_path / "large.npz", **arrays)
    what = f"{key[2:]} {'inputs' if key[0] == 'x' else 'targets'}"
    with pytest.raises(ValueError, match=rf"large.npz: the {what} have .*{reason}.*row 8"):
        load(str(tmp_path / "large.npz"))


def test_an_npz_that_unpacks_to_gigabytes_is_refused(tmp_path):
    path = tmp_path / "bomb.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (2**30,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open("x.npy", "w") as member:
        member.write(header.getvalue())
        for _ in range(2**6):
            member.write(bytes(2**24))
    assert path.stat().st_size < 2**22
    peak = peak_of(readers.read_npz_inputs, path, match=r"bomb.npz .*x.npy holds .* unpack to 1,073,741,")
    assert peak < 2**26


def test_an_npz_that_claims_more_than_it_holds_is_refused(tmp_path):
    path = tmp_path / "claim.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", header.getvalue() + bytes(80))
    peak = peak_of(readers.read_npz_inputs, path, match=r"x.npy is to have shape \(1000000000000,\), .* but holds 80")
    assert peak < 2**26


def test_a_large_array_that_does_compress_is_read(tmp_path):
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros((2**20, 8)))  # 64 MiB in 64 KiB
    assert readers.read_npz_inputs(tmp_path / "zeros.npz").shape == (2**20, 8)


def test_a_gzipped_file_that_unpacks_to_gigabytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LARGE_BYTES", 2**20)
    (tmp_path / "bomb").write_bytes(gzip.compress(bytes(2**26), mtime=0))
    with pytest.raises(ValueError, match=r"bomb holds .* bytes that unpack to"):
        readers.read_idx(tmp_path / "bomb")


def png(width, height):
    """A grey image of zeros; only its header says how large it is."""
    chunks = b""
    for kind, content in (
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(1000))),
        (b"IEND", b""),
    ):
        chunks += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return b"\x89PNG\r\n\x1a\n" + chunks


@pytest.mark.parametrize("side", [8_000, 12_000, 60_000, 2**31 - 1])
def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path, side):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "large.png").write_bytes(png(side, side))
    peak = peak_of(readers.read_image_folder, tmp_path, match=r"a/large.png cannot be read as an image: .*pixels")
    assert peak < 2**24


def test_sizes_are_compared_before_any_image_is_decoded(tmp_path):
    (tmp_path / "a").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "a" / "1.png")
    (tmp_path / "a" / "2.png").write_bytes(png(6_000, 6_000))
    with pytest.raises(ValueError, match=r"2.png has 6000x6000 pixels, .*1.png has 4x4"):
        readers.read_images(tmp_path)


@FIFO
@pytest.mark.parametrize("name", ["pipe.csv", "pipe.npz"])
def test_a_pipe_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} is not a regular file"):
        load(str(tmp_path / name))


@FIFO
def test_a_pipe_among_images_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "pipe.png")
    with pytest.raises(ValueError, match=r"pipe.png .*is not a regular file"):
        readers.read_image_folder(Path(tmp_path))
