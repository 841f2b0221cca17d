import gzip
import hashlib
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from caveat.data import load
from caveat.data.images import CIFAR100, IMAGE_SETS, read_part

IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx_bytes(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def small_images(channels=1, side=28):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (30, channels, side, side), dtype=np.uint8)
    y = np.arange(30, dtype=np.uint8) % 10
    return x[:20], y[:20], x[20:], y[20:]


def write_idx(folder, zipped):
    folder.mkdir(parents=True)
    x_train, y_train, x_test, y_test = small_images()
    for file, array in zip(IDX_FILES, (x_train[:, 0], y_train, x_test[:, 0], y_test), strict=True):
        content = idx_bytes(array)
        (folder / (f"{file}.gz" if zipped else file)).write_bytes(gzip.compress(content) if zipped else content)


def write_cifar10_binary(folder):
    folder.mkdir(parents=True)
    x_train, y_train, x_test, y_test = small_images(channels=3, side=32)
    train = np.concatenate([y_train[:, None], x_train.reshape(20, -1)], axis=1)
    for batch in range(5):
        train[4 * batch : 4 * batch + 4].tofile(folder / f"data_batch_{batch + 1}.bin")
    np.concatenate([y_test[:, None], x_test.reshape(10, -1)], axis=1).tofile(folder / "test_batch.bin")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion_mnist", "fashion_mnist"),
        ("fashion_mnist", "fashion-mnist"),
    ],
)
def test_idx_files_are_found(tmp_path, name, folder, zipped):
    write_idx(tmp_path / folder, zipped)
    dataset = load(name, tmp_path)
    x_train, y_train, _, y_test = small_images()
    expected = torch.from_numpy(x_train).float() / 255
    torch.testing.assert_close(dataset.train.tensors[0], (expected - expected.mean()) / expected.std(correction=0))
    assert dataset.train.tensors[1].tolist() == y_train.tolist()
    assert dataset.test.tensors[1].tolist() == y_test.tolist()
    assert dataset.preprocessing["source"] == str(tmp_path / folder)


def test_mnist_npz_is_found_first(tmp_path):
    write_idx(tmp_path / "mnist", zipped=False)
    x_train, y_train, x_test, y_test = small_images()
    np.savez(tmp_path / "mnist.npz", x_train=x_train[:7, 0], y_train=y_train[:7], x_test=x_test[:, 0], y_test=y_test)
    assert len(load("mnist", tmp_path).train) == 7


def test_cifar_binary_batches_are_found(tmp_path):
    write_cifar10_binary(tmp_path / "cifar-10-batches-bin")
    dataset = load("cifar10", tmp_path)
    assert dataset.train.tensors[0].shape == (20, 3, 32, 32)
    assert dataset.train.tensors[1].tolist() == [label % 10 for label in range(20)]
    assert dataset.class_names[3] == "cat"


def test_folders_are_searched_in_order(tmp_path, monkeypatch):
    for place, count in (("given", 3), ("environment", 4), ("cache/caveat", 5)):
        (tmp_path / place).mkdir(parents=True)
        x_train, y_train, x_test, y_test = small_images()
        arrays = {"x_train": x_train[:count, 0], "y_train": y_train[:count], "x_test": x_test[:, 0], "y_test": y_test}
        np.savez(tmp_path / place / "mnist.npz", **arrays)
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache" / name)
    assert len(load("mnist").train) == 5
    monkeypatch.setenv("CAVEAT_DATA", str(tmp_path / "environment"))
    assert len(load("mnist").train) == 4
    assert len(load("mnist", tmp_path / "given").train) == 3


def test_the_system_folder_is_searched_last(tmp_path, monkeypatch):
    write_idx(tmp_path / "datasets" / "fashion-mnist", zipped=True)
    # the attribute `download` of caveat.data is the function, not the module
    monkeypatch.setattr(sys.modules["caveat.data.download"], "SYSTEM_FOLDER", tmp_path / "datasets")
    assert len(load("fashion_mnist").train) == 20


def test_a_missing_set_names_every_place_and_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("CAVEAT_DATA", str(tmp_path / "environment"))
    with pytest.raises(FileNotFoundError) as error:
        load("mnist", tmp_path / "given")
    message = str(error.value)
    for folder in ("given", "environment"):
        assert str(tmp_path / folder / "mnist.npz") in message
        assert f"{tmp_path / folder / 'mnist' / IDX_FILES[0]} (and 3 more)" in message
    assert str(Path("caveat") / "mnist.npz") in message
    assert 'caveat.data.download("mnist")' in message
    assert "CAVEAT_DATA" in message


def test_a_half_copied_set_names_the_missing_file(tmp_path):
    write_idx(tmp_path / "mnist", zipped=False)
    (tmp_path / "mnist" / IDX_FILES[3]).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}/mnist/{IDX_FILES[3]}\n"):
        load("mnist", tmp_path)


def test_a_wrong_label_names_the_source(tmp_path):
    x_train, y_train, x_test, y_test = small_images()
    np.savez(tmp_path / "mnist.npz", x_train=x_train[:, 0], y_train=y_train + 1, x_test=x_test[:, 0], y_test=y_test)
    with pytest.raises(ValueError, match=rf"{tmp_path}: labels run from 1 to 10, but there are 10 classes"):
        load("mnist", tmp_path)


def test_cifar100_classes_are_the_hundred_in_alphabetical_order():
    assert len(set(CIFAR100)) == 100
    assert list(CIFAR100) == sorted(CIFAR100)


def counts(dataset):
    return [torch.bincount(part.tensors[1]).tolist() for part in (dataset.train, dataset.test)]


def test_real_mnist(need):
    dataset = load("mnist", need("mnist.npz"))
    assert dataset.train.tensors[0].shape == (60000, 1, 28, 28)
    assert counts(dataset) == [
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ]
    np.testing.assert_allclose(
        dataset.preprocessing["mean"] + dataset.preprocessing["std"], [0.1307, 0.3081], atol=5e-5
    )


def test_real_cifar10(need):
    folder = need("cifar10_webp_test.npz")
    dataset = load("cifar10", folder)
    assert counts(dataset) == [[5000] * 10, [1000] * 10]
    np.testing.assert_allclose(dataset.preprocessing["mean"], [0.49140, 0.48216, 0.44653], atol=1e-5)
    np.testing.assert_allclose(dataset.preprocessing["std"], [0.24703, 0.24349, 0.26159], atol=1e-5)
    test, _ = read_part("cifar10", "test", folder)
    records = np.concatenate([test.y[:, None], test.x.reshape(10000, -1)], axis=1)
    # the checksum of test_batch.bin in the original release
    assert hashlib.md5(records.tobytes()).hexdigest() == "803d5f7f4d78ea53de84dbe85f74fb6d"


def test_real_cifar100(need):
    dataset = load("cifar100", need("cifar100_webp_test.npz"))
    assert counts(dataset) == [[500] * 100, [100] * 100]
    assert dataset.n_outputs == len(dataset.class_names) == 100
    np.testing.assert_allclose(dataset.preprocessing["mean"], [0.50708, 0.48655, 0.44092], atol=1e-5)
    np.testing.assert_allclose(dataset.preprocessing["std"], [0.26733, 0.25644, 0.27615], atol=1e-5)


def test_real_fashion_mnist(real_data):
    try:
        dataset = load("fashion_mnist", real_data)
    except FileNotFoundError:
        pytest.skip("Fashion-MNIST is neither in CAVEAT_DATA nor installed as dataset-fashion-mnist")
    assert counts(dataset) == [[6000] * 10, [1000] * 10]
    assert dataset.train.tensors[0].shape == (60000, 1, 28, 28)


def test_every_image_set_has_as_many_names_as_classes():
    sizes = {name: len(image_set.class_names) for name, image_set in IMAGE_SETS.items()}
    assert sizes == {"mnist": 10, "fashion_mnist": 10, "cifar10": 10, "cifar100": 100, "svhn": 10}
