"""An experiment file in pieces: run its cells for so many seconds, keep their place, and write a csv that can be cited.

    python experiments/pieces.py experiments/subnetwork/resnet18_cifar10.toml --device cuda --seconds 520
    python experiments/pieces.py experiments/hmc/resnet20_fidelity.toml --cells '*/*/map/0' '*/*/sghmc/0' --device cuda

The same command goes on where the last one stopped, or was killed: `caveat bench` with a limit, for machines that are
lent by the minute and have no more than torch, numpy, safetensors and tqdm. It writes, beside the experiment file or
as --csv says, a row for every cell and condition (and none twice) as soon as the cell is finished:

    data, model, method, seed, shift, severity, the metrics, fit_seconds, peak_gb, rhat_predictions (the largest, of
    chains), chosen, device, torch, command, commit
"""

import argparse
import csv
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from caveat import bench
from caveat.bench.plan import Cell
from caveat.bench.results import long_table

METRICS = ("accuracy", "nll", "joint_nll", "ece", "marginal_calibration_error", "brier", "agreement", "total_variation")
METRICS += ("auroc_entropy", "auroc_epistemic", "rmse", "crps", "coverage_90")
WHO = ("data", "model", "method", "seed")
WHERE = ("shift", "severity")
ABOUT = ("fit_seconds", "peak_gb", "rhat_predictions", "chosen", "device", "torch", "command", "commit")
COLUMNS = (*WHO, *WHERE, *METRICS, *ABOUT)
TABLES_SECONDS = 20  # kept back for the tables and the csv
Line = dict[str, Any]


def commit() -> str:
    """Of the checkout that this file is in, or of CAVEAT_COMMIT where it is none."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("CAVEAT_COMMIT", found)


def read(path: Path) -> list[dict[str, str]]:
    """The rows that a csv has."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def who_of(cell: Cell) -> tuple[str, ...]:
    """Data, model, method and seed."""
    return cell.data.label, cell.model, cell.label, str(cell.seed)


def lines_of(experiment: bench.Experiment, out: Path, names: set[str], about: Line) -> list[Line]:
    """A row for each finished cell of the folder and each of its conditions."""
    lines: dict[tuple[str, ...], Line] = {}
    results = bench.read_results(experiment, out)
    cells: dict[tuple[str, ...], Line] = {}
    for result in results:
        rhat, cost = result.saved.info["diagnostics"].get("rhat_predictions"), result.saved.cost
        cells[who_of(result.cell)] = {
            "chosen": result.saved.chosen,
            "rhat_predictions": "" if rhat is None else f"{rhat:.4g}",
            "fit_seconds": f"{cost['fit_seconds']:.4g}" if cost.get("fit_seconds") else "",
            "peak_gb": f"{cost['peak_bytes'] / 1e9:.3g}" if cost.get("peak_bytes") else "",
        }
    for row in long_table(results):
        who = tuple(str(row[name]) for name in WHO)
        if row["role"] == "cost":
            continue
        key = (*who, *("" if row[name] is None else str(row[name]) for name in WHERE))
        line = lines.setdefault(key, dict(zip((*WHO, *WHERE), key, strict=True)) | about | cells[who])
        if row["metric"] in METRICS and row["value"] is not None:
            line[row["metric"]] = f"{row['value']:.5g}"
    return [line for key, line in lines.items() if key[2] in names]


def add(path: Path, lines: list[Line]) -> int:
    """The lines that the csv does not have yet are added to it; how many."""
    known = {tuple(row[name] for name in (*WHO, *WHERE)) for row in read(path)}
    new = [line for line in lines if tuple(line[name] for name in (*WHO, *WHERE)) not in known]
    if not new:
        return 0
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerows(new)
    return len(new)


def main(words: list[str] | None = None) -> int:
    """0 when every cell that was asked for is done, 1 when some failed, 2 when there are more for the next piece."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--cells", nargs="+", default=["*"], help="data/model/method/seed, as for `caveat bench`")
    parser.add_argument("--seconds", type=int, default=0, help="stop after so many; 0 goes on to the end")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, each in a process of its own")
    parser.add_argument("--out", type=Path, help="folder of the cells; results/<name of the file> unless given")
    parser.add_argument("--csv", type=Path, help="<name of the file>.csv beside it unless given")
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args(words)
    out, path = given.out or Path("results") / given.file.stem, given.csv or given.file.with_suffix(".csv")
    experiment = bench.read_experiment(given.file)
    wanted = bench.select(bench.cells_of(experiment), given.cells)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(max(1, given.seconds - TABLES_SECONDS) if given.seconds else 0)
    place = bench.Place(out, torch.device(given.device), given.data_dir)
    name = torch.cuda.get_device_name() if place.device.type == "cuda" else "cpu"
    command = " ".join([Path(__file__).name, given.file.name, *(f"--cells {' '.join(given.cells)}".split())])
    about = {"device": name, "torch": torch.__version__.partition("+")[0], "command": command, "commit": commit()}
    names, rows = {cell.label for cell in wanted}, 0
    failed: dict[str, str] = {}

    def say(text: str) -> None:
        """Keep what is finished: the machine may be gone before the tables are written."""
        nonlocal rows
        rows += add(path, lines_of(experiment, out, names, about))
        print(text, file=sys.stderr, flush=True)

    try:
        failed = bench.run_bench(given.file, place, jobs=given.jobs, only=given.cells, say=say).failed
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr, flush=True)
    signal.alarm(0)
    done = {who_of(result.cell) for result in bench.read_results(experiment, out)}
    left = [cell for cell in wanted if who_of(cell) not in done]
    rows += add(path, lines_of(experiment, out, names, about))
    for cell, error in failed.items():
        print(f"{cell} failed: {error}", file=sys.stderr)
    print(f"{len(wanted) - len(left)} of {len(wanted)} cells done, {rows} new rows in {path}", flush=True)
    return 1 if failed else 2 if left else 0


if __name__ == "__main__":
    sys.exit(main())
