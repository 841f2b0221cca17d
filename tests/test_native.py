"""The kernels are compiled once, whole or not at all, and the library does without them where it must."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from caveat import native
from caveat.native import build

USE = """
import torch
from caveat.engine.sparse import Geometry, Pattern, apply
pattern = Pattern(Geometry((64, 64, 3, 3), (1, 1), (1, 1), (1, 1)), torch.arange(0, 36864, 37, dtype=torch.int32))
apply(torch.ones(2, 64, 8, 8), torch.ones(len(pattern.indices)), pattern)
print(pattern.ran)
"""


def run(code: str, *flags: str, **environment: str) -> "subprocess.Popen[str]":
    setting = {**os.environ, "OMP_NUM_THREADS": "2", **environment}
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code], env=setting, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_switched_off(monkeypatch: Any) -> None:
    monkeypatch.setenv("CAVEAT_NATIVE", "0")
    assert build.library.__wrapped__() is None


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_without_a_working_compiler_it_is_said_once(compiler: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="dense weights.*CAVEAT_NATIVE=0") as said:
        assert build.library.__wrapped__() is None
    assert len(said) == 1
    assert not [*tmp_path.rglob("*.so")]

    process = run(USE + USE, CXX=compiler, XDG_CACHE_HOME=str(tmp_path), CAVEAT_NATIVE="1")
    out, error = process.communicate()
    assert out.split() == ["dense", "dense"]
    assert error.count("UserWarning") == 1


def test_a_cache_that_cannot_be_written_is_said(monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="dense weights"):
        assert build.library.__wrapped__() is None


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_two_processes_build_at_once_and_a_third_finds_the_file(tmp_path: Path) -> None:
    both = [run(USE, "-W", "error", XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    assert [p.communicate() for p in both] == [("sparse\n", "")] * 2
    (made,) = (tmp_path / "caveat").iterdir()
    when = made.stat().st_mtime_ns
    assert run(USE, XDG_CACHE_HOME=str(tmp_path)).communicate() == ("sparse\n", "")
    assert made.stat().st_mtime_ns == when


@pytest.mark.skipif(native.library() is None or sys.platform != "linux", reason="no native kernels, or no /proc")
def test_torch_and_the_kernels_share_one_openmp() -> None:
    code = USE + "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line}))"
    out, error = run(code).communicate()
    assert out.split() == ["sparse", "1"], error


def test_the_source_is_part_of_the_package() -> None:
    import tomllib

    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert "native/*.cpp" in settings["tool"]["setuptools"]["package-data"]["caveat"]
    assert build.SOURCE.is_file()
