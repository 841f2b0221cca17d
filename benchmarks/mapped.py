"""A posterior of 30 draws of ResNet-18, 11 million weights each, served from its files: memory and time of a request.

    python benchmarks/mapped.py --out benchmarks/mapped.csv

Weights are made up (training changes nothing of what a prediction costs) and written as `posterior.save` writes them.
Another process loads the folder and answers requests of one row each. Tensors of more than 64 MiB stay in the file
until they are used: what they take is memory of the file, which the system takes back when others want it
(`RssFile`), and beside it the process has memory of its own (`RssAnon`).
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

import caveat
from caveat import models
from caveat.serve import Service

SHAPE, CLASSES, DRAWS = (3, 32, 32), 10, 30


def module() -> torch.nn.Module:
    return models.for_data("resnet18", SHAPE, CLASSES)


def write(folder: Path) -> None:
    """A posterior of made-up draws around untrained weights."""
    torch.manual_seed(0)
    data = torch.randn(8, *SHAPE), torch.arange(8)
    task = caveat.Task(module(), data, caveat.Categorical())
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=1, batch_size=8)), progress=False)
    point = posterior.state["params"]
    draws = {
        name: torch.stack([p + 0.01 * torch.randn_like(p) if p.is_floating_point() else p for _ in range(DRAWS)])
        for name, p in point.items()
    }
    draws |= {name: stack.abs() for name, stack in draws.items() if name.endswith("running_var")}
    method = caveat.DeepEnsemble(members=DRAWS)
    replace(posterior, method=method, state=posterior.state | {"params": draws}).save(folder)


def resident() -> dict[str, float]:
    """The process's memory in MB: its own, and of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile", "VmHWM")}


def serve(folder: Path, requests: int) -> None:
    """Load the folder and answer, in a process that has done nothing else."""
    torch.set_num_threads(1)
    network = module()
    before, began = resident(), time.perf_counter()
    posterior = caveat.load(folder, network)
    loading, loaded = time.perf_counter() - began, resident()
    service = Service.of(posterior)
    seconds = []
    for _ in range(requests + 1):
        cpu = time.process_time()
        service.answers(service.rows({"inputs": [service.example]}))
        seconds.append(time.process_time() - cpu)
    x = torch.zeros(1, *SHAPE)
    network.eval()
    plain = []
    for _ in range(10):
        cpu = time.process_time()
        with torch.no_grad():
            network(x)
        plain.append(time.process_time() - cpu)
    served = resident()
    result = {
        "weights": posterior.network.n_parameters,
        "draws": DRAWS,
        "file_mb": (folder / "state.safetensors").stat().st_size / 2**20,
        "load_s": loading,
        "own_mb_before": before["RssAnon"],
        "own_mb_loaded": loaded["RssAnon"],
        "own_mb_served": served["RssAnon"],
        "file_mb_served": served["RssFile"],
        "request_p50_ms": 1e3 * median(seconds[1:]),
        "request_most_ms": 1e3 * max(seconds[1:]),
        "plain_passes": median(seconds[1:]) / median(plain),
    }
    print(json.dumps({name: round(value, 1) for name, value in result.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--out", type=Path, help="a csv file")
    parser.add_argument("--folder", type=Path, help="a folder that this wrote before; a temporary one unless given")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.folder, options.requests)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary) / "posterior"
        if not folder.exists():
            write(folder)
        own = [sys.executable, __file__, "--serve", "--folder", str(folder), "--requests", str(options.requests)]
        printed = subprocess.run(own, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(printed, end="")
    if options.out is not None:
        result = json.loads(printed)
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, result, lineterminator="\n")
            writer.writeheader()
            writer.writerow(result)


if __name__ == "__main__":
    main()
