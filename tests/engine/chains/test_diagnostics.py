"""R-hat and effective sample sizes against ArviZ, and the null of R-hat against draws that are independent."""

import math
import time
import warnings

import numpy as np
import pytest
import torch

from caveat.engine.chains import diagnostics
from caveat.engine.chains.diagnostics import (
    convergence,
    e_bfmi,
    effective_sample_size,
    rank_normalised_split_rhat,
    rhat_null,
    rhat_null_cdf,
)

arviz = pytest.importorskip("arviz_stats.base").array_stats


def autoregressive(phi: float, shape: tuple[int, int, int]) -> np.ndarray:
    rng = np.random.default_rng(1)
    noise = rng.normal(size=shape)
    x = np.empty(shape)
    x[:, 0] = noise[:, 0] / math.sqrt(1 - phi**2)
    for t in range(1, shape[1]):
        x[:, t] = phi * x[:, t - 1] + noise[:, t]
    return x


def cases() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    usual = (4, 150, 30)
    normal = rng.normal(size=usual)
    one_nan = normal[..., :3].copy()
    one_nan[2, 17, 1] = np.nan
    antithetic = np.where(np.arange(150) % 2, -1, 1)[None, :, None] * np.abs(normal)
    found = {
        "independent": normal,
        "antithetic": antithetic,
        "heavy tails": rng.standard_cauchy(usual),
        "shifted chains": normal + 0.3 * np.arange(4)[:, None, None],
        "chains of different spread": normal * (1 + np.arange(4))[:, None, None],
        "a trend": normal + np.linspace(0, 2, 150)[None, :, None],
        "rejected steps": np.repeat(normal[:, :50], 3, axis=1),
        "few values": rng.integers(0, 3, usual).astype(float),
        "yes and no": rng.integers(0, 2, usual).astype(float),
        "rare events": (rng.random(usual) < 0.01).astype(float),
        "constant": np.full((4, 150, 2), 0.1),
        "one NaN": one_nan,
        "all NaN": np.full((4, 150, 2), np.nan),
        "one chain": normal[:1],
        "one chain of an odd length": normal[:1, :141],
    }
    found |= {f"autoregressive {phi}": autoregressive(phi, usual) for phi in (0.5, 0.9, 0.99, -0.5, -0.95)}
    return found | {f"{n} draws": normal[:, :n] for n in (1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 149)}


@pytest.mark.parametrize("name", cases())
def test_the_numbers_are_arviz_s(name: str) -> None:
    draws = cases()[name]
    found = convergence(torch.from_numpy(draws))
    last = np.moveaxis(draws, 2, 0)  # ArviZ wants chains and draws last
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of divisions by zero
        expected = {
            "rhat": arviz.rhat(last),
            "ess_bulk": arviz.ess(last, method="bulk"),
            "ess_tail": arviz.ess(last, method="tail", prob=0.05),
        }
    for key, value in expected.items():
        np.testing.assert_allclose(getattr(found, key).numpy(), value, rtol=1e-10, err_msg=key)


def test_parts_are_those_of_the_whole() -> None:
    draws = torch.from_numpy(cases()["autoregressive 0.5"]).reshape(4, 150, 5, 6)
    found = convergence(draws)
    assert found.rhat.shape == (5, 6)
    torch.testing.assert_close(rank_normalised_split_rhat(draws), found.rhat, rtol=0, atol=0)
    bulk, tail = effective_sample_size(draws)
    torch.testing.assert_close(bulk, found.ess_bulk, rtol=0, atol=0)
    torch.testing.assert_close(tail, found.ess_tail, rtol=0, atol=0)
    assert rank_normalised_split_rhat(draws[..., 0, 0]).shape == ()


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.from_numpy(cases()["few values"])
    whole = convergence(draws)
    monkeypatch.setattr(diagnostics, "_BLOCK_NUMBERS", 4 * 150 * 7)  # 30 quantities in blocks of seven
    torch.testing.assert_close(convergence(draws).rhat, whole.rhat, rtol=0, atol=0)
    torch.testing.assert_close(convergence(draws).ess_tail, whole.ess_tail, rtol=0, atol=0)


def test_chains_that_stay_where_they_began_are_infinitely_far_apart() -> None:
    draws = torch.tensor([0.1, 0.2, 0.7]).expand(50, 3).T[..., None]
    found = convergence(draws)
    assert float(found.rhat) == math.inf
    assert float(found.ess_bulk) < 10


def test_infinity_has_no_diagnostics() -> None:
    draws = torch.randn(2, 20, 2, generator=torch.Generator().manual_seed(0))
    draws[0, 3, 1] = math.inf
    found = convergence(draws)
    for values in (found.rhat, found.ess_bulk, found.ess_tail):
        assert values.isnan().tolist() == [False, True]


@pytest.mark.parametrize("shape", [(5,), (0, 4, 2), (2, 0, 2)])
def test_draws_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\[chains, draws, ...\], got"):
        convergence(torch.zeros(shape))


def test_e_bfmi_is_arviz_s_and_low_for_a_creeping_energy() -> None:
    rng = np.random.default_rng(0)
    energy = np.stack([rng.normal(size=200), rng.normal(size=200).cumsum()])
    found = e_bfmi(torch.from_numpy(energy))
    np.testing.assert_allclose(found.numpy(), arviz.bfmi(energy), rtol=1e-12)
    assert float(found[0]) > 1.5
    assert float(found[1]) < 0.3


@pytest.mark.parametrize(
    ("chains", "draws", "quantities"), [(4, 150, 900), (2, 1000, 100), (64, 20, 100), (2, 40, 500)]
)
def test_the_null_is_what_independent_draws_give(chains: int, draws: int, quantities: int) -> None:
    """Twelve data sets: the share above 1.01 and the median of their maxima."""
    rng = torch.Generator().manual_seed(0)
    normal = torch.randn(chains, draws, 12 * quantities, generator=rng, dtype=torch.float64)
    rhat = rank_normalised_split_rhat(normal).reshape(12, quantities)
    null = rhat_null(chains, draws, quantities)
    share = float((rhat > 1.01).double().mean())
    assert abs(share - null.share_above) < 4 * math.sqrt(null.share_above / rhat.numel()) + 1e-3
    excess = float(rhat.amax(1).median() - 1) / (null.maximum - 1)
    assert 0.8 < excess < 1.15
    assert int((rhat.amax(1) > null.limit).sum()) <= 1
    assert null.maximum < null.limit


def test_the_null_of_a_usual_size() -> None:
    """4 chains of 150 draws of 3,600 quantities: simulations gave maxima of 1.019 to 1.025."""
    null = rhat_null(4, 150, 3600)
    assert 1.019 < null.maximum < 1.025 < null.limit < 1.035
    assert 0.02 < null.share_above < 0.04
    assert rhat_null(4, 150, 36_000).maximum > null.maximum
    assert rhat_null(4, 100_000, 10).limit < 1.0001


def test_the_whole_distribution_of_the_null() -> None:
    rng = torch.Generator().manual_seed(0)
    rhat = rank_normalised_split_rhat(torch.randn(4, 100, 4000, generator=rng)).sort().values
    cdf = rhat_null_cdf(4, 100, rhat)
    # Kolmogorov's distance of 4,000 draws is below 0.03 in 999 of 1,000 cases.
    assert float((cdf - torch.linspace(0, 1, 4000)).abs().max()) < 0.04
    assert rhat_null_cdf(4, 100, torch.tensor([0.5, 9.0])).tolist() == [0.0, 1.0]


def test_the_null_needs_chains() -> None:
    with pytest.raises(ValueError, match=r"chains=1.*at least 2 chains"):
        rhat_null(1, 100, 10)


def test_thousands_of_quantities_take_seconds() -> None:
    """2,000 quantities of 4 x 400 draws take about half a second; ArviZ takes 3.6 s."""
    draws = torch.randn(4, 400, 2000, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start = time.process_time()
    convergence(draws)
    seconds = time.process_time() - start
    torch.set_num_threads(threads)
    assert seconds < 2.5
