import math

import numpy as np
import pytest

from caveat.evaluate.metrics import ood_scores
from caveat.report import read
from caveat.report.numbers.run_gains import auroc_gain, log_prob_gain


def test_gain_on_one_set_is_the_paired_mean_with_its_standard_error(classification):
    base, run = read(classification)[:2]
    difference = run.clean.predictions["log_prob"].astype(float) - base.clean.predictions["log_prob"]
    gain = log_prob_gain(run, base, ["clean"])
    assert gain.mean == pytest.approx(difference.mean())
    assert gain.high - gain.mean == pytest.approx(1.959964 * difference.std(ddof=1) / math.sqrt(120))
    assert (gain.low + gain.high) / 2 == pytest.approx(gain.mean)


def test_rows_seen_at_several_severities_count_once(classification):
    base, run = read(classification)[:2]
    names = ["rotated 15", "rotated 30", "rotated 60"]
    each = [
        run.by_name[name].predictions["log_prob"].astype(float) - base.by_name[name].predictions["log_prob"]
        for name in names
    ]
    by_row = np.mean(each, axis=0)  # with the same rows in every set, the mean of a row is one observation
    gain = log_prob_gain(run, base, names)
    assert gain.mean == pytest.approx(by_row.mean())
    assert gain.high - gain.mean == pytest.approx(1.959964 * by_row.std(ddof=1) / math.sqrt(120))


def test_the_interval_covers_the_truth_as_often_as_it_says(classification):
    base = read(classification)[0]
    rng, hits = np.random.default_rng(0), 0
    for _ in range(400):
        run = read(classification)[1]
        noise = rng.normal(0.1, 1.0, 120)
        run.clean.predictions["log_prob"] = base.clean.predictions["log_prob"] + noise
        gain = log_prob_gain(run, base, ["clean"])
        hits += gain.low <= 0.1 <= gain.high
    assert 0.92 <= hits / 400 <= 0.98


def test_verdicts(classification):
    base, sharper, same = read(classification)
    assert log_prob_gain(sharper, base, ["clean"]).verdict == "better"
    assert log_prob_gain(base, sharper, ["clean"]).verdict == "worse"
    assert log_prob_gain(same, base, ["clean"]).verdict == "not distinguishable"


def test_infinite_or_absent_scores_are_not_compared(classification):
    base, run = read(classification)[:2]
    assert log_prob_gain(run, base, ["fog"]) is None
    assert log_prob_gain(run, base, []) is None
    run.clean.predictions["log_prob"][3] = -np.inf
    assert log_prob_gain(run, base, ["clean"]) is None


def test_runs_over_other_rows_are_refused(classification):
    path = classification / "swag" / "predictions" / "clean.npz"
    arrays = dict(np.load(path))
    np.savez(path, **{**arrays, "rows": arrays["rows"][::-1]})
    base, _, run = read(classification)
    with pytest.raises(ValueError, match="have different rows: evaluate both on the same data"):
        log_prob_gain(run, base, ["clean"])


def test_auroc_gain_is_the_difference_of_two_aurocs(classification):
    import torch

    base, run = read(classification)[:2]
    both = [
        ood_scores(
            torch.from_numpy(one.clean.predictions["entropy"]),
            torch.from_numpy(one.by_name["photographs"].predictions["entropy"]),
        )["auroc"]
        for one in (run, base)
    ]
    assert auroc_gain(run, base, "photographs").mean == pytest.approx(both[0] - both[1])


def test_auroc_interval_agrees_with_the_bootstrap(classification):
    base, run = read(classification)[:2]
    inside = [one.clean.predictions["entropy"] for one in (run, base)]
    ood = [one.by_name["photographs"].predictions["entropy"] for one in (run, base)]
    rng, drawn = np.random.default_rng(0), []
    for _ in range(1500):
        i, j = rng.integers(0, 120, 120), rng.integers(0, 80, 80)
        ours, theirs = ((o[j][:, None] > c[i]).mean() for c, o in zip(inside, ood, strict=True))
        drawn.append(ours - theirs)
    gain = auroc_gain(run, base, "photographs")
    assert (gain.high - gain.mean) / 1.959964 == pytest.approx(np.std(drawn), rel=0.15)
