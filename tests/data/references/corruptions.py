"""Makes corruptions.npz: what a public implementation of the corruption suite does to one small image.

    python -m venv reference && reference/bin/pip install --no-deps imagenet-c==0.0.3 imagecorruptions==1.1.2
    reference/bin/pip install numpy scipy scikit-image opencv-python-headless pillow
    reference/bin/python tests/data/references/corruptions.py

`imagenet-c` is the suite's authors' own package. It has the constants of ImageNet at 224 x 224; those of CIFAR, from
Hendrycks and Dietterich's script for CIFAR-10-C, are put in place of them here, and 32 in place of 224. ImageMagick's
motion blur, for which the package needs a system library, is the one of `imagecorruptions`. Each call is made with
numpy's legacy generator at a known seed, whose numbers never change, so that the test can hand the same ones to our
functions. Of Poisson and salt-and-pepper noise, which we draw in another way, moments over many draws are kept.
"""

import importlib.util
import io
import re
import sys
import types
from pathlib import Path

import cv2
import numpy as np
import scipy.ndimage
import skimage
from PIL import Image

CONSTANTS = {
    "gaussian_noise": "[0.04, 0.06, .08, .09, .10]",
    "shot_noise": "[500, 250, 100, 75, 50]",
    "impulse_noise": "[.01, .02, .03, .05, .07]",
    "speckle_noise": "[.06, .1, .12, .16, .2]",
    "gaussian_blur": "[.4, .6, 0.7, .8, 1]",
    "glass_blur": "[(0.05,1,1), (0.25,1,1), (0.4,1,1), (0.25,1,2), (0.4,1,2)]",
    "defocus_blur": "[(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)]",
    "motion_blur": "[(6,1), (6,1.5), (6,2), (8,2), (9,2.5)]",
    "zoom_blur": "[np.arange(1, top, 0.01) for top in (1.06, 1.11, 1.16, 1.21, 1.26)]",
    "fog": "[(.2,3), (.5,3), (0.75,2.5), (1,2), (1.5,1.75)]",
    "snow": "[(0.1,0.2,1,0.6,8,3,0.95), (0.1,0.2,1,0.5,10,4,0.9), (0.15,0.3,1.75,0.55,10,4,0.9), "
    "(0.25,0.3,2.25,0.6,12,6,0.85), (0.3,0.3,1.25,0.65,14,12,0.8)]",
    "spatter": "[(0.62,0.1,0.7,0.7,0.5,0), (0.65,0.1,0.8,0.7,0.5,0), (0.65,0.3,1,0.69,0.5,0), "
    "(0.65,0.1,0.7,0.69,0.6,1), (0.65,0.1,0.5,0.68,0.6,1)]",
    "contrast": "[.75, .5, .4, .3, 0.15]",
    "brightness": "[.05, .1, .15, .2, .3]",
    "saturate": "[(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)]",
    "jpeg_compression": "[80, 65, 58, 50, 40]",
    "pixelate": "[0.95, 0.9, 0.85, 0.75, 0.65]",
    "elastic_transform": "[(0, 0, 32*0.08), (32*0.05, 32*0.2, 32*0.07), (32*0.08, 32*0.06, 32*0.06), "
    "(32*0.1, 32*0.04, 32*0.05), (32*0.1, 32*0.03, 32*0.03)]",
}
SIDE, MANY = 32, 400
DRAWN = ("snow", "spatter", "elastic_transform")  # these twice
BY_MOMENTS = ("shot_noise", "impulse_noise")


class MagickImage:
    """What the suite uses of wand.image.Image, with the motion blur of `imagecorruptions`."""

    def __init__(self, blob: bytes) -> None:
        self.wand = self
        self.pixels = np.asarray(Image.open(io.BytesIO(blob)))

    def make_blob(self) -> bytes:
        file = io.BytesIO()
        Image.fromarray(self.pixels).save(file, "PNG")
        return file.getvalue()


def source(package: str) -> str:
    """The text of a package's corruptions.py, brought up to today's numpy, scipy and scikit-image."""
    spec = importlib.util.find_spec(package)
    text = (Path(spec.submodule_search_locations[0]) / "corruptions.py").read_text()
    for old, new in (
        ("from scipy.ndimage.interpolation import", "from scipy.ndimage import"),
        ("from pkg_resources import resource_filename", ""),
        ("np.float_", "np.float64"),
        ("np.fromstring", "np.frombuffer"),
        ("multichannel=True", "channel_axis=-1"),
        (", mode='L')", ")"),
    ):
        text = text.replace(old, new)
    return text


def suite() -> dict:
    """The functions of the suite at CIFAR's size and constants."""
    helpers: dict = {}
    exec(source("imagecorruptions"), helpers)

    def blur(image, radius, sigma, angle):
        image.pixels = np.round(helpers["_motion_blur"](image.pixels, radius, sigma, angle)).astype(np.uint8)

    api = types.SimpleNamespace(library=types.SimpleNamespace(MagickMotionBlurImage=lambda: None))
    sys.modules |= {
        "wand": types.ModuleType("wand"),
        "wand.image": types.SimpleNamespace(Image=MagickImage),
        "wand.api": api,
        "wand.color": types.ModuleType("wand.color"),
    }
    text = source("imagenet_c").replace("224", str(SIDE)).replace("mapsize=256", f"mapsize={SIDE}")
    for name, table in CONSTANTS.items():
        start = text.index(f"\ndef {name}(")
        found = re.search(r"c = \[.*?\]\[severity - 1\]", text[start:], re.DOTALL)
        text = text[: start + found.start()] + f"c = {table}[severity - 1]" + text[start + found.end() :]
    module: dict = {"__name__": "suite"}
    exec(text, module)
    module["wandlibrary"].MagickMotionBlurImage = blur
    return module


def clean() -> np.ndarray:
    """An image with blobs of colour, a disk and stripes, [32, 32, 3] bytes."""
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    smooth = scipy.ndimage.gaussian_filter(np.random.RandomState(0).normal(size=(SIDE, SIDE, 3)), (3, 3, 0))
    disk = ((x - 0.5) ** 2 + (y - 0.45) ** 2 < 0.07)[..., None] * np.array([0.3, -0.2, 0.1])
    stripes = 0.15 * np.sign(np.sin(8 * np.pi * (x + 0.4 * y)))[..., None] * (y > 0.6)[..., None]
    return np.round(np.clip(0.5 + 0.18 * smooth / smooth.std() + disk + stripes, 0, 1) * 255).astype(np.uint8)


def main() -> None:
    """Corrupt the image at every severity and write the results."""
    functions, image = suite(), clean()
    arrays = {"clean": image}

    def corrupted(name: str, severity: int, seed: int) -> np.ndarray:
        np.random.seed(seed)  # noqa: NPY002 - its numbers never change
        return np.uint8(functions[name](Image.fromarray(image), severity))

    for name in CONSTANTS:
        for severity in range(1, 6):
            if name in BY_MOMENTS:
                # skimage's own generator is not numpy's legacy one: these differ from run to run, their moments hardly
                out = np.stack([corrupted(name, severity, seed) for seed in range(MANY)]) / 255.0
                shares = [np.mean((out == value) & (image != 255 * value)) for value in (0, 1)]
                arrays[f"{name}/{severity}"] = np.array(
                    [np.mean(out - image / 255), np.var(out - image / 255), *shares]
                )
            else:
                repeats = 2 if name in DRAWN else 1
                arrays[f"{name}/{severity}"] = np.stack([corrupted(name, severity, seed) for seed in range(repeats)])
    target = Path(__file__).with_suffix(".npz")
    np.savez_compressed(target, **arrays)
    print(f"{target.name}: {target.stat().st_size:,} bytes; OpenCV {cv2.__version__}, skimage {skimage.__version__}")


if __name__ == "__main__":
    main()
