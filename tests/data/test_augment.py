import pytest
import torch
from torch.nn import functional as F

from caveat.data import crop_and_flip


def test_every_image_is_a_crop_of_its_padded_self_or_of_its_mirror() -> None:
    images = torch.rand(40, 2, 6, 7, generator=torch.Generator().manual_seed(0))
    moved = crop_and_flip(images, torch.Generator().manual_seed(1), padding=2)
    padded = F.pad(images, [2] * 4, mode="reflect")
    flipped, offsets = 0, set()
    for original, result in zip(padded, moved, strict=True):
        matches = [
            (mirror, i, j)
            for mirror in (False, True)
            for i in range(5)
            for j in range(5)
            if torch.equal(result.flip(-1) if mirror else result, original[:, i : i + 6, j : j + 7])
        ]
        assert len(matches) == 1
        flipped += matches[0][0]
        offsets.add(matches[0][1:])
    assert 10 < flipped < 30
    assert len(offsets) > 15
    assert torch.equal(moved, crop_and_flip(images, torch.Generator().manual_seed(1), padding=2))


def test_rows_that_are_no_images_are_refused() -> None:
    for shape in ((3, 8), (3, 1, 4, 4)):
        with pytest.raises(ValueError, match="crop_and_flip is for images"):
            crop_and_flip(torch.zeros(shape), torch.Generator().manual_seed(0))
