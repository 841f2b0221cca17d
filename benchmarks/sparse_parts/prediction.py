"""Predictions: `posterior.predict` with ten draws; stored are the bytes of the posterior's folder."""

import argparse
import functools
import math
import tempfile
from pathlib import Path
from typing import Any

from .cases import PEERS
from .fitted import Fitted
from .job import Job, measure
from .tables import Table
from .timing import timed


def compare_predictions(arguments: argparse.Namespace, fitted: Fitted, table: Table) -> None:
    """A row for every posterior and batch: ours in turns, bayesian-torch's in processes of their own."""
    for batch in fitted.batches:
        about = fitted.about | {"part": "prediction", "batch": batch}
        calls = {way: functools.partial(posterior.predict, fitted.x[:batch], draws=10)
                 for way, posterior in fitted.posteriors.items()}  # fmt: skip
        rows = timed(about, calls, arguments.rounds, fitted.clock)
        dense = rows[0]["step_s"]
        for row in rows:
            row |= {"times_faster": dense / row["step_s"], "stored_bytes": file_bytes(fitted.posteriors[row["way"]])}
        table.keep(rows)
        size = batch, arguments.device, arguments.threads, arguments.rounds, 1, arguments.processor_time
        for way in (way for way in arguments.way if way in PEERS):
            found = measure(Job(about["case"], way, *size, part="prediction"), arguments.peer, arguments.limit)
            row = about | {"way": way, "compiled": False, "step_s": math.nan} | found
            table.keep([row | {"times_faster": dense / row["step_s"]}])


def file_bytes(posterior: Any) -> int:
    """Of a posterior's folder."""
    with tempfile.TemporaryDirectory() as place:
        folder = posterior.save(Path(place) / "posterior")
        return sum(file.stat().st_size for file in folder.iterdir())
