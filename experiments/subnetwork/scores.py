"""What is lost where scores come from 5,000 rows, or from one random cotangent a row, in place of everything?

    python experiments/subnetwork/scores.py            # scores.csv: minutes on one core
    python experiments/subnetwork/scores.py --summary  # only the table of the README

LeNet-5 on MNIST (61,470 weights, 20,000 training rows), subnetworks of 1,000. Each score three ways: exactly; of 5,000
rows and all outputs; of 5,000 rows and one random cotangent each, as a network beyond `EXACT_UP_TO` has it, here at
three seeds of the draw. Overlap is the Jaccard index with the exact choice; then the NLL of 1,000 test images,
upright and rotated by 60 degrees, with the precision that 1,000 validation rows choose.
"""

import argparse
import csv
import os
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded

import torch
from torch.utils.data import TensorDataset

import caveat
from caveat import MAP, SubnetworkLaplace, Training, data, models
from caveat.engine.laplace import selection

COUNT, TRAIN, HELD, TEST = 1000, 20_000, 1000, 1000
SCORES = ("energy", "variance", "gradient", "obd")
WAYS = {"exact": (0,), "5,000 rows": (0,), "5,000 rows, one cotangent": (0, 1, 2)}
COLUMNS = ("score", "way", "seed", "overlap", "nll", "rotated_nll", "precision", "seconds")


def part(rows: TensorDataset, first: int, count: int) -> TensorDataset:
    return TensorDataset(*(tensor[first : first + count] for tensor in rows.tensors))


def measure(path: Path, data_dir: Path | None) -> None:
    """Every score, way and seed that the csv does not have yet."""
    whole = data.load("mnist", data_dir)
    held = part(whole.train, TRAIN, HELD)
    torch.manual_seed(0)
    prior = caveat.GaussianPrior(1.0)
    task = caveat.Task(models.lenet5(), part(whole.train, 0, TRAIN), caveat.Categorical(), prior, validation=held)
    point = caveat.fit(task, MAP(training=Training(epochs=5, learning_rate=2e-3)), seed=0, progress=False)
    upright = part(whole.test, 0, TEST)
    turned = data.rotate(upright.tensors[0], 60.0, whole.preprocessing["black"][0])
    tests = {"clean": upright, "rotated": TensorDataset(turned, upright.tensors[1])}
    done = {(row["score"], row["way"], row["seed"]) for row in read(path)}
    at_most = selection.EXACT_UP_TO
    for score in SCORES:
        chosen: set[int] = set()
        for way, seeds in WAYS.items():
            for seed in seeds:
                if (score, way, str(seed)) in done and way != "exact":
                    continue
                selection.EXACT_UP_TO = 0 if "cotangent" in way else 1e18  # as if the network were larger, or smaller
                method: Any = SubnetworkLaplace(COUNT, score, exact_scores=way == "exact")
                posterior = caveat.fit(task, method, start=point, seed=seed, progress=False)
                selection.EXACT_UP_TO = at_most
                mine = entries(posterior)
                chosen = mine if way == "exact" else chosen
                if (score, way, str(seed)) in done:
                    continue
                scores = caveat.evaluate(posterior, tests, seed=0, progress=False)
                info = posterior.info
                line = {"score": score, "way": way, "seed": seed, "seconds": f"{info.seconds:.3g}"}
                line |= {"overlap": f"{len(mine & chosen) / len(mine | chosen):.4f}"}
                line |= {"nll": f"{scores['clean']['nll'].mean:.5g}"}
                line |= {"rotated_nll": f"{scores['rotated']['nll'].mean:.5g}"}
                line |= {"precision": f"{float(info.diagnostics['prior_precision']):.3g}"}
                write(path, line)
                print(*line.values(), flush=True)


def entries(posterior: caveat.Posterior) -> set[int]:
    """The chosen weights, numbered through the network."""
    places, start = set(), 0
    for name, weight in posterior.state["params"].items():
        index = posterior.state["entries"].get(name)
        places |= set() if index is None else {start + int(i) for i in index}
        start += weight.numel()
    return places


def read(path: Path) -> list[dict[str, str]]:
    """What has been measured."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, line: dict[str, Any]) -> None:
    """One more line."""
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerow(line)


def summarise(rows: list[dict[str, str]]) -> None:
    """Means over the seeds of the draw."""
    print("| score | from | overlap | NLL | rotated by 60° |\n|---|---|---|---|---|")
    for score in SCORES:
        for way in WAYS:
            own = [row for row in rows if (row["score"], row["way"]) == (score, way)]
            cells = [f"{mean(float(row[name]) for row in own):.3f}" for name in ("overlap", "nll", "rotated_nll")]
            print(f"| {score} | {way} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_suffix(".csv"))
    given = parser.parse_args()
    if not given.summary:
        measure(given.csv, given.data_dir)
    summarise(read(given.csv))


if __name__ == "__main__":
    main()
