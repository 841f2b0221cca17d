"""The corruption suite against its authors' package, with the same random numbers; see references/corruptions.py."""

from pathlib import Path

import numpy as np
import pytest
import torch

from caveat.data.shifts import CORRUPTIONS, shift
from caveat.data.shifts.operators import cut_bytes
from caveat.data.shifts.weather import PANES, frosted_panes

REFERENCE = Path(__file__).parents[1] / "references" / "corruptions.npz"
BY_MOMENTS = ("shot_noise", "impulse_noise")
WHOLE = ("contrast", "fog", "jpeg_compression", "motion_blur", "pixelate", "spatter")  # equal wherever we looked


class Legacy:
    """The numbers that the reference drew, in its order, in the place of `RowDraws`."""

    def __init__(self, seed):
        self.random = np.random.RandomState(seed)  # its numbers never change

    def __len__(self):
        return 1

    def normal(self, channels, height, width):
        drawn = self.random.normal(size=(height, width, channels))
        return torch.from_numpy(drawn).permute(2, 0, 1)[None].float()

    def uniform(self, *shape):
        return torch.from_numpy(self.random.random_sample((1, *shape))).float()


class LegacySteps(Legacy):
    """Of glass blur: steps of one pixel, drawn from the last pixel to the first."""

    def uniform(self, two, height, width):
        back = np.zeros((1, two, height, width), dtype=bool)
        for row in range(height - 1, 1, -1):
            for column in range(width - 1, 1, -1):
                back[0, :, row, column] = self.random.randint(-1, 1, size=two) < 0
        return torch.from_numpy(np.where(back, 0.25, 0.75)).float()


@pytest.fixture(scope="module")
def reference():
    with np.load(REFERENCE) as content:
        return dict(content)


def pixels(reference):
    return torch.from_numpy(reference["clean"]).permute(2, 0, 1)[None] / 255


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", [name for name in CORRUPTIONS if name not in (*BY_MOMENTS, "frost")])
def test_the_same_numbers_give_the_same_image(name, severity, reference):
    for seed, expected in enumerate(reference[f"{name}/{severity}"]):
        draws = (LegacySteps if name == "glass_blur" else Legacy)(seed)
        found = CORRUPTIONS[name].change(pixels(reference), severity, draws).clamp(0, 1) * 255
        found = (cut_bytes(found / 255) * 255).round()[0].permute(1, 2, 0).numpy()
        off = np.abs(found - expected.astype(float))
        # A result that is a whole byte but for rounding may be cut to the byte below on either side.
        assert (off > 0).mean() < (0.02 if name in WHOLE else 0.1)
        assert (off > 1).mean() < 0.01
        assert off.mean() < 0.1


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", BY_MOMENTS)
def test_noise_has_the_same_moments(name, severity, reference):
    """Mean and variance of the change, and the shares that became black and white."""
    many = np.repeat(reference["clean"][None], 400, 0)
    many[:, 0, 0, 0] = np.arange(400) % 256  # images draw by their content: make them differ
    many[:, 0, 1, 0] = np.arange(400) // 256
    change = shift(many, name, severity)[:, 1:] / 255.0
    clean = many[:, 1:]
    mean, variance, black, white = reference[f"{name}/{severity}"]
    difference = change - clean / 255
    error = np.sqrt(variance / difference.size)
    assert abs(difference.mean() - mean) < 6 * error + 2e-5
    assert abs(difference.var() / variance - 1) < 0.05
    if name == "impulse_noise":
        shares = [np.mean((change == value) & (clean != 255 * value)) for value in (0, 1)]
        np.testing.assert_allclose(shares, [black, white], rtol=0.05)


def test_frost_is_a_share_of_the_image_and_a_share_of_a_pane(reference):
    """The suite's photographs are not ours; of it there are the shares, and colours that are like theirs."""
    x = pixels(reference).expand(64, -1, -1, -1).clone()
    x[:, 0, 0, 0] = torch.arange(64) / 255
    panes = frosted_panes(128)
    low, high = panes.amin(), panes.amax()
    for severity, (of_image, of_pane) in enumerate([(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)], 1):
        pane = (shift(x, "frost", severity) - of_image * x) / of_pane
        inside = shift(x, "frost", severity) < 1  # what is not cut off
        assert (pane[inside] >= low - 1e-4).all()
        assert (pane[inside] <= high + 1e-4).all()
    mean, spread = panes.mean((2, 3)), panes.mean(1).std((1, 2))
    torch.testing.assert_close(mean, torch.tensor([colour for colour, _ in PANES]), atol=0.03, rtol=0)
    torch.testing.assert_close(spread, torch.tensor([spread for _, spread in PANES]), atol=0.02, rtol=0)
