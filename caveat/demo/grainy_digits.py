"""The main job: what a posterior is worth, and what it costs, on a problem where the truth is known.

Digits as a poor sensor sees them, 800 rows to train on, a network of 3,760 weights under a weak prior: small enough for
HMC, whose long run comes with the package, and hard enough that one trained network is too sure of itself. Each method
is fitted with three seeds; all that is said of the results is made from their tables.
"""

import csv
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from caveat import report
from caveat.bench import Place, read_experiment, read_results, run_bench
from caveat.demo.sentences import demo_sentences, demo_table
from caveat.files import new_folder

__all__ = ["EXPERIMENT", "run_demo"]

SEEDS = 3
EXPERIMENT = """\
title = "Caveat: what a posterior is worth"
data = ["grainy_digits"]
models = ["mlp"]                 # 64-50-10
prior_precision = 3.0            # weak: each weight is expected within about 0.6 of zero
validation = 0.2
seeds = {seeds}
ood = ["photographs"]
[reference]
grainy_digits = "grainy_digits"  # HMC, a long run that comes with the package
[shifts]
rotation = [15, 30, 45]
[map]
epochs = 100
[methods.deep_ensemble]
members = 4
training.epochs = 100
[methods.last_layer_laplace]
[methods.subnetwork_laplace]
weights = 0.2
[methods.sampled_laplace]
samples = 32
tuning.samples = 4
temperature = "validation"
[methods.ssvi]
density = 0.3
interval = 20
kl_weight = 1.0
std_learning_rate = 0.05
training = {{ epochs = 100, learning_rate = 0.01 }}
[methods.hmc]
chains = 2
length = 100
warmup = 50
"""


def run_demo(folder: Path, *, seed: int = 0, device: torch.device | str = "cpu", progress: bool = True) -> str:
    """Fit and score every method of the demo; write the results and the page; returns the table and what it says."""
    if folder.exists() and not _is_of_demo(folder):
        raise FileExistsError(f"{folder} exists, and the demo did not make it: choose another --out, or delete it")
    with _one_thread(), new_folder(folder, overwrite=folder.exists()) as place:
        _run(place, range(seed, seed + SEEDS), torch.device(device), progress)
        report.write(place)
        summary, comparisons = (_rows(place / f"{name}.csv") for name in ("summary", "comparisons"))
        said = demo_sentences(summary, comparisons, _confidence(place))
        sentences = "\n".join(textwrap.fill(sentence, 100) for sentence in said)
        return f"{demo_table(summary)}\n\n{sentences}"


def _run(place: Path, seeds: Sequence[int], device: torch.device, progress: bool) -> None:
    """Run the experiment."""
    with tempfile.TemporaryDirectory(prefix="caveat-") as scratch:
        file = Path(scratch) / "demo.toml"
        file.write_text(EXPERIMENT.format(seeds=list(seeds)), encoding="utf-8")
        done = run_bench(file, Place(place, device, progress=progress), say=lambda text: None)
    if done.failed:
        cell, error = next(iter(done.failed.items()))
        raise RuntimeError(f"{len(done.failed)} of {done.cells} fits failed, the first is {cell}: {error}")


def _confidence(place: Path) -> float:
    """The mean probability of the label that the trained network names, over seeds."""
    results = read_results(read_experiment(place / "experiment.toml"), place)
    points = [result.saved.rows("clean")["confidence"].mean() for result in results if result.cell.label == "map"]
    return float(sum(points) / len(points))


def _rows(file: Path) -> list[dict[str, Any]]:
    with file.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def _is_of_demo(folder: Path) -> bool:
    """Whether a folder is one of the demo, which may be replaced; a page alone may be that of other results."""
    file = folder / "experiment.toml"
    return (folder / "report.html").exists() and file.exists() and file.read_text().startswith(EXPERIMENT[:40])


@contextmanager
def _one_thread() -> Iterator[None]:
    """The networks are too small for more: threads would wait for one another longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
