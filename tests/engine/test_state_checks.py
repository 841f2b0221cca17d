"""Checks of tensors that were read, against a network."""

import pytest
import torch
from torch import nn

import caveat
from caveat import CorruptFile
from caveat.engine import state_checks
from caveat.engine.state_checks import (
    check_finite,
    check_hyper,
    check_indices,
    check_like,
    check_names,
    check_point,
    check_tensor,
)


def network(likelihood: caveat.likelihoods.Likelihood | None = None) -> caveat.Network:
    return caveat.Network(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), likelihood or caveat.Gaussian())


def test_names_that_are_missing_or_too_many_are_refused() -> None:
    check_names("group", ["a", "b"], ["a"], ["b", "c"])
    with pytest.raises(CorruptFile, match="group/a is missing"):
        check_names("group", ["b"], ["a"], ["b"])
    with pytest.raises(CorruptFile, match="group/b does not belong there"):
        check_names("group", ["a", "b"], ["a"])


def test_shape_type_and_finite_numbers() -> None:
    check_tensor("w", torch.zeros(2, 3), (2, 3), (torch.float32,))
    with pytest.raises(CorruptFile, match=r"w has shape \[2, 3\], not \[3, 2\]"):
        check_tensor("w", torch.zeros(2, 3), (3, 2), (torch.float32,))
    with pytest.raises(CorruptFile, match="w is of type float16, not float32 or float64"):
        check_tensor("w", torch.zeros(2).half(), (2,), (torch.float32, torch.float64))
    for bad in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(CorruptFile, match="w holds NaN or infinity"):
            check_finite("w", torch.tensor([0.0, bad]))
    check_finite("log", torch.tensor([-torch.inf]), logarithm=True)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(CorruptFile, match="log holds NaN or infinity"):
            check_finite("log", torch.tensor([bad]), logarithm=True)


def test_tensors_that_stay_in_their_files_are_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_checks, "LOOKED_THROUGH", 4)
    check_finite("large", torch.tensor([0.0, torch.nan]))


def test_a_point_has_all_buffers_or_none() -> None:
    here = network()
    params, buffers = here.params(), here.buffers()
    check_point("params", params, here)
    check_point("params", params | buffers, here)
    for name in buffers:
        with pytest.raises(CorruptFile, match=f"params/{name} is missing"):
            check_point("params", params | {n: b for n, b in buffers.items() if n != name}, here)
    stacked = {name: torch.stack([value] * 4) for name, value in (params | buffers).items()}
    check_point("params", stacked, here, (4,))
    noise = {"log_noise": torch.zeros(3)}
    with pytest.raises(CorruptFile, match="params/hyper/log_noise is missing"):
        check_point("params", stacked, here, (4,), noise)
    check_point("params", stacked | {"hyper/log_noise": torch.zeros(4, 3)}, here, (4,), noise)
    with pytest.raises(CorruptFile, match=r"0.weight has shape \[4, 3, 2\], not \[5, 3, 2\]"):
        check_like("params", {"0.weight": stacked["0.weight"]}, {"0.weight": params["0.weight"]}, (5,))


def test_what_the_likelihood_has_beside_the_weights() -> None:
    good = {name: torch.ones(3).double() for name in ("target_mean", "target_scale", "log_noise")}
    check_hyper(good, network())
    for change, told in (
        ({"target_scale": torch.zeros(3).double()}, "target_scale is not positive"),
        ({"log_noise": torch.zeros(2).double()}, "hyper/.* has shape"),
        ({"log_noise": torch.zeros(3).long()}, "is of type int64"),
        ({"log_noise": torch.full((3,), torch.nan)}, "holds NaN"),
        ({"strange": torch.zeros(3)}, "hyper/strange does not belong there"),
    ):
        with pytest.raises(CorruptFile, match=told):
            check_hyper(good | change, network())
    with pytest.raises(CorruptFile, match="hyper/log_noise is missing"):
        check_hyper({name: value for name, value in good.items() if name != "log_noise"}, network())
    classes = network(caveat.Categorical())
    check_hyper({}, classes)
    check_hyper({"temperature": torch.tensor(2.0).double()}, classes)
    with pytest.raises(CorruptFile, match="hyper/temperature is not positive"):
        check_hyper({"temperature": torch.tensor(0.0)}, classes)


def test_positions_ascend_and_are_within() -> None:
    check_indices("places", torch.tensor([0, 2, 5], dtype=torch.int32), 6)
    check_indices("places", torch.zeros(0, dtype=torch.int32), 6)
    for bad in ([0, 6], [-1, 2], [2, 2], [3, 1]):
        with pytest.raises(CorruptFile, match="places are not ascending positions below 6"):
            check_indices("places", torch.tensor(bad, dtype=torch.int32), 6)
    with pytest.raises(CorruptFile, match="int64, not int32"):
        check_indices("places", torch.tensor([1]), 6)
