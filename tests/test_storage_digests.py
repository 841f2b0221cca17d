"""A large file is checked by every byte of it, side by side; those of earlier versions as they were written."""

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch

from caveat import storage
from caveat.storage import CorruptFile, read_state, settings_digest, write_state


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def test_every_byte_of_a_large_file_counts(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(storage, "_TREE_ABOVE", 2**20)
    monkeypatch.setattr(storage, "_PIECE", 2**20)
    path = tmp_path / "s.safetensors"
    state = {"a": {"w": torch.arange(2**20, dtype=torch.float32)}}  # 4 MiB and a header
    digest = write_state(path, state)
    assert torch.equal(read_state(path, digest)["a"]["w"], state["a"]["w"])
    places = torch.randint(path.stat().st_size, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    for place in [0, 2**20 - 1, 2**20, 2**22 + 1, path.stat().st_size - 1, *places]:
        flip(path, place)
        with pytest.raises(CorruptFile, match="cut or was changed"):
            read_state(path, digest)
        flip(path, place)
    assert torch.equal(read_state(path, digest)["a"]["w"], state["a"]["w"])


def test_a_flipped_bit_between_the_blocks_that_were_looked_at_is_noticed(tmp_path: Path) -> None:
    """13 of 40 flips in 367 MiB were not, when 256 blocks of 1 MiB spread over such a file stood for all of it."""
    path = tmp_path / "s.safetensors"
    digest = write_state(path, {"a": {"w": torch.zeros(300 * 2**20, dtype=torch.uint8)}})
    size = path.stat().st_size
    flip(path, 7 * (size - 2**20) // 255 + 2**20 + 99)
    with pytest.raises(CorruptFile, match="cut or was changed"):
        read_state(path, digest)


def test_a_large_file_that_an_earlier_version_wrote_is_read(tmp_path: Path, monkeypatch) -> None:
    """Its digest is of spread blocks, of which there are 256 of 1 MiB."""
    monkeypatch.setattr(storage, "_TREE_ABOVE", 2**20)
    path, state = tmp_path / "s.safetensors", {"a": {"w": torch.zeros(2**19)}}
    write_state(path, state)
    content, size = path.read_bytes(), path.stat().st_size
    starts = [k * (size - 2**20) // 255 for k in range(256)]
    earlier = hashlib.sha256(str(size).encode() + b"".join(content[at : at + 2**20] for at in starts)).hexdigest()
    assert torch.equal(read_state(path, earlier)["a"]["w"], state["a"]["w"])
    flip(path, size - 1)
    with pytest.raises(CorruptFile, match="cut or was changed"):
        read_state(path, earlier)


def test_a_knob_that_is_not_in_use_does_not_count() -> None:
    @dataclasses.dataclass(frozen=True)
    class Knobs:
        rate: float = 0.1

    earlier = settings_digest(Knobs())

    @dataclasses.dataclass(frozen=True)
    class Knobs:  # type: ignore[no-redef]
        rate: float = 0.1
        added: tuple[Knobs | None, ...] | None = None

    assert settings_digest(Knobs()) == earlier
    assert settings_digest(Knobs(added=(None,))) != earlier
