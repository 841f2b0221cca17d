"""What every shift keeps: type, shape, range, its seed, and an image's independence of its batch."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import caveat
from caveat.data import CORRUPTIONS, SHIFTS, load, shift, shifted
from caveat.data.dataset import Arrays, assemble
from caveat.data.shifts.operators import gaussian_blurred

OF_IMAGES = [name for name, found in SHIFTS.items() if found.group != "rows"]
OF_ROWS = [name for name, found in SHIFTS.items() if found.group == "rows"]
RANDOM = {
    *("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "glass_blur", "motion_blur", "snow", "frost"),
    *("fog", "elastic_transform", "spatter", "translation"),
}


def bytes_of(n=5, channels=3, height=16, width=16):
    rng = torch.Generator().manual_seed(0)
    smooth = gaussian_blurred(torch.randn(n, channels, height, width, generator=rng), 1.5)
    return (128 + 55 * smooth / smooth.std()).clamp(0, 255).to(torch.uint8)


def hardest(name):
    return SHIFTS[name].severities[-1] if name != "rotation" else 40


def test_the_suite_has_nineteen_corruptions_of_five_severities():
    assert len(CORRUPTIONS) == 19
    assert {found.severities for found in CORRUPTIONS.values()} == {(1, 2, 3, 4, 5)}
    assert SHIFTS["rotation"].severities == tuple(range(15, 181, 15))
    assert caveat.shift is shift


@pytest.mark.parametrize("name", OF_IMAGES)
@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 28, 28), (3, 9, 14), (1, 8, 8), (3, 4, 5), (1, 33, 20)])
def test_dtype_shape_and_range_stay(name, shape):
    x = bytes_of(3, *shape)
    for severity in {SHIFTS[name].severities[0], hardest(name)}:
        found = shift(x, name, severity)
        assert (found.dtype, found.shape) == (x.dtype, x.shape)
        for dtype in (torch.float32, torch.float64):
            image = shift(x.to(dtype) / 255, name, severity)
            assert (image.dtype, image.shape) == (dtype, x.shape)
            assert 0 <= image.min() <= image.max() <= 1


@pytest.mark.parametrize("name", OF_IMAGES)
def test_layouts_and_types_are_the_same_images(name):
    x = bytes_of()
    expected = shift(x, name, hardest(name))
    last = shift(x.movedim(1, 3).numpy(), name, hardest(name))
    assert isinstance(last, np.ndarray)
    assert last.dtype == np.uint8
    np.testing.assert_array_equal(last, expected.movedim(1, 3).numpy())
    floats = shift(x / 255, name, hardest(name))
    assert ((floats * 255 - expected).abs() <= 1.001).float().mean() > 0.999  # bytes are cut
    grey = bytes_of(channels=1)
    flat = shift(grey[:, 0], name, hardest(name))
    assert torch.equal(flat, shift(grey, name, hardest(name))[:, 0])


@pytest.mark.parametrize("name", OF_IMAGES)
def test_an_image_is_the_same_in_any_batch(name):
    x = bytes_of(8)
    state = torch.get_rng_state()
    whole = shift(x, name, hardest(name), seed=3)
    assert torch.equal(shift(x, name, hardest(name), seed=3), whole)
    assert torch.equal(shift(x[[6, 2]], name, hardest(name), seed=3), whole[[6, 2]])
    assert torch.equal(shift(x[5:6], name, hardest(name), seed=3), whole[5:6])
    assert torch.equal(torch.get_rng_state(), state)
    other = shift(x, name, hardest(name), seed=4)
    assert torch.equal(other, whole) == (name not in RANDOM)


def test_more_images_than_are_taken_at_once(monkeypatch):
    x = bytes_of(7)
    whole = shift(x, "fog", 5)
    monkeypatch.setattr("caveat.data.shifts.registry.AT_ONCE", 2 * x[0].numel())
    assert torch.equal(shift(x, "fog", 5), whole)


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_different_images_have_different_draws(name):
    x = bytes_of(1).expand(2, -1, -1, -1).clone()
    x[1, 0, 0, 0] ^= 1
    first, second = shift(x, name, hardest(name)).float()
    assert (first - second).abs()[:, 4:].mean() > 0.05, "one bit of one pixel, and another noise"


@pytest.mark.parametrize("name", OF_IMAGES)
def test_the_input_is_left_alone_and_may_be_empty(name):
    x = bytes_of()
    before = x.clone()
    shift(x, name, hardest(name))
    floats = x / 255
    shift(floats, name, hardest(name)).zero_()
    assert torch.equal(x, before)
    assert torch.equal(floats, before / 255)
    assert shift(x[:0], name, hardest(name)).shape == x[:0].shape


@pytest.mark.parametrize("name", OF_IMAGES)
@pytest.mark.parametrize("value", [0, 255])
def test_black_and_white_images_are_no_trouble(name, value):
    found = shift(torch.full((2, 3, 12, 12), value / 255), name, hardest(name))
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("severity", [0, 6, 2.5, -1])
def test_a_severity_that_is_none_is_refused(severity):
    with pytest.raises(ValueError, match=r"fog has no severity .*: it has 1, 2, 3, 4, 5 \(of five\)"):
        shift(bytes_of(), "fog", severity)


def test_bad_input_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="there is no shift 'jpeg': did you mean 'jpeg_compression'"):
        shift(bytes_of(), "jpeg", 1)
    with pytest.raises(ValueError, match="there is no shift 'xyzzy': there are gaussian_noise, "):
        shift(bytes_of(), "xyzzy", 1)
    with pytest.raises(ValueError, match=r"1 or 3 channels, or \[N, H, W\], not \(5, 4, 16, 16\)"):
        shift(torch.zeros(5, 4, 16, 16), "fog", 1)
    with pytest.raises(ValueError, match="at least 4 x 4 pixels, not 3 x 8"):
        shift(torch.zeros(5, 1, 3, 8), "fog", 1)
    with pytest.raises(ValueError, match=r"floats in \[0, 1\], but these run from -1 to 2"):
        shift(torch.tensor([-1.0, 2.0]).repeat(8).expand(1, 1, 16, 16), "fog", 1)
    with pytest.raises(ValueError, match=r"floats in \[0, 1\], but these run from nan to nan"):
        shift(torch.full((1, 1, 8, 8), torch.nan), "fog", 1)
    with pytest.raises(ValueError, match=r"bytes or floats in \[0, 1\], not torch.int64"):
        shift(torch.zeros(1, 1, 8, 8, dtype=torch.long), "fog", 1)
    with pytest.raises(TypeError, match="a numpy array or a tensor, not a list"):
        shift([[1.0]], "fog", 1)
    for name, severity in (("rotation", float("nan")), ("rotation", float("inf")), ("translation", -0.1)):
        with pytest.raises(ValueError, match=f"{name} has no severity {severity}: it has "):
            shift(bytes_of(), name, severity)
    with pytest.raises(ValueError, match=r"feature_shift takes rows of floats \[N, D\], not torch.uint8"):
        shift(bytes_of(), "feature_shift", 1)


def image_set():
    pixels = bytes_of(40).numpy()
    labels = np.arange(40) % 2
    arrays = Arrays(pixels[:25], labels[:25], pixels[25:], labels[25:])
    return assemble("mine", arrays, "categorical", ("a", "b"), {"source": "here", "split": "published"}), pixels[25:]


def test_a_family_is_the_test_rows_in_their_own_standardisation():
    data, pixels = image_set()
    family = shifted(data, "gaussian_noise", seed=2)
    assert list(family) == [1, 2, 3, 4, 5]
    (batch, labels), *others = DataLoader(family[3], batch_size=10)
    assert len(others) == 1
    expected = shift(torch.from_numpy(pixels[:10]) / 255, "gaussian_noise", 3, seed=2)
    mean, std = (torch.tensor(data.preprocessing[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    torch.testing.assert_close(batch, (expected - mean) / std, atol=1e-4, rtol=0)
    assert torch.equal(labels, data.test.tensors[1][:10])
    assert torch.equal(family[3][7][0], batch[7]), "one row alone is the same"


def test_a_family_of_rotations_is_what_rotate_gives():
    digits = load("digits")
    (x, _), *_ = DataLoader(shifted(digits, "rotation", (30,))[30], batch_size=400)
    expected = caveat.data.rotate(digits.test.tensors[0], 30, fill=digits.preprocessing["black"])
    torch.testing.assert_close(x, expected, atol=1e-4, rtol=0)


def test_a_shift_that_does_not_fit_the_data_is_refused():
    with pytest.raises(ValueError, match="fog is no shift for diabetes, which has rows; these are: feature_shift, "):
        shifted(load("diabetes"), "fog")
    with pytest.raises(ValueError, match="signal_noise is no shift for mine, which has images; these are: gaussian_"):
        shifted(image_set()[0], "signal_noise")
    with pytest.raises(ValueError, match="fog has no severity 9"):
        shifted(image_set()[0], "fog", (1, 9))
