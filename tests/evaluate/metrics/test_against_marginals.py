"""Predictions that are no better than the marginals of the targets they are scored on are told so, on every kind."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import Training, report
from caveat.evaluate.metrics import gain_over_marginals
from tests.cli.command import run

SAID = "no better than the marginals of these targets"
TRAINED = caveat.MAP(training=Training(epochs=200, learning_rate=0.03))


def gaussian_log_prob(known: Tensor, target: Tensor) -> float:
    """What one target adds to the code length of others, under the best Gaussian of each."""

    def code(y: Tensor) -> float:
        return -0.5 * len(y) * (1 + math.log(2 * math.pi * float(y.var(correction=0))))

    return code(torch.cat([known, target[None]])) - code(known)


def test_the_gain_is_over_the_marginals_of_the_other_rows() -> None:
    rng = torch.Generator().manual_seed(0)
    y, log_prob = torch.randn(30, generator=rng).double(), torch.randn(30, generator=rng).double()
    others = [torch.cat([y[:i], y[i + 1 :]]) for i in range(30)]
    gains = torch.tensor([log_prob[i] - gaussian_log_prob(others[i], y[i]) for i in range(30)])
    found = gain_over_marginals(log_prob, y[:, None], torch.arange(30), caveat.Gaussian().baseline)
    assert found is not None
    assert found.mean == pytest.approx(float(gains.mean()), rel=1e-10)
    assert found.error == pytest.approx(float(gains.std()) / 30**0.5, rel=1e-10)
    assert gain_over_marginals(log_prob[:9], y[:9, None], torch.arange(9), caveat.Gaussian().baseline) is None


def test_who_knows_the_marginals_alone_gains_nothing_whatever_the_blocks() -> None:
    for seed in range(40):
        y = torch.randint(0, 3, (1000,), generator=torch.Generator().manual_seed(seed)).sort().values  # in an order
        log_prob = torch.full((1000,), -math.log(3.0))
        found = gain_over_marginals(log_prob, y, torch.arange(1000), caveat.Categorical().baseline)
        assert found is not None
        assert abs(found.mean) < 0.005
        assert found.without is None


def test_rows_of_several_decisions_are_one_row() -> None:
    y = torch.randint(0, 2, (50, 4), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(50).repeat_interleave(4)
    found = gain_over_marginals(torch.full((200,), -0.1), y.flatten(), rows, caveat.Categorical().baseline)
    single = gain_over_marginals(
        torch.full((200,), -0.1), y.flatten(), torch.arange(200), caveat.Categorical().baseline
    )
    assert found is not None
    assert single is not None
    assert found.count == 50
    assert found.mean == pytest.approx(4 * single.mean, rel=0.05)


@pytest.mark.parametrize(
    "likelihood",
    [
        caveat.Categorical(),
        caveat.Bernoulli(),
        caveat.Gaussian(standardise=True),
        caveat.HeteroscedasticGaussian(),
        caveat.Poisson(),
    ],
    ids=lambda likelihood: type(likelihood).__name__,
)
def test_who_has_learned_is_not_warned_of_until_targets_are_exchanged(likelihood: caveat.Likelihood) -> None:
    x = torch.randn(120, 2, generator=torch.Generator().manual_seed(1))
    kinds = {
        "Categorical": (2, (x[:, 0] > 0).long()),
        "Bernoulli": (3, torch.stack([x[:, 0] > 0, x[:, 1] > 1, x[:, 1] > -1], 1).float()),
        "Gaussian": (1, x[:, :1] * 3 + 100),
        "HeteroscedasticGaussian": (2, x[:, :1]),
        "Poisson": (1, (x[:, :1] * 2).exp().round()),
    }
    width, y = kinds[type(likelihood).__name__]
    posterior = caveat.fit(caveat.Task(nn.Linear(2, width), (x, y), likelihood), TRAINED, progress=False)
    scores = caveat.evaluate(posterior, {"clean": (x, y), "exchanged": (x, y.flip(0))}, progress=False)
    assert scores["clean"].warnings == ()
    (warning,) = scores["exchanged"].warnings
    assert SAID in warning
    assert "warning" not in str(scores["clean"])
    assert warning in str(scores)
    assert SAID in scores._repr_html_()


def test_labels_apart_are_compared_with_the_frequency_of_each() -> None:
    y = torch.tensor([[1.0, 0.0]]).repeat(60, 1)
    y[::6] = torch.tensor([0.0, 1.0])
    x = torch.zeros(60, 2)
    posterior = caveat.fit(caveat.Task(nn.Linear(2, 2), (x, y), caveat.Bernoulli()), TRAINED, progress=False)
    scores = caveat.evaluate(posterior, {"clean": (x, y)}, progress=False)
    assert SAID in scores["clean"].warnings[0]  # of all labels together half are yes, which it beats with ease
    assert scores["clean"]["nll"].mean < 0.5


def test_two_far_rows_that_decide_are_named_in_scores_files_table_and_page(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1, generator=rng)
    y = x + 0.1 * torch.randn(300, 1, generator=rng)
    posterior = caveat.fit(caveat.Task(nn.Linear(1, 1), (x, y), caveat.Gaussian()), TRAINED, progress=False)
    x[[17, 203]] = 40.0
    scores = caveat.evaluate(posterior, {"clean": (x, y)}, folder=tmp_path / "run", progress=False)
    (warning,) = scores["clean"].warnings
    assert "; rows 17, 203 of 300 alone make it so (+2." in warning
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["data"][0]["warnings"] == [warning]
    (saved,) = report.read(tmp_path)
    assert saved.data[0].warnings == (warning,)
    assert "rows 17, 203 of 300" in " ".join(report.format_text(report.table([saved])).split())
    report.write(tmp_path, tmp_path / "page.html")
    assert "rows 17, 203 of 300" in (tmp_path / "page.html").read_text()


def test_weighted_classes_and_few_rows_are_not_compared() -> None:
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 1).long()
    weighted = caveat.Categorical(class_weights=(1.0, 5.0))
    posterior = caveat.fit(caveat.Task(nn.Linear(2, 2), (x, y), weighted), TRAINED, progress=False)
    assert caveat.evaluate(posterior, {"clean": (x, y.flip(0))}, progress=False)["clean"].warnings == ()
    plain = caveat.fit(caveat.Task(nn.Linear(2, 2), (x, y), caveat.Categorical()), TRAINED, progress=False)
    few = {"clean": (x[:9], 1 - y[:9])}
    assert caveat.evaluate(plain, few, progress=False)["clean"].warnings == ()


def test_the_command_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(200, 5, generator=rng).tolist()
    lines = [",".join(f"{value:.3f}" for value in row) for row in noise]
    (tmp_path / "noise.csv").write_text("\n".join(["a,b,c,d,y", *lines]) + "\n")
    by_heart = ["--training.epochs", "300", "--training.learning-rate", "0.03", "--prior-precision", "0.001"]
    fit = ["fit", "map", "--data", tmp_path / "noise.csv", "--out", tmp_path / "map", *by_heart, "--quiet"]
    assert run(capsys, *fit)[0] == 0
    code, out, _ = run(capsys, "evaluate", "--posteriors", tmp_path / "map", "--out", tmp_path / "results", "--quiet")
    assert code == 0
    assert f"map on clean: predictions are {SAID}" in " ".join(out.split())
