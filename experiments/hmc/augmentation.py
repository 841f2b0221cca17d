"""Is a cold posterior an artefact of augmentation? HMC on digits, with and without moved copies of every image.

    python experiments/hmc/augmentation.py            # augmentation.csv: ten minutes on one core
    python experiments/hmc/augmentation.py --summary  # only the table of the README

An image comes as it is and moved by a pixel in four directions, K = 5 copies, and its log likelihood is their mean:

    log p(w) + sum_i 1/K sum_k log p(y_i | f(x_ik, w))

what training with random copies follows. Full-batch HMC draws from it: with all copies as rows, K times the prior's
precision and temperature K, the log density over the temperature is the line above. A colder posterior has K T.
"""

import argparse
import csv
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded

import torch
from problems import PRECISIONS, network, problem
from tables import table
from torch import Tensor
from torch.utils.data import TensorDataset

import caveat
from caveat import HMC
from caveat.data import DataSet

TEMPERATURES = (0.1, 0.3, 1.0)
MOVES = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))  # pixels down and right
METHOD = HMC(chains=2, length=40, warmup=30)


def moved(x: Tensor, down: int, right: int, black: float) -> Tensor:
    """Images [N, C, H, W] moved by so many pixels, what comes in being black."""
    height, width = x.shape[-2:]
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1), value=black)
    return padded[..., 1 - down : 1 - down + height, 1 - right : 1 - right + width]


def task(rows: DataSet, moves: tuple[tuple[int, int], ...]) -> caveat.Task:
    """All copies as rows, and the prior as often."""
    x, y = rows.train.tensors
    copies = torch.cat([moved(x, *move, rows.preprocessing["black"][0]) for move in moves])
    prior = caveat.GaussianPrior(len(moves) * PRECISIONS[rows.name])
    return caveat.Task(network(rows.name), TensorDataset(copies, y.repeat(len(moves))), caveat.Categorical(), prior)


def measure(path: Path) -> None:
    """Every setting that the csv does not have yet."""
    rows = problem("digits")
    tests = {"clean": rows.test}
    x, y = rows.test.tensors
    black = rows.preprocessing["black"][0]
    tests["moved"] = TensorDataset(torch.cat([moved(x, *m, black) for m in MOVES[1:]]), y.repeat(4))
    done = {(row["copies"], row["temperature"]) for row in read(path)}
    for moves in (MOVES[:1], MOVES):
        for temperature in TEMPERATURES:
            if (str(len(moves)), str(temperature)) in done:
                continue
            method = HMC(METHOD.chains, METHOD.length, METHOD.warmup, temperature=len(moves) * temperature)
            posterior = caveat.fit(task(rows, moves), method, seed=0, progress=False)
            scores = caveat.evaluate(posterior, tests, seed=0, progress=False)
            row = {"copies": len(moves), "temperature": temperature, "seconds": f"{posterior.info.seconds:.3g}"}
            row["acceptance"] = f"{posterior.info.diagnostics['acceptance']:.3f}"
            for name in tests:
                row |= {f"{name} {m}": f"{scores[name][m].mean:.5g}" for m in ("accuracy", "nll", "ece")}
            fresh = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.DictWriter(file, list(row))
                if fresh:
                    writer.writeheader()
                writer.writerow(row)
            print(row, flush=True)


def read(path: Path) -> list[dict[str, str]]:
    """What has been measured."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("augmentation.csv"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.summary:
        measure(arguments.csv)
    metrics = ("accuracy", "nll", "ece")
    heads = [f"{name} {metric}" for name in ("clean", "moved") for metric in metrics]
    rows = [
        (row["copies"], [row["temperature"], *(f"{float(row[head]):.3f}" for head in heads)])
        for row in read(arguments.csv)
    ]
    table(["copies", "temperature", *heads], rows)


if __name__ == "__main__":
    main()
