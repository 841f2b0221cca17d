"""The commands that README.md and docs/ show: the command line takes them, and their models fit their data."""

import dataclasses
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import TensorDataset

from caveat import cli, data
from caveat.cli.commands import VERBS
from caveat.priors import GaussianPrior
from caveat.recipe import Recipe

ROOT = Path(__file__).parents[1]
WITH_A_PACKAGE = ROOT / "docs" / "add_a_method.md"  # tests/test_plugins.py installs its package and runs its commands
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {WITH_A_PACKAGE})]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELLS = ("sh", "bash", "shell", "console")


@dataclasses.dataclass(frozen=True)
class Shown:
    """A command of a page; whole in a block, and in a sentence perhaps without what it needs."""

    page: str
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def shown(page: Path) -> list[Shown]:
    """Every `caveat ...` in a shell block or, between backticks, in the text."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    lines = [line for language, block in FENCE.findall(text) if language in SHELLS for line in block.splitlines()]
    blocks = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    for words in blocks:
        while words and re.match(r"\w+=", words[0]):  # CAVEAT_DATA=/data caveat ...
            del words[0]
    sentences = [shlex.split(code) for code in re.findall(r"`(caveat [^`]+)`", FENCE.sub("", text))]
    found = [(words, True) for words in blocks] + [(words, words[1] == "fit" and len(words) > 2) for words in sentences]
    return [Shown(name, tuple(words[1:]), whole) for words, whole in found if words[:1] == ["caveat"]]


COMMANDS = [command for page in PAGES for command in shown(page)]
FITS = [
    command for command in COMMANDS if command.whole and command.words[0] == "fit" and "--help" not in command.words
]


@cache
def first_rows(source: str) -> data.DataSet:
    """A data set with few training rows, since some take a gigabyte."""
    whole = data.load(source)
    few = (tensor[:200].clone() for tensor in whole.train.tensors)
    return dataclasses.replace(whole, train=TensorDataset(*few), test=TensorDataset())


@pytest.fixture
def understood(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the command line would run, in place of running it."""
    found: list[tuple[Any, ...]] = []
    for verb in VERBS:
        monkeypatch.setattr(verb, "run", lambda *given: found.append(given))
    return found


def test_commands_are_found() -> None:
    assert {command.words[0] for command in COMMANDS} >= {"fit", "predict", "evaluate", "bench", "report", "reference"}
    assert {command.words[1] for command in FITS} >= {page.stem for page in (ROOT / "docs" / "methods").glob("*.md")}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_documented_command_is_understood(
    command: Shown, understood: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(command.words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    printed = capsys.readouterr().err
    lacks = any(title in printed for title in ("Required options", "Missing subcommand"))
    assert code == 0 or (lacks and not command.whole and "Unrecognized" not in printed), printed
    assert bool(understood) == (code == 0 and "--help" not in command.words)


@pytest.mark.parametrize("command", FITS, ids=str)
def test_a_documented_fit_has_a_model_for_its_data(command: Shown, understood: list[tuple[Any, ...]]) -> None:
    assert cli.main(command.words) == 0
    [(verb, _, method)] = understood
    try:
        rows = first_rows(verb.data)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    recipe = Recipe.of(rows, verb.data, verb.model, verb.likelihood)
    task = recipe.task(rows, seed=0, prior=GaussianPrior(1.0), parameters=verb.parameters, validation=verb.validation)
    method.check(task, task.network.device)
