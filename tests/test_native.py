"""The kernels are compiled once, whole or not at all, and the library does without them where it must."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomllib

from caveat import native
from caveat.native import Grid, Structure, build

USE = """
import torch
from caveat.engine.sparse import LayerGeometry
from caveat.engine.sparse.kernels import Pattern, apply
pattern = Pattern(LayerGeometry((64, 64, 3, 3), (1, 1), (1, 1), (1, 1)), torch.arange(0, 36864, 37, dtype=torch.int32))
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
def test_two_processes_build_at_once_and_a_third_finds_the_file(tmp_path: Path, copier: str) -> None:
    both = [run(USE, "-W", "error", CXX=copier, XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    assert [p.communicate() for p in both] == [("sparse\n", "")] * 2
    (made,) = (tmp_path / "caveat" / "native").iterdir()
    when = made.stat().st_mtime_ns
    assert run(USE, CXX=copier, XDG_CACHE_HOME=str(tmp_path)).communicate() == ("sparse\n", "")
    assert made.stat().st_mtime_ns == when


NATIVE = pytest.mark.skipif(native.library() is None, reason="no native kernels here")
LOAD = "from caveat.native import library; print(library() is not None)"
LOADED = ("True\n", "")


@pytest.fixture
def copier(tmp_path: Path) -> str:
    """A compiler that is quick: it copies the kernels which this machine's own has made."""
    kernels = Path(native.library()._name)  # type: ignore[union-attr]
    script = tmp_path / "copier"
    script.write_text(f'#!/bin/sh\nfor last; do :; done\n[ "$1" = --version ] && echo 1 || cp "{kernels}" "$last"\n')
    script.chmod(0o700)
    return str(script)


@pytest.fixture
def made(tmp_path: Path, copier: str) -> Path:
    """The compiled kernels in a cache of their own."""
    folder = tmp_path / "cache" / "caveat" / "native"
    folder.mkdir(parents=True, mode=0o700)
    return build.built(copier, folder)


def use(made: Path, copier: str) -> tuple[str, str]:
    """What is printed, and said, where the kernels are loaded by a process of its own."""
    return run(LOAD, CXX=copier, XDG_CACHE_HOME=str(made.parents[2])).communicate()


def with_digest(path: Path) -> Path:
    """The file under the name that its content asks for, as somebody would who knows how names are made."""
    key = path.stem.split("-")[1]
    return path.rename(path.with_name(f"native-{key}-{hashlib.sha256(path.read_bytes()).hexdigest()[:32]}.so"))


def planted(made: Path, source: str) -> Path:
    """Another library in the place of the kernels."""
    code = made.parents[2] / "other.cpp"
    code.write_text(source)
    done = build.output(build.compiler(), "-shared", "-fPIC", str(code), "-o", str(made))
    assert done.returncode == 0, done.stderr
    made.chmod(0o700)
    return with_digest(made)


OTHER = 'extern "C" int caveat_forward() { return 7; }'
EVIL = """#include <stdio.h>
__attribute__((constructor)) static void f() { puts("owned"); fflush(stdout); }"""


@NATIVE
def test_a_cut_file_is_no_end_of_the_process(made: Path, copier: str) -> None:
    """It was a SIGBUS at every use."""
    whole = made.read_bytes()
    made.write_bytes(whole[: len(whole) // 3])
    assert use(made, copier) == LOADED
    (again,) = made.parent.iterdir()
    assert again.read_bytes() == whole


@NATIVE
@pytest.mark.parametrize("damage", ["empty", "flipped", "text", "other symbols"])
def test_a_damaged_file_is_made_again(made: Path, copier: str, damage: str) -> None:
    whole = made.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    if damage == "other symbols":
        planted(made, OTHER)
    else:
        made.write_bytes({"empty": b"", "flipped": bytes(flipped), "text": b"no"}[damage])
    assert build.loaded(copier, made.parent).caveat_forward
    (again,) = made.parent.iterdir()
    assert again.read_bytes() == whole
    when = again.stat().st_mtime_ns
    assert build.loaded(copier, made.parent).caveat_forward
    assert again.stat().st_mtime_ns == when, "once"


@NATIVE
@pytest.mark.parametrize("of", ["another user", "this user, for all to write to"])
def test_a_file_that_others_could_have_written_is_not_loaded(made: Path, copier: str, of: str) -> None:
    evil = planted(made, EVIL)
    if of == "another user":
        if os.getuid() != 0:
            pytest.skip("only root gives files away")
        os.chown(evil, 12345, 12345)
    else:
        evil.chmod(0o777)
    assert use(made, copier) == LOADED
    assert not evil.exists()


@NATIVE
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_folder_that_others_can_write_to_is_not_used(
    made: Path, copier: str, place: int, capfd: pytest.CaptureFixture[str]
) -> None:
    planted(made, EVIL)
    made.parents[place].chmod(0o777)
    with pytest.warns(UserWarning, match=r"other users can write to .*, and every process compiles.*XDG_CACHE_HOME"):
        assert build.loaded(copier, made.parent).caveat_forward
    assert capfd.readouterr().out == "", "not owned"
    made.parents[place].chmod(0o700)
    build.loaded(copier, made.parent)
    assert capfd.readouterr().out == "owned\n", "this is what such a file could do"


@pytest.mark.skipif(native.library() is None or sys.platform != "linux", reason="no native kernels, or no /proc")
def test_torch_and_the_kernels_share_one_openmp() -> None:
    code = USE + "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line}))"
    out, error = run(code).communicate()
    assert out.split() == ["sparse", "1"], error


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_every_read_stays_in_the_grid(rows: int) -> None:
    """For all non-zeros there can be, from the first position to the last of the last tile, forward and back."""
    rng = np.random.default_rng(rows)
    tried = 0
    while tried < 200:
        kernel, stride, dilation = (tuple(rng.integers(1, 5, 2).tolist()) for _ in range(3))
        padding, size = tuple(rng.integers(0, 6, 2).tolist()), tuple(rng.integers(1, 9, 2).tolist())
        shape = (5, 3, *kernel)
        grid = Grid.of(shape, stride, padding, dilation, 1, (rows, 3, *size))
        if grid is None:
            continue
        tried += 1
        _, lanes, chunk, area, length, front = grid.plan[:6].tolist()
        indices = np.arange(np.prod(shape), dtype=np.int32)
        ends = [((chunk - 1) * area + span) * lanes for span in (grid.plan[12], grid.plan[20])]
        for make, end, other in ((Structure.forward, ends[1], 0), (Structure.backward, ends[0], 1)):
            offset = make(shape, 1, indices, grid).offset.astype(np.int64)
            assert front + offset.min() >= 0
            assert front + offset.max() + -(-end // 16) * 16 <= grid.rows[other] * length
            assert front + -(-end // 16) * 16 <= length


def test_the_source_is_part_of_the_package() -> None:
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert "native/*.cpp" in settings["tool"]["setuptools"]["package-data"]["caveat"]
    assert all(source.is_file() for source in build.SOURCES)
