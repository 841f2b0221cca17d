"""The page in a real browser: it loads, asks for a prediction, and shows it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import caveat
from caveat import data

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from caveat.serve import Service, app_of
from tests.serve.test_app import running

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
SWITCHES = "--headless --no-sandbox --disable-gpu --no-first-run --disable-sync --virtual-time-budget=20000 --dump-dom"
PROBLEMS = {
    "classes": (caveat.Categorical(), torch.arange(40) % 3, 3, r"(ant|bee|&lt;b&gt;cat), with probability \d+\.\d%"),
    "labels": (caveat.Bernoulli(), (X[:, :2] > 0).float(), 2, r"probability \d+\.\d%, \d+\.\d%"),
    "a set": (caveat.Categorical(), torch.arange(40) % 3, 3, r"\w+, with probability \d+\.\d%; the 90% set: [\w, ]+"),
    "numbers": (caveat.Gaussian(), X[:, :1], 1, r"-?[\d.]+, with 90% between -?[\d.]+ and -?[\d.]+"),
}


def seen(port: int, tmp_path: Path) -> str:
    """The page once it has asked for a prediction."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on PATH")
    command = [chromium, *SWITCHES.split(), f"--user-data-dir={tmp_path}", f"http://127.0.0.1:{port}/?now"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.browser
@pytest.mark.parametrize("name", PROBLEMS)
def test_an_input_is_tried(name: str, tmp_path: Path) -> None:
    likelihood, y, outputs, expected = PROBLEMS[name]
    torch.manual_seed(0)
    task = caveat.Task(nn.Linear(4, outputs), (X, y), likelihood)
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=2)), progress=False)
    posterior = posterior.calibrate((X, y), randomised=False) if name == "a set" else posterior
    names = {"classes": ("ant", "bee", "<b>cat"), "a set": ("ant", "bee", "cat")}.get(name, ())
    for port in running(app_of(Service.of(posterior, class_names=names))):
        page = seen(port, tmp_path)
    (headline,) = re.findall(r'<p id="headline">(.*?)</p>', page)
    assert re.fullmatch(expected, headline), headline
    assert '<p id="fault" role="alert"></p>' in page
    assert re.search(r"<td>epistemic</td><td[^>]*>[\d.e-]+", page)


@pytest.mark.browser
def test_a_row_of_a_table_is_tried(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"size": [None, *range(1, 40)], "city": ["Bonn", "Oslo"] * 20, "price": range(0, 400_000, 10_000)}
    )
    table = data.from_frame(frame, target="price")
    torch.manual_seed(0)
    task = caveat.Task(nn.Linear(table.train.tensors[0].shape[1], 1), table.train, caveat.Gaussian(standardise=True))
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=2)), progress=False)
    for port in running(app_of(Service.of(posterior, table=table.preprocessing))):
        page = seen(port, tmp_path)
    (headline,) = re.findall(r'<p id="headline">(.*?)</p>', page)
    assert re.fullmatch(r"-?[\d,]+, with 90% between -?[\d,]+ and -?[\d,]+", headline), headline
    assert "<td>column city</td><td>text: Bonn, Oslo</td>" in page
    assert "of cells by the names of columns" in page
