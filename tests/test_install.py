"""Installing must not change the user's torch nor pull torchvision."""

import re
from importlib import metadata
from pathlib import Path

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
    direct = {Requirement(r).name.lower() for r in metadata.requires("caveat") or []} - {"caveat"}
    assert direct <= pins
