import numpy as np
import pytest
import torch
from scipy import ndimage

from caveat.data import rotate


def images(height=7, width=7, dtype=torch.float64):
    return torch.randn(4, 3, height, width, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("quarters", [-5, -1, 0, 1, 2, 3, 4, 7])
def test_quarter_turns_are_exact(quarters):
    x = images(dtype=torch.float32)
    assert torch.equal(rotate(x, 90 * quarters, fill=3.0), torch.rot90(x, quarters, (-2, -1)))


def test_identity_and_half_turn_are_exact_for_oblong_images():
    x = images(5, 8)
    assert torch.equal(rotate(x, 0), x)
    assert torch.equal(rotate(x, -180), torch.rot90(x, 2, (-2, -1)))


def test_the_turn_is_continuous_at_quarter_turns():
    x = images()
    for degrees in (0, 90, 180, 270):
        torch.testing.assert_close(rotate(x, degrees + 1e-9), rotate(x, degrees), atol=1e-7, rtol=0)


@pytest.mark.parametrize("size", [(9, 9), (6, 11)])
@pytest.mark.parametrize("degrees", [17.0, 90.0, -123.0])
def test_rotation_agrees_with_scipy_inside_the_image(size, degrees):
    x = images(*size)
    smooth = torch.from_numpy(ndimage.gaussian_filter(x.numpy(), (0, 0, 2, 2)))
    expected = ndimage.rotate(
        smooth.numpy(), degrees, axes=(3, 2), reshape=False, order=1, mode="grid-constant", cval=-2.0
    )
    np.testing.assert_allclose(rotate(smooth, degrees, fill=-2.0).numpy(), expected, atol=1e-9)


def test_fill_may_differ_between_channels():
    rotated = rotate(torch.zeros(2, 3, 9, 9), 45.0, fill=[1.0, 2.0, 3.0])
    torch.testing.assert_close(rotated[:, :, 0, 0], torch.tensor([[1.0, 2.0, 3.0]] * 2))
    assert (rotated[:, :, 4, 4] == 0).all()


def test_constant_images_of_the_fill_do_not_change():
    x = torch.full((1, 1, 8, 8), -0.42)
    torch.testing.assert_close(rotate(x, 33.0, fill=-0.42), x)


def test_the_input_is_left_alone():
    x = images()
    before = x.clone()
    rotate(x, 30.0).add_(1)
    rotate(x, 0.0).add_(1)
    assert torch.equal(x, before)


@pytest.mark.parametrize("bad", [torch.zeros(3, 8, 8), torch.zeros(1, 3, 8, 8, dtype=torch.uint8)])
def test_other_inputs_are_refused(bad):
    with pytest.raises(ValueError, match="rotate takes floating-point images"):
        rotate(bad, 10.0)


def test_an_angle_that_is_none_is_refused():
    with pytest.raises(ValueError, match="degrees=nan is not an angle"):
        rotate(images(), float("nan"))
