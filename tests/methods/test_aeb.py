"""AEB: stochastic approximation comes to its fixed point, the steps are the paper's, and what is pruned is gone."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat import AEB
from caveat.engine.sparse_chains import SpikeSlab
from caveat.methods import aeb as aeb_module

SPIKE, SLAB = 0.1, 1.0


def test_inclusion_scale_and_share_are_the_maxima_of_the_expected_log_joint() -> None:
    values = torch.tensor([0.01, -0.4, 1.5, 0.2, -0.03, 0.9, -2.0], dtype=torch.float64)
    latent = SpikeSlab([4, 3], SPIKE, SLAB, values)
    latent.share = torch.tensor([0.3, 0.6], dtype=torch.float64)
    latent.variance = torch.tensor(1.7, dtype=torch.float64)
    std = math.sqrt(1.7)
    delta = latent.share.repeat_interleave(torch.tensor([4, 3]))
    slab = torch.distributions.Normal(0, std * SLAB**0.5).log_prob(values).exp() * delta
    spike = torch.distributions.Laplace(0, std * SPIKE).log_prob(values).exp() * (1 - delta)
    rho = slab / (slab + spike)
    torch.testing.assert_close(latent.expected_inclusion(values), rho)

    latent.inclusion = rho
    omega, before = latent.share_of_way(0), (latent.variance.clone(), latent.share.clone())
    latent.update(values, omega)
    reached = [b + (a - b) / omega for b, a in zip(before, (latent.variance, latent.share), strict=True)]

    def expected(sigma: Tensor, share: Tensor) -> Tensor:
        """Of the log joint of weights, indicators, sigma and the shares, but for constants."""
        own = share.repeat_interleave(torch.tensor([4, 3]))
        weights = rho * (torch.distributions.Normal(0, sigma * SLAB**0.5).log_prob(values) + own.log())
        weights += (1 - rho) * (torch.distributions.Laplace(0, sigma * SPIKE).log_prob(values) + (1 - own).log())
        # Inverse gamma(7/2, 7/2) of sigma^2, and Beta(size, size) of each share.
        scale = -(7 + 2) * sigma.log() - 7 / (2 * sigma**2)
        size = torch.tensor([4.0, 3.0], dtype=torch.float64)
        return weights.sum() + scale + ((size - 1) * (share.log() + (1 - share).log())).sum()

    sigma, share = reached[0].sqrt().requires_grad_(), reached[1].requires_grad_()
    slopes = torch.autograd.grad(expected(sigma, share), (sigma, share))
    assert float(slopes[0].abs()) < 1e-9
    assert float(slopes[1].abs().max()) < 1e-9
    sigma, share = sigma.detach(), share.detach()
    for change in (-0.1, 0.1):
        assert float(expected(sigma + change, share)) < float(expected(sigma, share))
        assert float(expected(sigma, share + change)) < float(expected(sigma, share))


def test_the_weights_prior_is_the_expected_one() -> None:
    values = torch.tensor([0.3, -0.1, 2.0], dtype=torch.float64)
    latent = SpikeSlab([3], SPIKE, SLAB, values)
    latent.inclusion, latent.variance = torch.tensor([0.9, 0.2, 0.5]).double(), torch.tensor(4.0).double()
    known = -(0.1 * 0.3 + 0.8 * 0.1 + 0.5 * 2.0) / (SPIKE * 2) - (0.9 * 0.09 + 0.2 * 0.01 + 0.5 * 4) / (2 * SLAB * 4)
    assert float(latent.log_prior(values)) == pytest.approx(known)


LEVELS = torch.tensor([0.0, 0.15, 0.3, 0.5, 0.8, 1.2, 2.0, 0.05], dtype=torch.float64)  # what the rows say of 8 weights
COPIES, NOISE = 40, 0.6  # outputs that share the design, and the noise of rows
PRECISION = 8 / NOISE**2  # of a weight given the rows, whose design is orthogonal


def orthogonal() -> caveat.Task:
    """Linear regression with 8 orthogonal columns and 40 outputs that are alike."""
    design = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(3):
        design = torch.cat([torch.cat([design, design], 1), torch.cat([design, -design], 1)])  # Hadamard
    module = nn.Linear(8, COPIES, bias=False).double()
    with torch.no_grad():
        module.weight.copy_(LEVELS.expand(COPIES, 8))
    targets = (design @ LEVELS)[:, None].expand(8, COPIES)
    return caveat.Task(module, (design, targets), caveat.Gaussian(noise=NOISE))


def exact_fixed_point(start: float) -> tuple[Tensor, float, float]:
    """Rho of each level, delta and sigma at which a step of the mean field stays where it is, by quadrature."""
    grid = torch.linspace(-2, 4, 1201, dtype=torch.float64)
    weights, p = COPIES * 8, COPIES * 8.0
    rho, delta, sigma = torch.full((8,), start, dtype=torch.float64), 0.5, 1.0
    for _ in range(500):
        log = -PRECISION / 2 * (grid - LEVELS[:, None]) ** 2 - (1 - rho[:, None]) * grid.abs() / (SPIKE * sigma)
        density = (log - rho[:, None] * grid**2 / (2 * SLAB * sigma**2)).softmax(1)  # of each weight, on the grid
        slab = torch.distributions.Normal(0, sigma * SLAB**0.5).log_prob(grid).exp() * delta
        spike = torch.distributions.Laplace(0, sigma * SPIKE).log_prob(grid).exp() * (1 - delta)
        absolute = COPIES * float(((1 - rho) * (density @ grid.abs())).sum()) / SPIKE
        square = COPIES * float((rho * (density @ grid**2)).sum()) / SLAB + p
        a = 2 * p + 2
        to_rho, to_delta = (
            density @ (slab / (slab + spike)),
            (COPIES * float(rho.sum()) + weights - 1) / (3 * weights - 2),
        )
        to_sigma = (absolute + math.sqrt(absolute**2 + 4 * a * square)) / (2 * a)
        rho, delta, sigma = (
            rho + 0.1 * (to_rho - rho),
            delta + 0.1 * (to_delta - delta),
            sigma + 0.1 * (to_sigma - sigma),
        )
    return rho, delta, sigma


def test_stochastic_approximation_comes_to_the_exact_fixed_point(monkeypatch: pytest.MonkeyPatch) -> None:
    known = exact_fixed_point(0.5)
    for start in (0.05, 0.95):
        torch.testing.assert_close(exact_fixed_point(start)[0], known[0], rtol=0, atol=1e-6, msg="one fixed point")
    assert float(known[0].min()) < 0.2
    assert float(known[0].max()) > 0.9
    seen: list[tuple[Tensor, float, float]] = []
    update = SpikeSlab.update

    def recorded(self: SpikeSlab, values: Tensor, omega: float) -> None:
        update(self, values, omega)
        seen.append((self.inclusion.view(COPIES, 8).mean(0), float(self.share), float(self.variance)))

    monkeypatch.setattr(SpikeSlab, "update", recorded)
    # As after ten thousand steps and more: what is left is the error of a last step, which is of the order of omega.
    monkeypatch.setattr(SpikeSlab, "share_of_way", staticmethod(lambda step: 10 * (10_000 + 10 * step) ** -0.75))
    rate = 0.05 / PRECISION * 8  # so that the variance of the weights is 2.5% too large
    method = AEB(density=1.0, spike=SPIKE, slab=SLAB, burn_in=0, length=1, thin=1800, learning_rate=rate, momentum=0.0)
    caveat.fit(orthogonal(), replace(method, temperature=1.0), progress=False)
    late = seen[900:]
    rho = torch.stack([r for r, _, _ in late]).mean(0)
    torch.testing.assert_close(rho, known[0], rtol=0, atol=0.025)
    assert sum(d for _, d, _ in late) / len(late) == pytest.approx(known[1], abs=0.01)
    assert math.sqrt(sum(v for _, _, v in late) / len(late)) == pytest.approx(known[2], rel=0.03)
    assert abs(known[2] - 1) > 0.1, "sigma has gone somewhere"


def digits_like(n: int = 120) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(n, 1, 6, 6, generator=rng)
    return x, (x[:, 0, :3].sum((1, 2)) > 0).long() + (x[:, 0, 3:].sum((1, 2)) > 0).long()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
    )


def task(model: nn.Module | None = None) -> caveat.Task:
    return caveat.Task(model or build(), digits_like(), caveat.Categorical())


@pytest.fixture(scope="module")
def posterior() -> caveat.Posterior:
    method = AEB(density=0.2, burn_in=6, length=4, thin=1, batch_size=30)
    return caveat.fit(task(), method, start=caveat.MAP(training=caveat.Training(epochs=30)), progress=False)


def test_what_is_left_is_values_and_places_shared_by_all_draws(posterior: caveat.Posterior, tmp_path: Path) -> None:
    left = {"2.weight": 43, "6.weight": 14}  # a fifth of 216 and 72, to the nearest; the first convolution stays whole
    active = posterior.state["active"]
    assert active["counts"].tolist() == [0, 43, 14]
    assert active["indices"].dtype == torch.int32
    assert {name: tuple(t.shape) for name, t in active.items()} == {
        "0/mean": (57,), "1/mean": (57,), "2/mean": (57,), "3/mean": (57,), "indices": (57,), "counts": (3,),
    }  # fmt: skip
    draws = list(posterior.sample(4))
    for name, count in left.items():
        places = torch.stack([draw[name] != 0 for draw in draws])
        assert int(places.any(0).sum()) == count, "the same ones in all draws"
        assert not torch.equal(draws[0][name], draws[1][name])
    assert not torch.equal(draws[0]["0.weight"], draws[1]["0.weight"]), "the rest is drawn as well"
    rest = sum(t.numel() * t.element_size() for t in posterior.state["rest"].values())
    assert posterior.info.stored_bytes == 4 * 57 * 4 + 57 * 4 + 3 * 8 + rest
    diagnostics = posterior.info.diagnostics
    assert diagnostics["density"] == pytest.approx((36 + 57) / (36 + 216 + 72))
    assert set(diagnostics["delta"]) == {"2", "6"}
    assert {e["layer"]: e["treatment"] for e in posterior.info.coverage}["2"] == (
        "4 draws by SG-MCMC, 43 of 216 weights"
    )


def test_sparse_passes_are_those_of_whole_weights_and_of_deployed_modules(posterior: caveat.Posterior) -> None:
    x, _ = digits_like(20)
    samples = posterior.predict(x).samples
    for i, draw in enumerate(posterior.sample(4)):
        logits = posterior.network(draw, x)
        torch.testing.assert_close(samples[i], logits.log_softmax(-1).exp(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(caveat.deploy(posterior)(x), logits, rtol=1e-4, atol=1e-4)
    one = next(posterior.sample(1, seed=3))
    torch.testing.assert_close(
        caveat.deploy(posterior, seed=3)(x), posterior.network(one, x), rtol=1e-4, atol=1e-4, msg="of the same draw"
    )


def test_the_largest_are_left_and_more_go_as_the_burn_in_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, list[int]]] = []
    truncate, settle = aeb_module._Pruned._truncate, aeb_module._Pruned._settle

    def watched(self: Any, share: float) -> None:
        truncate(self, share)
        seen.append((share, [int((part == 0).sum()) for _, part in self.substitute.layout.split(self.values)]))

    def settled(self: Any, places: Tensor) -> None:
        before = self.values.detach().abs()
        settle(self, places)
        for part, (_, mine) in zip(before.split([216, 72]), self.substitute.layout.split(self.values), strict=True):
            assert torch.equal(part.sort().values[-len(mine) :], mine.detach().abs().sort().values)

    monkeypatch.setattr(aeb_module._Pruned, "_truncate", watched)
    monkeypatch.setattr(aeb_module._Pruned, "_settle", settled)
    start = caveat.MAP(training=caveat.Training(epochs=30))
    caveat.fit(task(), AEB(density=0.2, burn_in=5, length=1, batch_size=30), start=start, progress=False)
    assert len(seen) == 20
    for step, (share, zeros) in enumerate(seen, 1):
        assert share == pytest.approx(1 - math.exp(-10 * step / 20), abs=1e-6)
        assert zeros == [int(share * (216 - 43)), int(share * (72 - 14))]


def test_costs_are_those_of_all_weights_until_the_burn_in_is_over(posterior: caveat.Posterior) -> None:
    account = posterior.info.diagnostics["account"]
    dense, sparse = account["dense"]["training_flops"], account["total"]["training_flops"]
    start = caveat.fit(task(), caveat.MAP(training=caveat.Training(epochs=30)), progress=False)
    again = caveat.fit(task(), posterior.method, start=start, progress=False)
    search = 11 + 2 + 2  # gradients for the curvature before steps 0, 10 and 20
    assert again.info.flops == pytest.approx(120 * ((6 + search) * dense + 4 * sparse))
    assert again.info.gradient_evaluations == 10 + search
    x, _ = digits_like(20)
    assert torch.equal(again.predict(x).probs, posterior.predict(x).probs)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"AEB\(density=0\): must be in \(0, 1\]"):
        AEB(density=0)
    with pytest.raises(ValueError, match="spike=-1"):
        AEB(spike=-1)
    with pytest.raises(ValueError, match="length=0"):
        AEB(length=0)
    start = caveat.MAP(training=caveat.Training(epochs=30))
    with pytest.raises(ValueError, match=r"density=0\.001 leaves no weight of layer '6'"):
        caveat.fit(task(), AEB(density=0.001), start=start, progress=False)
    with pytest.raises(ValueError, match="keeps every layer whole"):
        caveat.fit(task(), AEB(dense=("0", "2", "6")), start=start, progress=False)
    with pytest.raises(ValueError, match="starts from a trained network"):
        caveat.fit(task(), AEB(), progress=False)
    with pytest.raises(ValueError, match="ran away to infinity in epoch"):
        caveat.fit(task(), AEB(learning_rate=1e6, burn_in=20), start=start, progress=False)
    x, y = digits_like()
    embedding = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.AdaptiveAvgPool1d(3))
    with pytest.raises(ValueError, match="none of the selected parameters is a weight"):
        caveat.fit(caveat.Task(embedding, (x, y), caveat.Categorical()), AEB(), start=start, progress=False)
