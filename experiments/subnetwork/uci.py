"""Which weights, and how many: subnetworks on UCI regression, against MAP and Laplace over all weights.

    python experiments/subnetwork/uci.py                     # uci.csv; half an hour, goes on where it stopped
    python experiments/subnetwork/uci.py --summary           # only the tables of the README
    python experiments/subnetwork/uci.py --validation gap    # validation rows from a gap of their own, not at random

Networks with two hidden layers of 50 are trained once a split; every posterior is around that MAP, predicts in closed
form, and has its prior precision (and, where there is a posterior beside it, the noise) tuned on validation rows, which
are 15% of the training rows. MAP has its noise fitted on the same rows. The test rows of a gap split are the middle
third along one feature; no validation row is among them.
"""

import argparse
import csv
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

import caveat
from caveat import MAP, Laplace, LastLayerLaplace, SubnetworkLaplace, Training, data, models

EPOCHS = {"wine": 60, "kin8nm": 60, "protein": 40}
GAPS = {"wine": 11, "kin8nm": 8, "protein": 9}  # one a feature
STANDARD = 5  # of the published random splits
TRAIN_ROWS, TEST_ROWS = 8000, 4000  # at most; only protein has more, and a random part of them is taken
SHARE = 0.15  # of the training rows, for validation
SCORES = ("energy", "gradient", "variance", "swag", "obd", "magnitude", "random")
COUNTS = (50, 200, 600, 1800)
COLUMNS = ["data", "split", "method", "weights", "nll", "rmse", "coverage_90", "validation_nll", "multiple", "noise"]
COLUMNS += ["seconds"]
Row = dict[str, Any]


def splits() -> Iterator[tuple[str, str]]:
    """(data, split) for every cell, gaps first; a split is "gap 3" or "standard 0"."""
    for kind in ("gap", "standard"):
        for name, gaps in GAPS.items():
            for number in range(gaps if kind == "gap" else STANDARD):
                yield name, f"{kind} {number}"


def methods() -> Iterator[tuple[str, caveat.Method]]:
    """(name, method) for every posterior around the MAP."""
    yield "diagonal", Laplace(structure="diagonal", prediction="closed")
    yield "kronecker", Laplace(structure="kronecker", prediction="closed")
    yield "full", Laplace(structure="full", prediction="closed")
    yield "last layer", LastLayerLaplace(prediction="closed")
    for count in COUNTS:
        for score in SCORES:
            yield f"{score} {count}", SubnetworkLaplace(count, score, prediction="closed")


def rows(name: str, split: str) -> tuple[TensorDataset, TensorDataset]:
    """Training and test rows of a cell."""
    kind, number = split.split()
    found = data.load(f"uci/{name}", gap=kind == "gap", split=int(number))
    rng = torch.Generator().manual_seed(int(number))

    def part(whole: TensorDataset, most: int) -> TensorDataset:
        kept = torch.randperm(len(whole), generator=rng)[:most]
        return TensorDataset(*(tensor[kept] for tensor in whole.tensors))

    return part(found.train, TRAIN_ROWS), part(found.test, TEST_ROWS)


def make_task(name: str, split: str, validation: str) -> tuple[caveat.Task, TensorDataset]:
    """The task of a cell with its validation rows, and the test rows."""
    train, test = rows(name, split)
    x, _ = train.tensors
    number = int(split.split()[1])
    if validation == "gap":  # the middle of the training rows along the next feature
        held_out = data.gap_mask(x[:, (number + 1) % x.shape[1]], SHARE, seed=1000 + number)
    else:
        held_out = torch.zeros(len(x), dtype=torch.bool)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1000 + number))
        held_out[order[: round(SHARE * len(x))]] = True
    torch.manual_seed(number)
    network = models.mlp(x.shape[1], 1, hidden=(50, 50), activation=nn.ReLU)
    parts = [TensorDataset(*(tensor[mask] for tensor in train.tensors)) for mask in (~held_out, held_out)]
    likelihood, prior = caveat.Gaussian(standardise=True), caveat.GaussianPrior(1.0)
    return caveat.Task(network, parts[0], likelihood, prior, validation=parts[1]), test


def scores(posterior: caveat.Posterior, x: Tensor, y: Tensor) -> Row:
    """Mean negative log likelihood, root mean square error, and how often the 90% interval holds the target."""
    found = caveat.evaluate(posterior, {"test": TensorDataset(x, y)}, progress=False)["test"]
    return {name: f"{found[name].mean:.6g}" for name in ("nll", "rmse", "coverage_90")}


def run_cell(name: str, split: str, validation: str, missing: list[str], write: Any, bar: tqdm) -> None:
    """Train the MAP of a cell and fit what is missing."""
    task, test = make_task(name, split, validation)
    seed = int(split.split()[1])
    point = caveat.fit(task, MAP(training=Training(EPOCHS[name], batch_size=64)), seed=seed, progress=False)

    def record(method: str, posterior: caveat.Posterior, validation_nll: float) -> None:
        diagnostics = posterior.info.diagnostics
        chosen = diagnostics.get("subnetwork", {}).get("weights", "")
        row = {"data": name, "split": split, "method": method, "weights": chosen, **scores(posterior, *test.tensors)}
        row |= {"validation_nll": f"{validation_nll:.6g}", "seconds": f"{posterior.info.seconds:.3g}"}
        row["multiple"] = f"{diagnostics.get('prior_precision_multiple', 0):.3g}"
        row["noise"] = f"{float(posterior.state['hyper']['log_noise'].exp()):.4g}"
        write(row)
        bar.update()

    if "MAP" in missing:
        log_likelihood = task.log_likelihood(task.network, point.state["params"], point.state["hyper"], task.validation)
        record("MAP", point, -float(log_likelihood))
    for method, instance in methods():
        if method in missing:
            posterior = caveat.fit(task, instance, start=point, seed=seed, progress=False)
            record(method, posterior, posterior.info.diagnostics["validation_nll"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--validation", choices=("random", "gap"), default="random")
    parser.add_argument("--summary", action="store_true", help="fit nothing")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no new cell after this long")
    parser.add_argument("--csv", type=Path, help="uci.csv, or uci_gap_validation.csv, beside this script")
    arguments = parser.parse_args()
    file_name = "uci.csv" if arguments.validation == "random" else "uci_gap_validation.csv"
    path: Path = arguments.csv or Path(__file__).with_name(file_name)
    if not arguments.summary:
        measure(path, arguments.validation, arguments.minutes)
    summarise(read(path))


def measure(path: Path, validation: str, minutes: float) -> None:
    """Every cell that the csv does not have yet."""
    clock = time.monotonic()
    names = ["MAP", *(name for name, _ in methods())]
    cells = [cell for cell in splits() if validation == "random" or cell[1].startswith("gap")]
    done = {(row["data"], row["split"], row["method"]) for row in read(path)}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not done:
            writer.writeheader()

        def write(row: Row) -> None:
            writer.writerow(row)
            file.flush()

        with tqdm(total=len(cells) * len(names), initial=len(done), unit="fit", mininterval=5) as bar:
            for name, split in cells:
                missing = [method for method in names if (name, split, method) not in done]
                bar.set_description(f"{name} {split}")
                if missing and (time.monotonic() - clock) / 60 < minutes:
                    run_cell(name, split, validation, missing, write, bar)


def read(path: Path) -> list[Row]:
    """What has been measured."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def summarise(found: list[Row]) -> None:
    """Mean NLL by data set, and paired differences to MAP and to diagonal Laplace; these also over all data sets."""
    for kind in ("gap", "standard"):
        table: dict[str, list[str]] = {}
        heads: list[str] = []
        everywhere: dict[tuple[str, str], list[float]] = {}  # differences by (method, other)
        for name in GAPS:
            cells: dict[str, dict[str, Row]] = {}
            for row in found:
                if row["data"] == name and row["split"].startswith(kind):
                    cells.setdefault(row["split"], {})[row["method"]] = row
            whole = [own for own in cells.values() if len(own) == 1 + len(list(methods()))]
            if not whole:
                continue
            heads += [f"{name} ({len(whole)})", "less MAP", "less diagonal"]
            for method, values in by_method(whole).items():
                table.setdefault(method, []).append(f"{mean(values):.4f}")
                for other in ("MAP", "diagonal"):
                    differences = [v - float(own[other]["nll"]) for v, own in zip(values, whole, strict=True)]
                    table[method].append(with_error(differences))
                    everywhere.setdefault((method, other), []).extend(differences)
        heads += ["all less MAP", "all less diagonal"]
        if table:
            print(f"\nTest NLL, {kind} splits\n\n| | " + " | ".join(heads) + " |\n|---|" + "---|" * len(heads))
        for method, line in table.items():
            line += [with_error(everywhere[method, other]) for other in ("MAP", "diagonal")]
            print(f"| {method} | " + " | ".join(line) + " |")


def by_method(cells: list[dict[str, Row]]) -> dict[str, list[float]]:
    """Test NLL of each cell by method, with the subnetworks that the validation rows choose."""
    values = {method: [float(own[method]["nll"]) for own in cells] for method in cells[0]}

    def chosen(counts: tuple[int, ...], scores: tuple[str, ...] = SCORES) -> list[float]:
        names = [f"{score} {count}" for count in counts for score in scores]
        best = [min(names, key=lambda name, own=own: float(own[name]["validation_nll"])) for own in cells]
        return [float(own[name]["nll"]) for own, name in zip(cells, best, strict=True)]

    values |= {f"score chosen on validation, {count}": chosen((count,)) for count in COUNTS}
    return values | {"score and size chosen on validation": chosen(COUNTS)}


def with_error(differences: list[float]) -> str:
    """Mean and standard error over splits."""
    error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    return f"{mean(differences):+.4f} ±{error:.4f}"


if __name__ == "__main__":
    sys.exit(main())
