"""Fidelity: agreement, total variation and Wasserstein distances by hand, in closed form, and in every shape."""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import caveat
from caveat import Bernoulli, Categorical, Gaussian, GaussianPrior, HeteroscedasticGaussian, Info, Network, Posterior
from caveat.engine.method import Method
from caveat.evaluate.fidelity import fidelity


@dataclass(frozen=True)
class Told(Method):
    """A method whose draws' outputs are told, [S, N, ...]; an input is the number of its row."""

    @property
    def default_draws(self) -> int:
        return 10**6

    def predictor(self, state: Any, network: Any) -> Any:
        return ToldPredictor(state)


class ToldPredictor:
    def __init__(self, state: Any) -> None:
        self.state = state

    def outputs(self, x: Tensor, n: int, rng: Any) -> tuple[Tensor, Any]:
        return self.state["told"]["outputs"][:n, x[:, 0].long()], self.state["hyper"]


def told(outputs: Tensor, likelihood: Any, chains: int = 0, prior: Any = None, hyper: Any = None) -> Posterior:
    """A posterior that predicts these outputs, [S, N, ...]; with `chains`, a reference."""
    network = Network(nn.Linear(1, 1), likelihood, prior or GaussianPrior(1.0))
    state = {"told": {"outputs": outputs}, "hyper": hyper or {}}
    if chains:
        state["stats"] = {"lp": torch.zeros(chains, len(outputs) // chains)}
    return Posterior(Told(), state, network, Info(coverage=[]))  # type: ignore[arg-type]


def rows(count: int) -> tuple[Tensor, Tensor]:
    return torch.arange(count).float().unsqueeze(1), torch.zeros(count, dtype=torch.long)


UNITS = {"target_mean": torch.zeros(1), "target_scale": torch.ones(1)}


def test_classes_by_hand() -> None:
    """Two chains of two draws, two rows; every number below was computed on paper."""
    chain_a = [[[0.8, 0.2], [0.3, 0.7]], [[0.6, 0.4], [0.5, 0.5]]]  # means .7 .3 and .4 .6
    chain_b = [[[0.9, 0.1], [0.6, 0.4]], [[0.9, 0.1], [0.8, 0.2]]]  # means .9 .1 and .7 .3
    reference = told(torch.tensor([*chain_a, *chain_b]).log(), Categorical(), chains=2)  # .8 .2 and .55 .45
    ours = told(torch.tensor([[[0.5, 0.5], [0.2, 0.8]], [[0.9, 0.1], [0.4, 0.6]]]).log(), Categorical())  # .7 .3, .3 .7
    found = fidelity(ours, reference, rows(2))
    assert found["agreement"].mean == 0.5
    assert found["total_variation"].mean == pytest.approx((0.1 + 0.25) / 2, rel=1e-5)
    assert found["total_variation"].stderr == pytest.approx((0.25 - 0.1) / 2, rel=1e-5)  # s / sqrt(2)
    assert found.floor["agreement"].mean == 0.5
    assert found.floor["total_variation"].mean == pytest.approx((0.2 + 0.3) / 2, rel=1e-5)
    assert (found.kind, found.rows, found.chains, found.draws) == ("classification", 2, 2, 2)


def gaussian(means: Sequence[float], stds: Sequence[float], chains: int = 0) -> Posterior:
    """One row, one draw a component."""
    outputs = torch.tensor([[[m, 2 * math.log(s)]] for m, s in zip(means, stds, strict=True)])
    return told(outputs, HeteroscedasticGaussian(), chains, hyper=UNITS)


@pytest.mark.parametrize(("mean", "std"), [(1.0, 1.0), (0.0, 3.0), (-2.0, 0.25), (1e-3, 1.0)])
def test_gaussians_in_closed_form(mean: float, std: float) -> None:
    found = fidelity(gaussian([mean], [std]), gaussian([0.0], [2.0], chains=1), rows(1))
    assert found["w2"].mean == pytest.approx(math.hypot(mean, std - 2), rel=1e-4)
    folded = stats.foldnorm(abs(mean) / abs(std - 2), scale=abs(std - 2)).mean()  # E|mean + (std - 2) z|
    assert found["w1"].mean == pytest.approx(folded, rel=1e-4)
    assert found["relative_w1"].mean == pytest.approx(found["w1"].mean / 2)
    assert found["relative_w2"].mean == pytest.approx(found["w2"].mean / 2)
    assert found.floor == {}


def test_equal_predictions_of_unequal_draws_are_at_no_distance() -> None:
    found = fidelity(gaussian([1.0], [2.0]), gaussian([1.0] * 6, [2.0] * 6, chains=3), rows(1))
    assert found["w2"].mean == pytest.approx(0, abs=1e-9)
    assert found.floor["w2"].mean == pytest.approx(0, abs=1e-9)


def test_chains_that_are_far_apart_are_told_so() -> None:
    """At the points of one chain the cdf of the other is 0 or 1 to the last digit."""
    found = fidelity(gaussian([0.0], [1.0]), gaussian([0.0, 1000.0], [1.0, 1.0], chains=2), rows(1))
    assert found.floor["w1"].mean == pytest.approx(1000, rel=1e-3)
    assert found["w1"].mean == pytest.approx(500, rel=1e-2)
    assert found["w2"].mean == pytest.approx(1000 / math.sqrt(2), rel=1e-2)


def random_classes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_order_of_rows_of_draws_and_of_chains_does_not_matter() -> None:
    ours, theirs = random_classes(5, 30, 4), random_classes(12, 30, 4, seed=1)
    found = fidelity(told(ours, Categorical()), told(theirs, Categorical(), chains=3), rows(30))
    shuffled = torch.randperm(30, generator=torch.Generator().manual_seed(2))
    x, y = rows(30)
    turned = theirs.unflatten(0, (3, 4))[[2, 0, 1]][:, [3, 1, 0, 2]].flatten(0, 1)
    again = fidelity(
        told(ours.flip(0), Categorical()), told(turned, Categorical(), chains=3), (x[shuffled], y[shuffled])
    )
    for name in ("agreement", "total_variation"):
        assert again[name].mean == pytest.approx(found[name].mean, abs=1e-6)
        assert again[name].stderr == pytest.approx(found[name].stderr, abs=1e-6)
        assert again.floor[name].mean == pytest.approx(found.floor[name].mean, abs=1e-6)
    mixed = told(theirs.unflatten(0, (3, 4)).transpose(0, 1).flatten(0, 1), Categorical(), chains=3)
    assert fidelity(told(ours, Categorical()), mixed, rows(30)).floor != found.floor, "chains are told apart"


def test_more_rows_than_go_through_at_once() -> None:
    ours, theirs = random_classes(2, 2500, 3), random_classes(4, 2500, 3, seed=1)
    found = fidelity(told(ours, Categorical()), told(theirs, Categorical(), chains=2), rows(2500))
    p, q = ours.softmax(-1).double().mean(0), theirs.softmax(-1).double().mean(0)
    variation = (p - q).abs().sum(-1) / 2
    assert found["total_variation"].mean == pytest.approx(float(variation.mean()), rel=1e-5)
    assert found["total_variation"].stderr == pytest.approx(float(variation.std() / 50), rel=1e-5)
    assert found["agreement"].mean == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (4, 3)])
def test_yes_and_no_for_one_label_and_for_many(shape: tuple[int, ...]) -> None:
    ours, theirs = random_classes(3, 20, *shape), random_classes(6, 20, *shape, seed=1)
    found = fidelity(told(ours, Bernoulli()), told(theirs, Bernoulli(), chains=2), rows(20))
    p, q = ours.sigmoid().double().mean(0), theirs.sigmoid().double().mean(0)
    assert found["total_variation"].mean == pytest.approx(float((p - q).abs().mean()), rel=1e-5)
    assert found["agreement"].mean == pytest.approx(float(((p > 0.5) == (q > 0.5)).double().mean()))
    by_row = (p - q).abs().reshape(20, -1).mean(1)  # the labels of one row are not independent
    assert found["total_variation"].stderr == pytest.approx(float(by_row.std() / 20**0.5), rel=1e-5)


def test_pixels_count_but_for_ignored_ones() -> None:
    likelihood = Categorical(class_axis=1, ignore_index=255)
    ours, theirs = random_classes(3, 6, 4, 2, 5), random_classes(4, 6, 4, 2, 5, seed=1)  # [S, B, C, H, W]
    targets = torch.zeros(6, 2, 5, dtype=torch.long)
    targets[:, 0, 1:] = 255
    x, _ = rows(6)
    found = fidelity(told(ours, likelihood), told(theirs, likelihood, chains=2), (x, targets))
    p, q = (t.softmax(2).double().mean(0).movedim(1, -1) for t in (ours, theirs))  # [B, H, W, C]
    variation = ((p - q).abs().sum(-1) / 2)[targets != 255]
    assert found["total_variation"].mean == pytest.approx(float(variation.mean()), rel=1e-5)
    assert fidelity(told(ours, likelihood), told(theirs, likelihood, chains=2), torch.utils.data.TensorDataset(x))[
        "total_variation"
    ].mean == pytest.approx(float((p - q).abs().sum(-1).mean() / 2), rel=1e-5), "without targets every pixel counts"
    with pytest.raises(ValueError, match="nothing to compare"):
        fidelity(told(ours, likelihood), told(theirs, likelihood, chains=2), (x, torch.full_like(targets, 255)))


def test_several_outputs_and_positions_of_numbers() -> None:
    """Shifts by 1 and 3 of the two outputs; every position of a row alike."""
    outputs = random_classes(4, 7, 3, 2)
    shift = torch.tensor([1.0, 3.0])
    hyper = {"target_mean": torch.zeros(2), "target_scale": torch.ones(2), "log_noise": torch.zeros(2)}
    ours = told(outputs + shift, Gaussian(noise=1.0), hyper=hyper)
    found = fidelity(ours, told(outputs, Gaussian(noise=1.0), chains=2, hyper=hyper), rows(7))
    assert found["w1"].mean == pytest.approx(2.0, rel=1e-4)
    assert found["w2"].mean == pytest.approx(2.0, rel=1e-4)
    std = (1 + outputs.double().var(0, correction=0)).sqrt()
    assert found["relative_w2"].mean == pytest.approx(float((shift / std).mean()), rel=1e-4)
    assert found.floor["w1"].mean > 0.1


def test_units_are_those_of_the_targets() -> None:
    scaled = {"target_mean": torch.tensor([100.0]), "target_scale": torch.tensor([7.0])}
    one, two = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[1.0, 0.0]]])
    reference = told(one, HeteroscedasticGaussian(), chains=1, hyper=scaled)
    found = fidelity(told(two, HeteroscedasticGaussian(), hyper=scaled), reference, rows(1))
    assert found["w1"].mean == pytest.approx(7.0, rel=1e-5)
    assert found["relative_w1"].mean == pytest.approx(1.0, rel=1e-5)


def test_an_exact_posterior_lies_below_the_floor_by_what_is_promised() -> None:
    """Chains that are the truth and independent errors: the distance to their mean is sqrt(C - 1) / C of the floor."""
    rng = torch.Generator().manual_seed(0)
    truth = torch.full((4000, 2), 0.5)
    error = 0.02 * torch.randn(4, 4000, 1, generator=rng)
    chains = (truth + torch.cat([error, -error], -1)).log()
    found = fidelity(told(truth.log().unsqueeze(0), Categorical()), told(chains, Categorical(), chains=4), rows(4000))
    share = found["total_variation"].mean / found.floor["total_variation"].mean
    assert share == pytest.approx(math.sqrt(3) / 4, rel=0.03)


def test_json_and_text() -> None:
    ours, theirs = random_classes(3, 20, 4), random_classes(6, 20, 4, seed=1)
    found = fidelity(told(ours, Categorical()), told(theirs, Categorical(), 2, GaussianPrior(10.0)), rows(20))
    content = json.loads(json.dumps(dataclasses.asdict(found)))
    assert content["scores"]["agreement"]["mean"] == found["agreement"].mean
    assert found.notes == (
        "the reference's prior is GaussianPrior(precision=10.0), the posterior's GaussianPrior(precision=1.0)",
    )
    text = str(found)
    assert text.startswith("against 2 chains of 3 draws on 20 rows\n")
    assert f"total variation  {found['total_variation']}" in text
    assert f"one chain against the others: {found.floor['agreement']}" in text
    assert "note: the reference's prior" in text
    with pytest.raises(KeyError, match="there are agreement, total_variation"):
        found["w1"]
    same = fidelity(told(ours, Categorical()), told(theirs, Categorical(), chains=2), rows(20))
    assert same.notes == ()


def with_activation(posterior: Posterior, kind: type[nn.Module]) -> Posterior:
    module = nn.Sequential(nn.Linear(1, 1), kind())
    network = Network(module, posterior.network.likelihood, posterior.network.prior)
    return Posterior(posterior.method, posterior.state, network, posterior.info)


def test_another_activation_is_said() -> None:
    ours, theirs = told(random_classes(3, 20, 4), Categorical()), told(random_classes(6, 20, 4), Categorical(), 2)
    found = fidelity(with_activation(ours, nn.ReLU), with_activation(theirs, nn.SiLU), rows(20))
    assert found.notes == ("the reference's activation is SiLU, the posterior's ReLU",)
    assert not fidelity(with_activation(ours, nn.SiLU), with_activation(theirs, nn.SiLU), rows(20)).notes
    assert not fidelity(ours, theirs, rows(20)).notes


def test_notes_go_with_the_scores(tmp_path: Path) -> None:
    ours, theirs = random_classes(3, 20, 4), random_classes(6, 20, 4, seed=1)
    reference = told(theirs, Categorical(), 2, GaussianPrior(10.0))
    places = {"folder": tmp_path / "run", "label": "mine", "progress": False}
    scores = caveat.evaluate(told(ours, Categorical()), {"clean": rows(20)}, reference=reference, **places)
    (note,) = scores.notes
    assert note.startswith("the reference's prior is GaussianPrior(precision=10.0)")
    assert f"note: {note}" in str(scores)
    content = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert content["reference"] == {"chains": 2, "draws": 3, "notes": [note]}
    runs = caveat.report.read(tmp_path)
    assert runs[0].notes == (note,)
    sentence = f"Closeness of mine to the reference is not of methods alone: {note}."
    assert caveat.report.table(runs).notes[-1] == sentence
    alone = caveat.evaluate(told(ours, Categorical()), {"clean": rows(20)}, progress=False)
    assert (alone.notes, "reference" in alone.content) == ((), False)


def test_what_cannot_be_compared_is_refused() -> None:
    classes = told(random_classes(2, 5, 3), Categorical(), chains=2)
    with pytest.raises(ValueError, match=r"a posterior with chains, such as HMC, or a stored set, not a Told"):
        fidelity(classes, told(random_classes(2, 5, 3), Categorical()), rows(5))
    with pytest.raises(ValueError, match=r"classification of shape \[5, 4\] against classification of shape \[5, 3\]"):
        fidelity(told(random_classes(2, 5, 4), Categorical()), classes, rows(5))
    with pytest.raises(ValueError, match=r"regression of shape \[1, 1\] against classification of shape \[1, 3\]"):
        fidelity(gaussian([0.0], [1.0]), classes, rows(1))


def test_a_fitted_ensemble_against_draws_of_its_members() -> None:
    """A method of the package on the one side: what it predicts is what is compared."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 1), torch.randint(0, 3, (40,))
    task = caveat.Task(nn.Linear(1, 3), (x, y), Categorical())
    posterior = caveat.fit(task, caveat.DeepEnsemble(members=2, training=caveat.Training(epochs=1)), progress=False)
    outputs = random_classes(4, 3)
    constant = told(outputs.unsqueeze(1).expand(4, 40, 3), Categorical(), chains=2)
    numbered = fidelity(posterior, _by_position(constant, x), (x, y))
    p, q = posterior.predict(x).probs, outputs.softmax(-1).mean(0)
    assert numbered["total_variation"].mean == pytest.approx(float((p - q).abs().sum(-1).mean() / 2), rel=1e-4)


def _by_position(posterior: Posterior, x: Tensor) -> Posterior:
    """The same for inputs that are not row numbers; its outputs are the same for all rows."""

    class ConstantPredictor(ToldPredictor):
        def outputs(self, x: Tensor, n: int, rng: Any) -> tuple[Tensor, Any]:
            return self.state["told"]["outputs"][:n, : len(x)], self.state["hyper"]

    @dataclass(frozen=True)
    class Constant(Told):
        def predictor(self, state: Any, network: Any) -> Any:
            return ConstantPredictor(state)

    return dataclasses.replace(posterior, method=Constant())  # type: ignore[arg-type]


def test_an_evaluation_scores_it_beside_the_rest(tmp_path: Path) -> None:
    ours, reference = (
        told(random_classes(3, 20, 4), Categorical()),
        told(random_classes(6, 20, 4, seed=1), Categorical(), 2),
    )
    x, y = rows(20)
    sets = {"clean": (x, y), "flipped": {1: (x.flip(0), y)}}
    scores = caveat.evaluate(ours, sets, ood={"ood": (x, y)}, reference=reference, folder=tmp_path, progress=False)
    expected = fidelity(ours, reference, (x, y))
    for name in ("agreement", "total_variation"):
        assert scores["clean"][name] == expected[name]
        assert name in scores["flipped 1"].metrics
        assert name not in scores["ood"].metrics
    written = json.loads((tmp_path / "metrics.json").read_text())["data"][0]["metrics"]
    assert written["total_variation"]["mean"] == expected["total_variation"].mean
    assert "agreement" not in caveat.evaluate(ours, sets, progress=False)["clean"].metrics
