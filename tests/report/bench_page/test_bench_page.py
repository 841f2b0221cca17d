"""The page of a bench: the verdicts first, the same numbers as the tables, plots that a browser draws and filters."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from caveat import report
from caveat.cli import main
from caveat.report.bench_page.shown_inputs import toy_plots
from caveat.report.saved import read_bench
from caveat.storage import read_json, write_json

pytest.importorskip("plotly")
TableOf = Callable[[str], tuple[list[str], list[tuple[str, list[str]]]]]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> %{x} & <b>bold</b>"


def sections(text: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', text)


def described(text: str, start: str) -> list[str]:
    return [words for words in re.findall(r'role="img" aria-label="(.*?)"', text) if words.startswith(start)]


def test_the_page_of_images_has_every_section_and_the_verdicts_first(digits: Path) -> None:
    text = report.write(digits).read_text(encoding="utf-8")
    assert sections(text) == [
        "summary",
        "gains",
        "results",
        "shift",
        "reliability",
        "ood",
        "rejection",
        "cost",
        "fidelity",
        "gallery",
        "configuration",
    ]
    assert "<h1>Digits &amp; more</h1>" in text
    summary = text[text.index('id="summary"') : text.index('id="gains"')]
    for label in ("map", "swag", "last_layer_laplace"):
        assert re.search(
            rf"<li class=\"\w+\" data-run=\"\d\"><b>{label}</b> is (better|worse|level|not distinguishable)", summary
        )
    assert "With 2 seeds little can be said" in summary
    assert "[methods.swag]" in text
    assert "torch" in text[text.index('id="configuration"') :]
    assert len(described(text, "Reliability of")) == 4
    assert len(described(text, "ROC of telling permuted")) == 1
    assert len(described(text, "Entropy, nats under")) == 4
    assert len(described(text, "Accuracy against the share rejected")) == 2
    assert text.count('<table class="matrix">') == 3  # two closenesses to the reference, and to each other
    assert all(re.findall(r'<img src="data:image/png;base64,[^"]+" alt="([^"]*)"', text))
    assert "://" not in text
    assert not re.search(r"<button(?! type)", text)  # what can be pressed is a button, so the keyboard reaches it


def test_toys_of_two_kinds_share_a_page(toys: Path, results_table_of: TableOf) -> None:
    text = report.write(toys).read_text(encoding="utf-8")
    assert {"reliability", "coverage", "ood", "rejection", "toys"} < set(sections(text))
    line, plane = read_bench(toys).groups
    assert (line.kind, plane.kind) == ("regression", "classification")
    assert re.findall(r'data-toggle-set="\d"[^>]*>(.*?)<', text) == [line.title, plane.title]
    _, truth, curve = toy_plots(line)[0].figure.data
    assert len(truth.x) == 40  # the rows that were kept
    assert np.all(np.diff(curve.x) >= 0)
    assert line.runs[0].clean is not None
    assert sorted(truth.y) == pytest.approx(sorted(line.runs[0].clean.predictions["targets"][:, 0].tolist()))
    (points,) = toy_plots(plane)[1].figure.data
    assert len(points.x) == len(points.y) == 40
    keys, rows = results_table_of(text)
    assert len(rows) == 6
    coverage = [losses[keys.index("coverage_90")] for _, losses in rows]
    assert [bool(value) for value in coverage] == [True] * 3 + [False] * 3  # of numbers only


def test_what_failed_is_said_and_colours_stay(toys: Path, tmp_path: Path, changed_copy: Callable[..., Path]) -> None:
    def fail(content: dict[str, object]) -> None:
        content["title"] = HOSTILE
        for cell in content["cells"]:
            if (cell["method"], cell["data"]) == ("map_tempered", "line"):
                cell |= {"status": "failed", "error": HOSTILE}

    folder = changed_copy(toys, tmp_path / "toys", fail)
    text = report.write(folder).read_text(encoding="utf-8")
    assert "2 of 12 fits failed or are missing" in text
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    line, plane = read_bench(folder).groups
    assert [run.label for run in line.done] == ["map", "laplace"]
    assert set(re.findall(r'data-run="(\d)"><figcaption>laplace', text)) == {"2"}, (
        "laplace has the same number on both data sets"
    )
    assert len(plane.done) == 3


def test_warnings_and_notes_stand_beside_what_they_touch(
    digits: Path, tmp_path: Path, changed_copy: Callable[..., Path]
) -> None:
    assert "the reference's" not in report.write(digits).read_text(encoding="utf-8"), "the same network and prior"

    out, note = changed_copy(digits, tmp_path / "out", lambda index: None), "the reference's prior is another"
    for cell in read_json(out / "bench.json")["cells"]:
        path = out / cell["folder"] / "metrics.json"
        content = read_json(path)
        content["info"]["warnings"] = [HOSTILE] if cell["method"] == "map_tempered" else []
        content["reference"]["notes"] = [note]
        write_json(path, content)
    text = report.write(out).read_text(encoding="utf-8")
    summary = text[text.index('id="summary"') : text.index('id="gains"')]
    assert "Fits with warnings: map_tempered (1)" in summary
    assert f"All verdicts are against map_tempered, which says: {html.escape(HOSTILE)}" in summary
    near = text[text.index('id="fidelity"') : text.index('id="gallery"')]
    labels = "map, map_tempered, swag and last_layer_laplace"
    assert f"Closeness of {labels} to the reference is not of methods alone: {html.escape(note)}." in near
    assert HOSTILE not in text


def test_without_a_baseline_nothing_is_claimed(toys: Path, tmp_path: Path, changed_copy: Callable[..., Path]) -> None:
    folder = changed_copy(toys, tmp_path / "toys", lambda content: content.update(guards=[]))
    text = report.write(folder).read_text(encoding="utf-8")
    assert "There is nothing to compare" in text
    assert "has to beat" not in text
    assert "gains" not in sections(text)


def test_the_same_folder_gives_the_same_page(toys: Path, tmp_path: Path) -> None:
    pages = [report.write(toys, tmp_path / name).read_bytes() for name in ("a.html", "b.html")]
    assert pages[0] == pages[1]


def test_report_without_a_folder_takes_the_newest(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report"]) == 1
    assert "caveat report --results FOLDER" in capsys.readouterr().err
    monkeypatch.chdir(toys.parents[1])
    (toys / "report.html").unlink(missing_ok=True)
    assert main(["report", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(Path("results") / "tiny" / "report.html")}
    assert (toys / "report.html").exists()


CLICKS = """<script>
const done = new MutationObserver(() => {
  if (!document.documentElement.dataset.ready || document.body.dataset.clicked) return;
  document.body.dataset.clicked = "true";
  const press = (selector) => document.querySelector(selector).click();
  const rows = () => [...document.querySelectorAll("#table tbody tr")].filter((row) => row.offsetParent);
  const curve = () => document.querySelector("#rejection .canvas").data.filter((trace) => trace.visible).length;
  const costs = () => [...document.querySelectorAll("#cost .canvas")].filter((canvas) => canvas.offsetParent);
  const front = () => costs()[0].data.at(-1).x.length;
  const seen = () => `${rows().length} ${curve()} ${front() > 0}`;
  const found = [seen()];
  press('[data-toggle="0"]'); found.push(seen());
  press('[data-toggle-set="0"]'); found.push(`${rows().length}`);
  press('[data-toggle-set="0"]'); press('[data-toggle-all]'); found.push(seen());
  press('[data-toggle-all]'); found.push(`${rows().length}`); press('[data-toggle-all]');
  press('th[data-key="nll"] button');
  found.push(rows().map((row) => row.cells[2].dataset.loss).join(","));
  press('th[data-key="nll"] button');
  found.push(document.querySelector('th[data-key="nll"]').getAttribute("aria-sort"));
  press('th[data-key="order"] button');
  found.push(rows().map((row) => row.cells[0].dataset.loss).join(","));
  dispatchEvent(new Event("beforeprint"));
  const copies = [...document.querySelectorAll(".copy")];
  const columns = copies.map((copy) => copy.rows[1].cells.length - 1);
  const last = copies.at(-1).rows[1].cells[1].dataset.key;
  found.push(`${columns.reduce((a, b) => a + b)} ${Math.max(...columns)} ${last}`);
  dispatchEvent(new Event("afterprint"));
  found.push(document.querySelectorAll(".copy").length);
  document.body.dataset.found = found.join(" | ");
});
done.observe(document.documentElement, { attributes: true });
</script>"""


@pytest.mark.browser
def test_plots_are_drawn_and_buttons_filter_and_sort(
    toys: Path,
    tmp_path: Path,
    rendered: Callable[[Path], str],
    results_table_of: TableOf,
) -> None:
    page = report.write(toys, tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    keys, _ = results_table_of(text)
    assert keys.index("nll") == 2
    page.write_text(text.replace("</body>", CLICKS + "</body>"), encoding="utf-8")
    text = rendered(page)
    found = re.search(r'data-found="(.*?)"', text)[1].split(" | ")
    whole, fewer, one_set, again, none, losses, turned, order, printed, left = found
    assert whole == "6 6 true"  # three methods on two data sets; a curve and its band of each
    assert fewer == "4 4 true"
    assert one_set == "2"
    assert (again, none) == ("6 6 true", "0")
    values = [float(value) for value in losses.split(",")]
    assert values == sorted(values)
    assert turned == "descending"
    assert order == "0,1,2,3,4,5"
    columns, widest, last = printed.split()  # on paper every column is in one of several tables
    assert int(columns) == len(keys) - 1
    assert int(widest) <= 8
    assert last == "seconds"
    assert left == "0"


@pytest.mark.browser
def test_the_page_of_images_is_drawn(
    digits: Path,
    rendered: Callable[[Path], str],
    results_table_of: TableOf,
) -> None:
    text = rendered(report.write(digits), "#sort=rotation.nll")
    keys, rows = results_table_of(text)
    losses = [float(row[keys.index("rotation.nll")]) for _, row in rows]
    assert losses == sorted(losses)
