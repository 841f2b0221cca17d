"""Installing must not change the user's torch nor pull torchvision."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def test_core_dependencies_are_the_four() -> None:
    core = [r for r in map(Requirement, metadata.requires("caveat") or []) if r.marker is None]
    assert {r.name for r in core} == {"torch", "numpy", "safetensors", "tqdm"}


def test_nothing_that_is_installed_for_any_extra_is_torchvision() -> None:
    """Follow the requirements of the package with all its extras, as far as they are installed."""
    seen: set[str] = set()
    waiting = [(Requirement(r).name, Requirement(r).extras) for r in metadata.requires("caveat") or []]
    while waiting:
        name, extras = waiting.pop()
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for line in needed:
            requirement = Requirement(line)
            wanted = requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in ("", *extras))
            if wanted:
                waiting.append((requirement.name, requirement.extras))
    assert "numpy" in seen
    assert not seen & {"torchvision", "torchaudio"}
    installed = {distribution.metadata["Name"].lower() for distribution in metadata.distributions()}
    assert not installed & {"torchvision", "torchaudio"}


def test_torch_is_as_pinned() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert metadata.version("torch").split("+")[0] == pins["torch"] == "2.13.0"


def test_every_direct_dependency_is_pinned() -> None:
    pins = {
        name.lower().replace("_", "-")
        for name in re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    }
    direct = {Requirement(r).name.lower().replace("_", "-") for r in metadata.requires("caveat") or []} - {"caveat"}
    assert direct <= pins


def test_the_source_distribution_is_the_whole_repository(tmp_path: Path) -> None:
    """The docs and most of the tests were not in it."""
    files = _copied(tmp_path / "tree")
    _built("sdist", tmp_path)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert not files - packed


def test_the_wheel_needs_no_compiler_and_brings_its_types(tmp_path: Path) -> None:
    files = _copied(tmp_path / "tree")
    _built("wheel", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl"), "one for every system, with nothing compiled in it"
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    assert "caveat/py.typed" in packed
    assert {name for name in files if name.startswith("caveat/")} <= packed
    assert not {name for name in packed if name.startswith(("tests/", "docs/")) or name.endswith((".so", ".pyd"))}


def _copied(tree: Path) -> set[str]:
    """The files of the repository, which are copied to a place where packages may be built."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    pytest.importorskip("setuptools")
    files = {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
    for name in files:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    return files


def _built(kind: str, folder: Path) -> None:
    """Build a source distribution or a wheel of the tree in a folder."""
    build = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=folder / "tree", capture_output=True, check=True)


def test_data_inside_the_package_come_with_their_licence() -> None:
    """The reference for digits holds test inputs of a data set that asks for attribution."""
    for folder in (ROOT / "caveat" / "references").glob("*/"):
        if (folder / "reference.json").exists():
            text = (folder / "LICENSE.md").read_text()
            assert "CC BY 4.0" in text
            assert "https://doi.org/10.24432/C50P49" in text
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "references/*/*" in settings["tool"]["setuptools"]["package-data"]["caveat"]
    assert "caveat/references/digits/LICENSE.md" in settings["project"]["license-files"]
