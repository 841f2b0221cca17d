"""`caveat bench FILE`: from an experiment file to tables of results."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

from caveat.cli.verb import Common, Failure, Verb, is_first_rank, printable
from caveat.knobs import Count, check_knobs

__all__ = ["Bench"]


@dataclass(frozen=True)
class Bench(Verb):
    """Run an experiment file: every method on every data set, model and seed, clean and shifted, in tables.

    Done cells are skipped, a stopped one goes on from its checkpoint, a failed one is tried again. Exit code 1 where
    cells failed; the others are done all the same.
    """

    out: Path | None = None  # folder of the results; results/<name of the file> unless given
    jobs: Count = 1  # cells at a time, each in its own process; the threads are divided among them
    cells: tuple[str, ...] = ("*",)  # only those that match, and what they need: data/model/method/seed
    dry_run: bool = False  # only show the grid, with the time and memory it will take
    parquet: bool = False  # write the tables as parquet too; needs pyarrow
    data_dir: Path | None = None  # where named data sets are; else CAVEAT_DATA, else the user's cache

    def __post_init__(self) -> None:
        check_knobs(self)

    def stopped(self) -> str:
        """That finished cells are kept."""
        return "stopped; finished cells are kept, and the same command goes on from there"

    def run(self, common: Common, file: Path) -> None:
        """Run what is missing; say where methods are no better than a tempered MAP."""
        from caveat import bench

        out = self.out or Path("results") / file.stem
        place = bench.Place(out, common.place(), self.data_dir, progress=not common.quiet)
        if self.dry_run:
            experiment = bench.read_experiment(file)
            grid = bench.estimates(experiment, bench.select(bench.cells_of(experiment), self.cells), place)
            common.show({"grid": [dataclasses.asdict(e) for e in grid]}, bench.estimate_text(grid, self.jobs))
            return

        def say(text: str) -> None:
            if not common.quiet and is_first_rank():
                print(printable(text), file=sys.stderr, flush=True)

        done = bench.run_bench(file, place, jobs=self.jobs, parquet=self.parquet, only=self.cells, say=say)
        content = {
            "out": str(out),
            "cells": done.cells,
            "ran": done.ran,
            "failed": done.failed,
            "guards": [dataclasses.asdict(guard) for guard in done.guards],
        }
        text = f"{bench.guard_text(done.guards)}\n\nThe tables: {out}\nTheir page: caveat report --results {out}"
        if not (done.failed and common.json):  # then the failure tells all of it, in one object
            common.show(content, text)
        if done.failed:
            listed = "".join(f"\n  {cell}: {error}" for cell, error in done.failed.items())
            reason = f"{len(done.failed)} of {done.cells} cells failed; the same command tries them again:{listed}"
            raise Failure(reason, content)
