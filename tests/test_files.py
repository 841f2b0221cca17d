"""A file is there whole or not at all."""

from pathlib import Path

import pytest

from caveat.files import umask, whole_file


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "values.txt"
    with whole_file(path) as temporary:
        temporary.write_text("before")
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()

    def fail() -> None:
        with whole_file(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail()
    assert path.read_text() == "before"
    assert [p.name for p in path.parent.iterdir()] == ["values.txt"]
