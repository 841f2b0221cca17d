"""The page of results says what the csv files say."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


@pytest.fixture
def results_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    return import_module("results_page")


def test_every_table_of_the_page_is_that_of_the_files(results_page: ModuleType) -> None:
    page = results_page.PAGE.read_text()
    named = [found["name"] for found in results_page.BLOCK.finditer(page)]
    assert named == list(results_page.TABLES), "each table stands on the page once"
    assert results_page.filled(page) == page, "run experiments/results_page.py"


def test_a_number_that_was_changed_by_hand_is_noticed(
    results_page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = results_page.PAGE.read_text()
    assert "95.24" in page
    edited = tmp_path / "results.md"
    edited.write_text(page.replace("95.24", "95.99"))
    monkeypatch.setattr(results_page, "PAGE", edited)
    monkeypatch.setattr(sys, "argv", ["results_page.py", "--check"])
    with pytest.raises(SystemExit, match="is not what the csv files say"):
        results_page.main()
    assert results_page.filled(edited.read_text()) == page
