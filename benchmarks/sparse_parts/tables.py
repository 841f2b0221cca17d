"""Rows found so far, in a file, and the tables of README.md."""

import csv
import math
from typing import Any

from .sizes import MIB

KEYS = ("part", "case", "way", "compiled", "batch")  # what a row is of


class Table:
    """Rows found so far, written to a file whenever there are more of them."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self._by_key: dict[tuple[Any, ...], dict[str, Any]] = {}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """In the order in which they first came."""
        return [*self._by_key.values()]

    def keep(self, rows: list[dict[str, Any]]) -> None:
        """Put these rows in the place of older ones of the same measurement."""
        self._by_key |= {tuple(row[key] for key in KEYS): row for row in rows}
        if self.path:
            with open(self.path, "w", newline="") as file:  # noqa: PTH123
                writer = csv.DictWriter(file, list(dict.fromkeys(key for row in self.rows for key in row)))
                writer.writeheader()
                writer.writerows(self.rows)


def print_training(rows: list[dict[str, Any]]) -> None:
    """A line for each way to train."""
    if not (rows := [row for row in rows if row["part"] == "training"]):
        return
    print(
        "\n| network, batch | | step, ms | dense VI / this | exchanging step, ms | training bytes, MiB "
        "| accounted, MiB | exchanging adds, MiB | kernels' tables, MiB | peak, MB | ran sparse |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    sizes = ("training_bytes", "accounted_bytes", "update_bytes", "kernel_bytes")
    for row in rows:
        cells = [*first_cells(row), number(row["update_s"], 1e3), *(number(row[size], 1 / MIB) for size in sizes)]
        cells += [number(row["peak_bytes"], 1e-6), "" if math.isnan(row["ran_sparse"]) else f"{row['ran_sparse']:.0%}"]
        print("| " + " | ".join([*cells, row["failure"]] if row["failure"] else cells) + " |")


def print_inference(rows: list[dict[str, Any]]) -> None:
    """Of networks at the means, and of predictions."""
    for part, title in (("inference", "fastest dense / this"), ("prediction", "dense VI / this")):
        if not (own := [row for row in rows if row["part"] == part]):
            continue
        print(f"\n| {part}: network, batch | | ms | {title} | stored, MiB | kernels' tables, MiB |")
        print("|---|---|---|---|---|---|")
        for row in own:
            sizes = [number(row.get(key, math.nan), 1 / MIB) for key in ("stored_bytes", "kernel_bytes")]
            print("| " + " | ".join([*first_cells(row), *sizes]) + " |")


def print_targets(rows: list[dict[str, Any]]) -> None:
    """What was to be reached, and what was, on the ResNet."""
    rows = [row for row in rows if row["case"] == "resnet18" and (row["part"] == "training" or row["batch"] == 1)]
    found = {(row["part"], row["way"], row["compiled"]): row for row in rows}
    cuda = any(row["device"] != "cpu" for row in rows)
    wanted = [("training", "SSVI channel 90%", compiled, 2.0 if cuda else 3.0) for compiled in (False, True)]
    if not cuda:
        wanted += [("training", "SSVI 95%", False, 2.0), ("inference", "SSVI 95%", False, 2.5)]
        wanted += [("inference", "SSVI channel 95%", False, 3.0)]
        if ("training", "SSVI 95%", False) in found:
            size = found["training", "SSVI 95%", False]["training_bytes"] / MIB
            print(f"\ntraining bytes of SSVI 95%: {size:.1f} MiB, wanted under 20")
    for part, way, compiled, least in wanted:
        if (row := found.get((part, way, compiled))) is not None:
            what = f"{part} of {way}" + ", compiled" * compiled
            print(f"{what}: {row['times_faster']:.2f} times as fast as dense, wanted at least {least}")


def first_cells(row: dict[str, Any]) -> list[str]:
    """Those that all tables begin with: what was measured, its seconds, and how many times as fast that is."""
    what = [f"{row['case']}, {row['batch']}", row["way"] + ", compiled" * row["compiled"]]
    return [*what, number(row["step_s"], 1e3), f"**{row['times_faster']:.2f}**"]


def number(value: float, unit: float) -> str:
    """With three digits, or nothing where there is none."""
    if math.isnan(value) or value == 0:
        return ""
    value *= unit
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
