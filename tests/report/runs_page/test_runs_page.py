import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from caveat.report import read, write
from caveat.report.saved import mean_over_data

pytest.importorskip("plotly")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"a\" 'b' %{x} & <b>bold</b>"


class Page(HTMLParser):
    """Collects the elements of a page: (tag, attributes), and the text outside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.text, self.inside = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside not in ("script", "style"):
            self.text.append(data)

    def find(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def sections(self):
        return [attributes["id"] for attributes in self.find("section")]

    def plots(self):
        return [attributes for attributes in self.find("div") if attributes.get("class") == "canvas"]


def opened(path):
    return Page(path.read_text(encoding="utf-8"))


def test_classification_page_has_every_section(classification):
    path = write(classification, title="Digits & more")
    assert path == classification / "report.html"
    page = opened(path)
    assert page.sections() == [
        "summary",
        "results",
        "shift",
        "classes",
        "reliability",
        "ood",
        "refusal",
        "gallery",
        "cost",
        "configuration",
    ]
    assert page.find("html")[0]["lang"] == "en"
    assert "Digits & more" in page.text
    assert len(page.find("h1")) == 1
    assert "one member did not converge" in page.text
    assert "Worse than MAP:" in page.text or "Not distinguishable from MAP:" in page.text
    # gains 3, curves 3, reliability 3, dots 1, histograms 3, refusal 2; cost 2, as all took as many gradients
    assert len(page.plots()) == 17
    assert all(plot["aria-label"] and plot["role"] == "img" for plot in page.plots())
    assert all(image["alt"] for image in page.find("img"))
    assert page.find("caption")


def test_regression_page_has_its_own_sections(regression, tmp_path):
    page = opened(write(regression, tmp_path / "elsewhere" / "page.html"))
    assert page.sections() == ["summary", "results", "shift", "coverage", "intervals", "configuration"]
    labels = [plot["aria-label"] for plot in page.plots()]
    assert sum(label.startswith("Predicted against true") for label in labels) == 4  # two runs, two outputs
    (coverage,) = [label for label in labels if label.startswith("Coverage against nominal level on clean")]
    pit = np.load(regression / "map" / "predictions" / "clean.npz")["pit"]
    assert f"MAP covers {(np.abs(pit - 0.5) <= 0.45).mean():.0%} at 90%" in coverage


def test_binary_page_without_baseline_or_shift(binary):
    page = opened(write(binary))
    assert page.sections() == ["summary", "results", "classes", "reliability", "refusal", "configuration"]
    assert any("no MAP run" in text for text in page.text)


def test_the_page_reaches_for_nothing_outside(classification):
    text = write(classification).read_text(encoding="utf-8")
    assert "://" not in text
    page = Page(text)
    assert page.find("link") == []
    for tag, attributes in page.elements:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,")), (tag, attributes)
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    assert "@import" not in style
    assert "url(" not in style
    (policy,) = [meta["content"] for meta in page.find("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert text.count('id="plotly"') == 1
    assert len(text) < 2_600_000


def test_the_same_results_give_the_same_page(classification, tmp_path):
    assert (
        write(classification, tmp_path / "a.html").read_bytes()
        == write(classification, tmp_path / "b.html").read_bytes()
    )


def hostile_names(folder, change_metrics):
    """Puts markup into every text that a metrics.json brings along."""

    def change(content):
        content["class_names"] = [HOSTILE + name for name in content["class_names"]]
        content["info"]["warnings"] = [HOSTILE]
        content["info"]["coverage"] = [{HOSTILE: HOSTILE}]
        content["info"]["versions"] = {HOSTILE: HOSTILE}
        content["method"]["fields"] = {HOSTILE: {HOSTILE: HOSTILE}}
        for entry in content["data"]:
            if entry["family"] in ("rotated", "photographs"):
                entry["name"], entry["family"] = entry["name"] + HOSTILE, entry["family"] + HOSTILE

    for path in sorted(folder.glob("*/metrics.json")):
        change_metrics(path.parent, change)
    change_metrics(folder / "swag", lambda content: content.update(label="SWAG" + HOSTILE))
    change_metrics(folder / "swag", lambda content: content["method"].update(name=HOSTILE))


def test_names_from_files_stay_text(classification, change_metrics):
    plain = opened(write(classification))
    hostile_names(classification, change_metrics)
    page = opened(write(classification, title=HOSTILE))
    for tag in ("script", "img", "b"):
        assert [set(attributes) for attributes in page.find(tag)] == [set(attributes) for attributes in plain.find(tag)]
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert any(HOSTILE in text for text in page.text)


def test_missing_plotly_says_what_to_install(classification, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ImportError, match=r'pip install "caveat\[report\]"'):
        write(classification)
    assert not (classification / "report.html").exists()


@pytest.mark.browser
def test_plots_are_drawn_and_the_table_sorts(classification, rendered):
    text = rendered(write(classification), "#sort=rotated.nll")
    body = re.search(r'<table class="results".*?<tbody>(.*?)</tbody>', text, re.S)[1]
    order = [int(index) for index in re.findall(r'<tr data-run="(\d)"', body)]
    losses = [mean_over_data(run.shifts["rotated"], "nll").mean for run in read(classification)]
    assert order == sorted(range(3), key=lambda index: losses[index])
    assert order != [0, 1, 2]
    (head,) = re.findall(r'<th [^>]*data-key="rotated.nll"[^>]*>', text)
    assert 'aria-sort="ascending"' in head


@pytest.mark.browser
def test_hostile_names_run_nothing_in_the_browser(classification, change_metrics, rendered):
    hostile_names(classification, change_metrics)
    text = rendered(write(classification))
    assert all(image["src"].startswith("data:") for image in Page(text).find("img"))


@pytest.mark.browser
def test_regression_plots_are_drawn(regression, rendered):
    rendered(write(regression))


def test_what_is_left_out_is_said_beside_answers_and_table(classification, change_metrics):
    change_metrics(classification / "swag", lambda content: content["data"].pop(3))
    text = " ".join(opened(write(classification)).text)
    assert text.count("rotated: means are over 15 and 30, which all runs with this shift have; 60 is left out.") == 2
    assert "rotated, severities that all runs have" in text


def test_a_run_on_other_clean_data_stands_alone(classification, change_metrics):
    def other(content):
        content["data"][0].update(name="holdout", family="holdout")
        content["data"][1:4] = []

    change_metrics(classification / "swag", other)
    assert "SWAG was scored on holdout instead" in " ".join(opened(write(classification)).text)


PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  const broken = [...document.querySelectorAll(".card tbody td:nth-child(2)")].filter((cell) => {
    const range = document.createRange(), text = cell.firstChild, start = text.data.indexOf(" ") + 1;
    range.setStart(text, start);
    range.setEnd(text, text.length);
    return range.getClientRects().length > 1;
  });
  const root = document.documentElement;
  root.setAttribute("data-probe", `${broken.length} words broken, ${root.scrollWidth - root.clientWidth} too wide`);
}, 2000))</script>"""


def test_words_are_whole_and_only_tables_scroll(classification, change_metrics, rendered):
    for folder in ("map", "deep_ensemble", "swag"):
        names = ["hippopotamus", "triangle", "square", "salamander"]
        change_metrics(classification / folder, lambda content, names=names: content.update(class_names=names))
    path = write(classification)
    path.write_text(path.read_text(encoding="utf-8") + PROBE, encoding="utf-8")
    assert 'data-probe="0 words broken, 0 too wide"' in rendered(path)
