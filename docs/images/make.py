"""Makes report.png and bench.png: the tops of the pages of `caveat demo` and of a small bench, as Chromium shows them.

Run with `python docs/images/make.py`, with the name of a picture to make that one alone. It needs Chromium (or Chrome)
on the path; the demo and the bench take a minute or two each.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from caveat import bench, report
from caveat.demo import run_demo

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
EXPERIMENT = """
title = "Digits under shift"
data = ["digits"]
models = ["networks.py:digits_mlp"]
seeds = [0, 1, 2]
prior_precision = 10.0
ood = ["photographs"]
[reference]
digits = "digits"
[map]
epochs = 40
[shifts]
rotation = [15, 30, 45, 60, 75, 90]
[methods.deep_ensemble]
training.epochs = 40
[methods.swag]
training = { epochs = 15, learning_rate = 0.05 }
[methods.last_layer_laplace]
[methods.mean_field_vi]
training = { epochs = 60, learning_rate = 0.01 }
"""


def demo_page(folder: Path) -> Path:
    """The page of the demo."""
    run_demo(folder / "demo", progress=False)
    return folder / "demo" / "report.html"


def bench_page(folder: Path) -> Path:
    """The page of a small bench."""
    shutil.copy(HERE.parents[1] / "experiments" / "networks.py", folder)
    (folder / "digits.toml").write_text(EXPERIMENT)
    done = bench.run_bench(folder / "digits.toml", bench.Place(folder / "digits", torch.device("cpu")))
    return report.write(done.out)


PICTURES: dict[str, tuple[Callable[[Path], Path], str]] = {  # page, and size in pixels
    "report": (demo_page, "1280,1410"),  # the answers, and the plots that compare each method with MAP
    "bench": (bench_page, "1280,2550"),  # the verdicts, what they rest on, the table, the first curves
}


def main() -> None:
    """Make the pages, take the pictures."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit("no Chromium or Chrome on the path: install one to take the pictures")
    for name in sys.argv[1:] or PICTURES:
        make, size = PICTURES[name]
        target = HERE / f"{name}.png"
        with tempfile.TemporaryDirectory() as folder:
            page = make(Path(folder)).as_uri()
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
            picture = [f"--window-size={size}", f"--screenshot={target}"]
            subprocess.run([browser, *options, *picture, page], check=True, capture_output=True)
        Image.open(target).convert("RGB").quantize(128).save(target, optimize=True)  # a third of the size
        print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
