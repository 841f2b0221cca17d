"""The folders are the architecture: imports point one way, rooms are entered by their doors, importing is quick."""

import ast
import graphlib
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "caveat"

# A file may import from its own layer and from those below it; methods never import methods.
LAYERS = [
    {"files", "knobs", "batches", "randomness", "copies", "notebooks"},
    {"data", "models", "native"},
    {"predictive", "likelihoods", "priors", "network", "rows", "task", "storage", "typed_json"},
    {"engine"},
    {"methods"},
    {"posterior", "posterior_folder", "fitting", "deploy", "serve", "bayesian_linear_model"},
    {"evaluate"},
    {"recipe", "references"},
    {"bench"},
    {"report"},
    {"plot", "demo"},
    {"cli", "public", "integrations", "__init__"},
]
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}

# A room is a folder with one idea. Its files may import from the rooms named here and from the floor, and anyone
# outside of it imports from its door, the `__init__`. Every folder below a parent with rooms is a room.
ROOMS: dict[str, set[str]] = {
    "engine/training": set(),
    "engine/row_gradients": set(),
    "engine/tangents": set(),
    "engine/linear_model": set(),
    "engine/sparse": {"engine/training"},
    "engine/linearised": {"engine/linear_model", "engine/row_gradients", "engine/tangents"},
    "engine/laplace": {"engine/row_gradients"},
    "engine/served": set(),
    "engine/channels": {"engine/sparse", "engine/training"},
    "engine/variational": {"engine/channels", "engine/sparse", "engine/training"},
    "engine/members": {"engine/training"},
    "engine/chains": {"engine/training"},
    "engine/sparse_chains": {
        "engine/chains",
        "engine/channels",
        "engine/sparse",
        "engine/training",
        "engine/variational",
    },
    "bench/plan": set(),
    "evaluate/metrics": set(),
    "evaluate/predictions": set(),
    "evaluate/feature_distance": set(),
    "evaluate/diagnosis": set(),
    "evaluate/comparison": {"evaluate/metrics"},
    "evaluate/fidelity": {"evaluate/metrics", "evaluate/predictions"},
    "evaluate/scoring": {"evaluate/feature_distance", "evaluate/metrics", "evaluate/predictions", "evaluate/fidelity"},
    "report/saved": set(),
    "report/numbers": {"report/saved"},
    "report/draw": {"report/saved", "report/numbers"},
    "report/runs_page": {"report/saved", "report/numbers", "report/draw"},
    "report/bench_page": {"report/saved", "report/numbers", "report/draw"},
    "report/chains_page": {"report/draw"},
}
# Files beside the rooms that the rooms may import. Others beside them, the door of the parent first, stand above.
FLOOR: dict[str, set[str]] = {
    "engine": {
        "captured_steps",
        "cost",
        "distributed",
        "flat_weights",
        "forward_probe",
        "fresh_weights",
        "golden_section",
        "method",
        "own_initialisers",
        "predictors",
        "run",
        "running_moments",
        "state_checks",
        "torch_settings",
    },
    "evaluate": set(),
    "bench": set(),
    "report": {"wording"},
}

MOST_FILES = 15  # Python files of a folder; `methods` has one a method
WITHOUT_LIMIT = {"methods"}


def part(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def names_imported(path: Path) -> set[str]:
    """The dotted names that a file imports from the package, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith("caveat.")}


def modules_imported(path: Path) -> set[Path]:
    """The modules of the package that a file imports from, as paths below it, without an ending."""
    modules = set()
    for name in names_imported(path):
        module = Path(*name.split(".")[1:])
        exists = (PACKAGE / module).is_dir() or (PACKAGE / module).with_suffix(".py").is_file()
        modules.add(module if exists else module.parent)
    return modules


def room_of(module: Path) -> str | None:
    """The room that a file or a module is in."""
    return next((room for room in ROOMS if module.is_relative_to(room)), None)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = part(path)
    assert own in HEIGHT, f"{own} is in no layer"
    for other in {name.split(".")[1] for name in names_imported(path)} & HEIGHT.keys():
        assert HEIGHT[other] <= HEIGHT[own], f"{own} imports {other}, which is above it"
        assert own != "methods" or other != "methods" or path.stem == "__init__", "methods never import methods"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_are_entered_by_their_doors_and_from_above(path: Path) -> None:
    here = path.relative_to(PACKAGE)
    own = room_of(here)
    for module in modules_imported(path):
        room, parent = room_of(module), module.parts[0] if module.parts else ""
        if room is not None and room != own:
            assert module == Path(room), f"{here} imports {module}: outsiders import from the door, {room}"
            assert own is None or own.split("/")[0] != parent or room in ROOMS[own], f"{own} must not import {room}"
        elif room is None and own is not None and own.split("/")[0] == parent:
            is_floor = len(module.parts) > 1 and module.parts[1] in FLOOR[parent]
            assert is_floor, f"{here} imports {module}, which is above its room"


def test_the_rooms_form_a_graph_without_cycles() -> None:
    order = list(graphlib.TopologicalSorter(ROOMS).static_order())  # a cycle is an error
    assert set(order) == set(ROOMS), "a room may import only rooms that there are"
    for parent in FLOOR:
        folders = {f"{parent}/{door.parent.name}" for door in (PACKAGE / parent).glob("*/__init__.py")}
        assert folders == {room for room in ROOMS if room.split("/")[0] == parent}


@pytest.mark.parametrize("room", ROOMS)
def test_doors_say_what_is_behind_them_and_who_comes_in(room: str) -> None:
    door = ast.parse((PACKAGE / room / "__init__.py").read_text())
    assert "Called by" in " ".join((ast.get_docstring(door) or "").split())
    assert all(isinstance(node, ast.Expr | ast.ImportFrom | ast.Assign) for node in door.body), "a door holds no code"


@pytest.mark.parametrize("room", ROOMS)
def test_no_name_of_a_door_is_that_of_a_file_behind_it(room: str) -> None:
    door = ast.parse((PACKAGE / room / "__init__.py").read_text())
    names = {alias.asname or alias.name for n in door.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    assert not names & {path.stem for path in (PACKAGE / room).glob("*.py")}


def test_the_written_plan_names_every_room_and_files_that_there_are() -> None:
    plan = (PACKAGE.parent / "docs/architecture.md").read_text()
    for name in re.findall(r"`([\w/]+\.py)`", plan):
        assert any((PACKAGE / parent / name).is_file() for parent in ("", "engine", "..")), f"there is no {name}"
    for room in ROOMS:
        assert f"`{room.removeprefix('engine/')}/`" in plan, f"{room} is not in the plan"


def test_folders_are_small_enough_to_take_in() -> None:
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        if folder.name not in WITHOUT_LIMIT:
            assert len(list(folder.glob("*.py"))) <= MOST_FILES, f"{folder.relative_to(PACKAGE)} needs rooms"


def test_benchmarks_and_experiments_import_what_there_is() -> None:
    for folder in ("benchmarks", "experiments"):
        for path in (PACKAGE.parent / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("caveat"):
                    module = importlib.import_module(str(node.module))
                    for alias in node.names:
                        name = f"{node.module}.{alias.name}"
                        is_module = hasattr(module, "__path__") and importlib.util.find_spec(name) is not None
                        assert hasattr(module, alias.name) or is_module, f"{path} imports {name}, which is not there"


def test_importing_costs_little_more_than_torch() -> None:
    clock = "time.process_time()"
    # Without the collector of garbage, which would look through all of torch's objects at a moment of its choice.
    code = f"import gc, time; gc.disable(); s = {clock}; import torch; t = {clock}; "
    code += f"import caveat; caveat.Task; u = {clock}; "
    code += "print((u - t) / (t - s))"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    assert min(float(run.stdout) for run in runs) < 0.4  # of the time that torch itself takes


def test_extras_are_imported_only_where_they_are_used() -> None:
    code = "import sys, caveat; caveat.Task; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"tyro", "sklearn", "plotly", "pooch", "PIL", "mnist1d", "matplotlib", "scipy", "arviz_stats"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["fit", "--help"], ["report", "--help"], ["fit"]])
def test_help_is_shown_without_torch(arguments: list[str]) -> None:
    code = f"""
import contextlib, sys
from caveat.cli import main
with contextlib.suppress(SystemExit):
    main({arguments})
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_found_whatever_was_imported_first() -> None:
    code = """
import caveat.evaluate.metrics, caveat.deploy, caveat
from caveat import *
assert caveat.evaluate is evaluate and callable(evaluate) and callable(caveat.deploy)
assert caveat.Task is Task and caveat.HMC.__name__ == "HMC" and caveat.data.load
assert {"Task", "HMC", "evaluate"} <= set(dir(caveat)) and not hasattr(caveat, "Tusk")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_modules_that_share_their_names_with_functions_are_known() -> None:
    package = importlib.import_module("caveat")
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert modules & set(package.__all__) == package._FUNCTIONS
