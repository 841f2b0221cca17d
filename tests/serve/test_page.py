"""The page in a real browser: it loads, asks for a prediction, and shows it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import caveat

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from caveat.serve import Service, app_of
from tests.serve.test_app import running

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
SWITCHES = "--headless --no-sandbox --disable-gpu --no-first-run --disable-sync --virtual-time-budget=20000 --dump-dom"
PROBLEMS = {
    "classes": (caveat.Categorical(), torch.arange(40) % 3, 3, r"(ant|bee|&lt;b&gt;cat), with probability \d+\.\d%"),
    "labels": (caveat.Bernoulli(), (X[:, :2] > 0).float(), 2, r"probability \d+\.\d%, \d+\.\d%"),
    "numbers": (caveat.Gaussian(), X[:, :1], 1, r"-?[\d.]+, with 90% between -?[\d.]+ and -?[\d.]+"),
}


@pytest.mark.browser
@pytest.mark.parametrize("name", PROBLEMS)
def test_an_input_is_tried(name: str, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on PATH")
    likelihood, y, outputs, expected = PROBLEMS[name]
    torch.manual_seed(0)
    task = caveat.Task(nn.Linear(4, outputs), (X, y), likelihood)
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=2)), progress=False)
    names = ("ant", "bee", "<b>cat") if name == "classes" else ()
    for port in running(app_of(Service.of(posterior, class_names=names))):
        command = [chromium, *SWITCHES.split(), f"--user-data-dir={tmp_path}", f"http://127.0.0.1:{port}/?now"]
        page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    (headline,) = re.findall(r'<p id="headline">(.*?)</p>', page)
    assert re.fullmatch(expected, headline), headline
    assert '<p id="fault" role="alert"></p>' in page
    assert re.search(r"<td>epistemic</td><td[^>]*>[\d.e-]+", page)
