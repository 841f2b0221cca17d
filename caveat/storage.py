"""Files: safetensors and json, written whole or not at all, checked when they are read. Nothing is unpickled.

A posterior is a folder of `posterior.json` (what it is) and `state.safetensors` (its tensors, named `group/name`).
The json carries a checksum of itself and of the tensor file, so a cut or edited folder is refused with a reason.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
import signal
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from caveat.files import whole_file
from caveat.knobs import check_knobs

__all__ = [
    "FORMAT",
    "CorruptFile",
    "State",
    "code_digest",
    "decode",
    "digest_of",
    "encode",
    "moved_state",
    "read_arrays",
    "read_json",
    "read_state",
    "settings_digest",
    "stored_bytes",
    "tensor_names",
    "write_arrays",
    "write_json",
    "write_state",
]

FORMAT = 2
_READABLE = range(1, FORMAT + 1)  # what earlier versions wrote, too
_RENAMED = {"n_draws": "default_draws"}  # fields of methods, as format 1 calls them
MOST_JSON = 2**28  # bytes: far more than any file of ours has, and it is held twice while it is read
State = dict[str, dict[str, Tensor]]  # group -> name -> tensor

_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}  # as the safetensors format names them
_LARGEST = 2**63  # whole numbers of files are below
_MAPPED_ABOVE = 64 * 2**20  # larger tensors stay on disk until they are used
_TREE_ABOVE = 256 * 2**20  # larger files have a digest of the digests of their pieces, which threads take side by side
_PIECE = 16 * 2**20  # bytes


class CorruptFile(ValueError):  # noqa: N818 - the name says what is wrong
    """A file that is cut, edited, of another format version, or not what it should be."""


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a json object with a checksum of itself; numbers that are not finite are written as Python reads them."""
    plain = json.loads(json.dumps(content))  # as it will be read: tuples are lists, every key is a string
    with whole_file(path) as temporary:
        temporary.write_text(json.dumps(plain | {"checksum": _checksum(plain)}, indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a json object and check its checksum and format version."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if path.stat().st_size > MOST_JSON:
        raise CorruptFile(f"{path} has {path.stat().st_size:,} bytes; one of more than {MOST_JSON:,} is not read")
    try:
        content = json.loads(path.read_text())
        claimed = content.pop("checksum")
        version = content["format"]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CorruptFile(f"{path} is not a whole file of this library ({type(error).__name__}: {error})") from error
    if version not in _READABLE:
        raise CorruptFile(f"{path} has format version {version}, this library reads versions 1 to {FORMAT}")
    if claimed != _checksum(content):
        raise CorruptFile(f"{path} was changed after it was written: its checksum does not match")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_state(path: Path, state: State) -> str:
    """Write grouped tensors; returns the file's digest."""
    if any("/" in group for group in state):
        raise ValueError(f"a group's name cannot hold a slash, which ends it in the file: {list(state)}")
    flat = {f"{group}/{name}": tensor for group, tensors in state.items() for name, tensor in tensors.items()}
    names = {group: list(tensors) for group, tensors in state.items()}
    header: dict[str, Any] = {"__metadata__": {"groups": json.dumps(names)}}
    unknown = [f"{name} ({tensor.dtype})" for name, tensor in flat.items() if tensor.dtype not in _KINDS]
    if unknown:
        raise ValueError(f"{unknown[0]} is of a type that files do not hold: convert it first")
    flat = dict(sorted(flat.items(), key=lambda item: -item[1].element_size()))  # so that each begins aligned
    end = 0
    for name, tensor in flat.items():
        kind, begin, end = _KINDS[tensor.dtype], end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    with whole_file(path) as temporary:
        # By hand, one tensor after the other: the library's own writer holds a copy of all of them in memory.
        with temporary.open("wb") as file:
            file.write(len(described).to_bytes(8, "little") + described)
            for tensor in flat.values():
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        digest = _digest(temporary)
    return digest


def write_arrays(path: Path, arrays: Mapping[str, numpy.ndarray]) -> None:
    """Write named arrays as a compressed npz file."""
    with whole_file(path) as temporary, temporary.open("wb") as file:
        numpy.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def read_arrays(path: Path, needed: Iterable[str] = (), *, skip: Iterable[str] = ()) -> dict[str, numpy.ndarray]:
    """Read the arrays of an npz file, but for those to skip; one that is missing, cut or damaged is refused by name."""
    if not path.is_file():
        raise CorruptFile(f"{path} is missing")
    try:
        with path.open("rb") as raw, numpy.load(raw, allow_pickle=False) as file:
            arrays = {
                name: file[name] for name in file.files if name not in skip
            }  # read whole, so that sums are checked
    except Exception as error:  # numpy, zipfile, zlib and the parser of headers have an error each for what is broken
        raise CorruptFile(f"{path} is cut or damaged ({type(error).__name__}: {error})") from error
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise CorruptFile(f"{path} holds no array {', '.join(missing)}, only {', '.join(arrays) or 'nothing'}")
    return arrays


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a Ctrl-C wait until the block ends: safetensors would swallow it, and a whole file would look broken."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)


def read_state(path: Path, digest: str, device: torch.device | str = "cpu") -> State:
    """Read grouped tensors (large ones memory-mapped on the CPU) after checking the file against its digest."""
    if not path.is_file():
        raise CorruptFile(f"{path} is missing")
    if _digest(path, sampled=not str(digest).startswith("tree:")) != digest:
        raise CorruptFile(f"{path} is cut or was changed after it was written: its digest does not match")
    try:
        with _uninterrupted(), safe_open(path, framework="pt", device=str(device)) as file:
            # Draws depend on the order, which the format does not keep; a clone is aligned, so sums round as before.
            state: State = {}
            for group, names in json.loads(file.metadata()["groups"]).items():
                tensors = {name: file.get_tensor(f"{group}/{name}") for name in names}
                state[group] = {name: t.clone() if t.nbytes < _MAPPED_ABOVE else t for name, t in tensors.items()}
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(f"{path} is not a whole safetensors file ({error})") from error
    return state


def _digest(path: Path, sampled: bool = False) -> str:
    """A digest of every byte of a file; `sampled`, as earlier versions wrote it, of 256 spread MiB of a large one."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    if size > _TREE_ABOVE and not sampled:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for piece in pool.map(functools.partial(_piece_digest, path), range(0, size, _PIECE)):
                digest.update(piece)
        return f"tree:{digest.hexdigest()}"
    with path.open("rb") as file:
        if size <= _TREE_ABOVE:
            while block := file.read(2**20):
                digest.update(block)
        else:
            for k in range(256):
                file.seek(k * (size - 2**20) // 255)
                digest.update(file.read(2**20))
    return digest.hexdigest()


def _piece_digest(path: Path, start: int) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        for _ in range(_PIECE // 2**20):
            digest.update(file.read(2**20))
    return digest.digest()


def stored_bytes(state: State) -> int:
    """The bytes that the tensors of a state take on disk."""
    return sum(tensor.numel() * tensor.element_size() for group in state.values() for tensor in group.values())


def moved_state(state: State, device: torch.device | str) -> State:
    """A state on a device; samples that are read a few at a time stay where they are."""
    return {
        group: tensors if group.rpartition(".")[2] == "samples" else {name: t.to(device) for name, t in tensors.items()}
        for group, tensors in state.items()
    }


def encode(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """A dataclass as json; tensors inside it go to `tensors` under their path and are referred to by it."""
    if isinstance(value, Tensor):
        tensors[where] = value
        return {"tensor": where}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        fields = {name: encode(getattr(value, name), tensors, f"{where}.{name}") for name in names}
        return {"type": type(value).__name__, "fields": fields}
    if isinstance(value, Mapping):
        items = enumerate(value.items())
        return {"mapping": [[key, encode(item, tensors, f"{where}.{i}")] for i, (key, item) in items]}
    if isinstance(value, list | tuple):
        return [encode(item, tensors, f"{where}.{i}") for i, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{where} holds a {type(value).__name__}, which cannot be saved: use numbers, strings, tensors or tuples"
    )


def tensor_names(value: Any) -> Iterator[str]:
    """The names of the tensors that what `encode` returned refers to."""
    if isinstance(value, Mapping) and "tensor" in value:
        yield value["tensor"]
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensor_names(item)


def settings_digest(value: Any) -> str:
    """A digest of a dataclass with its settings, tensors included; the name of one that cannot be saved.

    A knob that is None is not in use and does not count, so that one added later leaves earlier digests as they are.
    """
    tensors: dict[str, Tensor] = {}
    try:
        listing = json.dumps(_in_use(encode(value, tensors, "")))
    except TypeError:
        return type(value).__name__
    return hashlib.sha256(f"{listing} {digest_of({'': tensors})}".encode()).hexdigest()


def _in_use(described: Any) -> Any:
    """What `encode` made of a value, without the knobs that are None."""
    if isinstance(described, dict):
        return {key: _in_use(part) for key, part in described.items() if part is not None}
    return [_in_use(part) for part in described] if isinstance(described, list) else described


def code_digest(function: Any) -> str:
    """A digest of what a function does: its code, its defaults, and what it closes over.

    Objects among these count by how they print, without addresses; of a function without code of its own (one written
    in C) only the name counts.
    """
    parts: list[str] = []
    seen: set[int] = set()

    def add(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, types.CodeType):
            parts.extend([value.co_code.hex(), repr(value.co_names)])
            for constant in value.co_consts:
                add(constant)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, sorted(value.keywords.items())):
                add(part)
        elif isinstance(value, types.MethodType):
            add(value.__func__)
            add(value.__self__)
        elif isinstance(value, types.FunctionType):
            add(value.__code__)
            for part in (value.__defaults__, value.__kwdefaults__, *(c.cell_contents for c in value.__closure__ or ())):
                add(part)
        elif isinstance(value, Tensor):
            parts.append(digest_of({"": {"": value.detach()}}))
        elif isinstance(value, list | tuple):
            for part in value:
                add(part)
        elif callable(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
            add(type(value).__call__)
            for name, part in sorted(vars(value).items()):
                parts.append(name)
                add(part)
        else:
            parts.append(re.sub(r" at 0x[0-9a-f]+", "", repr(value)))

    add(function)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def digest_of(state: State) -> str:
    """A digest of a state's names, types, shapes and values."""
    digest = hashlib.sha256()
    for group, tensors in state.items():
        for name, tensor in tensors.items():
            digest.update(f"{group}/{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def decode(value: Any, tensors: Mapping[str, Tensor], classes: Iterable[type], *, complete: bool = False) -> Any:
    """The inverse of `encode` (lists come back as tuples): only the classes given are ever made.

    With `complete` every field must be there; without, those that a class has a default for may be missing, as in files
    of before it had them.
    """
    known = {cls.__name__: cls for cls in classes}

    def make(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(make(item) for item in value)
        if isinstance(value, int) and abs(value) >= _LARGEST:
            raise CorruptFile(f"the description of an object holds a number of {len(str(value))} digits")
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return tensors[value["tensor"]]
        if "mapping" in value:
            return {key: make(item) for key, item in value["mapping"]}
        name = value["type"]
        if name not in known:
            raise CorruptFile(
                f"{name} is not a class of this library: install the package with the method of that name, or pass the "
                f"class, as in load(..., classes=[{name}])"
            )
        accepted = {field.name for field in dataclasses.fields(known[name])}
        fields = {
            field if field in accepted else _RENAMED.get(field, field): make(item)
            for field, item in value["fields"].items()
        }
        missing = [field.name for field in dataclasses.fields(known[name]) if field.init and field.name not in fields]
        if missing and complete:
            raise CorruptFile(f"{name} cannot be made from what was saved: it lacks {missing[0]!r}")
        try:
            made = known[name](**fields)
            check_knobs(made)
        except (TypeError, ValueError) as error:
            raise CorruptFile(f"{name} cannot be made from what was saved ({error})") from error
        return made

    try:
        return make(value)
    except (KeyError, AttributeError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CorruptFile):
            raise
        raise CorruptFile(f"the description of an object is not whole ({type(error).__name__}: {error})") from error
