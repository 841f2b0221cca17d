"""The folders are the architecture: imports point one way only, and importing is quick."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "caveat"

# A file may import from its own layer and from those below it; methods never import methods.
LAYERS = [
    {"files", "knobs", "batches", "randomness"},
    {"data", "models", "native"},
    {"predictive", "likelihoods", "priors", "network", "rows", "task", "storage"},
    {"engine"},
    {"methods"},
    {"posterior", "fitting", "deploy", "bayesian_linear_model"},
    {"evaluate"},
    {"report"},
    {"recipe", "reference"},
    {"bench"},
    {"demo", "cli", "__init__"},
]
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}


def part(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(path: Path) -> set[str]:
    """The parts of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("caveat.")}
    return found & HEIGHT.keys()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = part(path)
    assert own in HEIGHT, f"{own} is in no layer"
    for other in imported(path):
        assert HEIGHT[other] <= HEIGHT[own], f"{own} imports {other}, which is above it"
        assert own != "methods" or other != "methods" or path.stem == "__init__", "methods never import methods"


def test_importing_costs_little_more_than_torch() -> None:
    clock = "time.process_time()"
    code = f"import time; s = {clock}; import torch; t = {clock}; import caveat; print(({clock} - t) / (t - s))"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.35  # of the time that torch itself takes


def test_extras_are_imported_only_where_they_are_used() -> None:
    code = "import sys, caveat; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"tyro", "sklearn", "plotly", "pooch", "PIL", "mnist1d", "matplotlib", "scipy", "arviz_stats"}
