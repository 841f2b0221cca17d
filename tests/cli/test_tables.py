"""A table of text, blanks, dates and dollars goes through all verbs without a hand-made step."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.command import run
from tests.cli.own_data import TRAINED, lines


def houses(path: Path, header: str = "house,area,town,sold,tax,remark,price", n: int = 150, seed: int = 0) -> Path:
    """What a person's table looks like; the price depends on area, town and date."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(n):
        area, town, day = rng.uniform(30, 200), rng.choice(["Oslo", "Bergen", "Bodø"]), int(rng.integers(0, 28))
        price = 2000 * area * (1.5 if town == "Oslo" else 1) + rng.normal() * 5000
        cells = {
            "house": f"H{number:03}",
            "area": f"{area:.1f}" if number % 10 else "",
            "town": town if number % 15 else "NA",
            "sold": f"{day + 1:02}.{number % 12 + 1:02}.2024",
            "tax": f"{rng.uniform(1, 9):.1f}%",
            "remark": f"note {number}",
            "price": f'"${price:,.2f}"',
            "sale": "yes" if price > 350_000 else "no",
        }
        rows.append(",".join(cells[name] for name in header.split(",")))
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from caveat.cli import main

    folder = tmp_path_factory.mktemp("houses")
    data = houses(folder / "houses.csv")
    assert main(["fit", "map", "--data", str(data), "--id", "house", "--out", str(folder / "map"), *TRAINED]) == 0
    return folder / "map"


def test_the_whole_way(fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    code, printed, err = run(capsys, "evaluate", "--posteriors", fitted, "--out", results, "--json")
    assert code == 0, err
    assert json.loads(printed)["map"]["clean"]["rmse"] < 60_000, "dollars; they spread by 110,000"
    said = (
        "inputs area, town (text, 4 values), sold (date, day.month.year), tax (%), target price in $, left out remark"
    )
    assert said in err
    assert "note: column area: 15 blank cells" in err
    assert json.loads((results / "map" / "metrics.json").read_text())["target"] == "price, $"
    code, printed, err = run(capsys, "report", "--results", results)
    assert code == 0, err
    page = (results / "report.html").read_text(encoding="utf-8")
    assert "True price, $" in page
    assert "Predicted price, $" in page


def test_new_rows_with_other_columns_unknown_towns_and_blanks(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = houses(tmp_path / "new.csv", "tax,sold,town,house,area", n=20, seed=1)
    new.write_text(new.read_text(encoding="utf-8").replace("Bergen", "Tromsø"), encoding="utf-8")
    command = ["predict", "--posterior", fitted, "--data", new, "--out"]
    code, _, err = run(capsys, *command, tmp_path / "o.csv", "--level", "0.9", "0.5")
    assert code == 0, err
    assert "note: column area: 2 blank cells, read as" in err
    assert "note: column town: 'Tromsø' in" in err
    rows = lines(tmp_path / "o.csv")
    deviations = ["standard_deviation", "aleatoric_deviation", "epistemic_deviation"]
    assert list(rows[0]) == ["house", "mean", *deviations, "lower_90", "upper_90", "lower_50", "upper_50"]
    assert [row["house"] for row in rows] == [f"H{number:03}" for number in range(20)]
    first = {name: float(value) for name, value in rows[1].items() if name != "house"}
    assert first["lower_90"] < first["lower_50"] < first["mean"] < first["upper_50"] < first["upper_90"]
    wide, narrow = first["upper_90"] - first["lower_90"], first["upper_50"] - first["lower_50"]
    assert wide / narrow == pytest.approx(1.6449 / 0.6745, rel=1e-3)
    assert first["standard_deviation"] == pytest.approx(wide / 2 / 1.6449, rel=1e-3), "in dollars"

    assert run(capsys, *command, tmp_path / "o.npz", "--quiet", "--level", "0.5")[0] == 0
    with np.load(tmp_path / "o.npz", allow_pickle=False) as arrays:
        assert arrays["ids"].tolist() == [f"H{number:03}" for number in range(20)]
        assert {"lower_50", "upper_50", "lower_90"} <= set(arrays.files)

    missing = houses(tmp_path / "missing.csv", "tax,sold,house,area", n=20)
    code, _, err = run(capsys, "predict", "--posterior", fitted, "--data", missing, "--out", tmp_path / "m.csv")
    assert (code, "missing.csv lacks the column town; it has tax, sold, house, area" in err) == (1, True)
    nameless = houses(tmp_path / "nameless.csv", "tax,sold,town,area", n=20)
    code, _, err = run(capsys, "predict", "--posterior", fitted, "--data", nameless, "--out", tmp_path / "n.csv")
    assert (code, "note:" in err and "has no column house, so its rows are numbered" in err) == (0, True)
    assert lines(tmp_path / "n.csv")[3]["row"] == "3"
    code, _, err = run(
        capsys, "predict", "--posterior", fitted, "--data", nameless, "--id", "z", "--out", tmp_path / "z.csv"
    )
    assert (code, "nameless.csv lacks the column z" in err) == (1, True)


def test_a_table_in_european_dress_goes_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Semicolons, decimal commas, dates in two ways, a name of two lines, a constant, millions of euros."""
    rng, rows = np.random.default_rng(0), []
    for number in range(80):
        area, day, month = rng.uniform(20, 90), rng.integers(1, 29), rng.integers(1, 13)
        sold = f"{day:02}.{month:02}.2024" if number % 3 else f"2024-{month:02}-{day:02}"
        price = f"{area * 3e4:,.2f} €".translate(str.maketrans(",.", ".,"))
        rows.append(f'H{number};{area:.1f};"{sold}";Europe;{price}'.replace(".", ",", 1))
    data = tmp_path / "flats.csv"
    data.write_text("\n".join(['id;"area\n(m²)";sold;continent;price', *rows, rows[0]]), encoding="utf-8-sig")
    short = ["--training.epochs", "60"]
    fit = ["fit", "map", "--data", data, "--id", "id", "--out", tmp_path / "map", *short]
    code, _, err = run(capsys, *fit)
    assert code == 0, err
    assert "sold (date, year-month-day or day.month.year), target price in €, left out continent (the same text" in err
    assert "area (m²)" in err
    assert "note: a comma stands before decimals" in err
    assert "note: 1 row repeats another" in err
    command = ["predict", "--posterior", tmp_path / "map", "--data", data, "--out"]
    code, _, err = run(capsys, *command, tmp_path / "o.csv", "--quiet")
    assert code == 0, err
    written = lines(tmp_path / "o.csv")
    assert len(written) == 81
    assert max(float(row["mean"]) for row in written) > 1e6
    assert not any("e" in row["mean"] for row in written), "all digits"
    assert "predictions are written as .npz or .csv" in run(capsys, *command, tmp_path / "o.parquet")[2]


def test_classes_and_their_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = houses(tmp_path / "sales.csv", "house,area,town,sold,sale")
    recalls = {}
    for weights in ([], ["--class-weights", "balanced"], ["--class-weights", "1", "50"]):
        out = tmp_path / f"p{len(recalls)}"
        code, _, err = run(capsys, "fit", "map", "--data", data, "--id", "house", "--out", out, *TRAINED, *weights)
        assert code == 0, err
        code, _, err = run(capsys, "predict", "--posterior", out, "--data", data, "--out", f"{out}.csv", "--quiet")
        assert code == 0, err
        recalls[len(recalls)] = sum(row["predicted"] == "yes" for row in lines(Path(f"{out}.csv")))
    assert recalls[0] < recalls[2]
    stored = json.loads((tmp_path / "p1" / "posterior.json").read_text())["likelihood"]
    first, second = stored["fields"]["class_weights"]
    assert first < 1 < second, "there are fewer sales than houses that were not sold"
    assert pytest.approx(1 / first + 1 / second, rel=1e-4) == 2

    code, _, err = run(
        capsys, "predict", "--posterior", out, "--data", data, "--out", tmp_path / "l.csv", "--level", ".5"
    )
    assert (code, "--level 0.5: intervals are of numbers; this posterior predicts classes" in err) == (1, True)
    numbers = houses(tmp_path / "numbers.csv")
    fit = ["fit", "map", "--data", numbers, "--out", tmp_path / "w", "--class-weights", "balanced"]
    assert "class weights are for the likelihood categorical, and this is gaussian" in run(capsys, *fit)[2]


def test_parquet_reads_as_the_csv(fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    new = houses(tmp_path / "new.csv", n=20, seed=2)
    pandas.read_csv(new).to_parquet(tmp_path / "new.parquet")
    for ending in ("csv", "parquet"):
        command = ["predict", "--posterior", fitted, "--data", tmp_path / f"new.{ending}", "--quiet"]
        assert run(capsys, *command, "--out", tmp_path / f"{ending}.csv")[0] == 0
    assert (tmp_path / "parquet.csv").read_text() == (tmp_path / "csv.csv").read_text()


def test_an_edited_encoding_is_refused(fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from caveat.storage import write_json

    content = json.loads((fitted / "posterior.json").read_text())
    del content["checksum"]
    content["note"]["recipe"]["preprocessing"]["encoding"]["numbers"][0]["name"] = "volume"
    (tmp_path / "edited").mkdir()
    (tmp_path / "edited" / "state.safetensors").write_bytes((fitted / "state.safetensors").read_bytes())
    write_json(tmp_path / "edited" / "posterior.json", content)
    code, _, err = run(capsys, "predict", "--posterior", tmp_path / "edited", "--out", tmp_path / "o.csv")
    assert (code, "the recipe, preprocessing" in err and "describes volume" in err) == (1, True)
