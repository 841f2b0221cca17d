"""The state of a Laplace posterior: groups of tensors and back, and a reason where groups are missing."""

import pytest
import torch
from torch import nn

import caveat
from caveat.engine.laplace.chosen_weights import ChosenWeights
from caveat.engine.laplace.gaussians import DenseGaussian
from caveat.engine.laplace.laplace_posterior import LaplaceState
from caveat.storage import CorruptFile, State


def network() -> caveat.Network:
    torch.manual_seed(0)
    return caveat.Network(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), caveat.Gaussian())


def state(chosen: ChosenWeights, whole: caveat.Network) -> LaplaceState:
    cholesky = torch.randn(len(chosen), len(chosen), generator=torch.Generator().manual_seed(0)).tril()
    gaussian = DenseGaussian(cholesky, torch.ones(len(chosen)))
    hyper = {"log_noise": torch.zeros(1)}
    return LaplaceState(whole.params(), hyper, gaussian.tensors(), chosen.stored_entries(whole))


@pytest.mark.parametrize("some", [False, True])
def test_groups_of_tensors_and_back(some: bool) -> None:
    whole = network()
    chosen = ChosenWeights.at(whole, torch.tensor([0, 7, 11])) if some else ChosenWeights(whole)
    before = state(chosen, whole)
    groups = before.tensors()
    assert ("subnetwork" in groups) == some
    after = LaplaceState.of(groups)
    weights, gaussian = after.posterior(whole)
    assert torch.equal(weights.weights(whole.params()), chosen.weights(whole.params()))
    assert isinstance(gaussian, DenseGaussian)
    assert torch.equal(gaussian.cholesky, before.gaussian["cholesky"])
    assert after.hyper == before.hyper


@pytest.mark.parametrize("group", ["params", "hyper", "gaussian"])
def test_a_missing_group_is_named(group: str) -> None:
    whole = network()
    groups: State = state(ChosenWeights(whole), whole).tensors()
    del groups[group]
    with pytest.raises(CorruptFile, match=f"not the state of a Laplace posterior: it has no group '{group}'"):
        LaplaceState.of(groups)


def test_a_gaussian_without_prior_precisions_is_refused() -> None:
    whole = network()
    groups = state(ChosenWeights(whole), whole).tensors()
    groups["gaussian"] = {"cholesky": groups["gaussian"]["cholesky"]}
    with pytest.raises(CorruptFile, match="it has no prior precisions"):
        LaplaceState.of(groups)
