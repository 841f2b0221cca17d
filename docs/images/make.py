"""Makes report.png and bench.png, the tops of the pages of six posteriors and of the demo, as Chromium shows them.

Run with `python docs/images/make.py`, with the name of a picture to make that one alone. It needs Chromium (or Chrome)
on the path; each takes a minute or two.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from PIL import Image

import caveat
from caveat import data, models, report
from caveat.demo import run_demo
from caveat.randomness import seeded

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TRAINED = {"MAP tempered": caveat.MAP(temperature=True), "DeepEnsemble": caveat.DeepEnsemble(members=4)}
AFTER_TRAINING = {
    "LastLayerLaplace": caveat.LastLayerLaplace(),
    "SubnetworkLaplace": caveat.SubnetworkLaplace(weights=500),
    "SWAG": caveat.SWAG(),
}


def runs_page(folder: Path) -> Path:
    """The page of six posteriors on digits, one fit each."""
    digits = data.load("digits")
    with seeded(0):
        module = models.mlp(64, 10)
    task = caveat.Task(module, digits.train, caveat.Categorical(), validation=0.1)
    point = caveat.fit(task, caveat.MAP())
    posteriors = {"MAP": point} | {label: caveat.fit(task, method) for label, method in TRAINED.items()}
    posteriors |= {label: caveat.fit(task, method, start=point) for label, method in AFTER_TRAINING.items()}
    asked = data.conditions(digits, angles=(15, 30, 45), ood=("photographs",))
    for label, posterior in posteriors.items():
        folder_of_run = folder / "results" / label.replace(" ", "_")
        caveat.evaluate(
            posterior, asked.inside, ood=asked.ood, folder=folder_of_run, label=label, class_names=digits.class_names
        )
    return report.write(folder / "results")


def demo_page(folder: Path) -> Path:
    """The page of the demo."""
    run_demo(folder / "demo", progress=False)
    return folder / "demo" / "report.html"


PICTURES: dict[str, tuple[Callable[[Path], Path], str]] = {  # page, and size in pixels
    "report": (runs_page, "1280,1360"),  # the answers, and the plots that compare each method with MAP
    "bench": (demo_page, "1280,2550"),  # the verdicts, what they rest on, the table, the first curves
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
        Image.open(target).convert("RGB").quantize(256).save(target, optimize=True)  # a third of the size
        print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
