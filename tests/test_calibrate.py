"""`posterior.calibrate`: what it promises, for every likelihood, and that a file keeps it."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import caveat
from caveat.predictive import Calibration
from caveat.storage import CorruptFile, write_json
from tests.test_contract import KNOWN, WIDTH, build, problem

ROWS = 1200  # a fifth of them are fitted to, two fifths calibrate


def posterior_and_rows(likelihood):
    """A point estimate that is too sure of itself, rows to calibrate with, and rows to test on."""
    x, y = problem(likelihood, n=ROWS)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    fit, calibrate, test = (TensorDataset(x[part], y[part]) for part in order.split([240, 480, 480]))
    task = caveat.Task(build(likelihood), fit, getattr(caveat, likelihood)())
    method = caveat.MAP(training=caveat.Training(epochs=25, learning_rate=0.03))
    return caveat.fit(task, method, progress=False), calibrate, test


@pytest.fixture(scope="module", params=KNOWN)
def fitted(request):
    return request.param, *posterior_and_rows(request.param)


def covered(prediction, y, level):
    """Which targets are in the interval or the set."""
    if prediction.kind == "regression":
        lower, upper = prediction.interval(level)
        return (lower <= y) & (y <= upper)
    sets = prediction.label_set(level)
    return sets.gather(-1, y.long().reshape(sets.shape[:-1]).unsqueeze(-1))


def test_targets_are_held_as_often_as_said(fitted):
    _, posterior, rows, test = fitted
    x, y = test.tensors
    calibrated = posterior.calibrate(rows)
    for level in (0.7, 0.9):
        share = float(covered(calibrated.predict(x), y, level).double().mean())
        # Of 480 rows that calibrate and 480 that test the share has a standard deviation of 0.02 at 90%; counts and
        # the few labels of a sure network tie, so that more are held.
        assert level - 0.06 < share < (level + 0.06 if posterior.network.likelihood.kind == "regression" else 1.0)


def test_nothing_else_changes(fitted):
    _, posterior, rows, test = fitted
    x, _ = test.tensors
    before = posterior.predict(x)
    calibrated = posterior.calibrate(rows)
    assert posterior.calibration is None
    assert isinstance(calibrated.calibration, Calibration)
    assert calibrated.state is posterior.state
    assert calibrated.network is posterior.network
    after = calibrated.predict(x)
    assert torch.equal(before.samples, after.samples)
    assert torch.equal(before.epistemic, after.epistemic)
    assert posterior.predict(x).calibration is None
    assert calibrated.calibrate(rows).calibration.scores.equal(calibrated.calibration.scores)


def test_a_file_keeps_it(fitted, tmp_path):
    likelihood, posterior, rows, test = fitted
    x, _ = test.tensors
    calibrated = posterior.calibrate(rows)
    loaded = caveat.load(calibrated.save(tmp_path / "calibrated"), build(likelihood))
    assert loaded.calibration.conformity == calibrated.calibration.conformity
    assert loaded.calibration.rows == len(rows)
    for a, b in zip(ends(calibrated.predict(x)), ends(loaded.predict(x)), strict=True):
        assert torch.equal(a, b)
    assert caveat.load(posterior.save(tmp_path / "plain"), build(likelihood)).calibration is None


def ends(prediction):
    return prediction.interval(0.8) if prediction.kind == "regression" else [prediction.label_set(0.8)]


def test_evaluate_reports_it(fitted):
    _likelihood, posterior, rows, test = fitted
    scored = caveat.evaluate(posterior.calibrate(rows), {"clean": test}, progress=False)["clean"]
    plain = caveat.evaluate(posterior, {"clean": test}, progress=False)["clean"]
    if posterior.network.likelihood.kind == "regression":
        assert scored["coverage_90"].mean == pytest.approx(0.9, abs=0.06)
        assert scored["nll"].mean == plain["nll"].mean
    else:
        x, y = test.tensors
        sets = posterior.calibrate(rows).predict(x).label_set(0.9).flatten(0, -2)
        assert scored["set_size_90"].mean == pytest.approx(float(sets.sum(1).double().mean()))
        assert scored["set_coverage_90"].mean == pytest.approx(
            float(sets.gather(1, y.long().reshape(-1, 1)).double().mean())
        )
        assert "set_size_90" not in plain.metrics


def test_several_outputs_have_bounds_of_their_own():
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(900, 3, generator=rng)
    y = x @ torch.randn(3, 2, generator=rng) + torch.randn(900, 2, generator=rng) * torch.tensor([0.1, 3.0])
    network = nn.Linear(3, 2)
    task = caveat.Task(network, (x[:300], y[:300]), caveat.Gaussian(noise=1.0))
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=60, learning_rate=0.05)), progress=False)
    calibrated = posterior.calibrate(TensorDataset(x[300:600], y[300:600]))
    lower, upper = calibrated.predict(x[600:]).interval(0.9)
    share = ((lower <= y[600:]) & (y[600:] <= upper)).double().mean(0)
    assert (share - 0.9).abs().max() < 0.06
    assert (upper - lower)[0, 1] > 10 * (upper - lower)[0, 0]


def test_more_data_take_the_calibration_away():
    x, y = problem("Gaussian", n=400)
    task = caveat.Task(build("Gaussian"), (x[:200], y[:200]), caveat.Gaussian())
    start = caveat.MAP(training=caveat.Training(epochs=20))
    posterior = caveat.fit(task, caveat.LastLayerLaplace(), start=start, progress=False)
    calibrated = posterior.calibrate(TensorDataset(x[200:300], y[200:300]))
    assert calibrated.update(TensorDataset(x[300:], y[300:]), progress=False).calibration is None


def test_too_few_rows_and_wrong_scores_are_refused(fitted):
    likelihood, posterior, rows, test = fitted
    x, _ = test.tensors
    few = TensorDataset(*(t[:8] for t in rows.tensors))
    with pytest.raises(ValueError, match="8 calibration rows are too few"):
        posterior.calibrate(few)
    wrong = "aps" if posterior.network.likelihood.kind == "regression" else "deviation"
    with pytest.raises(ValueError, match=f"score='{wrong}' is none for"):
        posterior.calibrate(rows, score=wrong)
    prediction = posterior.calibrate(TensorDataset(*(t[:20] for t in rows.tensors))).predict(x)
    with pytest.raises(ValueError, match="takes at least 99 calibration rows, and there were 20"):
        prediction.interval(0.99) if WIDTH[likelihood] and prediction.kind == "regression" else prediction.label_set(
            0.99
        )


def test_a_calibration_that_does_not_go_with_the_likelihood_is_refused(tmp_path):
    posterior, rows, _ = posterior_and_rows("Categorical")
    folder = posterior.calibrate(rows).save(tmp_path / "posterior")
    content = json.loads((folder / "posterior.json").read_text())
    del content["checksum"]
    conformity = content["calibration"]["fields"]["conformity"]["fields"]
    for change, complaint in (
        ({"score": "deviation", "randomised": False}, "does not go with Categorical"),
        ({"score": "unknown"}, "cannot be made from what was saved"),
    ):
        edited = json.loads(json.dumps(content))
        edited["calibration"]["fields"]["conformity"]["fields"] = conformity | change
        write_json(folder / "posterior.json", edited)
        with pytest.raises(CorruptFile, match=complaint):
            caveat.load(folder, build("Categorical"))


def test_duplicate_rows_and_a_class_that_was_never_seen_are_kept_by_a_file(tmp_path):
    x, y = problem("Categorical", n=400)
    network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))  # of a fourth class no row is
    task = caveat.Task(network, (x[:100], y[:100]), caveat.Categorical())
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=20)), progress=False)
    copies = TensorDataset(x[100:101].expand(50, 4), y[100:101].expand(50))
    unseen = TensorDataset(x[100:300], torch.full((200,), 3))
    for number, (rows, test, label) in enumerate(((copies, x[100:101].expand(40, 4), y[100]), (unseen, x[300:], 3))):
        for score in ("aps", "raps", "probability"):
            calibrated = posterior.calibrate(rows, score=score)
            sets = calibrated.predict(test).label_set(0.9)
            assert sets[:, int(label)].double().mean() > 0.8, "as often as said, with 50 and 200 calibration rows"
            again = caveat.load(calibrated.save(tmp_path / f"{number}-{score}"), network)
            assert torch.equal(again.predict(test).label_set(0.9), sets)
    with pytest.raises(ValueError, match=r"3 calibration rows are too few: a level of 0\.9 takes at least 9"):
        posterior.calibrate(TensorDataset(x[:3], y[:3]))
    with pytest.raises(ValueError, match="a label is 4, but there are 4 classes"):
        posterior.calibrate(TensorDataset(x[:20], torch.full((20,), 4)))
