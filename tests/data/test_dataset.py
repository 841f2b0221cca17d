import json

import numpy as np
import pytest
import torch

from caveat.data.dataset import Arrays, assemble, import_extra, random_split

PROVENANCE = {"source": "here", "split": "published"}


def table(n_train=20, n_test=6, columns=3):
    rng = np.random.default_rng(0)
    return Arrays(
        rng.normal(5, 2, (n_train, columns)),
        rng.normal(size=n_train),
        rng.normal(5, 2, (n_test, columns)),
        np.ones(n_test),
    )


def test_inputs_are_standardised_with_training_rows_only():
    arrays = table()
    dataset = assemble("t", arrays, "gaussian", (), PROVENANCE)
    mean, std = arrays.x_train.mean(0), arrays.x_train.std(0)
    np.testing.assert_allclose(dataset.train.tensors[0], (arrays.x_train - mean) / std, atol=1e-6)
    np.testing.assert_allclose(dataset.test.tensors[0], (arrays.x_test - mean) / std, atol=1e-6)
    np.testing.assert_allclose(dataset.preprocessing["mean"], mean)
    np.testing.assert_allclose(dataset.preprocessing["std"], std)
    assert dataset.train.tensors[0].dtype == torch.float32
    assert dataset.train.tensors[1].shape == (20, 1)
    assert dataset.n_outputs == 1


def test_the_raw_arrays_are_left_alone():
    arrays = table()
    before = arrays.x_train.copy()
    assemble("t", arrays, "gaussian", (), PROVENANCE)
    np.testing.assert_array_equal(arrays.x_train, before)


def test_constant_columns_are_centred_and_reported():
    arrays = table()
    arrays.x_train[:, 1] = 0.998  # its mean is not exactly representable as a sum, so std is not exactly 0
    arrays.x_test[:, 1] = 1.998
    dataset = assemble("t", arrays, "gaussian", (), PROVENANCE)
    assert dataset.preprocessing["constant_features"] == [1]
    torch.testing.assert_close(dataset.train.tensors[0][:, 1], torch.zeros(20), atol=1e-6, rtol=0)
    torch.testing.assert_close(dataset.test.tensors[0][:, 1], torch.ones(6), atol=1e-6, rtol=0)


def test_images_are_standardised_per_channel_and_know_their_black():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (30, 3, 4, 4), dtype=np.uint8)
    pixels[:, 1] //= 4
    pixels[0, :, 0, 0] = 0
    dataset = assemble(
        "i", Arrays(pixels, np.arange(30) % 2, pixels, np.arange(30) % 2), "categorical", ("a", "b"), PROVENANCE
    )
    x = dataset.train.tensors[0]
    torch.testing.assert_close(x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.ones(3))
    torch.testing.assert_close(x[0, :, 0, 0], torch.tensor(dataset.preprocessing["black"]))
    np.testing.assert_allclose(dataset.preprocessing["mean"], (pixels / 255).mean((0, 2, 3)), rtol=1e-5)
    assert dataset.preprocessing["pixel_range"] == [0.0, 255.0]


def test_floating_point_images_are_ranged_by_the_training_pixels():
    pixels = np.linspace(-1.0, 3.0, 10 * 16).reshape(10, 1, 4, 4)
    dataset = assemble(
        "i", Arrays(pixels, np.arange(10) % 2, pixels, np.arange(10) % 2), "categorical", ("a", "b"), PROVENANCE
    )
    assert dataset.preprocessing["pixel_range"] == [-1.0, 3.0]
    np.testing.assert_allclose(dataset.preprocessing["mean"], [0.5])


def test_binary_targets_are_one_float_column():
    arrays = table()._replace(y_train=np.arange(20) % 2, y_test=np.zeros(6, dtype=int))
    dataset = assemble("b", arrays, "bernoulli", ("no", "yes"), PROVENANCE)
    assert dataset.n_outputs == 1
    assert dataset.train.tensors[1].dtype == torch.float32
    torch.testing.assert_close(dataset.train.tensors[1][:4], torch.tensor([[0.0], [1.0], [0.0], [1.0]]))


def test_preprocessing_is_json():
    dataset = assemble("t", table(), "gaussian", (), PROVENANCE)
    assert json.loads(json.dumps(dataset.preprocessing)) == dataset.preprocessing


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y_test": np.ones(5)}, "here: the test part has 6 inputs and 5 targets"),
        ({"x_train": np.ones((0, 3)), "y_train": np.ones(0)}, "here: the train part has 0 inputs"),
        ({"x_test": np.ones((6, 4))}, r"here: train and test inputs differ in shape: \(3,\) and \(4,\)"),
        ({"x_test": np.full((6, 3), np.nan)}, "here: the test inputs have missing or infinite values"),
        ({"y_train": np.array(["a"] * 20)}, "here: the train targets are of type <U1, not numbers"),
    ],
)
def test_unusable_arrays_are_refused_with_their_source(change, message):
    with pytest.raises(ValueError, match=message):
        assemble("t", table()._replace(**change), "gaussian", (), PROVENANCE)


def test_labels_beyond_the_classes_are_refused():
    arrays = table()._replace(y_train=np.arange(20) % 3, y_test=np.zeros(6, dtype=int))
    with pytest.raises(ValueError, match="here: labels run from 0 to 2, but there are 2 classes"):
        assemble("t", arrays, "categorical", ("a", "b"), PROVENANCE)


def test_random_split_is_a_partition_set_by_the_seed():
    x, y = np.arange(103)[:, None], np.arange(103) % 4
    first, again, other = (random_split(x, y, seed, stratify=True) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.x_test, again.x_test)
    assert not np.array_equal(first.x_test, other.x_test)
    assert sorted(np.concatenate([first.x_train, first.x_test]).ravel()) == list(range(103))
    np.testing.assert_array_equal(first.y_train, first.x_train.ravel() % 4)  # rows stay together


def test_stratified_split_takes_a_fifth_of_every_class():
    y = np.repeat([0, 1, 2], [10, 50, 40])
    split = random_split(np.zeros((100, 1)), y, seed=3, stratify=True)
    np.testing.assert_array_equal(np.bincount(split.y_test), [2, 10, 8])


def test_random_split_leaves_the_global_generators_alone():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    random_split(np.zeros((10, 1)), np.zeros(10), seed=0, stratify=False)
    assert torch.equal(torch.get_rng_state(), torch_state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002


def test_too_few_rows_to_split():
    with pytest.raises(ValueError, match="4 rows are too few"):
        random_split(np.zeros((4, 1)), np.zeros(4), seed=0, stratify=False)


def test_a_missing_extra_says_how_to_install_it():
    with pytest.raises(ImportError, match=r'pip install "caveat\[data\]"'):
        import_extra("no_such_module_anywhere")
