import hashlib
import random

import numpy as np
import pytest
import torch

from caveat.data import embedded, load
from caveat.data.download import cache_folder


def test_digits():
    dataset = load("digits")
    x, y = dataset.train.tensors
    assert x.shape == (1438, 1, 8, 8)
    assert len(dataset.test) == 359
    assert dataset.class_names == tuple("0123456789")
    assert dataset.n_outputs == 10
    counts = torch.bincount(dataset.test.tensors[1])
    assert (counts * 5 - torch.bincount(torch.cat([y, dataset.test.tensors[1]]))).abs().max() <= 5
    mean, std = dataset.preprocessing["mean"][0], dataset.preprocessing["std"][0]
    levels = (torch.unique(x) * std + mean) * 16
    torch.testing.assert_close(levels, torch.arange(17.0), atol=1e-4, rtol=0)


def test_digits_split_is_set_by_the_seed():
    first, again, other = load("digits"), load("digits", seed=0), load("digits", seed=1)
    assert torch.equal(first.test.tensors[0], again.test.tensors[0])
    assert not torch.equal(first.test.tensors[1], other.test.tensors[1])


def test_breast_cancer_is_a_single_logit():
    dataset = load("breast_cancer")
    y = torch.cat([dataset.train.tensors[1], dataset.test.tensors[1]])
    assert dataset.likelihood == "bernoulli"
    assert dataset.n_outputs == 1
    assert dataset.class_names == ("malignant", "benign")
    assert y.shape == (569, 1)
    assert y.sum() == 357


def test_diabetes_keeps_the_units_of_its_target():
    dataset = load("diabetes")
    y = torch.cat([dataset.train.tensors[1], dataset.test.tensors[1]])
    assert dataset.likelihood == "gaussian"
    assert dataset.class_names == ()
    assert y.shape == (442, 1)
    assert (y.min(), y.max()) == (25.0, 346.0)
    torch.testing.assert_close(dataset.train.tensors[0].std(0, correction=0), torch.ones(10))


def test_mnist1d_is_the_published_set_and_is_cached():
    numpy_state, python_state = np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    dataset = load("mnist1d")
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002
    assert random.getstate() == python_state
    assert dataset.train.tensors[0].shape == (4000, 40)
    assert dataset.test.tensors[0].shape == (1000, 40)
    labels = torch.cat([dataset.train.tensors[1], dataset.test.tensors[1]])
    assert torch.bincount(labels).tolist() == [500] * 10
    assert hashlib.sha256(labels.numpy().astype(np.uint8).tobytes()).hexdigest() == MNIST1D_LABELS_SHA256
    path = cache_folder() / "mnist1d.npz"
    written = path.stat().st_mtime_ns
    again = load("mnist1d")
    assert path.stat().st_mtime_ns == written
    assert torch.equal(again.train.tensors[0], dataset.train.tensors[0])


MNIST1D_LABELS_SHA256 = "4f5f4160c519e3c47f9d3e196c161336fcd32126a9efffe4153d6e7c8b73f963"


def small_mnist1d():
    x = np.arange(80, dtype=np.float32).reshape(2, 40)
    return embedded.Arrays(x, np.arange(2), x + 1, np.arange(2))


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_mnist1d_cache_is_made_anew(monkeypatch, damage):
    monkeypatch.setattr(embedded, "_generate_mnist1d", small_mnist1d)
    whole = load("mnist1d")
    path = cache_folder() / "mnist1d.npz"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:200])
    else:
        with np.load(path) as npz:
            content = dict(npz)
        content["x_train"][0, 0] += 1
        np.savez(path, **content)
    assert torch.equal(load("mnist1d").train.tensors[0], whole.train.tensors[0])
    with np.load(path) as npz:
        np.testing.assert_array_equal(npz["x_train"], small_mnist1d().x_train)


def test_mnist1d_without_a_writable_cache_warns(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "_generate_mnist1d", small_mnist1d)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "file" / name)
    with pytest.warns(UserWarning, match="generated anew each time"):
        assert len(load("mnist1d").train) == 2


def test_grainy_digits_are_the_digits_with_noise_within_the_same_range():
    dataset = load("grainy_digits")
    assert (len(dataset.train), len(dataset.test)) == (1000, 797)
    mean, std = dataset.preprocessing["mean"][0], dataset.preprocessing["std"][0]
    images = torch.cat([part.tensors[0] for part in (dataset.train, dataset.test)]) * std + mean
    assert images.min() > -1e-5
    assert images.max() < 1 + 1e-5
    whole = load("digits")
    clean = torch.cat([part.tensors[0] for part in (whole.train, whole.test)])
    grey = (clean * whole.preprocessing["std"][0] + whole.preprocessing["mean"][0]).flatten(1)
    other = images.flatten(1)
    distance = torch.cdist(other, grey).min(1).values  # of each noisy image to the clean one next to it
    assert 0.15 < float(distance.square().mean() / 64) ** 0.5 < 0.375, "noise of 6 of 16 levels, less what is cut off"
    assert not torch.equal(dataset.test.tensors[0], load("grainy_digits", seed=1).test.tensors[0])
