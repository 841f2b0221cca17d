"""What pages say of the demo's results is made from docs/demo_results/; tests/cli/test_demo.py runs the demo."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCORE = re.compile(r"\b[0-2]\.\d\d\b")


def fill() -> ModuleType:
    """The script that fills pages."""
    spec = importlib.util.spec_from_file_location("fill", ROOT / "docs" / "fill.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FILL = fill()


@pytest.mark.parametrize("page", FILL.PAGES, ids=lambda page: page.name)
def test_generated_parts_are_what_the_results_give(page: Path) -> None:
    text = page.read_text()
    assert text == FILL.filled(text), f"{page.name} is not what the results give: run `python docs/fill.py`"


def test_every_part_stands_in_a_page() -> None:
    parts = [part for page in FILL.PAGES for part in FILL.PART.findall(page.read_text())]
    assert set(parts) == set(FILL.PARTS)


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_words_beside_the_picture_are_those_in_it(name: str) -> None:
    (alt,) = re.findall(r"!\[(.*?)\]\([\w/]*first\.svg\)", (ROOT / name).read_text())
    picture = (ROOT / "docs" / "images" / "first.svg").read_text()
    digits = re.search(
        r"a noisy (\d) that a network calls a (\d), (\d+)% sure; its posterior gives (\d+)% .*? and (\d+)%", alt
    )
    assert digits
    true, named, sure, of_named, of_true = digits.groups()
    for words in (f"A noisy {true}", f"“a {named}”, {sure}% sure", f"{of_named}% for {named}, {of_true}% for {true}"):
        assert words in picture


@pytest.mark.parametrize("name", ["README.md", "docs/demo.md"])
def test_results_stand_in_generated_parts_alone(name: str) -> None:
    """No score is written by hand: outside of generated parts and of code there is no number of two decimals."""
    text = re.sub(r"```.*?```|<!-- invisible.*?-->", "", FILL.PART.sub("", (ROOT / name).read_text()), flags=re.DOTALL)
    assert not SCORE.findall(text)
