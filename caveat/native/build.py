"""Compiles the kernels on first use, into the user's cache, and loads them.

The file's name holds what its code depends on (source, compiler, flags, processor), so a change of any makes another
file and none is ever out of date. The name ends with a digest of the content: a file that was cut or changed, that is
not this user's own, or that lacks a kernel is thrown away and made again before anything of it is run. A folder that
others can write to is not used. CAVEAT_NATIVE=0 leaves the kernels out.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path

__all__ = ["library"]

USER = getattr(os, "getuid", int)()  # where users have no numbers, files have 0
SOURCES = tuple(Path(__file__).with_name(name) for name in ("sparse.cpp", "winograd.cpp", "perceptron.cpp"))
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-std=c++17")
# With threads, which torch's own OpenMP then serves, where the compiler can; else without.
CHOICES = ((*FLAGS, "-fopenmp"), FLAGS)
POINTERS = {
    "caveat_forward": 9,
    "caveat_backward": 14,
    "caveat_winograd_weights": 3,
    "caveat_winograd": 6,
    "caveat_trajectory_float": 4,
    "caveat_trajectory_double": 4,
}  # each followed by the number of threads


class BuildError(Exception):
    """The kernels could not be compiled or loaded; the message says why."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels; None where they are switched off, or, which is said once, where they cannot be had."""
    if os.environ.get("CAVEAT_NATIVE", "1") == "0":
        return None
    try:
        return loaded(compiler(), cache())
    except (BuildError, OSError, RuntimeError) as error:  # the last: no home directory
        warnings.warn(
            "sparse layers run through dense weights, convolutions by direct sums and trajectories of HMC through "
            f"torch, which is slower: {error}. "
            "Install a C++ compiler (g++ or clang++, or name one in CXX), or set CAVEAT_NATIVE=0 to do without",
            stacklevel=2,
        )
        return None


def cache() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "caveat" / "native"


def loaded(command: str, folder: Path) -> ctypes.CDLL:
    """The kernels of a folder, made now if they are not there; two that make them at once do not disturb each other."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    reason = _reach_of_others(folder)
    if reason:
        warnings.warn(
            f"{reason}, so that compiled kernels are not kept there, and every process compiles its own: take that "
            "right away, or name another folder in XDG_CACHE_HOME",
            stacklevel=3,
        )
        with tempfile.TemporaryDirectory() as private:
            return _opened(built(command, Path(private)))
    for path in folder.glob(f"native-{_key(command)}-*.so"):
        with contextlib.suppress(OSError):  # lacks a kernel, or was taken away meanwhile
            if _is_as_written(path):
                return _opened(path)
        path.unlink(missing_ok=True)
    return _opened(built(command, folder))


def _opened(path: Path) -> ctypes.CDLL:
    kernels = ctypes.CDLL(str(path))
    for name, pointers in POINTERS.items():
        try:
            kernel = getattr(kernels, name)
        except AttributeError as error:
            raise OSError(f"{path} has no kernel {name}") from error
        kernel.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int]
        kernel.restype = ctypes.c_int
    return kernels


def _is_as_written(path: Path) -> bool:
    """Whether a file is this user's own, nobody else can write to it, and its content is what its name says."""
    status = path.lstat()
    own = status.st_uid == USER and stat.S_ISREG(status.st_mode) and not status.st_mode & 0o022
    return own and path.stem.endswith(f"-{_digest(path)}")


def _reach_of_others(folder: Path) -> str:
    """Who else could put a file into a folder, or another folder into its place; empty where nobody can."""
    for place in (folder, *folder.absolute().parents):
        status = place.stat()
        writable = stat.S_IWOTH | (stat.S_IWGRP if place == folder else 0)
        if status.st_uid not in (USER, 0) or (place == folder and status.st_uid != USER):
            return f"{place} belongs to another user"
        if status.st_mode & writable and not (status.st_mode & stat.S_ISVTX and place != folder):
            return f"other users can write to {place}"
    return ""


def compiler() -> str:
    """The C++ compiler to use."""
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["c++", "g++", "clang++"]
    for name in names:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler found (looked for {', '.join(names)})")


def built(command: str, folder: Path) -> Path:
    """The kernels, compiled into a folder: there whole, or not at all."""
    key = _key(command)
    for flags in CHOICES:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".native.")
        os.close(handle)
        temporary = Path(name)
        try:
            done = output(command, *flags, *map(str, SOURCES), "-o", name)
            if not done.returncode:
                temporary.chmod(0o700)
                return temporary.rename(folder / f"native-{key}-{_digest(temporary)}.so")
        finally:
            temporary.unlink(missing_ok=True)
    raise BuildError(f"{command} failed: {done.stderr.strip()[-500:]}")


def _key(command: str) -> str:
    """A digest of all that the code of the kernels depends on."""
    version = output(command, "--version").stdout
    marks = [*(source.read_text() for source in SOURCES), command, version, processor(), repr(CHOICES)]
    return hashlib.sha256(chr(0).join(marks).encode()).hexdigest()[:16]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def output(*command: str) -> subprocess.CompletedProcess[str]:
    """A command's output, whatever its outcome."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {error.timeout:.0f} s") from error


def processor() -> str:
    """What -march=native depends on: the instructions this processor has."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *sorted({line for line in lines if line.startswith(wanted)})])
