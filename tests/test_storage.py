"""Files come back as they were written, or are refused with a reason; a write that fails leaves nothing behind."""

import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from caveat import CorruptFile, storage
from caveat.files import umask
from caveat.storage import (
    FORMAT,
    decode,
    encode,
    read_json,
    read_state,
    stored_bytes,
    write_arrays,
    write_json,
    write_state,
)


def awkward_state() -> dict[str, dict[str, Tensor]]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "zeta": {
            "z": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
            "a.weight": torch.tensor([float("nan"), float("inf"), -0.0]),
            "hyper/log_noise": torch.tensor(-1.5, dtype=torch.float64),
        },
        "empty group": {},
        "alpha": {
            "int64": torch.tensor([2**62, -1]),
            "bool": torch.tensor([[True], [False]]),
            "bfloat16": torch.randn(7, generator=torch.Generator().manual_seed(1)).bfloat16(),
            "uint8": torch.arange(9, dtype=torch.uint8),
            "no rows": torch.zeros(0, 3),
            "also no rows": torch.zeros(0, 3),
            "transposed": base.T,
            "strided": base[:, ::2],
            "view": base[1],
            "overlapping view": base[1:3],
            "whole": base,
            "same": base,
            "expanded": torch.ones(1).expand(5),
            "needs gradients": torch.ones(2, requires_grad=True),
            "channels last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        },
    }


def assert_same(state: dict, other: dict) -> None:
    assert list(state) == list(other)
    for group in state:
        assert list(state[group]) == list(other[group])
        for name, tensor in state[group].items():
            found = other[group][name]
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            bits, expected = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (found, tensor))
            assert torch.equal(bits, expected), name


def test_state_comes_back_bit_for_bit_in_order(tmp_path: Path) -> None:
    state = awkward_state()
    digest = write_state(tmp_path / "state.safetensors", state)
    found = read_state(tmp_path / "state.safetensors", digest)
    assert_same(state, found)
    assert not found["alpha"]["needs gradients"].requires_grad
    found["alpha"]["same"].zero_()  # tensors that shared memory are apart when they come back
    assert torch.equal(found["alpha"]["whole"], state["alpha"]["whole"])
    assert torch.equal(state["alpha"]["same"], torch.arange(24.0).reshape(4, 6))
    assert write_state(tmp_path / "again.safetensors", state) == digest
    assert list(tmp_path.glob(".*")) == []


def test_empty_state_comes_back(tmp_path: Path) -> None:
    assert read_state(tmp_path / "s", write_state(tmp_path / "s", {})) == {}
    assert read_state(tmp_path / "s", write_state(tmp_path / "s", {"a": {}})) == {"a": {}}


def test_large_tensors_stay_mapped_and_private(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(storage, "_MAPPED_ABOVE", 0)
    path, state = tmp_path / "s.safetensors", {"a": {"w": torch.arange(1000.0), "b": torch.arange(3)}}
    digest = write_state(path, state)
    found = read_state(path, digest)
    write_state(path, {"a": {"w": torch.zeros(1000)}})  # replaces the file, not the one that is mapped
    assert_same(state, found)
    digest = write_state(path, state)
    mapped = read_state(path, digest)
    mapped["a"]["w"].add_(1)
    assert_same(state, read_state(path, digest))


def test_group_names_with_a_slash_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot hold a slash"):
        write_state(tmp_path / "s", {"a/b": {"w": torch.zeros(1)}})
    assert list(tmp_path.iterdir()) == []


def test_stored_bytes_counts_elements() -> None:
    assert stored_bytes({"a": {"x": torch.zeros(3, dtype=torch.float64)}, "b": {"y": torch.zeros(2, 2).bool()}}) == 28


def test_cut_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    digest = write_state(path, awkward_state())
    whole = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFile, match="cut or was changed"):
            read_state(path, digest)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CorruptFile, match="cut or was changed"):
        read_state(path, digest)


def test_every_flipped_byte_of_a_state_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    digest = write_state(path, {"a": {"w": torch.arange(6.0)}})
    whole = path.read_bytes()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(CorruptFile, match="cut or was changed"):
            read_state(path, digest)


def test_files_that_are_not_ours_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with pytest.raises(CorruptFile, match="is missing"):
        read_state(path, "")
    path.write_bytes(b"not a safetensors file")
    with pytest.raises(CorruptFile, match="not a whole safetensors file"):
        read_state(path, storage._digest(path))
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(1)}, path)
    with pytest.raises(CorruptFile, match="not a whole safetensors file"):
        read_state(path, storage._digest(path))


CONTENT = {"format": FORMAT, "name": "größe\n", "values": [1, 2.5, None, True], "nested": {"b": 1, "a": 0.1}}


def test_a_json_of_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.touch()
    os.truncate(path, 2**40)  # takes no space
    with pytest.raises(CorruptFile, match=r"large.json has 1,099,511,627,776 bytes"):
        read_json(path)


def test_json_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, CONTENT)
    assert read_json(path) == CONTENT
    assert list(read_json(path)) == list(CONTENT)
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def test_json_that_python_reads_otherwise_is_still_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"format": FORMAT, "epochs": {2: "two", 10: "ten"}, "shape": (1, 2)})
    assert read_json(path)["epochs"] == {"2": "two", "10": "ten"}
    assert read_json(path)["shape"] == [1, 2]
    write_json(path, {"format": FORMAT, "rhat": float("nan"), "bound": -float("inf")})
    assert numpy.isnan(read_json(path)["rhat"])
    assert read_json(path)["bound"] == -float("inf")


def test_cut_and_edited_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, CONTENT)
    whole = path.read_bytes()
    for length in (0, 1, 10, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptFile, match="not a whole file"):
            read_json(path)
    for i in range(len(whole) - 1):  # the last byte is a newline
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(CorruptFile):
            read_json(path)
    edited = json.loads(whole)
    edited["nested"]["a"] = 0.2
    path.write_text(json.dumps(edited))
    with pytest.raises(CorruptFile, match="was changed after it was written"):
        read_json(path)


@pytest.mark.parametrize(
    "text", ["[1]", "3", "null", '"text"', "{}", '{"format": 1}', '{"checksum": ""}', "\udcff", "["]
)
def test_json_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CorruptFile, match="not a whole file of this library"):
        read_json(path)


def test_other_versions_and_missing_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(FileNotFoundError, match=r"a\.json does not exist"):
        read_json(path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path)
    write_json(path, CONTENT | {"format": FORMAT + 1})
    with pytest.raises(CorruptFile, match=f"format version {FORMAT + 1}, this library reads versions 1 to {FORMAT}"):
        read_json(path)


def test_a_write_that_fails_leaves_the_earlier_file_alone(tmp_path: Path, monkeypatch) -> None:
    path, tensors = tmp_path / "a.json", tmp_path / "s.safetensors"

    def fail(*args, **kwargs):
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", fail)
        with pytest.raises(OSError, match="no space left"):
            write_json(path, CONTENT)
        patched.setattr(storage, "_digest", fail)  # after the tensors were written
        with pytest.raises(OSError, match="no space left"):
            write_state(tensors, awkward_state())
        patched.setattr(numpy, "savez_compressed", fail)
        with pytest.raises(OSError, match="no space left"):
            write_arrays(tmp_path / "a.npz", {"x": numpy.zeros(3)})
    assert list(tmp_path.iterdir()) == []
    write_json(path, CONTENT)
    digest = write_state(tensors, {"a": {"w": torch.ones(2)}})
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)  # after everything was written
        with pytest.raises(OSError, match="no space left"):
            write_json(path, CONTENT | {"name": "new"})
        with pytest.raises(OSError, match="no space left"):
            write_state(tensors, {"a": {"w": torch.zeros(2)}})
    with pytest.raises(TypeError):
        write_json(path, CONTENT | {"name": object()})
    assert read_json(path) == CONTENT
    assert_same(read_state(tensors, digest), {"a": {"w": torch.ones(2)}})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "s.safetensors"]


def test_arrays_are_written_whole(tmp_path: Path) -> None:
    write_arrays(tmp_path / "made" / "a.npz", {"x": numpy.arange(3), "y": numpy.ones((2, 2))})
    with numpy.load(tmp_path / "made" / "a.npz", allow_pickle=False) as found:
        assert found["x"].tolist() == [0, 1, 2]
        assert found["y"].shape == (2, 2)
    assert [p.name for p in (tmp_path / "made").iterdir()] == ["a.npz"]


@dataclass(frozen=True)
class Renamed:
    default_draws: int = 100


@dataclass(frozen=True)
class Kept:
    n_draws: int = 100


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    name: str | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner
    sizes: tuple[int, ...]
    nested: tuple[tuple[float, ...], ...]
    table: dict[str, float | Tensor]
    scores: Tensor
    flag: bool = True
    derived: int = field(default=0, init=False)


def outer() -> Outer:
    table: dict[str, float | Tensor] = {"b.*": 2.0, "a": torch.arange(3)}
    return Outer(Inner(float("inf"), "ü"), (1, 2), ((0.5,), ()), table, torch.eye(2), False)


def test_dataclasses_come_back(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    encoded = encode(outer(), tensors, "method")
    assert sorted(tensors) == ["method.scores", "method.table.1"]
    write_json(tmp_path / "a.json", {"format": FORMAT, "method": encoded})
    made = decode(read_json(tmp_path / "a.json")["method"], tensors, [Inner, Outer])
    expected = outer()
    assert (made.inner, made.sizes, made.nested, made.flag) == (
        expected.inner,
        expected.sizes,
        expected.nested,
        expected.flag,
    )
    assert list(made.table) == ["b.*", "a"]
    assert made.table["b.*"] == 2.0
    assert torch.equal(made.table["a"], torch.arange(3))
    assert torch.equal(made.scores, torch.eye(2))


def test_a_knob_is_read_under_the_name_that_it_had() -> None:
    of_before = {"type": "Renamed", "fields": {"n_draws": 7}}
    assert decode(of_before, {}, [Renamed]).default_draws == 7
    of_others = {"type": "Kept", "fields": {"n_draws": 7}}
    assert decode(of_others, {}, [Kept]).n_draws == 7


def test_files_of_format_1_are_read(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", CONTENT | {"format": 1})
    assert read_json(tmp_path / "a.json")["nested"] == CONTENT["nested"]


def test_unknown_classes_and_values_are_refused() -> None:
    tensors: dict[str, Tensor] = {}
    encoded = encode(outer(), tensors, "method")
    with pytest.raises(CorruptFile, match=r"Inner is not a class of this library: .*classes=\[Inner\]"):
        decode(encoded, tensors, [Outer])
    with pytest.raises(TypeError, match=r"method\.rate holds a function, which cannot be saved"):
        encode(Inner(rate=lambda: 0), {}, "method")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="holds a type"):
        encode(Inner, {}, "method")


@pytest.mark.parametrize(
    "value",
    [
        {"type": "Inner", "fields": {"rate": 0.1, "gone": 1}},  # of another version
        {"type": "Inner"},
        {"type": "Inner", "fields": [1]},
        {"type": ["Inner"], "fields": {}},
        {"tensor": "not there"},
        {"mapping": 3},
        {},
    ],
)
def test_descriptions_that_are_not_whole_are_refused(value) -> None:
    with pytest.raises(CorruptFile):
        decode(value, {}, [Inner])


def test_values_that_a_class_refuses_are_corrupt() -> None:
    @dataclass(frozen=True)
    class Strict:
        rate: float

        def __post_init__(self) -> None:
            if self.rate < 0:
                raise ValueError("rate must be positive")

    with pytest.raises(CorruptFile, match=r"Strict cannot be made from what was saved .rate must be positive"):
        decode({"type": "Strict", "fields": {"rate": -1}}, {}, [Strict])


def test_every_tensor_begins_where_its_type_may(tmp_path: Path) -> None:
    state = {"a": {"odd": torch.ones(3, dtype=torch.bool), "w": torch.arange(5.0), "d": torch.ones(2).double()}}
    read = read_state(tmp_path / "s.safetensors", write_state(tmp_path / "s.safetensors", state))
    assert list(read["a"]) == ["odd", "w", "d"]
    with (tmp_path / "s.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert all(header[f"a/{name}"]["data_offsets"][0] % t.element_size() == 0 for name, t in state["a"].items())
    with pytest.raises(ValueError, match=r"a/c \(torch.complex64\) is of a type that files do not hold"):
        write_state(tmp_path / "c.safetensors", {"a": {"c": torch.ones(2, dtype=torch.complex64)}})


def test_an_interrupt_while_a_file_is_read_is_no_broken_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors swallows it; it is raised when the file has been read."""
    digest = storage.write_state(tmp_path / "s.safetensors", {"a": {"x": torch.ones(3)}})
    opened = storage.safe_open

    def interrupted(*given: object, **named: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return opened(*given, **named)

    monkeypatch.setattr(storage, "safe_open", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            storage.read_state(tmp_path / "s.safetensors", digest)
        assert caught.value.__context__ is None, "the file was read to its end"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
