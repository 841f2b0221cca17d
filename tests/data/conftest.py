"""No test here sees the user's folders or the network; those on real data ask for `real_data`."""

import os
from pathlib import Path

import pytest

REAL_DATA = os.environ.get("CAVEAT_DATA")


@pytest.fixture(autouse=True)
def _isolated(tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr("pooch.os_cache", lambda name: cache / name)
    monkeypatch.delenv("CAVEAT_DATA", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def real_data():
    if REAL_DATA is None:
        pytest.skip("CAVEAT_DATA is not set: no real data to check")
    return Path(REAL_DATA)


@pytest.fixture
def need(real_data):
    def need(file):
        if not (real_data / file).exists():
            pytest.skip(f"{file} is not in CAVEAT_DATA")
        return real_data

    return need
