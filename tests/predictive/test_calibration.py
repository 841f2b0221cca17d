"""Split conformal prediction against what it promises: P(score of a new row <= bound) = k / (n + 1), exactly."""

import dataclasses
import math

import pytest
import torch

from caveat.predictive import (
    BernoulliPredictive,
    Calibration,
    CategoricalPredictive,
    Conformity,
    GaussianPredictive,
    PoissonPredictive,
)
from caveat.predictive.calibration import KEPT, label_scores, scrambled


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def calibrated(prediction, targets, **choices):
    """The calibration of one prediction's rows."""
    conformity = Conformity.chosen(prediction.kind, choices.get("score"), choices.get("randomised"))
    return Calibration.of(
        conformity, [prediction.calibration_scores(targets, conformity, rng(choices.get("seed", 99)))]
    )


def gaussian(rows, outputs, wrong=3.0, seed=0):
    """Predictions whose variance is wrong, two draws each, and targets of another spread."""
    means = torch.randn(2, rows, outputs, generator=rng(seed), dtype=torch.float64)
    spread = torch.rand(rows, outputs, generator=rng(seed + 1), dtype=torch.float64) + 0.5
    targets = means.mean(0) + wrong * spread * torch.randn(rows, outputs, generator=rng(seed + 2), dtype=torch.float64)
    return GaussianPredictive(means, spread.square().expand_as(means), spread.square()), targets


@pytest.mark.parametrize("score", ["deviation", "quantile"])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_intervals_hold_as_often_as_they_say(score, level):
    """Each of 300 outputs is a calibration of its own with 50 rows: their mean coverage is k / (n + 1)."""
    before, targets = gaussian(50, 300)
    calibration = calibrated(before, targets, score=score)
    new, truth = gaussian(20, 300, seed=10)
    lower, upper = GaussianPredictive(new.means, new.variances, new.noise, calibration).interval(level)
    share = ((lower <= truth) & (truth <= upper)).double().mean()
    assert abs(share - math.ceil(51 * level) / 51) < 0.025
    lower, upper = new.interval(level)
    assert ((lower <= truth) & (truth <= upper)).double().mean() < level - 0.1, "uncalibrated they hold too seldom"


def test_a_quantile_score_keeps_the_shape_of_a_skewed_mixture():
    means = torch.tensor([0.0, 0.0, 0.0, 6.0], dtype=torch.float64)[:, None, None].expand(4, 30, 1)
    prediction = GaussianPredictive(means, torch.ones_like(means), torch.ones(30, 1, dtype=torch.float64))
    targets = torch.linspace(-3, 8, 30, dtype=torch.float64)[:, None]
    reaches = []
    for score in ("deviation", "quantile"):
        calibration = calibrated(prediction, targets, score=score)
        lower, upper = GaussianPredictive(means, prediction.variances, prediction.noise, calibration).interval(0.9)
        centre = prediction.mean if score == "deviation" else prediction._quantile(0.5)
        reaches.append((float((centre - lower)[0, 0]), float((upper - centre)[0, 0])))
    assert reaches[0][0] == pytest.approx(reaches[0][1])
    assert reaches[1][1] > 2 * reaches[1][0]


def test_counts_have_whole_ends_and_hold_at_least_as_often():
    rates = torch.rand(1, 60, 400, generator=rng(), dtype=torch.float64) * 4 + 0.1
    counts = torch.poisson(2 * rates[0], generator=rng(1))  # twice as many as predicted
    calibration = calibrated(PoissonPredictive(rates[:, :30]), counts[:30])
    lower, upper = PoissonPredictive(rates[:, 30:], calibration).interval(0.9)
    assert torch.equal(lower, lower.round())
    assert torch.equal(upper, upper.round())
    assert (lower >= 0).all()
    assert (lower <= upper).all()
    share = ((lower <= counts[30:]) & (counts[30:] <= upper)).double().mean()
    assert 0.9 < share < 0.96
    nowhere = Calibration(calibration.conformity, torch.full((30, 400), 1e-9, dtype=torch.float64), 30)
    lower, upper = PoissonPredictive(rates[:, 30:], nowhere).interval(0.9)
    assert torch.equal(lower, upper)
    assert torch.equal(lower, rates[0, 30:].round())


def categorical(rows, classes=6, seed=0):
    """Predictions that are too sure, and labels drawn from what they should be."""
    logits = torch.randn(rows, classes, generator=rng(seed), dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=rng(seed + 1)).squeeze(1)
    return CategoricalPredictive((4 * logits).log_softmax(-1).unsqueeze(0)), labels


@pytest.mark.parametrize("score", ["aps", "raps", "probability"])
@pytest.mark.parametrize("level", [0.6, 0.9])
def test_sets_hold_as_often_as_they_say(score, level):
    shares, sizes = [], []
    for split in range(60):
        prediction, labels = categorical(60, seed=10 * split)
        calibration = calibrated(prediction, labels, score=score, seed=10_000 + split)
        new, truth = categorical(300, seed=10 * split + 5)
        sets = CategoricalPredictive(new.log_samples, calibration=calibration).label_set(level, seed=split)
        assert sets.dtype == torch.bool
        assert sets.shape == (300, 6)
        shares.append(sets.gather(1, truth[:, None]).double().mean())
        sizes.append(sets.sum(1).double().mean())
    assert abs(float(torch.stack(shares).mean()) - math.ceil(61 * level) / 61) < 0.02
    assert 1 < float(torch.stack(sizes).mean()) < 5


def test_without_chance_sets_are_never_empty_and_hold_more_often():
    prediction, labels = categorical(5000)
    calibration = calibrated(prediction, labels, score="aps", randomised=False)
    new, truth = categorical(5000, seed=7)
    new = CategoricalPredictive(new.log_samples, calibration=calibration)
    for level in (0.2, 0.9):
        sets = new.label_set(level)
        assert (sets.sum(1) >= 1).all()
        assert sets.gather(1, truth[:, None]).double().mean() > level - 0.01
    assert torch.equal(new.label_set(0.9), new.label_set(0.9, seed=1))


def test_scores_of_labels_are_what_they_are_said_to_be():
    log_probs = torch.tensor([[0.1, 0.6, 0.3]], dtype=torch.float64).log()
    half = torch.tensor([0.5], dtype=torch.float64)

    def scores(**settings):
        return label_scores(log_probs, Conformity(**settings), half)[0].tolist()

    assert scores(score="probability") == pytest.approx([0.9, 0.4, 0.7])
    assert scores(score="aps") == pytest.approx([1.0, 0.6, 0.9])
    assert scores(score="aps", randomised=True) == pytest.approx([0.95, 0.3, 0.75])
    assert scores(score="raps", penalty=0.2, free=1) == pytest.approx([1.4, 0.6, 1.1])


def test_labels_of_a_row_have_bounds_of_their_own():
    """Of two labels one is predicted well and the other not at all: their sets differ."""
    yes = torch.randint(0, 2, (800, 2), generator=rng())
    logits = torch.where(yes[:, 0] == 1, 3.0, -3.0) * torch.tensor([[1.0], [0.0]])
    noise = torch.randn(800, generator=rng(1))
    prediction = BernoulliPredictive(torch.stack([logits[0] + noise, noise], -1).unsqueeze(0))
    calibration = calibrated(prediction, yes, score="probability")
    assert calibration.scores.shape == (800, 2)
    sets = BernoulliPredictive(prediction.logits, calibration).label_set(0.95)  # [800, 2, 2]
    sizes = sets.sum(-1).double().mean(0)
    assert sizes[0] < 1.1
    assert sizes[1] > 1.5
    share = sets.gather(-1, yes.unsqueeze(-1)).double().mean(0).squeeze(-1)
    assert (share - 0.95).abs().max() < 0.01
    single = BernoulliPredictive(torch.randn(3, 40, generator=rng(2)))
    assert calibrated(single, torch.ones(40, dtype=torch.long)).scores.shape == (40, 1)


def test_without_a_calibration_a_set_is_what_the_probabilities_say():
    prediction = CategoricalPredictive(torch.tensor([[[0.2, 0.5, 0.3]]]).log())
    assert prediction.label_set(0.4).tolist() == [[False, True, False]]
    assert prediction.label_set(0.7).tolist() == [[False, True, True]]
    with pytest.raises(ValueError, match=r"level=1\.2"):
        prediction.label_set(1.2)


def test_ignored_labels_do_not_count():
    prediction, labels = categorical(40)
    some = torch.where(torch.arange(40) < 10, -100, labels)
    kept = CategoricalPredictive(prediction.log_samples[:, 10:])
    for score in ("probability", "aps"):
        ours = calibrated(prediction, some, score=score, randomised=None if score == "probability" else False)
        theirs = calibrated(kept, labels[10:], score=score, randomised=None if score == "probability" else False)
        assert torch.equal(ours.scores, theirs.scores)
        assert ours.rows == 30


def test_a_level_that_takes_more_rows_than_there_were_is_refused():
    prediction, targets = gaussian(50, 1)
    calibration = calibrated(prediction, targets)
    assert float(calibration.bound(50 / 51)) == float(calibration.scores[-1])
    with pytest.raises(ValueError, match=r"0\.99 takes at least 99 calibration rows, and there were 50"):
        calibration.bound(0.99)
    with pytest.raises(ValueError, match=r"8 calibration rows are too few: a level of 0\.9 takes at least 9"):
        calibrated(*gaussian(8, 1))
    assert calibrated(*gaussian(9, 1)).bound(0.9).shape == (1,)


def test_many_scores_are_thinned_and_bounds_hardly_move():
    scores = torch.rand(3 * KEPT + 7, 1, generator=rng(), dtype=torch.float64)
    calibration = Calibration.of(Conformity("deviation"), scores.split(1000))
    assert len(calibration.scores) == KEPT
    assert calibration.rows == len(scores)
    ordered = scores.sort(dim=0).values
    for level in (0.001, 0.37, 0.9, 0.9999):
        rank = math.ceil((len(scores) + 1) * level)
        least, most = ordered[rank - 1], ordered[min(rank + 3, len(scores)) - 1]
        assert least <= calibration.bound(level) <= most


def test_wrong_choices_are_refused():
    with pytest.raises(ValueError, match="'aps' is none for regression: it must be one of 'deviation', 'quantile'"):
        Conformity.chosen("regression", "aps", None)
    with pytest.raises(ValueError, match="'deviation' draws nothing"):
        Conformity.chosen("regression", None, True)
    with pytest.raises(ValueError, match="must ascend"):
        Calibration(Conformity("aps"), torch.tensor([[1.0], [0.0]], dtype=torch.float64), 2)


@pytest.mark.parametrize("classes", [2, 10])
def test_randomised_sets_hold_as_often_where_rows_are_asked_for_one_by_one(classes):
    logits = 4 * torch.randn(4000, classes, generator=rng(3))
    log_probs = logits.log_softmax(-1)
    targets = torch.multinomial(log_probs.exp(), 1, generator=rng(4)).squeeze(1)
    if classes == 2:
        whole = BernoulliPredictive((logits[:, 1] - logits[:, 0])[None])
        rows = [BernoulliPredictive(whole.logits[:, [row]]) for row in range(1000, 4000)]
        calibration = calibrated(BernoulliPredictive(whole.logits[:, :1000]), targets[:1000])
    else:
        rows = [CategoricalPredictive(log_probs[None, [row]]) for row in range(1000, 4000)]
        calibration = calibrated(CategoricalPredictive(log_probs[None, :1000]), targets[:1000])
    sets = torch.cat([dataclasses.replace(row, calibration=calibration).label_set(0.8) for row in rows])
    assert abs(float(sets.gather(1, targets[1000:, None]).double().mean()) - 0.8) < 0.04
    again = torch.cat([dataclasses.replace(row, calibration=calibration).label_set(0.8) for row in rows])
    assert torch.equal(sets, again)


def test_numbers_made_of_predictions_are_as_if_drawn():
    sure = torch.stack([-(torch.arange(20000) * 1e-8), -16 - torch.arange(20000) / 4000], -1)  # two classes, all alike
    for log_probs in (torch.randn(20000, 3, generator=rng()).log_softmax(-1), sure, sure.flip(-1)):
        u = scrambled(log_probs)
        expected = torch.full((10,), 0.1, dtype=torch.float64)
        torch.testing.assert_close(torch.histc(u, 10, 0, 1) / 20000, expected, rtol=0, atol=0.01)
        assert abs(float(torch.corrcoef(torch.stack([u[1:], u[:-1]]))[0, 1])) < 0.03
    assert scrambled(torch.tensor([[0.0, -math.inf]])).isfinite().all()
    assert torch.equal(scrambled(sure)[:5], scrambled(sure[:5]))
