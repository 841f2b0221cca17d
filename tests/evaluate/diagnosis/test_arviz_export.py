"""What ArviZ reads of the chains."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import caveat
from caveat.engine.chains import convergence

Chains = Callable[..., tuple[caveat.Posterior, Tensor, Tensor]]


def test_arviz_reads_what_is_exported(tmp_path: Path, chains_by_hand: Chains) -> None:
    arviz = pytest.importorskip("arviz_stats")
    xarray = pytest.importorskip("xarray")
    posterior, x, y = chains_by_hand(caveat.Gaussian(), draws=50)
    tree = caveat.to_arviz(posterior, (x, y), rows=10)
    tree.to_netcdf(tmp_path / "chains.nc")
    with xarray.open_datatree(tmp_path / "chains.nc") as read:
        read.load()
    assert set(read.children) == {
        "posterior",
        "sample_stats",
        "log_likelihood",
        "posterior_predictive",
        "observed_data",
    }
    assert set(read.posterior.data_vars) == {"weight", "bias", "log_noise"}
    assert read.posterior.weight.dims[:2] == ("chain", "draw")
    assert read.posterior.attrs["inference_library"] == "caveat"
    assert read.sample_stats.diverging.dtype == bool
    assert set(read.sample_stats.data_vars) == set(posterior.state["stats"])
    assert read.log_likelihood.y.shape == (4, 50, 10)
    assert read.posterior_predictive["mean"].shape == (4, 50, 10, 1)
    assert list(read.observed_data.row) == [*range(0, 18, 2), 19]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rhat, tail = arviz.rhat(read), arviz.ess(read, method="tail", prob=(0.05, 0.95))
        energies = arviz.bfmi(read)
    ours = convergence(posterior.state["params"]["weight"])
    torch.testing.assert_close(torch.from_numpy(rhat.weight.values), ours.rhat, rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.from_numpy(tail.weight.values), ours.ess_tail, rtol=1e-4, atol=0)
    assert energies.energy.values == pytest.approx(caveat.diagnose(posterior, (x, y)).e_bfmi)


def test_an_export_without_data_has_what_the_sampler_left(chains_by_hand: Chains) -> None:
    pytest.importorskip("arviz_base")
    posterior, _, _ = chains_by_hand(draws=8)
    tree = caveat.to_arviz(posterior, parameters="b*")
    assert set(tree.children) == {"posterior", "sample_stats"}
    assert set(tree.posterior.data_vars) == {"bias"}


def test_an_export_without_arviz_says_what_to_install(monkeypatch: pytest.MonkeyPatch, chains_by_hand: Chains) -> None:
    posterior, _, _ = chains_by_hand(draws=8)
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    with pytest.raises(ImportError, match=r'pip install "caveat\[mcmc\]"'):
        caveat.to_arviz(posterior)
