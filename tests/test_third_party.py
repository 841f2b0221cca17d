"""Networks of other packages fit, predict, are saved, and load bit-equal: some cells of `benchmarks/third_party.py`.

All of its networks and settings are fifty by twenty-odd; a cell may be refused, with a reason. Some cells are tests of
every run, every method on a dozen networks those of a slow one. A package that is not installed skips its networks
(`pip install 'caveat[test-models]'` has most of them).
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]
POST_HOC = ("laplace", "subnetwork_laplace")
QUICK = [
    ("BERT", ("laplace", "swag")),
    ("BERT with LoRA", ("laplace", "deep_ensemble", "ivon")),
    ("GPT-2 with LoRA (Conv1D)", POST_HOC),
    ("Llama with LoRA, bfloat16 base", POST_HOC),
    ("Mixtral, routed experts", ("laplace",)),
    ("ViT with LoRA", ("last_layer_laplace", "mc_dropout")),
    ("Graph convolutions", POST_HOC),
    ("Mixture of linear experts", POST_HOC),
    ("Packed LSTM", POST_HOC),
    ("nn.TransformerEncoder", ("laplace",)),
    ("Attention for regression, bare parameters", (*POST_HOC, "deep_ensemble")),
]
pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own


@pytest.fixture(scope="module")
def parts() -> Iterator[ModuleType]:
    """The modules of the benchmark."""
    before = set(sys.modules)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import third_party_parts
    from third_party_parts import cell, language, others, settings, tables, vision  # noqa: F401

    yield third_party_parts
    sys.path.remove(str(ROOT / "benchmarks"))
    for name in set(sys.modules) - before:
        if name.startswith("third_party"):
            del sys.modules[name]


def stages(parts: ModuleType, network: str, setting: str, folder: Path) -> dict:
    """The row of a cell, in this process."""
    found: dict = {}
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        for stage in parts.cell._stages(network, setting, folder / "points", folder):
            found |= stage
    return found


@pytest.mark.parametrize(("network", "settings"), QUICK, ids=[network for network, _ in QUICK])
def test_a_network_fits_predicts_and_loads_as_it_was(
    parts: ModuleType, network: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    entry = parts.cases.CASES[network]
    if (missing := entry.missing()) is not None:
        pytest.skip(missing)
    for setting in settings:
        folder = tmp_path / setting
        folder.mkdir()
        row = stages(parts, network, setting, folder)
        assert row["stage"] == "done"
        assert row["equal"], f"{setting}: what was loaded predicts otherwise"


@pytest.mark.slow  # some minutes a network
@pytest.mark.parametrize("network", [*(network for network, _ in QUICK), "T5 encoder"])
def test_every_method_takes_a_network_or_says_why_not(parts: ModuleType, network: str, tmp_path: Path) -> None:
    if (missing := parts.cases.CASES[network].missing()) is not None:
        pytest.skip(missing)
    rows = [parts.cell.run_cell(network, setting, tmp_path, 300.0) for setting in parts.settings.CORE]
    ends = {row["setting"]: (row["outcome"], row["stage"], row["said"]) for row in rows}
    wrong = [row["setting"] for row in rows if row["outcome"] != "ok" and not parts.tables.justification(row)]
    assert not wrong, {setting: ends[setting] for setting in wrong}


def test_the_page_has_the_rows_of_the_csv_and_their_refusals_are_justified(parts: ModuleType) -> None:
    import third_party

    rows = parts.tables.Rows(ROOT / "benchmarks" / "third_party.csv")
    text = (ROOT / "docs" / "networks.md").read_text()
    assert text == third_party.filled(text, rows), "run `python benchmarks/third_party.py --page docs/networks.md`"
    assert [row for row in rows.all() if row["outcome"] != "ok" and not parts.tables.justification(row)] == []


def test_a_cell_that_fails_says_where(parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which may refuse, break, or take too long."""
    case, cell = parts.cases, parts.cell

    class Broken(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.max() < 50 else x.unknown

    def broken() -> object:
        x, y = case.table()
        x[case.ROWS :] += 100
        return case.Case(Broken(6, 3), x, y)

    monkeypatch.setitem(case.CASES, "broken", case.Entry("broken", (), broken))
    row = cell.run_cell("broken", "ivon", tmp_path, 60.0)
    assert (row["outcome"], row["stage"]) == ("fault", "predict")
    assert "AttributeError: 'Tensor' object has no attribute 'unknown' (test_third_party.py" in row["said"]
    refused = cell.run_cell("broken", "mc_dropout", tmp_path, 60.0)
    assert refused["outcome"] == "refused"
    assert parts.tables.justification(refused)

    def endless(*_: object) -> Iterator[dict]:
        while True:
            pass
        yield {}

    monkeypatch.setattr(cell, "_stages", endless)
    endless_row = cell.run_cell("broken", "swag", tmp_path, 1.0)
    assert (endless_row["outcome"], endless_row["stage"]) == ("over the time limit", "start")
    table = parts.tables.Rows(tmp_path / "rows.csv")
    table.keep(row)
    assert parts.tables.Rows(tmp_path / "rows.csv").all()[0]["said"] == row["said"]
    assert "0 refusals are justified" in parts.tables.summary(table.all())
