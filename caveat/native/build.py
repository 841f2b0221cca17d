"""Compiles the kernels on first use, into the user's cache, and loads them.

The file's name holds what its code depends on (source, compiler, flags, processor), so a change of any makes another
file and none is ever out of date. CAVEAT_NATIVE=0 leaves the kernels out.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import warnings
from pathlib import Path

from caveat.files import whole_file

__all__ = ["library"]

SOURCES = tuple(Path(__file__).with_name(name) for name in ("sparse.cpp", "winograd.cpp"))
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", "-std=c++17")
# With threads, which torch's own OpenMP then serves, where the compiler can; else without.
CHOICES = ((*FLAGS, "-fopenmp"), FLAGS)
POINTERS = {
    "caveat_forward": 9,
    "caveat_backward": 14,
    "caveat_winograd_weights": 3,
    "caveat_winograd": 6,
}  # each followed by the number of threads


class BuildError(Exception):
    """The kernels could not be compiled or loaded; the message says why."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels; None where they are switched off, or, which is said once, where they cannot be had."""
    if os.environ.get("CAVEAT_NATIVE", "1") == "0":
        return None
    try:
        kernels = ctypes.CDLL(str(built(compiler(), cache())))
    except (BuildError, OSError, RuntimeError) as error:  # the last: no home directory
        warnings.warn(
            f"sparse layers run through dense weights and convolutions by direct sums, which is slower: {error}. "
            "Install a C++ compiler (g++ or clang++, or name one in CXX), or set CAVEAT_NATIVE=0 to do without",
            stacklevel=2,
        )
        return None
    for name, pointers in POINTERS.items():
        getattr(kernels, name).argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int]
        getattr(kernels, name).restype = ctypes.c_int
    return kernels


def cache() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "caveat"


def compiler() -> str:
    """The C++ compiler to use."""
    wanted = os.environ.get("CXX")
    names = [wanted] if wanted else ["c++", "g++", "clang++"]
    for name in names:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler found (looked for {', '.join(names)})")


def built(command: str, folder: Path) -> Path:
    """The compiled kernels, made now if they are not there; two that make them at once do not disturb each other."""
    version = output(command, "--version").stdout
    marks = [*(source.read_text() for source in SOURCES), command, version, processor(), repr(CHOICES)]
    path = folder / f"native-{hashlib.sha256(chr(0).join(marks).encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    for flags in CHOICES:
        try:
            with whole_file(path, tidy=False) as temporary:
                done = output(command, *flags, *map(str, SOURCES), "-o", str(temporary))
                if done.returncode:
                    raise BuildError(f"{command} failed: {done.stderr.strip()[-500:]}")
            return path
        except BuildError as error:
            failure = error
    raise failure


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
