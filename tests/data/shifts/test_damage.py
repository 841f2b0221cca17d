"""Damage grows with severity: on photographs, by the measure in which the published constants order a corruption.

Most grow in their distance from the clean image. Some do not, whoever makes them, and are looked at in their own terms:
frost also dims the image, glass is smoother where pixels move as often, elastic gives up affine for local distortion,
saturation first falls and then rises, spatter is first water and then mud, and motion blur of severities 3 and 4
differs by weights below 1e-9.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

from caveat.data import CORRUPTIONS, shift
from caveat.data.ood import _photographs

OWN_TERMS = ("frost", "glass_blur", "elastic_transform", "saturate", "spatter", "motion_blur")


@pytest.fixture(scope="module")
def photographs():
    return _photographs(60, 32, 32, torch.Generator().manual_seed(0)).clamp(0, 1)


def distances(x, name):
    return [(shift(x, name, severity) - x).square().mean().sqrt().item() for severity in range(1, 6)]


def grows(values, by=1e-4):
    return all(second > first + by for first, second in itertools.pairwise(values))


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name not in OWN_TERMS])
def test_the_distance_from_the_clean_image_grows(name, photographs):
    found = distances(photographs, name)
    assert grows(found), found


@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name not in (*OWN_TERMS, "saturate")])
def test_the_distance_grows_for_grey_images_of_another_size(name, photographs):
    grey = F.interpolate(photographs.mean(1, keepdim=True), (28, 28), mode="bilinear", antialias=True).clamp(0, 1)
    found = distances(grey, name)
    assert grows(found), found


def test_motion_blur_grows_but_for_two_severities_that_are_one(photographs):
    first, second, third, fourth, fifth = distances(photographs, "motion_blur")
    assert grows([first, second, third, fifth])
    assert fourth == pytest.approx(third, abs=1e-4)


def test_frost_hides_more_of_the_image(photographs):
    """How much of the result is the image: its slope on the clean one, against what is laid over it."""
    found = []
    for severity in range(1, 6):
        frosted = shift(photographs * 0.4, "frost", severity)  # dark enough that nothing is cut off
        clean = photographs * 0.4
        slope = ((frosted - frosted.mean()) * (clean - clean.mean())).mean() / clean.var()
        found.append(((frosted - slope * clean).mean() / slope).item())
    assert grows(found, 0.01), found


def test_glass_moves_pixels_more_often_and_then_smooths_more(photographs):
    once_a, once_b, once_c, twice_a, twice_b = distances(photographs, "glass_blur")
    assert min(twice_a, twice_b) > 1.2 * max(once_a, once_b, once_c)
    detail = [shift(photographs, "glass_blur", severity).diff(dim=-1).abs().mean().item() for severity in range(1, 6)]
    assert detail[0] > detail[1] > detail[2]
    assert detail[3] > detail[4]


def test_elastic_bends_more():
    """On ramps the result is the place a pixel came from; what an affine map does not explain is the bending."""
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    x = torch.stack([rows, columns, rows * 0]).div(62).add(0.25).expand(40, -1, -1, -1).clone()
    x[:, 2, 0, 0] = torch.arange(40) / 255  # each image has draws of its own
    inner = slice(9, 23)  # away from the border, which mirrors
    design = torch.stack([rows, columns, torch.ones_like(rows)], -1)[inner, inner].reshape(-1, 3)
    found = []
    for severity in range(1, 6):
        places = shift(x, "elastic_transform", severity)[:, :2, inner, inner].flatten(2) * 62  # [N, 2, P]
        fitted = design @ torch.linalg.lstsq(design.expand(40, 1, -1, -1).squeeze(1), places.transpose(1, 2)).solution
        found.append((places.transpose(1, 2) - fitted).square().mean().sqrt().item())
    assert grows(found, 0.005), found
    assert found[0] < 1e-3, "the first severity is affine"


def test_saturation_falls_twice_and_rises_three_times(photographs):
    found = distances(photographs, "saturate")
    assert grows(found[:2], 0.01)
    assert grows(found[2:], 0.01)

    def colour(x):
        return (x.amax(1) - x.amin(1)).mean().item()

    levels = [colour(shift(photographs, "saturate", severity)) for severity in range(1, 6)]
    assert levels[1] < levels[0] < colour(photographs) < levels[2] < levels[3] < levels[4]


def test_spatter_covers_more_with_water_and_more_with_mud(photographs):
    found = distances(photographs, "spatter")
    assert grows(found[:3], 0.005)
    assert grows(found[3:], 0.005)
    assert found[3] > found[1]


def test_cifar_images(need):
    from caveat.data.images import read_part

    x = torch.from_numpy(read_part("cifar10", "test", need("cifar10_webp_test.npz"))[0].x[:200].copy()) / 255
    for name in CORRUPTIONS:
        if name not in OWN_TERMS:
            found = distances(x, name)
            assert grows(found), (name, found)
