import numpy as np
import pytest
import torch
import torch.nn.functional as F

from caveat.data import load, ood_pairs, out_of_distribution
from caveat.data.dataset import Arrays, assemble


def image_set(channels, height=8, width=8, name="mine"):
    pixels = np.random.default_rng(0).integers(0, 256, (40, channels, height, width), dtype=np.uint8)
    pixels[..., 0] //= 8
    labels = np.arange(40) % 2
    arrays = Arrays(pixels[:25], labels[:25], pixels[25:], labels[25:])
    return assemble(name, arrays, "categorical", ("a", "b"), {"source": "here", "split": "published"})


def to_pixels(x, like):
    mean, std = (torch.tensor(like.preprocessing[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    return x * std + mean


@pytest.mark.parametrize("name", ["photographs", "permuted", "constant", "noise"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 16, 12), (1, 28, 28)])
def test_images_take_the_shape_and_pixels_of_the_set(name, shape):
    like = image_set(*shape)
    (x,) = out_of_distribution(name, like).tensors
    assert x.shape == (15, *shape)
    assert x.dtype == torch.float32
    pixels = to_pixels(x, like)
    assert pixels.min() > -1e-4
    assert pixels.max() < 1 + 1e-4


@pytest.mark.parametrize("name", ["photographs", "permuted", "constant", "noise"])
def test_the_seed_sets_everything_and_touches_nothing(name):
    like = image_set(1)
    state = torch.get_rng_state()
    first, again, other = (out_of_distribution(name, like, seed=seed).tensors[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_permuted_images_share_one_permutation():
    like = image_set(3)
    (x,) = out_of_distribution("permuted", like).tensors
    test = like.test.tensors[0].flatten(2)
    shuffled = x.flatten(2)
    # each shuffled pixel is one pixel of the original, the same for all images and channels
    source = [(test == shuffled[:, :, [i]]).all(0).all(0).nonzero().flatten().tolist() for i in range(64)]
    assert sorted(index for (index,) in source) == list(range(64))
    assert not torch.equal(test, shuffled)


def test_constant_images_have_one_colour():
    (x,) = out_of_distribution("constant", image_set(3)).tensors
    assert torch.equal(x, x[:, :, :1, :1].expand_as(x))
    assert len(torch.unique(x[:, 0, 0, 0])) == 15


def test_photographs_are_smooth_patches_of_many_places():
    like = image_set(3, 16, 16)
    (photographs,), (noise,) = (out_of_distribution(name, like, n=200).tensors for name in ("photographs", "noise"))

    def roughness(x):
        pixels = to_pixels(x, like)
        return (pixels.diff(dim=-1).abs().mean() / pixels.std()).item()

    assert roughness(photographs) < 0.5 * roughness(noise)
    assert len({tuple(patch.flatten()[:20].tolist()) for patch in photographs}) > 150


def test_n_chooses_rows_and_must_be_there():
    like = image_set(1)
    assert len(out_of_distribution("noise", like, n=100)) == 100
    assert len(out_of_distribution("permuted", like, n=5)) == 5
    with pytest.raises(ValueError, match=r"n=16 is more than 'permuted' has \(15\)"):
        out_of_distribution("permuted", like, n=16)


def save_mnist(folder, side=28):
    x = np.random.default_rng(1).integers(0, 256, (12, side, side), dtype=np.uint8)
    y = np.arange(12) % 10
    np.savez(folder / "mnist.npz", x_train=x[:2], y_train=y[:2], x_test=x[2:], y_test=y[2:])
    return torch.from_numpy(x[2:])[:, None] / 255


def test_another_image_set_is_standardised_as_this_one(tmp_path):
    pixels = save_mnist(tmp_path)
    like = image_set(1, 28, 28)
    (x,) = out_of_distribution("mnist", like, tmp_path).tensors
    torch.testing.assert_close(to_pixels(x, like), pixels, atol=1e-5, rtol=0)
    assert len(out_of_distribution("mnist", like, tmp_path, n=4)) == 4


def test_another_image_set_is_resized_and_given_channels(tmp_path):
    pixels = save_mnist(tmp_path)
    like = image_set(3, 32, 32)
    (x,) = out_of_distribution("mnist", like, tmp_path).tensors
    expected = F.interpolate(pixels, (32, 32), mode="bilinear", align_corners=False, antialias=True)
    torch.testing.assert_close(to_pixels(x, like), expected.expand(-1, 3, -1, -1), atol=1e-5, rtol=0)


def test_colour_becomes_luminance(tmp_path):
    colour = np.zeros((12, 3, 32, 32), dtype=np.uint8)
    colour[:, 1] = 255
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    records = np.concatenate([np.arange(12, dtype=np.uint8)[:, None] % 10, colour.reshape(12, -1)], axis=1)
    for file in (*(f"data_batch_{batch}.bin" for batch in range(1, 6)), "test_batch.bin"):
        records.tofile(folder / file)
    like = image_set(1, 28, 28)
    (x,) = out_of_distribution("cifar10", like, tmp_path).tensors
    torch.testing.assert_close(to_pixels(x, like), torch.full((12, 1, 28, 28), 0.587), atol=1e-5, rtol=0)


def test_a_set_is_not_outside_itself(tmp_path):
    with pytest.raises(ValueError, match="'mnist' is no out-of-distribution set for mnist"):
        out_of_distribution("mnist", image_set(1, name="mnist"), tmp_path)


def test_an_image_set_that_is_missing_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="svhn was not found"):
        out_of_distribution("svhn", image_set(1), tmp_path)


def test_tables_are_shuffled_column_by_column():
    like = load("diabetes")
    test = like.test.tensors[0]
    (x,) = out_of_distribution("permuted", like).tensors
    assert torch.equal(x.sort(0).values, test.sort(0).values)
    rows = {tuple(row) for row in test.tolist()}
    assert sum(tuple(row) in rows for row in x.tolist()) < 5


def test_noise_for_tables_fills_the_training_range():
    like = load("diabetes")
    train = like.train.tensors[0]
    (x,) = out_of_distribution("noise", like, n=5000).tensors
    assert (x >= train.amin(0)).all()
    assert (x <= train.amax(0)).all()
    torch.testing.assert_close(x.mean(0), (train.amin(0) + train.amax(0)) / 2, atol=0.15, rtol=0)


def test_image_sets_are_no_match_for_tables():
    with pytest.raises(
        ValueError, match="'photographs' is no out-of-distribution set for diabetes; these are: permuted, noise"
    ):
        out_of_distribution("photographs", load("diabetes"))


def test_digits_are_outside_of_other_images():
    like = image_set(1, 28, 28, name="mnist")
    (x,) = out_of_distribution("digits", like, n=30).tensors
    assert x.shape == (30, 1, 28, 28)
    assert to_pixels(x, like).amax() > 0.9


def test_pairs_are_those_on_disk_and_those_that_are_made(tmp_path):
    save_mnist(tmp_path)
    like = image_set(1, 28, 28, name="fashion_mnist")
    found = ood_pairs(like, tmp_path, n=12)
    assert list(found) == ["mnist", "digits", "permuted", "constant"]
    assert [len(rows) for rows in found.values()] == [10, 12, 12, 12]
    assert list(ood_pairs(image_set(3, name="svhn"), tmp_path)) == ["permuted", "constant"]
    assert list(ood_pairs(load("diabetes"))) == ["permuted", "noise"]


def test_real_pairs(need):
    folder = need("mnist.npz")
    need("cifar10_webp_test.npz")
    digits = load("digits")
    (mnist,) = out_of_distribution("mnist", digits, folder).tensors
    (cifar,) = out_of_distribution("cifar10", digits, folder, n=500).tensors
    assert mnist.shape == (10000, 1, 8, 8)
    assert cifar.shape == (500, 1, 8, 8)
    assert to_pixels(cifar, digits).mean() > 0.4  # photographs are lighter than digits
