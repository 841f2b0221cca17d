"""`make matrix`: the contract tests, the README and the tutorial on several versions of Python and torch.

Each combination has an environment of its own in `.matrix/`, into which the package is installed with what it needs.
One that cannot be had (no such Python here, no such build of torch in the index) is skipped, and it is said. Builds of
torch with CUDA take some 6 GB each; an environment is removed when its tests are done, unless --keep.

    python tests/version_matrix.py                          all
    python tests/version_matrix.py --only 3.10:2.6 --keep   one
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMBINATIONS = ("3.10:2.6", "3.11:2.8", "3.12:2.10", "3.13:2.13", "3.14:2.13")  # Python:torch
TESTS = ("tests/test_contract.py", "README.md", "docs/tutorial.md")
NEEDED = ("pytest>=8", "hypothesis>=6.100", "sybil>=9", "torchmetrics>=1.6", "scipy>=1.13", "pandas>=2.0")
SECONDS = 3600  # for the tests of one combination


def main() -> int:
    """Run every combination and print a line for each; 1 where tests failed."""
    parser = argparse.ArgumentParser(description="Tests on several versions of Python and torch.")
    parser.add_argument("--only", nargs="+", default=COMBINATIONS, metavar="PYTHON:TORCH")
    parser.add_argument("--keep", action="store_true", help="keep the environments, to use them again")
    options = parser.parse_args()
    failed = False
    print(f"{'Python':8} {'torch':8} {'passed':>7} {'failed':>7} {'minutes':>8}  note", flush=True)
    for combination in options.only:
        python, torch = combination.split(":")
        began = time.monotonic()
        passed, broken, note = run_one(python, torch, options.keep)
        minutes = (time.monotonic() - began) / 60
        print(f"{python:8} {torch:8} {passed:>7} {broken:>7} {minutes:8.1f}  {note}", flush=True)
        failed |= broken not in ("", "0")
    return int(failed)


def run_one(python: str, torch: str, keep: bool) -> tuple[str, str, str]:
    """How many tests passed and failed, and a note; blank where the combination cannot be had."""
    place = ROOT / ".matrix" / f"python{python}-torch{torch}"
    command = interpreter(python)
    if command is None:
        return "", "", f"skipped: no Python {python} here"
    try:
        environment = place / "bin" / "python"
        if not environment.exists():
            subprocess.run([command, "-m", "venv", str(place)], check=True)
        pip = [str(environment), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run([*pip, f"torch=={torch}.*", *NEEDED, f"{ROOT}[cli]"], capture_output=True, text=True)
        if done.returncode:
            return "", "", f"skipped: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}"
        subprocess.run([str(environment), "-m", "pip", "check"], check=True, capture_output=True)
        return tested(environment)
    except subprocess.CalledProcessError as error:
        return "", "1", f"{' '.join(map(str, error.cmd[-2:]))} failed: {(error.stdout or b'').decode()[-200:]}"
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def tested(environment: Path) -> tuple[str, str, str]:
    """Run the tests in an environment."""
    command = [str(environment), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *TESTS]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "", "1", f"stopped after {SECONDS} s"
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
    counts = {word: number for number, word in re.findall(r"(\d+) (passed|failed|error)", last)}
    broken = str(int(counts.get("failed", 0)) + int(counts.get("error", 0)))
    first = next((line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    return counts.get("passed", "0"), broken if counts else "1", first or ("" if counts else last)


def interpreter(version: str) -> str | None:
    """A Python of this version: on the path, or among those of pyenv."""
    on_path = shutil.which(f"python{version}")
    if on_path and subprocess.run([on_path, "-c", ""], capture_output=True).returncode == 0:
        return on_path
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = sorted(pyenv.glob(f"{version}.*/bin/python"))
    return str(found[-1]) if found else None


if __name__ == "__main__":
    sys.exit(main())
