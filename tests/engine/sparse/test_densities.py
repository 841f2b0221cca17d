"""Counts of active weights are whole, at least one, and sum to what was asked for."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from caveat.engine.sparse.densities import (
    active_counts,
    default_density,
    default_interval,
    dense_layers,
    exchange_count,
    replacement_rate,
)
from caveat.engine.sparse.kernels import LayerGeometry
from caveat.engine.sparse.substitute import LayerGeometries

LAYERS = {
    "stem": LayerGeometry((16, 3, 3, 3)),  # 432 weights
    "body": LayerGeometry((64, 16, 3, 3)),  # 9,216
    "wide": LayerGeometry((256, 64, 3)),  # 49,152
    "head": LayerGeometry((10, 256)),  # 2,560
}
SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple), min_size=1, max_size=7)


def test_uniform_is_the_same_share_of_every_layer() -> None:
    assert active_counts(LAYERS, 0.1, "uniform") == {"stem": 43, "body": 922, "wide": 4915, "head": 256}


def test_dense_layers_are_full_and_take_nothing_from_the_others() -> None:
    assert active_counts(LAYERS, 0.1, "uniform", {"stem", "head"}) == {
        "stem": 432,
        "body": 922,
        "wide": 4915,
        "head": 2560,
    }
    by_kernel = active_counts(LAYERS, 0.1, "erk", {"stem"})
    assert by_kernel["stem"] == 432
    assert sum(by_kernel.values()) - 432 == round(0.1 * (9216 + 49152 + 2560))
    assert active_counts(LAYERS, 0.1, "erk", set(LAYERS)) == {name: g.size for name, g in LAYERS.items()}


def test_erk_is_in_proportion_to_the_sum_of_dimensions() -> None:
    found = active_counts(LAYERS, 0.02, "erk")
    assert sum(found.values()) == round(0.02 * 61360)
    scale = sum(found.values()) / sum(sum(g.shape) for g in LAYERS.values())
    for name, geometry in LAYERS.items():
        assert abs(found[name] - scale * sum(geometry.shape)) < 1


def test_a_full_layer_leaves_its_surplus_to_the_others() -> None:
    found = active_counts(LAYERS, 0.3, "erk")
    others = {name: g for name, g in LAYERS.items() if name != "stem"}
    assert found["stem"] == 432
    rest = round(0.3 * 61360) - 432
    full = [name for name, g in others.items() if found[name] == g.size]
    free = {name: g for name, g in others.items() if name not in full}
    scale = (rest - sum(others[name].size for name in full)) / sum(sum(g.shape) for g in free.values())
    assert all(abs(found[name] - scale * sum(g.shape)) < 1 for name, g in free.items())
    assert all(scale * sum(LAYERS[name].shape) >= found[name] for name in full)


@settings(deadline=None)
@given(shapes=SHAPES, density=st.floats(0.001, 1.0))
def test_erk_counts_are_whole_and_exact_in_total(shapes: list[tuple[int, ...]], density: float) -> None:
    layers = {str(k): LayerGeometry(shape) for k, shape in enumerate(shapes)}
    size = sum(g.size for g in layers.values())
    total = math.floor(density * size + 0.5)
    if total < len(layers):
        with pytest.raises(ValueError, match="fewer than one each"):
            active_counts(layers, density, "erk")
        return
    found = active_counts(layers, density, "erk")
    assert sum(found.values()) == total
    assert all(1 <= found[name] <= g.size for name, g in layers.items())
    assert list(found) == list(layers)


@settings(deadline=None)
@given(shapes=SHAPES, density=st.floats(0.001, 1.0))
def test_the_smallest_density_that_is_said_to_work_does(shapes: list[tuple[int, ...]], density: float) -> None:
    layers = {str(k): LayerGeometry(shape) for k, shape in enumerate(shapes)}
    for allocation in ("uniform", "erk"):
        try:
            found = active_counts(layers, density, allocation)
        except ValueError as error:
            said = float(str(error).split("take at least ")[1].split(",")[0])
            assert density < said <= 1
            found = active_counts(layers, said, allocation)
        assert min(found.values()) >= 1


def test_a_density_of_one_is_every_weight() -> None:
    for allocation in ("uniform", "erk"):
        assert active_counts(LAYERS, 1.0, allocation) == {name: g.size for name, g in LAYERS.items()}


def test_geometries_come_from_layers() -> None:
    layers = {"grouped": LayerGeometry.of(nn.Conv2d(8, 8, 3, groups=4)), "linear": LayerGeometry.of(nn.Linear(8, 4))}
    assert active_counts(layers, 0.5) == {"grouped": 72, "linear": 16}


def test_the_first_layer_is_dense_where_it_is_a_convolution_and_not_the_only_layer() -> None:
    assert dense_layers(LAYERS, "first") == ("stem",)
    assert dense_layers({"stem": LAYERS["stem"]}, "first") == ()
    assert dense_layers({"head": LAYERS["head"], "stem": LAYERS["stem"]}, "first") == ()
    assert dense_layers(LAYERS, ["head", "body"]) == ("head", "body")


def test_nothing_is_dense_in_place_of_a_first_layer_that_is_none_of_them() -> None:
    assert dense_layers(LayerGeometries(LAYERS, first="stem"), "first") == ("stem",)
    assert dense_layers(LayerGeometries(LAYERS, first="circular"), "first") == ()
    assert dense_layers(LayerGeometries(LAYERS, first="circular"), ["body"]) == ("body",)


@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, math.nan])
def test_a_density_that_is_no_share_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 and at most 1"):
        active_counts(LAYERS, density)


def test_too_few_weights_are_refused_with_the_density_that_would_do() -> None:
    with pytest.raises(
        ValueError, match=r"leaves no weight of layer 'stem', which has 432: take at least 0\.00116, or"
    ):
        active_counts(LAYERS, 0.001)
    with pytest.raises(ValueError, match=r"3 weights for 4 layers, fewer than one each: take at least 5\.71e-05, or"):
        active_counts(LAYERS, 0.00005, "erk")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="dense names foot, tail, which are not layers: there are stem, body"):
        active_counts(LAYERS, 0.1, "uniform", {"tail", "stem", "foot"})
    with pytest.raises(ValueError, match="allocation='even' is neither"):
        active_counts(LAYERS, 0.1, "even")  # type: ignore[arg-type]


def test_replacement_falls_as_half_a_cosine_and_stops() -> None:
    assert replacement_rate(0.0, 0.3, 0.75) == pytest.approx(0.3)
    assert replacement_rate(0.375, 0.3, 0.75) == pytest.approx(0.15)
    assert replacement_rate(0.25, 0.3, 0.75) == pytest.approx(0.15 * (1 + math.cos(math.pi / 3)))
    assert replacement_rate(0.75, 0.3, 0.75) == replacement_rate(1.0, 0.3, 0.75) == 0.0
    assert replacement_rate(0.0, 0.3, 0.0) == 0.0


@pytest.mark.parametrize("initial", [1.0, 1.5, -0.1, math.nan])
def test_a_rate_that_would_empty_a_layer_is_refused(initial: float) -> None:
    with pytest.raises(ValueError, match="must be at least 0 and below 1: at 1 an update would empty the layers"):
        replacement_rate(0.1, initial, 0.75)


@pytest.mark.parametrize(
    ("count", "size", "rate", "expected"),
    [(100, 1000, 0.3, 30), (1, 100, 0.9, 0), (2, 100, 0.99, 1), (90, 100, 0.3, 10), (100, 100, 0.3, 0), (5, 9, 0.0, 0)],
)
def test_exchanged_weights_have_others_to_take_their_place(count: int, size: int, rate: float, expected: int) -> None:
    assert exchange_count(count, size, rate) == expected


@pytest.mark.parametrize(("weights", "density"), [(350, 0.5), (2000, 0.5), (4000, 0.25), (20_000, 0.05), (10**7, 0.05)])
def test_the_default_density_leaves_a_small_network_most_of_its_weights(weights: int, density: float) -> None:
    assert default_density(weights) == density


@pytest.mark.parametrize(("steps", "interval"), [(1, 1), (100, 1), (2000, 37), (5334, 100), (10**6, 100)])
def test_the_default_interval_makes_dozens_of_exchanges(steps: int, interval: int) -> None:
    assert default_interval(steps, 0.75) == interval
    assert default_interval(steps, 0.0) == 1
