"""What chain methods share: random streams by name, who has which chain, and draws that live in files."""

import os
import threading
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.chains import parallel_chains as engine
from caveat.engine.chains.coordinates import Coordinates
from caveat.engine.chains.draw_store import DrawStore
from caveat.engine.chains.log_posterior import LogPosterior
from caveat.engine.chains.parallel_chains import ParallelChains, random_stream
from caveat.engine.distributed import Ranks
from caveat.engine.run import Run
from caveat.task import Task

STATS = {"lp": torch.float64, "diverging": torch.bool, "n_steps": torch.int64}


def make_task(prior: object | None = None) -> Task:
    torch.manual_seed(0)
    x, y = torch.randn(17, 3, dtype=torch.float64), torch.randint(2, (17,))
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return Task(module, (x, y), caveat.Categorical(), prior)  # type: ignore[arg-type]


def test_streams_are_named_by_what_they_are_for() -> None:
    def first(*name: object) -> list[float]:
        return torch.rand(4, generator=random_stream(*name), dtype=torch.float64).tolist()  # type: ignore[arg-type]

    names = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (0, 12), (0, "start", 1), (0, "length", 1), (0, "1", 2, 0), (2**40, 1)]
    values = [tuple(first(*name)) for name in names]
    assert len(set(values)) == len(names)
    assert first(0, 1, 2) == first(0, 1, 2) == list(values[0])
    together = torch.tensor([first(0, i, c) for i in range(200) for c in range(4)]).flatten()
    assert abs(float(together.mean()) - 0.5) < 4 * (12 * len(together)) ** -0.5


def test_parts_and_the_prior_sum_to_the_whole() -> None:
    task = make_task(caveat.LaplacePrior(0.5))
    coordinates = Coordinates.of(task.network, {})
    position = torch.randn(1, coordinates.size, dtype=torch.float64)
    found = []
    for parts in (1, 3):
        chains = ParallelChains(task, Run(), 1, coordinates, temperature=0.3, parts=parts)
        _, log_posterior = chains.log_posteriors[0]
        pairs = [chains.gradient(log_posterior, position, part) for part in range(parts)]
        found.append(
            [sum(value for value, _ in pairs), sum(g for _, g in pairs), *chains.densities(log_posterior, position)]
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(found[0][0], found[0][2])


@pytest.mark.parametrize("threads", [1, 2])
def test_every_lane_works_and_results_come_in_order(threads: int) -> None:
    task, before = make_task(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seen: set[int] = set()

        def work(log_posterior: LogPosterior, own: slice) -> tuple[slice, Tensor]:
            seen.add(threading.get_ident())
            position = torch.zeros(1, log_posterior.coordinates.size, dtype=torch.float64)
            return own, log_posterior.log_prior(position)

        with ParallelChains(task, Run(), 3, Coordinates.of(task.network, {})) as chains:
            found = chains.each(work)
        together = {1: [slice(0, 3)], 2: [slice(0, 2), slice(2, 3)]}  # as many log_posteriors as threads
        assert [own for own, _ in found] == together[threads]
        assert (threading.get_ident() in seen) == (threads == 1)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("prior", [caveat.GaussianPrior(2.0), caveat.LaplacePrior(0.5)])
def test_lanes_that_share_the_rows_of_a_chain_add_up(
    monkeypatch: pytest.MonkeyPatch, prior: caveat.priors.Prior
) -> None:
    monkeypatch.setattr("caveat.engine.chains.log_posterior._STACK_BYTES", 300)  # several pieces
    monkeypatch.setattr("caveat.engine.chains.parallel_chains.SMALL_PIECE", 0)
    task, before = make_task(prior), torch.get_num_threads()
    coordinates = Coordinates.of(task.network, {})
    position, found = torch.randn(1, coordinates.size, dtype=torch.float64), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with ParallelChains(task, Run(), 1, coordinates) as chains:
                assert len(chains.pieces.part()) > 3  # type: ignore[arg-type]
                assert [len(helpers) for helpers in chains._helpers.values()] == [threads - 1]
                found.append(
                    chains.each(lambda log_posterior, _, chains=chains: chains.gradient(log_posterior, position))[0]
                )  # type: ignore[misc]
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_an_error_in_one_lane_comes_out() -> None:
    def work(log_posterior: LogPosterior, own: slice) -> None:
        if own.stop == 2:
            raise ValueError("chain 1 is unwell")

    task = make_task()
    with (
        pytest.raises(ValueError, match="chain 1 is unwell"),
        ParallelChains(task, Run(), 2, Coordinates.of(task.network, {})) as chains,
    ):
        chains.each(work)


@pytest.mark.parametrize(("count", "mine", "rows"), [(4, [1, 3], 17), (3, [0, 1, 2], 8), (1, [0], 8)])
def test_ranks_share_chains_where_each_gets_as_many_and_rows_otherwise(count: int, mine: list[int], rows: int) -> None:
    task = make_task()
    chains = ParallelChains(task, Run(ranks=Ranks(1, 2)), count, Coordinates.of(task.network, {}))
    assert chains.mine == mine
    assert sum(len(y) for _, y in chains.pieces.everything()) == rows
    assert [own.stop for own, _ in chains.log_posteriors][-1] == len(mine)


def filled(store: DrawStore, draws: int) -> None:
    for draw in range(draws):
        weights = torch.arange(2 * store.coordinates.size, dtype=torch.float64).reshape(2, -1) + 1000 * draw
        stats = {"lp": torch.tensor([draw, -draw]).double(), "diverging": torch.tensor([draw == 1, False])}
        store.write(draw, weights, stats | {"n_steps": torch.tensor([draw, 7])})


@pytest.mark.parametrize("in_files", [True, False])
def test_draws_come_back_by_name_chain_and_draw(in_files: bool, tmp_path: Path) -> None:
    task = make_task()
    coordinates = Coordinates.of(task.network, {})
    store = DrawStore(Run(folder=tmp_path / "run" if in_files else None), torch.float64, coordinates, (2, 3), STATS)
    filled(store, 3)
    params, stats = store.params, store.stats
    assert {name: stack.shape[2:] for name, stack in params.items()} == {
        name: weight.shape for name, weight in task.network.params().items()
    }
    flat = torch.cat([params[name].flatten(2) for name in coordinates.places], 2)
    wanted = torch.arange(2 * coordinates.size).reshape(2, 1, -1) + 1000 * torch.arange(3).reshape(1, 3, 1)
    assert torch.equal(flat, wanted.double())
    assert stats["lp"].tolist() == [[0, 1, 2], [0, -1, -2]]
    assert stats["diverging"].tolist() == [[False, True, False], [False] * 3]
    assert stats["n_steps"].dtype == torch.int64
    first, *_, last = store.state({}).draws(task.network, 6, torch.Generator())
    assert torch.equal(first["0.weight"], params["0.weight"][0, 0])
    assert torch.equal(last["0.weight"], params["0.weight"][1, 2])


def test_files_hold_the_draws_and_are_taken_up_again(tmp_path: Path) -> None:
    coordinates = Coordinates.of(make_task().network, {})
    run = Run(folder=tmp_path / "run")
    filled(DrawStore(run, torch.float64, coordinates, (2, 3), STATS), 2)
    name, (_, shape) = next(iter(coordinates.places.items()))
    array = numpy.load(tmp_path / "run" / "params-0.npy", mmap_mode="r")  # another reader sees them at once
    assert array.shape == (2, 3, *shape)
    assert array[0, 1].min() == 1000
    again = DrawStore(run, torch.float64, coordinates, (2, 3), STATS)
    assert torch.equal(again.params[name][:, :2], torch.from_numpy(array[:, :2].copy()))
    assert not any(path.suffix == ".new" for path in (tmp_path / "run").iterdir())


def test_a_file_that_a_kill_left_unfinished_is_made_anew(tmp_path: Path) -> None:
    run = Run(folder=tmp_path / "run")
    (tmp_path / "run" / "params-0.new").write_bytes(os.urandom(100))
    store = DrawStore(run, torch.float64, Coordinates.of(make_task().network, {}), (2, 3), STATS)
    filled(store, 3)
    assert float(store.params["0.weight"][1, 2, 0, 0]) == 2000 + store.coordinates.size


def test_draws_that_do_not_fit_into_memory_are_refused_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caveat.engine.cost.free_bytes", lambda device: 1000)
    coordinates = Coordinates.of(make_task().network, {})
    with pytest.raises(MemoryError, match=r"keeping 2 x 30 draws of 26 numbers in memory needs 12\.5 kB.*folder="):
        DrawStore(Run(), torch.float64, coordinates, (2, 30), STATS)
    DrawStore(Run(folder=tmp_path / "run"), torch.float64, coordinates, (2, 30), STATS)


def test_what_everyone_has_is_ones_own_when_alone() -> None:
    task = make_task()
    chains = ParallelChains(task, Run(), 2, Coordinates.of(task.network, {}))
    own = torch.randn(2, 3)
    assert chains.everyones(own) is own
    assert chains.agreed(True)
    assert not chains.agreed(False)
    assert engine.Ranks() == chains.ranks
