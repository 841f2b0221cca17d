import gzip
import io
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from PIL import Image

from caveat.data import readers

IDX_CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx_bytes(array):
    code = IDX_CODES[array.dtype.str[1:]]
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    array=st.sampled_from(sorted(IDX_CODES)).flatmap(
        lambda dtype: arrays_of.arrays(
            np.dtype(dtype), arrays_of.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)
        )
    ),
    zipped=st.booleans(),
)
def test_idx_round_trip(tmp_path, array, zipped):
    path = tmp_path / "values"
    path.write_bytes(gzip.compress(idx_bytes(array), mtime=0) if zipped else idx_bytes(array))
    read = readers.read_idx(path)
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


IMAGES = idx_bytes(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an idx file: it starts with nothing"),
        (b"\x01" + IMAGES[1:], "is not an idx file: it starts with 01 00 08 03"),
        (b"\0\0\x07\x03" + IMAGES[4:], "is not an idx file: it starts with 00 00 07 03"),
        (IMAGES[:-1], "is cut off or too long: 39 bytes, 40 expected"),
        (IMAGES + b"\0", "is cut off or too long: 41 bytes, 40 expected"),
        (IMAGES[:10], "is cut off or too long: 10 bytes"),
        (gzip.compress(IMAGES, mtime=0)[:-9], "is not a whole gzip file"),
    ],
)
def test_broken_idx_files_are_refused(tmp_path, content, message):
    path = tmp_path / "broken-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"broken-idx3-ubyte {message}"):
        readers.read_idx(path)


def test_idx_images_and_labels_must_match(tmp_path):
    images, labels = tmp_path / "images", tmp_path / "labels"
    images.write_bytes(IMAGES)
    labels.write_bytes(idx_bytes(np.zeros(3, dtype=np.uint8)))
    with pytest.raises(ValueError, match=r"images \(2, 3, 4\) and .*labels \(3,\) are not images and their labels"):
        readers.read_idx_pair([images, labels])


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_cifar_binary(tmp_path, label_bytes):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
    labels = rng.integers(0, 10, (6, label_bytes), dtype=np.uint8)
    records = np.concatenate([labels, images.reshape(6, -1)], axis=1)
    paths = [tmp_path / "one.bin", tmp_path / "two.bin"]
    records[:4].tofile(paths[0])
    records[4:].tofile(paths[1])
    pair = readers.read_cifar_binary(paths, label_bytes)
    np.testing.assert_array_equal(pair.x, images)
    np.testing.assert_array_equal(pair.y, labels[:, -1])  # the fine label comes last
    zipped = tmp_path / "two.bin.gz"
    zipped.write_bytes(gzip.compress(paths[1].read_bytes()))
    again = readers.read_cifar_binary([paths[0], zipped], label_bytes)
    assert all(np.array_equal(*both) for both in zip(pair, again, strict=True))
    zipped.write_bytes(zipped.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"two\.bin\.gz is not a whole gzip file"):
        readers.read_cifar_binary([zipped], label_bytes)
    paths[1].write_bytes(paths[1].read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"two.bin is not a whole CIFAR batch: .* not a multiple of"):
        readers.read_cifar_binary(paths, label_bytes)


def write_mosaic(path, images, labels, cut=None):
    """A 2 x 3 mosaic of six images [6, 32, 32, 3]."""
    mosaic = images.reshape(2, 3, 32, 32, 3).swapaxes(1, 2).reshape(64, 96, 3)
    buffer = io.BytesIO()
    Image.fromarray(mosaic).save(buffer, "webp", lossless=True)
    webp = np.frombuffer(buffer.getvalue()[:cut], dtype=np.uint8)
    np.savez(path, webp=webp, offsets=np.array([0, len(webp)]), y=labels)


def test_webp_mosaics(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    write_mosaic(tmp_path / "a.npz", images, np.arange(6))
    pair = readers.read_webp_mosaics([tmp_path / "a.npz"] * 2)
    np.testing.assert_array_equal(pair.x, np.concatenate([images, images]).transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(pair.y, [0, 1, 2, 3, 4, 5] * 2)


def test_broken_webp_mosaics_are_refused(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    write_mosaic(tmp_path / "cut.npz", images, np.arange(6), cut=100)
    with pytest.raises(ValueError, match=r"cut.npz holds a mosaic that cannot be decoded"):
        readers.read_webp_mosaics([tmp_path / "cut.npz"])
    write_mosaic(tmp_path / "labels.npz", images, np.arange(5))
    with pytest.raises(ValueError, match=r"labels.npz holds 6 images but 5 labels"):
        readers.read_webp_mosaics([tmp_path / "labels.npz"])


def test_svhn_mat(tmp_path):
    from scipy.io import savemat

    images = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    savemat(tmp_path / "train.mat", {"X": images.transpose(2, 3, 1, 0), "y": np.array([[1], [10], [9], [10], [2]])})
    pair = readers.read_svhn_mat([tmp_path / "train.mat"])
    np.testing.assert_array_equal(pair.x, images)
    np.testing.assert_array_equal(pair.y, [1, 0, 9, 0, 2])
    savemat(tmp_path / "other.mat", {"X": np.zeros(3)})
    with pytest.raises(ValueError, match=r"other.mat is not an SVHN file with X and y"):
        readers.read_svhn_mat([tmp_path / "other.mat"])
    (tmp_path / "junk.mat").write_bytes(b"junk" * 100)
    with pytest.raises(ValueError, match=r"junk.mat is not an SVHN file with X and y"):
        readers.read_svhn_mat([tmp_path / "junk.mat"])


def test_npz_with_missing_keys_names_them(tmp_path):
    np.savez(tmp_path / "part.npz", x_train=np.zeros(3))
    with pytest.raises(ValueError, match=r"part.npz lacks y_train; it holds x_train"):
        readers.read_npz_pair([tmp_path / "part.npz"], "train")


def test_npz_that_is_none_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "whole.npz", x_train=np.random.default_rng(0).normal(size=500))
    whole = (tmp_path / "whole.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    for content in (b"", b"junk", whole[: len(whole) // 2], bytes(flipped), buffer.getvalue()):
        (tmp_path / "broken.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"broken.npz cannot be read as an npz file"):
            readers.read_npz(tmp_path / "broken.npz", ["x_train"])


def test_npz_with_pickled_objects_is_refused(tmp_path):
    np.savez(tmp_path / "objects.npz", x_train=np.array([{}, None]))
    with pytest.raises(ValueError, match=r"objects.npz cannot be read as an npz file without pickled objects"):
        readers.read_npz(tmp_path / "objects.npz", ["x_train"])


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ((7,), (7, 1)),
        ((7, 2), (7, 2)),
        ((7, 5, 6), (7, 1, 5, 6)),
        ((7, 3, 5, 6), (7, 3, 5, 6)),
        ((7, 5, 6, 3), (7, 3, 5, 6)),
    ],
)
def test_npz_inputs_become_columns_or_channel_first_images(tmp_path, stored, read):
    np.savez(tmp_path / "a.npz", x_train=np.zeros(stored), y_train=np.zeros(7))
    assert readers.read_npz_pair([tmp_path / "a.npz"], "train").x.shape == read


def test_npz_inputs_of_rank_five_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=np.zeros((2, 3, 4, 5, 6)), y_train=np.zeros(2))
    with pytest.raises(ValueError, match=r"a.npz: x_train has shape \(2, 3, 4, 5, 6\)"):
        readers.read_npz_pair([tmp_path / "a.npz"], "train")


def image_file(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def test_folder_of_grey_images(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 5), dtype=np.uint8)
    for name, image in zip(("dog/b.png", "cat/x.PNG", "dog/a.bmp"), pixels, strict=True):
        image_file(tmp_path / name, image)
    (tmp_path / "dog" / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden").mkdir()
    x, y, class_names = readers.read_image_folder(tmp_path)
    assert class_names == ("cat", "dog")
    np.testing.assert_array_equal(y, [0, 1, 1])
    np.testing.assert_array_equal(x, pixels[[1, 2, 0]][:, None])


def test_folder_with_some_colour_is_rgb(tmp_path):
    grey, colour = np.full((4, 5), 7, dtype=np.uint8), np.zeros((4, 5, 3), dtype=np.uint8)
    colour[..., 2] = 9
    image_file(tmp_path / "a" / "grey.png", grey)
    image_file(tmp_path / "b" / "colour.png", colour)
    x, _, _ = readers.read_image_folder(tmp_path)
    np.testing.assert_array_equal(x[:, :, 0, 0], [[7, 7, 7], [0, 0, 9]])


def test_broken_image_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} is empty"):
        readers.read_image_folder(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match="cat holds no images"):
        readers.read_image_folder(tmp_path)
    image_file(tmp_path / "cat" / "a.png", np.zeros((4, 5), dtype=np.uint8))
    image_file(tmp_path / "cat" / "b.png", np.zeros((6, 5), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"unequal size: .*b.png has 5x6 pixels, .*a.png has 5x4"):
        readers.read_image_folder(tmp_path)
    (tmp_path / "cat" / "b.png").write_bytes((tmp_path / "cat" / "a.png").read_bytes()[:40])
    with pytest.raises(ValueError, match=r"b.png cannot be read as an image"):
        readers.read_image_folder(tmp_path)
    image_file(tmp_path / "cat" / "b.png", np.zeros((4, 5), dtype=np.uint16))
    with pytest.raises(ValueError, match=r"b.png cannot be read as an image: pixels of mode I;16 are not 8 bit"):
        readers.read_image_folder(tmp_path)
