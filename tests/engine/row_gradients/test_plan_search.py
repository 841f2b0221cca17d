"""The way of each parameter is found once, mended where later rows show it wrong, and refused where there is none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from caveat.engine.row_gradients.jacobian import Jacobian, Plans
from tests.engine.row_gradients.row_reference import (
    TWO,
    Custom,
    assert_right,
    chain,
    frames,
    network,
    normal,
    reference,
)


def test_a_plan_is_made_once_and_holds_at_other_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = network(Custom(frames, **TWO)), normal(5, 4)
    at_zero = {name: value * (not name.startswith("b")) for name, value in net.params().items()}
    plans = Plans()
    Jacobian(net, at_zero, x, plans=plans)  # the first layer has no gradient here, and still its rows are not first
    monkeypatch.delattr("caveat.engine.row_gradients.jacobian.find_plan")
    assert_right(Jacobian(net, net.params(), x, plans=plans), x, reference(net, x))


def test_another_use_of_a_weight_than_the_planned_one_takes_copies() -> None:
    net = network(Custom(lambda s, x: s.a(x) if len(x) != 2 else x @ s.a.weight.T + s.a.bias, a=nn.Linear(4, 3)))
    plans = Plans()
    jacobian = Jacobian(net, net.params(), normal(4), plans=plans)
    x = normal(4, rows=2)
    assert_right(jacobian, x, reference(net, x))
    assert jacobian.plan.general == ("a.weight", "a.bias")
    assert Jacobian(net, net.params(), x, plans=plans).plan.general == ()  # the others are none the slower for it


def test_rows_that_the_network_cannot_take_change_no_plan() -> None:
    net = network(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    x = normal(4)
    jacobian = Jacobian(net, net.params(), x)
    with pytest.raises((RuntimeError, ValueError)):
        jacobian.at(x[0])  # without a batch axis
    assert jacobian.plan.general == ()
    assert_right(jacobian, x, reference(net, x))


TWO_ALIKE = {"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)}


def route_rows(s: Any, x: Tensor) -> Tensor:
    chosen = (x[:, 0] > 0).nonzero()[:, 0]
    return s.a(x).index_add(0, chosen, s.b(x[chosen]))


def route_tokens(s: Any, x: Tensor) -> Tensor:
    return route_rows(s, x.flatten(0, 1)).unflatten(0, (len(x), -1)).tanh().mean(1)


def sort_rows(s: Any, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return s.a(x).index_add(0, order, s.b(x[order]))


@pytest.mark.parametrize(
    ("route", "first", "signs"),
    [
        (route_rows, (1, 1, 1), (1, -1, 1, -1, -1)),  # fewer rows than there are
        (route_rows, (1, 1, 1), (-1, -1)),  # none
        (route_tokens, (1, 1, 1, 1, 1, 1), (1, 1, -1, -1, 1, -1, 1, -1)),  # as many as rows, but not one of each
        (route_tokens, (1, -1, -1, 1, 1, -1), (1, 1, -1, -1)),  # as many of each as in the first rows, on average
        (sort_rows, (1, 2, 3), (3, 1, 2)),
    ],
    ids=["rows", "no rows", "tokens", "as many tokens", "sorted"],
)
def test_layers_that_see_some_rows_only_get_the_gradients_of_each(
    route: Callable[[Any, Tensor], Tensor], first: tuple[int, ...], signs: tuple[int, ...]
) -> None:
    def make(signs: tuple[int, ...]) -> Tensor:
        x = torch.randn(len(signs), 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        x[:, 0] = x[:, 0].abs() * torch.tensor(signs) if route is not sort_rows else torch.tensor(signs).double()
        return x.reshape(-1, 2, 4) if route is route_tokens else x

    net = network(Custom(route, **TWO_ALIKE))
    jacobian, x = Jacobian(net, net.params(), make(first)), make(signs)
    assert_right(jacobian, make(first), reference(net, make(first)))
    assert not jacobian.plan.general, "the first rows are to look like any other"
    assert_right(jacobian, x, reference(net, x))


def test_a_weight_that_sees_some_rows_only_has_no_kronecker_factors() -> None:
    net = network(Custom(lambda s, x: route_rows(s, x) if bool((x[:, 0] > 0).any()) else s.a(x), **TWO_ALIKE))
    jacobian = Jacobian(net, net.params(), normal(4).abs())
    x = normal(4, rows=3)
    x[:, 0] = -x[:, 0].abs()
    assert len(jacobian.at(normal(4).abs()).factored("b.weight")) == 1
    assert jacobian.at(x).factored("b.weight") == []  # it does not act on these
    x[0, 0] = 1.0
    with pytest.raises(ValueError, match=r"b\.weight acts on some of the rows only.*structure='diagonal'"):
        jacobian.at(x).factored("b.weight")


def test_an_expert_with_room_for_few_rows_only_is_an_error() -> None:
    def crowded(s: Any, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).nonzero()[:3, 0]
        return s.a(x).index_add(0, chosen, s.b(x[chosen]))

    net = network(Custom(crowded, **TWO_ALIKE))
    jacobian = Jacobian(net, net.params(), normal(4, rows=3).abs())
    with pytest.raises(ValueError, match="depends on the other rows"):
        jacobian.at(normal(4, rows=5).abs())


@pytest.mark.parametrize("x", [normal(4), normal(4, 2, 2)])
def test_rows_that_depend_on_one_another_are_an_error(x: Tensor) -> None:
    norm = (nn.BatchNorm1d if x.ndim == 2 else nn.BatchNorm2d)(4, track_running_stats=False)
    net, before = network(chain(norm)), torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(ValueError, match="no gradient of its own"):
        Jacobian(net, net.params(), x)
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_checkpointed_activations_are_refused_with_advice() -> None:
    net = network(Custom(lambda s, x: s.b(checkpoint(s.a, x, use_reentrant=False)), **TWO))
    with pytest.raises(ValueError, match="switch gradient checkpointing off"):
        Jacobian(net, net.params(), normal(4))


def test_an_input_that_is_lost_to_autograd_is_autograds_error() -> None:
    net = network(Custom(lambda s, x: s.b(h := s.a(x)) + h.mul_(2), **TWO))
    with pytest.raises(RuntimeError, match="inplace"):
        Jacobian(net, net.params(), normal(4))
