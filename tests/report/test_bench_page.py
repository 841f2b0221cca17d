"""The page of a bench: the verdicts first, the same numbers as the tables, plots that a browser draws and filters."""

import csv
import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from caveat import bench, report
from caveat.cli import main
from caveat.evaluate.calibration import reliability
from caveat.report.bench_guards import method_sentence
from caveat.report.bench_inputs import disagreement, disagreement_gallery, toy_plots
from caveat.report.bench_plots import REJECTED, calibration_plots, rejection_plot, roc_curve
from caveat.report.bench_runs import over_seeds, read_bench
from caveat.report.bench_tables import between_table
from caveat.storage import read_json, write_json

pytest.importorskip("plotly")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> %{x} & <b>bold</b>"
DIGITS = """
title = "Digits & more"
data = ["digits"]
models = ["networks.py:digits_mlp"]
seeds = [0, 1]
prior_precision = 10.0
ood = ["permuted"]
[reference]
digits = "digits"
[map]
epochs = 4
[shifts]
rotation = [15, 60]
[methods.swag]
rank = 0
training.epochs = 2
[methods.last_layer_laplace]
n_draws = 10
"""
TOYS = """
data = ["line.npz", "plane.npz"]
models = ["mlp"]
seeds = [0, 1]
ood = ["noise"]
kept_rows = 40
[map]
epochs = 5
[shifts]
feature_shift = [1]
[methods.laplace]
"""


def run(folder: Path, text: str) -> Path:
    (folder / "tiny.toml").write_text(text)
    place = bench.Place(folder / "results" / "tiny", torch.device("cpu"))
    assert not bench.run_bench(folder / "tiny.toml", place, say=lambda text: None).failed
    return place.out


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, with a shift, data from outside and a reference."""
    folder = tmp_path_factory.mktemp("digits")
    shutil.copy(Path(__file__).parents[2] / "experiments" / "networks.py", folder)
    return run(folder, DIGITS)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regression of one input and two classes in a plane; of 60 test rows 40 are kept."""
    folder, rng = tmp_path_factory.mktemp("toys"), np.random.default_rng(0)
    x = rng.uniform(-2, 2, (200, 1))
    y = np.sin(2 * x) + 0.1 * rng.normal(size=x.shape)
    np.savez(folder / "line.npz", x_train=x[:140], y_train=y[:140], x_test=x[140:], y_test=y[140:])
    labels = rng.integers(0, 2, 200)
    x = rng.normal(size=(200, 2)) + labels[:, None]
    np.savez(folder / "plane.npz", x_train=x[:140], y_train=labels[:140], x_test=x[140:], y_test=labels[140:])
    return run(folder, TOYS)


def sections(text: str) -> list[str]:
    return re.findall(r'<section id="(\w+)"', text)


def described(text: str, start: str) -> list[str]:
    return [words for words in re.findall(r'role="img" aria-label="(.*?)"', text) if words.startswith(start)]


def table_of(text: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The keys of the columns; for each row its text and what it is sorted by."""
    body = re.search(r'<table class="results".*?</table>', text, re.S)[0]
    rows = re.findall(r"<tr data-run.*?</tr>", body, re.S)
    return re.findall(r'data-key="(.*?)"', body), [
        (re.sub(r"<i.*?</i>|<.*?>", " ", row).strip(), re.findall(r'data-loss="(.*?)"', row)) for row in rows
    ]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_page_of_images_has_every_section_and_the_verdicts_first(digits: Path) -> None:
    text = report.write(digits).read_text(encoding="utf-8")
    assert sections(text) == [
        "summary",
        "gains",
        "results",
        "shift",
        "reliability",
        "outside",
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


def test_the_table_has_the_numbers_of_the_summary(digits: Path) -> None:
    keys, rows = table_of(report.write(digits).read_text(encoding="utf-8"))
    by_method = {name.split()[0].replace(" ", ""): losses for name, losses in rows}
    summary = {r["method"]: r for r in rows_of(digits / "summary.csv") if r["role"] == "clean"}
    shifted = [r for r in rows_of(digits / "results.csv") if r["shift"] == "rotation" and r["metric"] == "nll"]
    assert len(rows) == len(summary) == 4
    for method in ("map", "swag"):
        found = dict(zip(keys, by_method[method], strict=True))
        assert float(found["nll"]) == pytest.approx(float(summary[method]["nll"]))
        assert float(found["accuracy"]) == pytest.approx(-float(summary[method]["accuracy"]))
        assert float(found["flops"]) == pytest.approx(float(summary[method]["flops"]))
        mean = np.mean([float(r["value"]) for r in shifted if r["method"] == method])
        assert float(found["rotation.nll"]) == pytest.approx(mean)


def test_means_and_errors_are_over_seeds(digits: Path) -> None:
    assert over_seeds([1.0, 2.0, 6.0]).mean == pytest.approx(3.0)
    assert over_seeds([1.0, 2.0, 6.0]).stderr == pytest.approx(np.sqrt(7 / 3))
    assert over_seeds([0.1, 0.1, 0.1]).stderr == 0
    assert over_seeds([1.0]).stderr is None
    assert over_seeds([1.0, None]).mean is None
    (group,) = read_bench(digits).groups
    swag = next(r for r in group.runs if r.label == "swag")
    row = next(r for r in rows_of(digits / "summary.csv") if r["method"] == "swag" and r["severity"] == "60.0")
    scored = swag.by_name["rotation 60"].metrics["brier"]
    assert (scored.mean, scored.stderr) == pytest.approx((float(row["brier"]), float(row["brier_stderr"])))


def test_reliability_is_of_all_seeds(digits: Path) -> None:
    (group,) = read_bench(digits).groups
    plot = calibration_plots(group)[0]
    clean = [run.clean.predictions for run in group.seeds("map")]
    probs, targets = (np.concatenate([one[key] for one in clean]) for key in ("probs", "targets"))
    expected = reliability(torch.from_numpy(probs), torch.from_numpy(targets))
    drawn = plot.figure.data[0]
    kept = expected.count / 2 >= 5
    np.testing.assert_allclose(drawn.y, expected.accuracy[kept], rtol=1e-5)
    np.testing.assert_array_equal(drawn.customdata, (expected.count[kept] / 2).int())


def test_rejecting_nothing_is_the_accuracy_and_rejecting_helps(digits: Path) -> None:
    (group,) = read_bench(digits).groups
    curve = rejection_plot(group, "clean data", ["clean"]).figure.data[1]
    assert group.runs[0].clean is not None
    assert curve.y[0] == pytest.approx(group.runs[0].clean.metrics["accuracy"].mean, abs=1e-6)
    assert curve.y[len(REJECTED) // 2] > curve.y[0]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_area_under_the_roc_curve_is_the_auroc(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inside, outside = rng.integers(0, 6, 50), rng.integers(2, 9, 40)  # with ties
    false_alarms, noticed = roc_curve(inside, outside)
    assert (false_alarms[0], noticed[0], false_alarms[-1], noticed[-1]) == (0, 0, 1, 1)
    counted = (outside[:, None] > inside).mean() + 0.5 * (outside[:, None] == inside).mean()
    assert np.trapezoid(noticed, false_alarms) == pytest.approx(counted)


def guard(shift: str, role: str, verdicts: dict[str, str], marked: tuple[str, ...] = ()) -> dict[str, object]:
    return {"shift": shift, "role": role, "verdicts": verdicts, "marked": marked, "baseline": "map_tempered"}


def test_sentences_say_where_a_method_is_worse() -> None:
    verdicts = [
        guard("clean", "clean", {"a": "worse", "b": "not distinguishable", "c": "better", "d": "better"}),
        guard("fog", "shift", {"a": "better", "b": "better", "c": "not distinguishable", "d": "worse"}, ("b",)),
        guard("svhn", "ood", {"a": "worse", "b": "not distinguishable", "c": "better", "d": "better"}),
    ]
    state, sentence = method_sentence("a", verdicts)
    assert (state, sentence) == ("mixed", "is worse on clean data and at telling svhn apart; better under fog.")
    assert method_sentence("b", verdicts)[0] == "not"  # better than tempered MAP only where plain MAP is too
    assert "better under fog, but there not shown to be better than plain map" in method_sentence("b", verdicts)[1]
    assert method_sentence("c", verdicts)[0] == "better"
    assert method_sentence("d", verdicts)[0] == "mixed"
    assert method_sentence("a", [verdicts[0]])[0] == "worse"
    twice = [*verdicts, guard("snow", "shift", {"a": "better"})]
    assert method_sentence("a", twice)[1].endswith("better under fog and snow.")


def test_the_gallery_shows_what_methods_disagree_about(digits: Path) -> None:
    probs = np.array([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])  # two methods, two inputs
    np.testing.assert_allclose(disagreement(probs), [0.5, 0.0])
    (group,) = read_bench(digits).groups
    text = disagreement_gallery(group)
    assert re.findall(r"<summary>(.*?) <", text) == ["clean", "rotation 60", "permuted"]
    runs = [group.cells[run.label][0] for run in group.done]
    every = np.stack([run.by_name["clean"].predictions["probs"] for run in runs]).astype(np.float64)
    with np.load(digits / "inputs" / "digits" / "clean.npz") as inputs:
        shown = inputs["rows"]
    first = shown[np.argmax(disagreement(every[:, shown]))]
    assert int(re.search(r'alt="Row (\d+) of clean', text)[1]) == first


def test_methods_are_compared_with_each_other(digits: Path) -> None:
    (group,) = read_bench(digits).groups
    expected = []
    for seed in (0, 1):
        one, other = (group.cells[name][seed].clean.predictions["probs"] for name in ("map", "swag"))
        expected.append(0.5 * np.abs(one - other).sum(1).mean())
    row = re.search(r'<tr data-run="0">.*?</tr>', between_table(group), re.S)[0]
    assert f">{report.tables.format_number(float(np.mean(expected)))} " in row


def test_toys_of_two_kinds_share_a_page(toys: Path) -> None:
    text = report.write(toys).read_text(encoding="utf-8")
    assert {"reliability", "coverage", "outside", "rejection", "toys"} < set(sections(text))
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
    keys, rows = table_of(text)
    assert len(rows) == 6
    coverage = [losses[keys.index("coverage_90")] for _, losses in rows]
    assert [bool(value) for value in coverage] == [True] * 3 + [False] * 3  # of numbers only


def change(out: Path, target: Path, edit: Callable[[dict[str, object]], None]) -> Path:
    """A copy of a folder with another bench.json."""
    shutil.copytree(out, target, ignore=shutil.ignore_patterns("posterior"))
    content = read_json(target / "bench.json")
    edit(content)
    write_json(target / "bench.json", content)
    return target


def test_what_failed_is_said_and_colours_stay(toys: Path, tmp_path: Path) -> None:
    def fail(content: dict[str, object]) -> None:
        content["title"] = HOSTILE
        for cell in content["cells"]:
            if (cell["method"], cell["data"]) == ("map_tempered", "line"):
                cell |= {"status": "failed", "error": HOSTILE}

    folder = change(toys, tmp_path / "toys", fail)
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


def test_warnings_and_notes_stand_beside_what_they_touch(digits: Path, tmp_path: Path) -> None:
    assert "the reference's" not in report.write(digits).read_text(encoding="utf-8"), "the same network and prior"

    out, note = change(digits, tmp_path / "out", lambda index: None), "the reference's prior is another"
    for cell in read_json(out / "bench.json")["cells"]:
        path = out / cell["folder"] / "metrics.json"
        content = read_json(path)
        if cell["method"] == "map_tempered":
            content["info"]["warnings"] = [HOSTILE]
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


def test_without_a_baseline_nothing_is_claimed(toys: Path, tmp_path: Path) -> None:
    folder = change(toys, tmp_path / "toys", lambda content: content.update(guards=[]))
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
    toys: Path, tmp_path: Path, rendered: Callable[[Path], str]
) -> None:
    page = report.write(toys, tmp_path / "page.html")
    text = page.read_text(encoding="utf-8")
    keys, _ = table_of(text)
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
def test_the_page_of_images_is_drawn(digits: Path, rendered: Callable[[Path], str]) -> None:
    text = rendered(report.write(digits), "#sort=rotation.nll")
    keys, rows = table_of(text)
    losses = [float(row[keys.index("rotation.nll")]) for _, row in rows]
    assert losses == sorted(losses)
