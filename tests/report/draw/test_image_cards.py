import io

import numpy as np
import pytest

from caveat.report.draw.image_cards import png


@pytest.mark.parametrize("shape", [(8, 8), (5, 9), (4, 7, 3)])
def test_png_is_read_back_by_pillow(shape):
    image_module = pytest.importorskip("PIL.Image")
    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    assert np.array_equal(np.asarray(image_module.open(io.BytesIO(png(image)))), image)
