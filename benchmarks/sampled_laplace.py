"""How fast and how large sampled Laplace is: products with a network's Jacobian, solves with them, whole fits.

    python benchmarks/sampled_laplace.py                       # seconds a pass, on a CPU
    python benchmarks/sampled_laplace.py --device cuda         # on a GPU, in float16 and in TF32
    CAVEAT_DATA=DATA python benchmarks/sampled_laplace.py --solve --peer curvlinops/bin/python
    python benchmarks/sampled_laplace.py --memory              # peak memory of a fit, of n rows and of four times n

A pass is M z = sum_i J_i^T B_i J_i z over all rows, for K vectors z: the forward pass of a row, F operations, shared by
all, and four times F for each vector. The floor is that many operations at the rate of a large product of matrices of
the same type, measured in the same run. `naive` is torch.vmap over torch.func.jvp, then over torch.func.vjp, in batches
of 16 rows on a CPU and of 250 on a GPU. Of large data a part is timed, and the table gives the time for all rows in
proportion. Times are the least of three.

`--solve` finds K samples of a posterior, H z = b, to a residual of 1e-2: LeNet-small, trained on MNIST (on random
images where there is none, which the first line says), under a prior precision of 10. Everyone gets the same weights,
rows and b, and a process of its own that solves once. Ours are conjugate gradients after a sketch of rank 64, whose
time counts, or without one; every residual is below 1e-2 in two norms, and z^T M z rests
(`caveat/engine/linear_model/solvers.py`).
curvlinops 3.0.1 inverts its generalised Gauss-Newton operator plus a multiple of the identity, by conjugate gradients
for all K columns at once which stop when the mean residual is below 1e-2; it gets the fastest of three batch sizes,
found first. `benchmarks/laplace.py` says how to make an environment with it. `exact` is Laplace with the matrix of all
weights, no rows left out: the fit and K draws. Residual and error of all are computed here: the largest |b - H z| / |b|
and the mean of |z - z*| / |z*| in the norm of H, with z* by the exact posterior's Cholesky factor. A floor is that of
the products that a solver took.

`--memory` is the peak of a fit of 8 samples in a process of its own, above what that held with network and rows loaded
and after a fit of four rows; beside it, what K vectors of weights take, and two arrays that are not there.
"""

import argparse
import contextlib
import csv
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from laplace import resident, write_inputs
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import caveat
from caveat import data, models
from caveat.engine.cost import forward_flops, peak_bytes, reset_peak
from caveat.engine.linear_model import ConjugateGradients, LinearModel, LinearSystem, SampleRandomness, Tuning, inner
from caveat.engine.linearised.jacobian_features import NetworkBlock, NetworkFeatures
from caveat.network import Network
from caveat.rows import Rows

VECTORS = (1, 8, 64)
PRECISION, RESIDUAL = 10.0, 1e-2  # of the solves


def lenet_small() -> nn.Module:
    """14,597 weights for 28 x 28 grey images."""
    convolutions = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 45), nn.ReLU(), nn.Linear(45, 10))


@dataclass(frozen=True)
class Case:
    """A network, its rows, and how many of them are timed."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int
    timed: dict[str, int]  # by device
    fitted: int  # rows of the smaller fit whose memory is measured


CASES = {
    "lenet small": Case(lenet_small, (1, 28, 28), 10_000, {"cpu": 2048, "cuda": 8192}, 2500),
    "resnet18 width 16": Case(lambda: models.resnet18(width=16), (3, 32, 32), 50_000, {"cpu": 64, "cuda": 2048}, 64),
    "resnet18": Case(lambda: models.resnet18(), (3, 32, 32), 50_000, {"cpu": 16, "cuda": 2048}, 16),
}


class Softmax:
    """B = diag(p) - p p^T of each row's classes, as the factor diag(sqrt p) - p sqrt(p)^T."""

    width = 10

    def factor(self, block: NetworkBlock) -> Tensor:
        """Of a block's rows."""
        p = block.outputs.softmax(-1)
        return p.sqrt().diag_embed() - p.unsqueeze(2) * p.sqrt().unsqueeze(1)


def synchronised(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], Any], device: torch.device, repeats: int = 3) -> float:
    """The least of a few times, after one that does not count."""
    found = []
    for _ in range(repeats + 1):
        synchronised(device)
        start = time.perf_counter()
        work()
        synchronised(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def matrix_rate(device: torch.device, dtype: torch.dtype, tf32: bool) -> float:
    """Operations in a second of a large product of square matrices."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    side = 8192 if device.type == "cuda" else 2048
    a = torch.randn(side, side, device=device, dtype=dtype)
    found = 2 * side**3 / seconds(lambda: a @ a, device, repeats=5)
    torch.backends.cuda.matmul.allow_tf32 = before
    return found


def problem(case: Case, rows: int, device: torch.device) -> tuple[Network, Rows]:
    """Weights as they start, statistics of BatchNorm as after training, random images."""
    torch.manual_seed(0)
    module = case.build()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d) and layer.running_mean is not None and layer.running_var is not None:
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 2)
    x, y = torch.randn(rows, *case.shape), torch.randint(10, (rows,))
    return Network(module, caveat.Categorical()).to(device), Rows((x, y)).on(device)


def naive_pass(network: Network, rows: Rows, z: Tensor, size: int, float16: bool) -> Tensor:
    """The same product by torch.func."""
    params, total = network.params(), torch.zeros_like(z)
    sizes = [value.numel() for value in params.values()]

    def outputs(own: dict[str, Tensor], x: Tensor) -> Tensor:
        with torch.autocast(z.device.type, torch.float16, enabled=float16):
            return network(own, x)

    for x, _ in rows.ordered(size, z.device):

        def push(one: Tensor, x: Tensor = x) -> Tensor:
            parts = zip(params, one.split(sizes), strict=True)
            tangents = {name: part.view_as(params[name]) for name, part in parts}
            found: Tensor = torch.func.jvp(lambda own: outputs(own, x), (params,), (tangents,))[1]
            return found

        logits, pull = torch.func.vjp(lambda own, x=x: outputs(own, x), params)
        p = logits.float().softmax(-1)
        u = torch.vmap(push)(z).float()
        v = p * u - p * (p * u).sum(-1, keepdim=True)
        found = torch.vmap(pull)(v.to(logits.dtype))[0]
        total += torch.cat([found[name].flatten(1) for name in params], 1)
    return total


def passes(name: str, device: torch.device, float16: bool, vectors: tuple[int, ...], naive: bool) -> list[dict]:
    """Seconds of a pass, ours and by torch.func."""
    case, kind = CASES[name], device.type
    timed = case.timed[kind]
    network, rows = problem(case, timed, device)
    rate = matrix_rate(device, torch.float16 if float16 else torch.float32, kind == "cuda")
    x = next(rows.batches([torch.arange(8)], device))[0]
    flops = forward_flops(network, network.params(), x) / 8
    features = NetworkFeatures(network, network.params(), rows, float16=float16)
    model = LinearModel(features, Softmax(), torch.ones(1, device=device))
    found, single = [], "tf32" if kind == "cuda" else "float32"
    size = 250 if kind == "cuda" else 16  # of the naive product's batches
    part = rows.part(torch.arange(min(timed, 2 * size)))
    for k in vectors:
        z = torch.randn(k, features.size, device=device)
        floor = (4 * k + 1) * flops * case.rows / rate
        reset_peak(device)
        ours = seconds(lambda z=z: model.curvature(z), device) * case.rows / timed
        row = {
            "network": name, "device": kind, "type": "float16" if float16 else single,
            "vectors": k, "rows": case.rows, "timed rows": timed, "block": features.block_rows,
            "seconds": round(ours, 3), "floor": round(floor, 3), "share": round(floor / ours, 3),
            "rate": f"{floor / ours * rate / 1e12:.3g} TFLOP/s", "matrix rate": f"{rate / 1e12:.3g} TFLOP/s",
            "peak MB": peak_bytes(device) // 10**6, "naive": "",
        }  # fmt: skip
        if naive and k <= 8:
            took = seconds(lambda z=z: naive_pass(network, part, z, size, float16), device, 1)  # type: ignore[misc]
            row["naive"] = round(took * case.rows / len(part), 3)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        found.append(row)
    return found


@dataclass(frozen=True)
class Job:
    """What a process of its own is asked for."""

    what: str  # a solver, or the network of a fit whose memory is measured
    vectors: int
    rows: int
    folder: str  # of weights, rows and right-hand sides


def alone(job: Job, python: str = sys.executable) -> dict[str, Any]:
    """Run a job in a new process and read the line that it leaves."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    command = [python, __file__, "--job", json.dumps(dataclasses.asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{job} failed: {done.stderr.strip()}")
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


def work(job: Job) -> None:
    """In the new process: leave a line, and solutions in the folder."""
    if job.what in CASES:
        return print(json.dumps(fitted(job)))
    linear, systems = Linear(Path(job.folder)), load_file(Path(job.folder) / "systems.safetensors")
    right = systems["right"][: job.vectors]
    if job.what == "curvlinops":
        found, z = by_curvlinops(linear, right)
    elif job.what == "exact":
        found, z = exactly(linear, right)
    else:
        rank = 0 if job.what == "caveat, no sketch" else ConjugateGradients.rank
        found, z = by_caveat(linear, LinearSystem(right, systems["prior"][: job.vectors]), rank)
    save_file({"z": z.contiguous()}, Path(job.folder) / f"{job.what}.safetensors")
    print(json.dumps(found))


class Linear:
    """LeNet-small as it lies in a folder: the module, its rows and the linear model there."""

    def __init__(self, folder: Path) -> None:
        self.module = lenet_small()
        self.module.load_state_dict(load_file(folder / "weights.safetensors"))
        rows = load_file(folder / "data.safetensors")
        self.x, self.y = rows["x"], rows["y"]
        self.network = Network(self.module, caveat.Categorical())
        features = NetworkFeatures(self.network, self.network.params(), Rows((self.x, self.y)))
        self.model = LinearModel(features, Softmax(), torch.full((1,), PRECISION))


def write_systems(rows: int, vectors: int, folder: Path) -> str:
    """Train the network, draw the samples' right-hand sides, and say what the rows are."""
    write_inputs(CASES["lenet small"], rows, folder)
    said = f"{rows} random images, as no MNIST was found"
    with contextlib.suppress(FileNotFoundError):
        x, y = data.load("mnist").train.tensors
        save_file({"x": x[:rows].clone(), "y": y[:rows].clone()}, folder / "data.safetensors")
        said = f"the first {rows} rows of MNIST"
    linear = Linear(folder)
    torch.manual_seed(0)
    task = caveat.Task(lenet_small(), (linear.x, linear.y), caveat.Categorical())
    training = caveat.Training(epochs=15, learning_rate=2e-3, batch_size=100)
    state = caveat.fit(task, caveat.MAP(training=training), progress=False).state
    save_file(dict(state["params"]), folder / "weights.safetensors")
    model = Linear(folder).model
    system = SampleRandomness(model, vectors).system(model)
    save_file({"right": system.right, "prior": system.prior}, folder / "systems.safetensors")
    return said


def by_caveat(linear: Linear, system: LinearSystem, rank: int) -> tuple[dict[str, float], Tensor]:
    """Sketch and solve, after a pass that is not timed."""
    linear.model.product(system.right)
    start = time.perf_counter()
    prepared = ConjugateGradients(rank=rank, tolerance=RESIDUAL).prepare(linear.model)
    sketched = time.perf_counter() - start
    found = prepared.solve(linear.model, system)
    took = time.perf_counter() - start
    return {"seconds": took, "sketch": sketched, "products": prepared.preparation + found.report.vectors}, found.z


def by_curvlinops(linear: Linear, right: Tensor) -> tuple[dict[str, float], Tensor]:
    """All columns at once, with the fastest of three batch sizes."""
    operators = importlib.import_module("curvlinops")
    identity = importlib.import_module("curvlinops.examples").IdentityLinearOperator
    loss, params = nn.CrossEntropyLoss(reduction="sum"), list(linear.module.parameters())

    def matrix(rows: int, batch: int) -> Any:
        parts = list(zip(linear.x[:rows].split(batch), linear.y[:rows].split(batch), strict=True))
        ggn = operators.GGNLinearOperator(linear.module, loss, params, parts, check_deterministic=False, num_data=rows)
        return ggn + PRECISION * identity([p.shape for p in params], right.device, right.dtype)

    def trial(batch: int) -> float:
        part = matrix(min(256, len(linear.x)), batch)
        return seconds(lambda: part @ right.T, right.device, 1)

    batch = min((16, 64, 256), key=trial)
    whole, passes = matrix(len(linear.x), batch), 0
    product = whole._matmat

    def counted(columns: list[Tensor]) -> list[Tensor]:
        nonlocal passes
        passes += 1
        found: list[Tensor] = product(columns)
        return found

    whole._matmat = counted
    start = time.perf_counter()
    z = (operators.CGInverseLinearOperator(whole, tolerance=RESIDUAL) @ right.T).T
    return {"seconds": time.perf_counter() - start, "products": passes * len(right), "batch": batch}, z


def exactly(linear: Linear, right: Tensor) -> tuple[dict[str, float], Tensor]:
    """Laplace with the matrix of all weights: the fit and as many draws; then the solutions, which are not timed."""
    task = caveat.Task(linear.module, (linear.x, linear.y), caveat.Categorical())
    start = time.perf_counter()
    posterior = caveat.fit(task, caveat.Laplace(structure="full", precision=PRECISION, skip=0.0), progress=False)
    for _ in posterior.sample(len(right)):
        pass
    took = time.perf_counter() - start
    return {"seconds": took}, torch.cholesky_solve(right.T, posterior.state["gaussian"]["cholesky"]).T


def solves(rows: int, vectors: tuple[int, ...], python: str | None) -> list[dict]:
    """Seconds of every solver, for each number of vectors."""
    with tempfile.TemporaryDirectory() as name:
        folder, most = Path(name), max(vectors)
        print(f"LeNet-small, trained on {write_systems(rows, most, folder)}; load {os.getloadavg()[0]:.1f}", flush=True)
        rate, linear = matrix_rate(torch.device("cpu"), torch.float32, False), Linear(folder)
        flops = rows * forward_flops(linear.network, linear.network.params(), linear.x[:8]) / 8
        right = load_file(folder / "systems.safetensors")["right"]
        jobs = [Job("exact", most, rows, name)]
        for k in vectors:
            solvers = ["caveat", *(["caveat, no sketch"] if k <= 8 else []), *(["curvlinops"] if python else [])]
            jobs += [Job(what, k, rows, name) for what in solvers]
        table: list[dict] = []
        for job in jobs:
            found = alone(job, str(python) if job.what == "curvlinops" else sys.executable)
            z, reference = (load_file(folder / f"{what}.safetensors")["z"] for what in (job.what, "exact"))
            k, took, products = job.vectors, found["seconds"], found.get("products", 0)
            floor = (4 + 1 / k) * products * flops / rate
            row = {"solver": job.what, "rows": rows, "vectors": k, "seconds": round(took, 2)}
            row |= {"of them sketch": round(found.get("sketch", 0), 2), "batch": found.get("batch", "")}
            row |= {
                "products a vector": round(products / k, 1),
                "floor": round(floor, 2),
                "share": round(floor / took, 3),
            }
            row |= _quality(linear.model, z, right[:k], reference[:k])
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            table.append(row)
    for row in table:
        ours = next(r["seconds"] for r in table if (r["solver"], r["vectors"]) == ("caveat", row["vectors"]))
        row["times ours"] = round(row["seconds"] / ours, 2)
    return table


def _quality(model: LinearModel, z: Tensor, right: Tensor, reference: Tensor) -> dict[str, str]:
    """The largest residual, and the mean error in the norm of H."""
    wrong = z - reference
    residual = ((right - model.product(z)).norm(dim=1) / right.norm(dim=1)).max()
    squares = [inner(vectors, model.product(vectors)) for vectors in (wrong, reference)]
    return {"residual": f"{float(residual):.1e}", "error": f"{float((squares[0] / squares[1]).sqrt().mean()):.1e}"}


def fitted(job: Job) -> dict[str, float]:
    """A whole fit: sketch, two steps of the precision, samples; few iterations, as more would not take more memory."""
    folder, device = Path(job.folder), torch.device("cpu")
    module, rows = CASES[job.what].build(), load_file(folder / "data.safetensors")
    module.load_state_dict(load_file(folder / "weights.safetensors"))
    method = caveat.SampledLaplace(
        samples=job.vectors,
        at_once=job.vectors,
        tuning=Tuning(steps=2, samples=4),
        solver=ConjugateGradients(rank=2 * job.vectors, at_once=job.vectors, iterations=1),
    )

    def fit(count: int) -> caveat.Posterior:
        task = caveat.Task(module, (rows["x"][:count], rows["y"][:count]), caveat.Categorical())
        return caveat.fit(task, method, progress=False)

    weights = fit(4).network.n_parameters  # and torch has loaded what it loads when first used
    start = resident(device)
    reset_peak(device)
    fit(job.rows)
    return {"peak": peak_bytes(device) - start, "weights": weights, "data": rows["x"].nbytes}


def memory(names: list[str], vectors: int) -> list[dict]:
    """The peak of a fit, of n rows and of four times n."""
    table: list[dict] = []
    for name in names:
        case = CASES[name]
        for rows in (case.fitted, 4 * case.fitted):
            with tempfile.TemporaryDirectory() as folder:
                write_inputs(case, rows, Path(folder))
                found = alone(Job(name, vectors, rows, folder))
            row = {"network": name, "rows": rows, "vectors": vectors, "peak MB": round(found["peak"] / 1e6, 1)}
            row |= {"rows' MB": round(found["data"] / 1e6, 1), "K d MB": round(4e-6 * vectors * found["weights"], 1)}
            row |= {"n m K MB": round(4e-5 * rows * vectors, 1), "n d MB": round(4e-6 * rows * found["weights"], 1)}
            row["times n rows'"] = round(row["peak MB"] / table[-1]["peak MB"], 3) if rows > case.fitted else ""
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            table.append(row)
    return table


def main() -> None:
    """Print a line for each measurement, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="of the passes")
    parser.add_argument("--case", choices=CASES, action="append", help="only this network; may be repeated")
    parser.add_argument("--vectors", type=int, action="append", help="1, 8 and 64 unless given; may be repeated")
    parser.add_argument("--no-naive", action="store_true")
    parser.add_argument("--solve", action="store_true", help="time solves instead of passes")
    parser.add_argument("--rows", type=int, default=2000, help="of the solves, at least 1,700")
    parser.add_argument("--peer", help="python of an environment with curvlinops")
    parser.add_argument("--memory", action="store_true", help="measure the memory of fits instead")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        return work(Job(**json.loads(arguments.job)))
    if arguments.rows < 1700:
        parser.error(
            f"--rows {arguments.rows}: exact Laplace has a matrix of all weights from 1,700 rows on, not below"
        )
    device, vectors = torch.device(arguments.device), tuple(arguments.vectors or VECTORS)
    rows: list[dict] = []
    if arguments.solve:
        rows = solves(arguments.rows, vectors, arguments.peer)
    elif arguments.memory:
        rows = memory(arguments.case or ["lenet small", "resnet18 width 16"], 8)
    else:
        for float16 in (True, False) if device.type == "cuda" else (False,):
            for name in arguments.case or CASES:
                rows += passes(name, device, float16, vectors, not arguments.no_naive)
    print("\n| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    print("\n".join("| " + " | ".join(map(str, row.values())) + " |" for row in rows))
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
