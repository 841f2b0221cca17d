"""The table as text for a terminal, and every number as a line of a csv."""

import csv

from caveat.report import format_text, read, table, write_csv


def test_text_is_aligned_and_narrow(classification):
    found = table(read(classification))
    text = format_text(found, width=60)
    blocks = [block.split("\n") for block in text.split("\n\n")]
    assert len(blocks) > 1
    assert max(len(line) for block in blocks for line in block) <= 60
    for block in blocks:
        assert [line.split("  ")[0].strip() for line in block[2:]] == ["MAP", "Deep ensemble", "SWAG"]
    assert text.count("*") >= sum(bool(found.best(index)) for index in range(len(found.columns))) > 5
    assert format_text(found, width=1000).count("\n") == 4


def test_csv_is_tidy(classification, tmp_path):
    runs = read(classification)
    path = write_csv(runs, tmp_path / "deep" / "results.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(scored.metrics) for run in runs for scored in run.data)
    assert list(rows[0]) == ["label", "method", "data", "family", "severity", "metric", "mean", "stderr"]
    wanted = {"label": "SWAG", "data": "rotated 30", "metric": "nll"}
    (row,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    assert (row["method"], row["family"], float(row["severity"])) == ("swag", "rotated", 30.0)
    assert float(row["mean"]) == runs[2].by_name["rotated 30"].metrics["nll"].mean
    (clean,) = [row for row in rows if (row["label"], row["data"], row["metric"]) == ("MAP", "clean", "ece")]
    assert (clean["severity"], clean["stderr"]) == ("", "")
    assert [file.name for file in path.parent.iterdir()] == ["results.csv"]  # no temporary file stays
