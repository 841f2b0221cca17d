"""How far work on a GPU is from the floor: one table, in one call of at most nine minutes that goes on where it was.

    python benchmarks/floor.py --out floor                      # one H200; call it again for the parts that are left
    python benchmarks/floor.py --out floor --part last-layer    # this part alone, again if it is there
    python benchmarks/floor.py --out tiny --device cpu --tiny   # whether the parts run, on a CPU

It needs torch, numpy, safetensors, tqdm and pytest alone, and no installed caveat: that beside it is taken. Every part
is a process of its own, whose rows go into `floor.csv` under --out when it ends; parts that are in there are not run
again, nor any that cannot end within --minutes, judging by the seconds that it may take. `tests.log` is what the tests
said. The floor of a row is measured in the same process: a bare loop (chains.py, sparse.py), or the arithmetic itself:

    sampled       the gradients of N rows x outputs, (1 + 2 C) forward passes, their products with each other in
                  bfloat16, and the products that the solver took, each (1 + 4 K) forward passes for K vectors
    subnetwork    one pass forward and one back for each of C - 1 cotangents, and the lower half of F^T F in float32
    last-layer    a forward pass over all rows, and the sum of Kronecker products
    tests         the tests of recorded steps and of all else on a GPU: seconds, and how many failed
"""

import argparse
import csv
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import caveat  # noqa: E402
from caveat.models import resnet18  # noqa: E402

Row = dict[str, str]


@dataclass(frozen=True)
class Part:
    """What is measured together: a script beside this one, or a function of it."""

    seconds: int  # that it may take on an H200
    wanted: str  # of its rows
    script: tuple[str, ...] = ()  # with its arguments; --csv is added
    needs_gpu: bool = False


SSVI = ("--device", "cuda", "--part", "training", "--case", "resnet18", "--mode", "compiled")
PARTS = {
    "tests": Part(240, "0 failed", needs_gpu=True),
    "sampled": Part(120, "15 s, then 5 s"),
    "last-layer": Part(60, "1x laplace-torch"),
    "subnetwork": Part(100, "12 s"),
    "sgmcmc": Part(150, "65,000 and 95,000 images/s", ("chains.py", "--only", "sgmcmc"), needs_gpu=True),
    "ensemble": Part(100, "2.2 times one", ("chains.py", "--only", "ensemble"), needs_gpu=True),
    "hmc": Part(90, ".75 s", ("chains.py", "--only", "hmc"), needs_gpu=True),
    "ssvi": Part(
        150,
        "dense VI's time and peak",
        ("sparse.py", *SSVI, "--way", "SSVI 95%"),
        needs_gpu=True,
    ),
}


@dataclass(frozen=True)
class Sizes:
    """How much there is to do."""

    width: int  # of the ResNet-18
    rows: int  # of SampledLaplace
    subnetwork_rows: int
    weights: int  # of the subnetwork
    last_layer_rows: int


FULL, TINY = Sizes(64, 2000, 50_000, 42_438, 8192), Sizes(4, 20, 20, 200, 40)


class Machine:
    """Where the work is done, and a clock that waits for it."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def best(self, work: Callable[[], Any]) -> float:
        """The fewest seconds of three calls."""
        return min(self.seconds(work) for _ in range(3))

    def seconds(self, work: Callable[[], Any]) -> float:
        """What a call takes."""
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def problem(self, model: nn.Module, rows: int) -> caveat.Task:
        """A network that is fairly sure of its own labels for random images, as its last layer is scaled."""
        x, last = torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(0)), last_of(model)
        with torch.no_grad():
            outputs = torch.cat([model.to(self.device)(part.to(self.device)) for part in x.split(500)]).cpu()
            model.cpu()
            centred = outputs - outputs.mean(0)
            scale = 3 / centred.std()
            last.bias.copy_(scale * (last.bias - outputs.mean(0)))
            last.weight.mul_(scale)
        return caveat.Task(model, (x, centred.argmax(1)), caveat.Categorical(), caveat.GaussianPrior(25.0))

    def fit(self, task: caveat.Task, method: caveat.Method) -> tuple[caveat.Posterior, float]:
        """The posterior, and its seconds."""
        found: list[caveat.Posterior] = []
        seconds = self.seconds(lambda: found.append(caveat.fit(task, method, device=str(self.device), progress=False)))
        return found[0], seconds

    def forward(self, task: caveat.Task) -> float:
        """Seconds of a forward pass over all rows, which are on the device."""
        module = task.network.to(self.device).module
        pieces = [x.to(self.device) for x, _ in task.train.ordered(1000)]

        @torch.no_grad()
        def everything() -> list[Tensor]:
            return [module(x) for x in pieces]

        return self.best(everything)


def last_of(model: nn.Module) -> nn.Linear:
    """The last linear layer."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


def residual(sizes: Sizes) -> nn.Module:
    """A ResNet-18 as if trained."""
    torch.manual_seed(0)
    return resnet18(width=sizes.width).eval()


def perceptron() -> nn.Module:
    """One with a hidden layer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 128), nn.ReLU(), nn.Linear(128, 10))


def row(work: str, here: float, floor: float, unit: str = "s") -> Row:
    """A line of the table."""
    return {"work": work, "here": f"{here:.4g}", "floor": f"{floor:.4g}", "unit": unit}


def sampled(machine: Machine, sizes: Sizes) -> list[Row]:
    """SampledLaplace with eight samples: the first call, and the second one of the same shapes."""
    task, rows = machine.problem(residual(sizes), sizes.rows), []
    forward = machine.forward(task)  # which loads the libraries
    side, weights = 10 * sizes.rows, task.network.n_parameters
    slices = torch.randn(min(weights, 65_536), side, device=machine.device, dtype=torch.bfloat16)
    product = machine.best(partial(torch.mm, slices.T, slices)) * weights / len(slices) / 2
    for call in ("first", "second"):
        posterior, seconds = machine.fit(task, caveat.SampledLaplace(samples=8))
        passes = float(posterior.info.diagnostics["passes"])
        rows.append(
            row(f"SampledLaplace, {sizes.rows:,} rows, {call} call", seconds, (21 + passes * 33) * forward + product)
        )
    return rows


def subnetwork(machine: Machine, sizes: Sizes) -> list[Row]:
    """SubnetworkLaplace with a full covariance, at the default arithmetic and in bfloat16."""
    small, task = (machine.problem(residual(sizes), rows) for rows in (20, sizes.subnetwork_rows))
    n, columns = sizes.weights, 9 * sizes.subnetwork_rows
    chunk = torch.randn(min(columns, 4096), n, device=machine.device)
    product = machine.best(partial(torch.mm, chunk.T, chunk)) * columns / len(chunk) / 2
    passes, rows = 10 * machine.forward(task), []
    for arithmetic in ("full", "bfloat16"):
        knobs: dict[str, Any] = {"arithmetic": arithmetic, "precision": "given", "skip": 0.0}
        machine.fit(small, caveat.SubnetworkLaplace(20, **knobs))
        _, seconds = machine.fit(task, caveat.SubnetworkLaplace(n, **knobs))
        rows.append(row(f"SubnetworkLaplace, {n:,} weights, {arithmetic}", seconds, passes + product))
    return rows


def last_layer(machine: Machine, sizes: Sizes) -> list[Row]:
    """LastLayerLaplace of two networks, its fixed costs included, after a fit of few rows."""
    method, rows = caveat.LastLayerLaplace(precision="given", skip=0.0), []
    for name, model in (("a perceptron", perceptron()), ("ResNet-18", residual(sizes))):
        task = machine.problem(model, sizes.last_layer_rows)
        machine.fit(task, method)
        seconds = min(machine.fit(task, method)[1] for _ in range(3))
        phi = torch.randn(sizes.last_layer_rows, last_of(model).in_features + 1, device=machine.device)
        kronecker = machine.best(lambda phi=phi: [phi.T @ phi for _ in range(55)])  # pairs of outputs
        rows.append(row(f"LastLayerLaplace, {name}", seconds, machine.forward(task) + kronecker))
    return rows


def tests(machine: Machine, sizes: Sizes) -> list[Row]:
    """The tests that need a GPU, those of recorded steps first; on a CPU all of them are skipped."""
    files = ["tests/test_cuda_captured.py", "tests/test_cuda.py"]
    started = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "--tb=short",
        "--show-capture=no",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    command += ["-p", "no:benchmark", "-n", "4"] if importlib.util.find_spec("xdist") else []
    lines = []
    with subprocess.Popen(command, cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        with (Path(os.environ["FLOOR_OUT"]) / "tests.log").open("w") as log:
            for line in run.stdout:  # as they come: what a time limit ends has said which test it was in
                lines.append(line)
                log.write(line)
                log.flush()
    failures = [place for place, line in enumerate(lines) if "= FAILURES" in line or "= ERRORS" in line]
    print("".join(lines[failures[0] if failures else -1 :])[-6000:], flush=True)
    said = lines[-1].strip("= \n") if lines else "nothing was said"
    return [row(f"tests: {said}", time.perf_counter() - started, float("nan"))]


OWN: dict[str, Callable[[Machine, Sizes], list[Row]]] = {
    "sampled": sampled, "subnetwork": subnetwork, "last-layer": last_layer, "tests": tests,
}  # fmt: skip


def read(path: Path) -> list[Row]:
    """The rows of a csv file, if it is there."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[Row]) -> None:
    """A csv file, whole or not at all."""
    names = list(dict.fromkeys(name for line in rows for name in line))
    unfinished = path.with_suffix(".partial")
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)


def run_part(name: str, a: argparse.Namespace, limit: float) -> list[Row]:
    """The rows of a part, in a process of its own which is ended, with all that it started, after `limit` seconds."""
    part, file = PARTS[name], a.out / f"{name}.unfinished.csv"
    if part.script:
        command = [str(HERE / part.script[0]), *part.script[1:], "--csv", str(file)]
    else:
        command = [__file__, "--work", name, "--device", a.device, "--out", str(file), *["--tiny"] * a.tiny]
    paths = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "FLOOR_OUT": str(a.out), "PYTHONUNBUFFERED": "1"}
    file.unlink(missing_ok=True)
    started = time.monotonic()
    print(f"{name}: at most {limit:.0f} s", flush=True)
    # A group, to be ended as a whole, but no session of its own: what ends this process is to end that one, too.
    process = subprocess.Popen([sys.executable, *command], env=environment, preexec_fn=os.setpgrp)
    try:
        failed = process.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"{name}: ended after {limit:.0f} s", flush=True)
        # The next call runs it again, but for tests, of which some will have said something.
        return told(part, a.out / "tests.log", limit) if name == "tests" else []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print(f"{name}: {f'failed with {failed}, ' if failed else ''}{time.monotonic() - started:.0f} s", flush=True)
    rows = [] if failed else read(file)
    file.unlink(missing_ok=True)
    rows = beside_dense(rows) if name == "ssvi" else rows
    return [{"part": name, "wanted": part.wanted} | {"floor" if n == "bare" else n: v for n, v in line.items()}
            for line in rows]  # fmt: skip


def told(part: Part, log: Path, limit: float) -> list[Row]:
    """What tests that were ended had said by then."""
    lines = log.read_text().splitlines() if log.exists() else []
    counts = [f"{sum(f' {word} ' in line for line in lines)} {word.lower()}" for word in ("FAILED", "ERROR", "PASSED")]
    seconds = row(f"tests: ended; {', '.join(counts)}", limit, float("nan"))
    return [{"part": "tests", "wanted": part.wanted} | seconds]


def beside_dense(rows: list[Row]) -> list[Row]:
    """The steps and peaks that sparse.py measured, each beside that of dense VI; none if one could not be measured."""
    by_way = {line["way"]: line for line in rows}
    for way, line in by_way.items():
        if line["failure"]:
            print(f"{way}: {line['failure']}", flush=True)
            return []
    dense = by_way.pop("dense VI")
    return [
        row(f"{way}, {what}, beside dense VI", scale * float(line[name]), scale * float(dense[name]), unit)
        for way, line in by_way.items()
        for what, name, scale, unit in (("a step", "step_s", 1e3, "ms"), ("peak", "peak_bytes", 1e-9, "GB"))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the csv files")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this, and again; may be repeated")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true", help="few rows and a narrow network, to see that it runs")
    parser.add_argument("--work", choices=OWN, help=argparse.SUPPRESS)
    a = parser.parse_args()
    a.out = a.out.resolve()
    if a.work:
        write(a.out, OWN[a.work](Machine(a.device), TINY if a.tiny else FULL))
        return
    a.out.mkdir(parents=True, exist_ok=True)
    path, end = a.out / "floor.csv", time.monotonic() + 60 * a.minutes
    for name in a.part or PARTS:
        part, left = PARTS[name], end - time.monotonic()
        if any(line["part"] == name for line in read(path)) and not a.part:
            continue
        if part.needs_gpu and a.device == "cpu" and not (a.tiny and name == "tests"):
            print(f"{name}: needs a GPU", flush=True)
        elif left < part.seconds and not a.tiny:
            print(f"{name}: {part.seconds} s may be needed and {left:.0f} are left: call again", flush=True)
        else:
            new = run_part(name, a, min(left, 2.0 * part.seconds))  # one that hangs leaves time for others
            if new:
                table = [line for line in read(path) if line["part"] != name] + new
                write(path, sorted(table, key=lambda line: [*PARTS].index(line["part"])))
    for line in read(path):
        print(" | ".join(f"{key} {value}" for key, value in line.items() if value))


if __name__ == "__main__":
    main()
