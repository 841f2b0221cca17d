"""Makes report.png, the picture of the README: the top of the page that `caveat demo` writes, as Chromium shows it.

Run with `python docs/images/make.py`; it needs Chromium (or Chrome) on the path.
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

from caveat.demo import run_demo

SIZE = "1280,1410"  # pixels: the answers, and the plots that compare each method with MAP
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Run the demo, take the picture."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit("no Chromium or Chrome on the path: install one to take the picture")
    target = Path(__file__).with_name("report.png")
    with tempfile.TemporaryDirectory() as folder:
        run_demo(Path(folder) / "demo", progress=False)
        page = (Path(folder) / "demo" / "report.html").as_uri()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
        picture = [f"--window-size={SIZE}", f"--screenshot={target}"]
        subprocess.run([browser, *options, *picture, page], check=True, capture_output=True)
    print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
