"""How fast the Laplace methods are, and what memory they take, against laplace-torch 0.3 (Daxberger et al., 2021).

    python benchmarks/laplace.py                                      # our side alone
    python benchmarks/laplace.py --peer laplace-torch/bin/python      # both: about an hour on two CPU cores
    python benchmarks/laplace.py --peer ... --case lenet5 --method subnetwork
    python benchmarks/laplace.py --peer ... --case lenet5 --backend AsdlGGN --batch 64    # without a search
    python benchmarks/laplace.py --peer ... --device cuda             # on a GPU
    OMP_NUM_THREADS=1 python benchmarks/laplace.py --processor-time   # on a machine that others use as well

laplace-torch lives in an environment of its own. Its requirements would replace torch, so they are named one by one
(torchvision, which it also asks for, is not needed):

    python3.11 -m venv laplace-torch
    laplace-torch/bin/pip install torch==2.13.0 numpy scipy tqdm opt_einsum einops jaxtyping packaging \
        lightning-utilities safetensors
    laplace-torch/bin/pip install --no-deps laplace-torch==0.3 asdfghjkl==0.1a4 backpack-for-pytorch==1.7.1 \
        curvlinops-for-pytorch==3.0.1 einconv==0.1.0 linear_operator==0.6.1 unfoldNd==0.2.3 torchmetrics==1.9.0

Both sides get the same module, weights, rows, prior precision (1) and likelihood, and predict by the probit formula
from linearised outputs. Every measurement is a process of its own, after a fit of four rows that is not timed; memory
is that process's peak above what it held with network and data loaded. On a GPU, where torch's allocator counts, one
process a side measures everything, each time after a fit of an eighth of the rows; laplace-torch's rows are there
already, ours come from the CPU. laplace-torch runs with whichever of its backends, and of the batch sizes of the case,
is fastest, which is found first unless one of each is named; Caveat chooses its own batches. Repeats alternate between
the two, the table gives medians. Labels are the network's own choices, its last layer scaled so that it is fairly sure
of them.
"""

import argparse
import csv
import dataclasses
import gc
import importlib
import json
import math
import os
import resource
import select
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from caveat import models
from caveat.engine.cost import peak_bytes, reset_peak

SUBNETWORK = 1000  # weights, drawn at random from the whole network
FEW = 4  # rows of the fit that is not timed, and of the comparison of what the two sides say
METHODS = ("subnetwork", "last layer", "diagonal", "kronecker")
BACKENDS = ("CurvlinopsGGN", "BackPackGGN", "AsdlGGN")  # of laplace-torch; the first is its default


@dataclass(frozen=True)
class Size:
    """How many rows, and the batch sizes that laplace-torch may choose from."""

    rows: int
    batches: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A network, the shape of a row, and the sizes for either kind of device."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    cpu: Size
    cuda: Size

    def size(self, device: str) -> Size:
        """For this device."""
        return self.cuda if device.startswith("cuda") else self.cpu


CASES = {
    "mlp": Case(
        lambda: models.mlp(784, 10, hidden=(100, 100)),
        (784,),
        Size(2048, (4, 16, 64, 256)),
        Size(8192, (64, 256, 1024)),
    ),
    "lenet5": Case(
        lambda: models.lenet5(),
        (1, 28, 28),
        Size(1024, (4, 16, 64, 256)),
        Size(8192, (64, 256, 1024)),
    ),
    "resnet18 width 16": Case(
        lambda: models.resnet18(width=16),
        (3, 32, 32),
        Size(128, (1, 4, 16, 64)),
        Size(2048, (16, 64, 256)),
    ),
    "resnet18 width 64": Case(
        lambda: models.resnet18(),
        (3, 32, 32),
        Size(256, (1, 4, 16)),
        Size(1024, (4, 16, 64)),
    ),
}


@dataclass(frozen=True)
class Job:
    """One measurement, as a process is asked for it. Backend and batch sizes are laplace-torch's."""

    case: str
    method: str
    side: str  # "peer" or "ours"
    folder: str  # of the weights and data
    device: str
    memory: int  # bytes, on a CPU; more is "out of memory"
    rows: int
    processor_time: bool
    limit: float  # seconds that it may take
    backend: str = ""
    fit_batch: int = 0
    predict_batch: int = 0


@dataclass
class Measured:
    """Seconds a row, and bytes: at the start and the peak above it. What did not come is infinite."""

    start_bytes: float = math.inf
    fit_s: float = math.inf
    fit_bytes: float = math.inf
    predict_s: float = math.inf
    predict_bytes: float = math.inf
    failure: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="python of an environment with laplace-torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--case", choices=CASES, action="append", help="only this network; may be repeated")
    parser.add_argument("--method", choices=METHODS, action="append", help="only this method; may be repeated")
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="laplace-torch's; may be repeated")
    parser.add_argument("--batch", type=int, action="append", help="laplace-torch's rows at once; may be repeated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that one measurement may take")
    parser.add_argument("--memory", type=float, default=12.0, help="GB that one measurement may take on a CPU")
    parser.add_argument("--processor-time", action="store_true", help="count the process's own seconds: see above")
    parser.add_argument("--csv", help="also write the table to this file")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        return serve()
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, load {load:.1f}, {arguments.device}")
    table: list[dict[str, Any]] = []
    workers = {"ours": Worker(sys.executable)}
    if arguments.peer:
        workers["peer"] = Worker(arguments.peer)
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.case or CASES:
            size = CASES[case].size(arguments.device)
            write_inputs(CASES[case], size.rows, Path(folder))
            for method in arguments.method or METHODS:
                limits = int(arguments.memory * 1e9), size.rows, arguments.processor_time, arguments.limit
                job = Job(case, method, "ours", folder, arguments.device, *limits)
                choice = arguments.backend or BACKENDS, arguments.batch or size.batches
                table.append(compare(job, workers, arguments.repeats, *choice))
                if arguments.csv:  # after each row: another may take all the time there is
                    write(table, Path(arguments.csv))
    for worker in workers.values():
        worker.close()
    print_markdown(table)


def write(table: list[dict[str, Any]], path: Path) -> None:
    """The table so far."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, table[0].keys())
        writer.writeheader()
        writer.writerows(table)


def write_inputs(case: Case, rows: int, folder: Path) -> None:
    """Weights, rows and one random score a weight, for both sides to read."""
    torch.manual_seed(0)
    model = case.build().eval()
    x = torch.randn(rows, *case.shape)
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    with torch.no_grad():
        outputs = model(x)
        scale = 4 / outputs.std(dim=0).mean()
        head.bias.sub_(outputs.mean(dim=0)).mul_(scale)
        head.weight.mul_(scale)
        y = model(x).argmax(dim=1)
    score = torch.rand(sum(parameter.numel() for parameter in model.parameters()))
    save_file(model.state_dict(), folder / "weights.safetensors")
    save_file({"x": x, "y": y, "score": score}, folder / "data.safetensors")


def compare(
    ours: Job, workers: "dict[str, Worker]", repeats: int, backends: Sequence[str], batches: Sequence[int]
) -> dict[str, Any]:
    """A row of the table: medians of repeats that alternate between the two sides."""
    jobs = {"peer": best_of_peer(ours, workers["peer"], backends, batches)} if "peer" in workers else {}
    jobs["ours"] = ours
    for old in Path(ours.folder).glob("found-*"):
        old.unlink()
    measured: dict[str, list[Measured]] = {side: [] for side in jobs}
    for _ in range(repeats):
        for side, job in jobs.items():
            measured[side].append(measure(job, workers[side]))
    row: dict[str, Any] = {"case": ours.case, "method": ours.method, "rows": ours.rows}
    row |= {key: getattr(jobs.get("peer", ours), key) for key in ("backend", "fit_batch", "predict_batch")}
    for side in ("peer", "ours"):
        results = measured.get(side, [Measured()])
        for key in ("start_bytes", "fit_s", "fit_bytes", "predict_s", "predict_bytes"):
            row[f"{side}_{key}"] = statistics.median(getattr(result, key) for result in results)
        row[f"{side}_failure"] = next((result.failure for result in results if result.failure), "")
    return row | difference(Path(ours.folder))


def best_of_peer(ours: Job, worker: "Worker", backends: Sequence[str], batches: Sequence[int]) -> Job:
    """laplace-torch's fastest backend at fit and prediction together, each at its fastest batch size, on fewer rows."""
    found: list[tuple[float, Job]] = []
    for backend in backends:
        tried: dict[int, Measured] = {}
        for batch in batches:
            job = dataclasses.replace(ours, side="peer", backend=backend, fit_batch=batch, predict_batch=batch)
            if len(backends) == len(batches) == 1:
                return job
            tried[batch] = measure(dataclasses.replace(job, rows=max(batch, job.rows // 32)), worker)
            fit_batch = min(tried, key=lambda b: tried[b].fit_s)
            predict_batch = min(tried, key=lambda b: tried[b].predict_s)
            fit_s, predict_s = tried[fit_batch].fit_s, tried[predict_batch].predict_s
            worse = tried[batch].fit_s > 1.5 * fit_s and tried[batch].predict_s > 1.5 * predict_s
            if worse or "Error" in tried[batch].failure:  # larger batches will not mend it
                break
        seconds = min(fit_s, ours.limit) + min(predict_s, ours.limit)
        found.append((seconds, dataclasses.replace(job, fit_batch=fit_batch, predict_batch=predict_batch)))
    return min(found, key=lambda pair: pair[0])[1]


def measure(job: Job, worker: "Worker") -> Measured:
    """Have a job done, and print what came of it."""
    result = Measured()
    for line in worker.ask(job).splitlines():
        if line.startswith('{"'):  # a library may print as well
            result = dataclasses.replace(result, **json.loads(line))
    how = f"{job.backend} {job.fit_batch}, {job.predict_batch}" if job.side == "peer" else ""
    print(
        f"{job.case:<18} {job.method:<10} {job.side} {how:<22} fit {result.fit_s * 1e3:8.3f} ms a row, "
        f"{result.fit_bytes / 1e6:5.0f} MB   predict {result.predict_s * 1e3:8.3f} ms a row, "
        f"{result.predict_bytes / 1e6:5.0f} MB   {result.failure}",
        flush=True,
    )
    return result


class Worker:
    """A process that does jobs: on a CPU a new one for each, whose memory is the job's; on a GPU one for all.

    It finds this repository's networks through PYTHONPATH; -P keeps this script's folder off the path, where the script
    would hide the package `laplace`.
    """

    def __init__(self, python: str):
        self.command = [python, "-P", __file__, "--work"]
        own = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, own))}
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, job: Job) -> str:
        """Everything that the process said about a job."""
        if self.process is None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self.process = subprocess.Popen(self.command, env=self.environment, **pipes)
        process, said, end = self.process, b"", time.monotonic() + job.limit
        process.stdin.write(json.dumps(dataclasses.asdict(job)).encode() + b"\n")
        process.stdin.flush()
        while not said.endswith(b"done\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                said += b'\n{"failure": "over the time limit"}\n'
                break
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:  # the process is gone: killed, most likely for its memory
                said += b'\n{"failure": "out of memory"}\n'
                break
            said += piece
        if not job.device.startswith("cuda") or not said.endswith(b"done\n"):
            self.close()
        return said.decode()

    def close(self) -> None:
        """End the process, where there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def serve() -> None:
    """In the worker: jobs from standard input, lines of json on standard output, "done" after each."""
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        try:
            work(Job(**json.loads(line)))
        except Exception as error:  # whatever a library raises: the next job may fare better
            words = f"{type(error).__name__}: {error}"
            memory = any(sign in words for sign in ("allocate memory", "MemoryError", "OutOfMemory"))
            print(json.dumps({"failure": "out of memory" if memory else words.strip().splitlines()[-1]}))
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # the other side's process may need the memory
        print("done", flush=True)


def work(job: Job) -> None:
    """Read, warm up, time the fit, time the prediction; a line of json for each."""
    device, folder = torch.device(job.device), Path(job.folder)
    model = CASES[job.case].build()
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    model = model.to(device).eval()
    if job.method == "kronecker":  # laplace-torch has no Kronecker factors for BatchNorm: frozen on both sides
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.requires_grad_(False)
    data = load_file(folder / "data.safetensors")
    x, y = data["x"][: job.rows], data["y"][: job.rows]
    if job.side == "peer":
        x, y = x.to(device), y.to(device)
    side = (Peer if job.side == "peer" else Ours)(job, model, data["score"])
    start, warm = resident(device), FEW
    if device.type == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (job.memory, job.memory))
    else:
        warm = max(job.rows // 8, job.fit_batch)  # kernels are loaded when they are first used
    side.predict(side.fit(x[:warm], y[:warm]), x[: 1 if device.type == "cpu" else warm])
    reset_peak(device)
    seconds, posterior = timed(lambda: side.fit(x, y), job)
    measured = {"start_bytes": start, "fit_s": seconds / len(x), "fit_bytes": peak_bytes(device) - start}
    print(json.dumps(measured), flush=True)
    seconds, _ = timed(lambda: side.predict(posterior, x), job)
    print(json.dumps({"predict_s": seconds / len(x), "predict_bytes": peak_bytes(device) - start}), flush=True)
    found = {name: value.cpu().contiguous() for name, value in side.found(posterior, x[:FEW]).items()}
    save_file(found, folder / f"found-{job.side}.safetensors")


class Peer:
    """laplace-torch."""

    def __init__(self, job: Job, model: nn.Module, score: Tensor):
        self.job, self.model = job, model
        self.laplace = importlib.import_module("laplace").Laplace
        weights, structure = {
            "subnetwork": ("subnetwork", "full"),
            "last layer": ("last_layer", "full"),
            "diagonal": ("all", "diag"),
            "kronecker": ("all", "kron"),
        }[job.method]
        self.options: dict[str, Any] = {"subset_of_weights": weights, "hessian_structure": structure}
        self.options["backend"] = getattr(importlib.import_module("laplace.curvature"), job.backend)
        if weights == "subnetwork":
            self.options["subnetwork_indices"] = score.topk(SUBNETWORK).indices.sort().values

    def fit(self, x: Tensor, y: Tensor) -> Any:  # noqa: D102
        posterior = self.laplace(self.model, "classification", prior_precision=1.0, **self.options)
        whole = BatchSampler(SequentialSampler(x), self.job.fit_batch, drop_last=False)
        posterior.fit(DataLoader(TensorDataset(x, y), batch_size=None, sampler=whole))  # not row by row: that is slow
        return posterior

    def predict(self, posterior: Any, x: Tensor) -> Tensor:  # noqa: D102
        return torch.cat([posterior(rows) for rows in x.split(self.job.predict_batch)])

    def found(self, posterior: Any, x: Tensor) -> dict[str, Tensor]:
        """What the other side should find as well."""
        pieces = [posterior._glm_predictive_distribution(row) for row in x.split(1)]
        found = {"covariance": torch.cat([covariance for _, covariance in pieces])}
        if self.job.method in ("subnetwork", "last layer"):
            found["precision"] = posterior.posterior_precision
        return found


class Ours:
    """Caveat, asked for what laplace-torch computes: no rows or weights left out, and the probit formula."""

    def __init__(self, job: Job, model: nn.Module, score: Tensor):
        self.caveat, self.model = importlib.import_module("caveat"), model
        same = {"precision": "given", "prediction": "closed", "skip": 0.0}
        if job.method == "subnetwork":
            self.method = self.caveat.SubnetworkLaplace(weights=SUBNETWORK, score=score, keep_dead=True, **same)
        elif job.method == "last layer":
            self.method = self.caveat.LastLayerLaplace(**same)
        else:
            self.method = self.caveat.Laplace(structure=job.method, **same)

    def fit(self, x: Tensor, y: Tensor) -> Any:  # noqa: D102
        task = self.caveat.Task(self.model, (x, y), self.caveat.Categorical(), self.caveat.GaussianPrior(1.0))
        return self.caveat.fit(task, self.method, progress=False)

    def predict(self, posterior: Any, x: Tensor) -> Any:  # noqa: D102
        return posterior.predict(x)

    def found(self, posterior: Any, x: Tensor) -> dict[str, Tensor]:
        """What the other side should find as well."""
        found = {"covariance": posterior.moments(x)[1]}
        gaussian = posterior.state["gaussian"]
        if set(gaussian) == {"cholesky", "prior"}:
            found["precision"] = gaussian["cholesky"] @ gaussian["cholesky"].T
        return found


def difference(folder: Path) -> dict[str, float]:
    """Largest difference between the sides over the largest entry: of posterior precision and output covariance."""
    files = [folder / f"found-{side}.safetensors" for side in ("peer", "ours")]
    found = [load_file(file) if file.exists() else {} for file in files]
    differences = {}
    for name in ("precision", "covariance"):
        theirs, ours = (tensors.get(name, torch.tensor(math.nan)).double() for tensors in found)
        differences[f"{name}_difference"] = float((theirs - ours).abs().max() / theirs.abs().max())
    return differences


def timed(function: Callable[[], Any], job: Job) -> tuple[float, Any]:
    clock = time.process_time if job.processor_time else time.perf_counter
    start = clock()
    result = function()
    if job.device.startswith("cuda"):
        torch.cuda.synchronize()
    return clock() - start, result


def resident(device: torch.device) -> int:
    """Bytes held now: by torch's allocator on a GPU, by this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def print_markdown(table: list[dict[str, Any]]) -> None:
    """The table of README.md; a cell is laplace-torch / Caveat = ratio."""
    print(
        "\n| network, rows | method | laplace-torch with | fit, ms a row | predict, ms a row | memory, MB | differ by |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in table:
        cells = [f"{row['case']}, {row['rows']}", row["method"]]
        cells.append(f"{row['backend']}, batch {row['fit_batch']}, {row['predict_batch']}" if row["backend"] else "")
        cells += [cell(row, key, unit) for key, unit in (("fit_s", 1e3), ("predict_s", 1e3), ("predict_bytes", 1e-6))]
        differences = [row[f"{name}_difference"] for name in ("precision", "covariance")]
        cells.append(" ".join(f"{value:.0e}" for value in differences if not math.isnan(value)))
        print("| " + " | ".join(cells) + " |")


def cell(row: dict[str, Any], key: str, unit: float) -> str:
    values = {side: row[f"{side}_{key}"] * unit for side in ("peer", "ours")}
    shown = [f"{v:.3g}" if math.isfinite(v) else row[f"{side}_failure"] or "-" for side, v in values.items()]
    both = all(map(math.isfinite, values.values()))
    return " / ".join(shown) + (f" = **{values['peer'] / values['ours']:.1f}**" if both else "")


if __name__ == "__main__":
    main()
