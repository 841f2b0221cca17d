"""What sparsity saves: training steps and inference of SSVI against dense variational inference, seconds and bytes.

    python benchmarks/sparse.py                                      # our side alone, a quarter of an hour on two cores
    python benchmarks/sparse.py --peer bayesian-torch/bin/python     # with bayesian-torch 0.5.0 (Intel Labs)
    python benchmarks/sparse.py --part inference --case resnet18 --csv benchmarks/sparse.csv
    python benchmarks/sparse.py --device cuda --peer PYTHON          # batch 512; eager, then compiled
    python benchmarks/sparse.py --device cuda --part training --mode compiled --way "SSVI 95%"
    python benchmarks/sparse.py --processor-time                     # on a machine that others use as well

A row is printed when it is there, and --csv written again, so that what a time limit ends has kept what it measured.

bayesian-torch lives in an environment of its own. It asks for torchvision, tensorboard and scikit-learn, of which its
layers import none:

    python3.11 -m venv bayesian-torch
    bayesian-torch/bin/pip install torch==2.13.0 numpy safetensors tqdm
    bayesian-torch/bin/pip install --no-deps bayesian-torch==0.5.0

**Training.** A step is forward, backward and optimiser (SGD with momentum for means, Adam for log standard deviations,
on every side), timed inside the library's own loop; the batch is there already. Every `interval`-th step exchanges
weights and is timed apart; the table charges it to the step at the default of one in 100. Bytes are those of the
tensors that are there between the way back and the optimiser's end, each storage once: values, gradients, moments,
places, buffers ("training bytes", beside what the accounting says), and the tables that native kernels make of the
places. Peaks are of the process, above what it held with network and data. Each measurement is a process of its own;
repeats alternate, the table has medians. bayesian-torch draws weights, one draw for all rows of a batch
(Reparameterization, its fastest: one product a layer) or with signs that differ by row (Flipout, two products, the
nearest to local reparameterisation, in which rows are independent); it has no local reparameterisation. On a GPU a step
is in bfloat16 (autocast) with channels last, on every side; bayesian-torch is not compiled.

**Inference** is at the mean weights of posteriors at 90, 95 and 99%, by `caveat.deploy`, against the same function as a
dense network in every layout tried (NCHW or channels last, BatchNorm folded or not, on a CPU oneDNN's own blocked
weights; with --mode both, by torch.compile too, which takes minutes more); ratios are to the fastest dense one. Stored
are the bytes of a network's state. **Predictions** are `posterior.predict` with ten draws; stored are those of the
posterior's folder. All ways take turns in one process, in --rounds rounds, nine where one takes over a second.
bayesian-torch's prediction is ten passes in eval mode and the mean of their softmax, in a process of its own. On a GPU
all of this is in float32 as torch has it: convolutions in TF32, products of matrices not. Unstructured layers have no
kernel there: a pass makes each layer's whole weight.

Threads of several programs on one core wait for each other, so on a machine in use only the seconds that a process
itself computes on one thread compare: that is --processor-time.
"""

import argparse
import contextlib
import copy
import csv
import dataclasses
import functools
import importlib
import io
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caveat import models
from caveat.engine.cost import peak_bytes, reset_peak

MIB = 2**20
DEFAULT_INTERVAL = 100  # steps from one exchange to the next, of SSVI and RigL
SPARSE = {"SSVI 90%": 0.1, "SSVI 95%": 0.05, "SSVI 99%": 0.01}
CHANNEL = {"SSVI channel 90%": 0.1, "SSVI channel 95%": 0.05}
PEERS = ("bayesian-torch Reparameterization", "bayesian-torch Flipout")
PARTS = ("training", "inference", "prediction")
KEYS = ("part", "case", "way", "compiled", "batch")  # what a row is of
WAYS = ("deterministic", "dense VI", *PEERS, *SPARSE, *CHANNEL, "RigL 95%")


@dataclass(frozen=True)
class Case:
    """A network, the shape of a row, and the batch of a training step."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int


CASES = {
    "resnet18": Case(lambda: models.resnet18(), (3, 32, 32), 16),
    "mlp 784-300-300-10": Case(lambda: models.mlp(784, 10, hidden=(300, 300)), (784,), 128),
}


@dataclass(frozen=True)
class Job:
    """One measurement of training, or of bayesian-torch's prediction: what a process of its own is asked for."""

    case: str
    way: str
    batch: int
    device: str
    threads: int
    interval: int  # steps of a block, of which the last exchanges weights
    blocks: int  # of which the first is not timed
    processor_time: bool
    compiled: bool = False
    part: str = "training"  # or "prediction", in as many rounds as a block has steps

    @property
    def steps(self) -> int:
        """In all."""
        return self.interval * self.blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="python of an environment with bayesian-torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; may be repeated")
    parser.add_argument("--case", choices=CASES, action="append", help="only this network; may be repeated")
    parser.add_argument("--way", choices=WAYS, action="append", help="only this and dense VI; in the order given")
    parser.add_argument("--batch", type=int, help="of training; 16 (ResNet) and 128 (MLP), on a GPU 512, unless given")
    parser.add_argument("--interval", type=int, help="steps of a block of training; 5, on a GPU 20, unless given")
    parser.add_argument("--blocks", type=int, default=4, help="of training, of which the first is not timed")
    parser.add_argument("--repeats", type=int, help="3, on a GPU 1, unless given")
    parser.add_argument("--mode", choices=("eager", "compiled", "both"), help="eager, on a GPU both, unless given")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--processor-time", action="store_true", help="the process's own seconds, on one thread")
    parser.add_argument("--rounds", type=int, default=40, help="of inference")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that one measurement may take")
    parser.add_argument("--csv", help="also write both tables to this file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        job = Job(**json.loads(arguments.job))
        return print(json.dumps(train(job) if job.part == "training" else predict_peer(job)))
    cuda = arguments.device != "cpu"
    arguments.threads = 1 if arguments.processor_time else arguments.threads
    arguments.mode = arguments.mode or ("both" if cuda else "eager")
    arguments.case = arguments.case or list(CASES)
    machine = torch.cuda.get_device_name() if cuda else f"{arguments.threads} threads, load {os.getloadavg()[0]:.1f}"
    print(f"torch {torch.__version__}, {machine}")
    table = Table(arguments.csv)
    arguments.part = arguments.part or PARTS
    for case in arguments.case if "training" in arguments.part else ():
        compare_training(arguments, case, table)
    for case in arguments.case if {"inference", "prediction"} & {*arguments.part} else ():
        compare_inference(arguments, case, table)
    print_training([row for row in table.rows if row["part"] == "training"])
    print_inference(table.rows)
    print_targets(table.rows)


class Table:
    """Rows found so far, written to a file whenever there are more of them."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []

    def keep(self, rows: list[dict[str, Any]]) -> None:
        """Put these rows in the place of older ones of the same measurement."""
        for row in rows:
            same = [i for i, old in enumerate(self.rows) if all(old[k] == row[k] for k in KEYS)]
            self.rows = [*self.rows[: same[0]], row, *self.rows[same[0] + 1 :]] if same else [*self.rows, row]
        if self.path:
            with open(self.path, "w", newline="") as file:  # noqa: PTH123
                writer = csv.DictWriter(file, list(dict.fromkeys(key for row in self.rows for key in row)))
                writer.writeheader()
                writer.writerows(self.rows)


def chosen_ways(arguments: argparse.Namespace) -> list[str]:
    """Those asked for, in that order, after dense VI; all of them unless asked."""
    ways = ["dense VI", *arguments.way] if arguments.way else WAYS
    return [way for way in dict.fromkeys(ways) if arguments.peer or way not in PEERS]


# Training


def compare_training(arguments: argparse.Namespace, case: str, table: Table) -> None:
    """A row for every way to train a network; repeats alternate."""
    cuda = arguments.device != "cpu"
    modes = {"eager": (False,), "compiled": (True,), "both": (False, True)}[arguments.mode if cuda else "eager"]
    batch = arguments.batch or (512 if cuda else CASES[case].batch)
    size = batch, arguments.device, arguments.threads, arguments.interval or (20 if cuda else 5), arguments.blocks
    jobs = [Job(case, way, *size, arguments.processor_time, compiled) for compiled in modes
            for way in chosen_ways(arguments) if not (compiled and way in PEERS)]  # fmt: skip
    measured: dict[Job, list[dict[str, Any]]] = {job: [] for job in jobs}
    for _ in range(arguments.repeats or (1 if cuda else 3)):
        for job in jobs:
            measured[job].append(measure(job, arguments.peer, arguments.limit))
            rows = [summary(job, results) for job, results in measured.items() if results]
            for row in rows:
                dense = [r["step_s"] for r in rows if r["way"] == "dense VI" and r["compiled"] == row["compiled"]]
                row["times_faster"] = dense[0] / row["step_s"] if dense else math.nan
            table.keep(rows)


def measure(job: Job, peer: str | None, limit: float) -> dict[str, Any]:
    """Run a job in a new process; -P keeps this folder off the path, whose scripts have the names of packages."""
    python = str(peer) if job.way in PEERS else sys.executable
    command = [python, "-P", __file__, "--job", json.dumps(dataclasses.asdict(job))]
    root, given = str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")
    environment = os.environ | {"PYTHONPATH": root if given is None else f"{root}{os.pathsep}{given}"}
    environment["OMP_NUM_THREADS"] = str(job.threads)
    failure = ""
    found: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]  # a library may print as well
        found = json.loads(lines[-1]) if lines else {}
        if done.returncode or not lines:
            failure = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        failure = "over the time limit"
    what = f"step {found.get('plain_s', math.nan):.4f} s, exchanging {found.get('update_s') or math.nan:.4f} s"
    if job.part == "prediction":
        what = f"prediction, batch {job.batch}, {found.get('step_s', math.nan):.4f} s"
    size = found.get("training_bytes", found.get("stored_bytes", math.nan)) / MIB
    print(
        f"{job.case:<18} {job.way:<34} {'compiled' if job.compiled else '':<8} {what}, {size:.1f} MiB, "
        f"load {os.getloadavg()[0]:.1f} {failure}",
        flush=True,
    )
    return found | {"failure": failure}


def summary(job: Job, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of a job's repeats."""
    row: dict[str, Any] = {"part": "training", "case": job.case, "way": job.way, "compiled": job.compiled}
    row |= {"batch": job.batch, "device": job.device, "threads": job.threads, "processor_time": job.processor_time}
    names = ("plain_s", "update_s", "training_bytes", "accounted_bytes", "update_bytes", "kernel_bytes")
    for name in (*names, "peak_bytes", "update_peak_bytes", "ran_sparse"):
        values = [result[name] for result in results if result.get(name) is not None]
        row[name] = statistics.median(values) if values else math.nan
    extra = 0.0 if math.isnan(row["update_s"]) else max(0.0, row["update_s"] - row["plain_s"]) / DEFAULT_INTERVAL
    seconds = [result["plain_s"] for result in results if "plain_s" in result] or [math.nan]
    row |= {"step_s": row["plain_s"] + extra, "fastest_s": min(seconds), "slowest_s": max(seconds)}
    return row | {"failure": next((result["failure"] for result in results if result["failure"]), "")}


def train(job: Job) -> dict[str, Any]:
    """In the process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    module, shape = CASES[job.case].build(), CASES[job.case].shape
    x, y = torch.randn(job.batch * job.steps, *shape), torch.randint(10, (job.batch * job.steps,))
    importlib.import_module("torch._dynamo")  # which optimisers import at their first step
    importlib.import_module("bayesian_torch.models.dnn_to_bnn" if job.way in PEERS else "caveat")
    watch = Watch(job)
    watch.start = resident(job.device)
    if job.device != "cpu":  # where the loop brings the rows
        watch.start += storage_bytes([x, y])
    return train_peer(job, module, x, y, watch) if job.way in PEERS else train_ours(job, module, x, y, watch)


class Watch:
    """Times steps and their peaks; where a GPU is waited for, only at the ends of a run of plain steps."""

    def __init__(self, job: Job) -> None:
        self.job, self.step, self.start = job, 0, 0
        self.began, self.ended = [0.0] * job.steps, [0.0] * job.steps
        self.peaks: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.clock = time.process_time if job.processor_time else time.perf_counter

    def before(self) -> None:
        """A step."""
        place = self.step % self.job.interval
        if place in (0, self.job.interval - 1):
            self._wait()
            reset_peak(torch.device(self.job.device))
        self.began[self.step] = self.clock()

    def after(self) -> None:
        """A step."""
        place = self.step % self.job.interval
        if place >= self.job.interval - 2:
            self._wait()
        self.ended[self.step] = self.clock()
        # A process keeps what it freed, so on a CPU only the steps before the first exchange say what plain ones take.
        telling = (self.step < self.job.interval) == (self.job.device == "cpu")
        if place >= self.job.interval - 2 and telling and self.step < self.job.steps - 1:  # the last exchanges nothing
            name = "update_peak_bytes" if place == self.job.interval - 1 else "peak_bytes"
            self.peaks[name] = peak_bytes(torch.device(self.job.device)) - self.start
        self.step += 1

    def _wait(self) -> None:
        if self.job.device != "cpu":
            torch.cuda.synchronize()

    def found(self, exchanges: bool) -> dict[str, Any]:
        """Seconds of plain steps and of those that exchange weights, and the bytes."""
        assert self.step == self.job.steps
        plain, update = [], []
        for first in range(self.job.interval, self.job.steps, self.job.interval):
            last = first + self.job.interval - 1
            if self.job.device == "cpu":
                plain += [self.ended[s] - self.began[s] for s in range(first, last)]
            else:
                plain.append((self.ended[last - 1] - self.began[first]) / (last - first))
            if last < self.job.steps - 1:  # nothing is exchanged at the end of training
                update.append(self.ended[last] - self.began[last])
        took = statistics.median(update) if exchanges and update else None
        return {"plain_s": statistics.median(plain), "update_s": took} | self.peaks | self.sizes


def train_ours(job: Job, module: nn.Module, x: Tensor, y: Tensor, watch: Watch) -> dict[str, Any]:
    """The library's own loop, watched."""
    import caveat
    from caveat.engine import optimise

    loop: Any = optimise._Loop
    backward, move = loop._backward, loop._move

    def watched_backward(self: Any, *given: Any) -> Tensor:
        watch.before()
        return backward(self, *given)

    def watched_move(self: Any) -> None:
        if watch.step == job.interval:
            watch.sizes |= training_sizes(self)
        move(self)
        watch.after()

    loop._backward, loop._move = watched_backward, watched_move
    method = method_of(job)
    task = caveat.Task(module, (x, y), caveat.Categorical(), caveat.GaussianPrior(1.0))
    posterior = caveat.fit(task, method, device=job.device, progress=False)
    diagnostics = posterior.info.diagnostics
    found = watch.found(exchanges=diagnostics.get("exchanges", 0) > 0)
    if "account" in diagnostics:
        found["accounted_bytes"] = diagnostics["account"]["total"]["training_bytes"]
        found["update_bytes"] = diagnostics["account"]["update_bytes"]
    return found | {"ran_sparse": diagnostics.get("ran_sparse")}


def method_of(job: Job) -> Any:
    """As the paper trains: SGD for means; all of training in one epoch."""
    import caveat

    training = caveat.Training(epochs=1, batch_size=job.batch, optimizer="sgd", learning_rate=1e-3)
    if job.device != "cpu":
        training = replace(training, precision="bfloat16", channels_last=True, compile=job.compiled)
    exchange = {"training": training, "interval": job.interval, "stop": 1.0}
    if job.way == "deterministic":
        return caveat.MAP(training=training)
    if job.way == "dense VI":
        return caveat.MeanFieldVI(training=training)
    if job.way == "RigL 95%":
        return caveat.RigL(density=0.05, **exchange)
    if job.way in CHANNEL:
        return caveat.SSVI(density=CHANNEL[job.way], structure="channel", **exchange)
    return caveat.SSVI(density=SPARSE[job.way], **exchange)


def training_sizes(loop: Any) -> dict[str, int]:
    """Bytes of what a loop holds before its optimiser's step: tensors, and the native kernels' tables."""
    tensors = [tensor for group in loop.variables.groups().values() for tensor in group.values()]
    tensors += [tensor.grad for tensor in loop.variables.trained() if tensor.grad is not None]
    tensors += [v for o in loop.optimizers for kept in o.state.values() for v in kept.values() if isinstance(v, Tensor)]
    substitute = getattr(getattr(loop.loss, "__self__", None), "substitute", None)
    tables = 0
    if substitute is not None:
        tensors.append(substitute.layout.indices)
        tables = sum(table_bytes(layer.pattern) for layer in substitute.layers.values())
    return {"training_bytes": storage_bytes(tensors), "kernel_bytes": tables}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def table_bytes(pattern: Any) -> int:
    """What native kernels made of a pattern."""
    made = getattr(pattern, "_structures", {}).values()
    return sum(a.nbytes for s in made for a in (s.start, s.offset, s.order) if a is not None)


def convert_peer(job: Job, module: nn.Module) -> Any:
    """Make a network bayesian-torch's, by its own conversion; returns the module that has its KL."""
    convert = importlib.import_module("bayesian_torch.models.dnn_to_bnn")
    prior = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -4.6}
    prior |= {"type": job.way.split()[1], "moped_enable": False}
    convert.dnn_to_bnn(module, prior)
    return convert


def train_peer(job: Job, module: nn.Module, x: Tensor, y: Tensor, watch: Watch) -> dict[str, Any]:
    """bayesian-torch: its own conversion and KL, the same optimisers, and on a GPU the same type and layout."""
    convert, cuda = convert_peer(job, module), job.device != "cpu"
    module.to(job.device).train()
    x, y = x.to(job.device), y.to(job.device)
    if cuda and x.ndim == 4:
        module.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    autocast = functools.partial(torch.autocast, "cuda", torch.bfloat16) if cuda else contextlib.nullcontext
    scales = [p for name, p in module.named_parameters() if "rho" in name]
    means = [p for name, p in module.named_parameters() if "rho" not in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(means, 1e-3, momentum=0.9, nesterov=True, fused=cuda),
        torch.optim.Adam(scales, 1e-2, fused=cuda),
    ]
    for rows, targets in zip(x.split(job.batch), y.split(job.batch), strict=True):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        watch.before()
        with autocast():
            loss = F.cross_entropy(module(rows), targets) + 0.1 * convert.get_kl_loss(module) / len(x)
        loss.backward()
        if watch.step == job.interval:
            tensors = [*module.parameters(), *module.buffers()] + [p.grad for p in module.parameters()]
            tensors += [v for o in optimizers for kept in o.state.values() for v in kept.values()]
            watch.sizes["training_bytes"] = storage_bytes(t for t in tensors if isinstance(t, Tensor))
        for optimizer in optimizers:
            optimizer.step()
        watch.after()
    return watch.found(exchanges=False)


def resident(device: str) -> int:
    """Bytes held now: by torch's allocator on a GPU, by this process on a CPU."""
    if device != "cpu":
        return torch.cuda.memory_allocated(device)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# Inference


def compare_inference(arguments: argparse.Namespace, case: str, table: Table) -> None:
    """A network at the means of its posteriors, and predictions with ten draws: ours in turns."""
    import caveat

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    device, cuda = arguments.device, arguments.device != "cpu"
    batches = (1, 512) if cuda else (1, 8)
    module = CASES[case].build()
    x = torch.randn(max(64, *batches), *CASES[case].shape)
    task = caveat.Task(module, (x, torch.randint(10, (len(x),))), caveat.Categorical(), caveat.GaussianPrior(1.0))
    training = caveat.Training(epochs=2, batch_size=len(x) // 4, optimizer="sgd", learning_rate=1e-2)
    methods: dict[str, Any] = {"dense VI": caveat.MeanFieldVI(training=training)}
    for way in chosen_ways(arguments):
        if way in SPARSE or way in CHANNEL:
            structure = "channel" if way in CHANNEL else "unstructured"
            methods[way] = caveat.SSVI(density=(SPARSE | CHANNEL)[way], structure=structure, training=training)
    posteriors = {way: caveat.fit(task, method, device=device, progress=False) for way, method in methods.items()}
    x = x.to(device)
    about = {"case": case, "device": device, "threads": arguments.threads, "processor_time": arguments.processor_time}
    clock = functools.partial(now, time.process_time if arguments.processor_time else time.perf_counter, cuda)
    wanted = "inference" in arguments.part and len(methods) > 1
    networks = networks_at_means(posteriors, module, x, arguments.mode != "eager") if wanted else {}
    for batch in batches if wanted else ():
        last = x[:batch].contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x[:batch]
        calls = {name: functools.partial(network, last if "last" in name else x[:batch].clone())
                 for name, network in networks.items()}  # fmt: skip
        with torch.inference_mode():
            rows = timed(about | {"part": "inference", "batch": batch}, calls, arguments.rounds, clock)
        best = min(row["step_s"] for row in rows if row["way"].startswith("dense"))
        for row in rows:
            network = module if row["way"].startswith("dense") else networks[row["way"]]
            row |= {"times_faster": best / row["step_s"], "stored_bytes": storage_bytes(network.state_dict().values())}
            row["kernel_bytes"] = module_tables(network)
        table.keep(rows)
    for batch in batches if "prediction" in arguments.part else ():
        calls = {way: functools.partial(posterior.predict, x[:batch], draws=10)
                 for way, posterior in posteriors.items()}  # fmt: skip
        rows = timed(about | {"part": "prediction", "batch": batch}, calls, arguments.rounds, clock)
        dense = rows[0]["step_s"]
        for row in rows:
            row |= {"times_faster": dense / row["step_s"], "stored_bytes": file_bytes(posteriors[row["way"]])}
        table.keep(rows)
        size = batch, device, arguments.threads, arguments.rounds, 1, arguments.processor_time
        for way in (way for way in chosen_ways(arguments) if way in PEERS):
            found = measure(Job(case, way, *size, part="prediction"), arguments.peer, arguments.limit)
            row = (
                about
                | {"part": "prediction", "way": way, "compiled": False, "batch": batch, "step_s": math.nan}
                | found
            )
            table.keep([row | {"times_faster": dense / row["step_s"]}])


def now(clock: Callable[[], float], cuda: bool) -> float:
    """Seconds, once the device has done what it was asked for."""
    if cuda:
        torch.cuda.synchronize()
    return clock()


def networks_at_means(posteriors: dict[str, Any], module: nn.Module, x: Tensor, compiled: bool) -> dict[str, nn.Module]:
    """Posteriors' networks, and the same function as a dense one in every layout."""
    import caveat

    networks = {way: caveat.deploy(posterior) for way, posterior in posteriors.items() if way != "dense VI"}
    dense = copy.deepcopy(module).to(x.device).eval()
    for way in (way for way in networks if way in SPARSE):
        dense.load_state_dict(whole_weights(posteriors[way]), strict=False)  # zeros and all
        with torch.inference_mode():
            differ = float((networks[way](x[:8]) - dense(x[:8])).abs().max() / dense(x[:8]).abs().max())
        print(f"{way}: its network and the dense one differ by {differ:.0e}", flush=True)
    found = {f"dense, {name}": network for name, network in dense_layouts(dense, x.ndim == 4).items()} | networks
    if x.ndim == 4:
        found |= {f"{way}, channels last": copy.deepcopy(networks[way]) for way in networks if way in CHANNEL}
    if compiled:
        importlib.import_module("torch._dynamo.config").recompile_limit = 100  # one forward, of many networks
        importlib.import_module("torch._inductor.config").freezing = x.device.type == "cpu"  # weights laid out before
        how = {"dynamic": False, "mode": "reduce-overhead" if x.device.type == "cuda" else "default"}
        left = {"dense, NCHW", "dense, channels last"}  # their BatchNorm is not folded
        left |= {*SPARSE} if x.device.type == "cpu" else set()  # a compiled pass leaves the native kernels alone
        found |= {f"{name}, compiled": torch.compile(network, **how) for name, network in found.items()
                  if name not in left and not isinstance(network, Blocked)}  # fmt: skip
    return found


def timed(
    about: dict[str, Any], calls: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> list[dict[str, Any]]:
    """A row for each call, printed."""
    rows = []
    for name, (median, low, high) in in_turns(calls, rounds, clock).items():
        row = about | {"way": name.removesuffix(", compiled"), "compiled": name.endswith(", compiled")}
        rows.append(row | {"step_s": median, "fastest_s": low, "slowest_s": high})
        load = f"load {os.getloadavg()[0]:.1f}"
        print(f"{row['case']:<18} {name:<34} {row['part']}, batch {row['batch']}, {median:.5f} s, {load}", flush=True)
    return rows


def in_turns(
    calls: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> dict[str, tuple[float, float, float]]:
    """Median, lowest and highest seconds of each call that works; nine rounds at most where one takes over a second."""
    working = {}
    for name, call in calls.items():
        try:
            call()
            working[name] = call
        except Exception as error:  # a compiler may fail in any way, and the others are to be timed
            print(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}", flush=True)
    seconds: dict[str, list[float]] = {name: [] for name in working}
    while not any(seconds.values()) or len(next(iter(seconds.values()))) <= rounds:
        for name, call in working.items():
            if rounds >= 10:
                call()  # short: its weights come back to the caches first, as when it runs alone
            started = clock()
            call()
            seconds[name].append(clock() - started)
        if sum(own[-1] for own in seconds.values()) > 1:
            rounds = min(9, rounds)
    return {name: (statistics.median(own[1:]), min(own[1:]), max(own[1:])) for name, own in seconds.items()}


def predict_peer(job: Job) -> dict[str, Any]:
    """Ten draws of bayesian-torch's network, in the process of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    module = CASES[job.case].build()
    convert_peer(job, module)
    module.to(job.device).eval()
    x = torch.randn(job.batch, *CASES[job.case].shape, device=job.device)
    clock = functools.partial(now, time.process_time if job.processor_time else time.perf_counter, job.device != "cpu")

    def predict() -> Tensor:
        return torch.stack([module(x).softmax(-1) for _ in range(10)]).mean(0)

    with torch.inference_mode():
        median, low, high = in_turns({job.way: predict}, job.interval, clock)[job.way]
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return {"step_s": median, "fastest_s": low, "slowest_s": high, "stored_bytes": file.tell()}


def dense_layouts(dense: nn.Module, images: bool) -> dict[str, nn.Module]:
    """A dense network as torch can lay it out for inference."""
    from torch.fx.experimental.optimization import fuse
    from torch.utils import mkldnn

    plain = {"NCHW": dense, "NCHW, folded": fuse(dense)} if images else {"plain": dense}
    last = {
        name.replace("NCHW", "channels last"): copy.deepcopy(network).to(memory_format=torch.channels_last)
        for name, network in plain.items()
        if images
    }
    if next(dense.parameters()).device.type != "cpu":
        return plain | last
    name = "oneDNN blocks, folded" if images else "oneDNN blocks"
    return plain | last | {name: Blocked(mkldnn.to_mkldnn(copy.deepcopy([*plain.values()][-1])))}


class Blocked(nn.Module):
    """A network in oneDNN's own layout; its inputs and outputs are ordinary tensors."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        outputs: Tensor = self.network(x.to_mkldnn())
        return outputs.to_dense() if outputs.is_mkldnn else outputs


def whole_weights(posterior: Any) -> dict[str, Tensor]:
    """A dense network's values at a posterior's means."""
    from caveat.engine.active import layout_of

    return posterior.state["rest"] | layout_of(posterior.state, posterior.network).whole(
        posterior.state["active"]["mean"]
    )


def module_tables(network: nn.Module) -> int:
    """What native kernels made of a network's patterns."""
    return sum(table_bytes(getattr(m, "pattern", None)) for m in network.modules())


def file_bytes(posterior: Any) -> int:
    """Of a posterior's folder."""
    with tempfile.TemporaryDirectory() as place:
        folder = posterior.save(Path(place) / "posterior")
        return sum(file.stat().st_size for file in folder.iterdir())


# Tables


def print_training(table: list[dict[str, Any]]) -> None:
    """The table of README.md."""
    if not table:
        return
    print(
        "\n| network, batch | | step, ms | dense VI / this | exchanging step, ms | training bytes, MiB "
        "| accounted, MiB | exchanging adds, MiB | kernels' tables, MiB | peak, MB | ran sparse |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for row in table:
        cells = [
            f"{row['case']}, {row['batch']}",
            row["way"] + ", compiled" * row["compiled"],
            number(row["step_s"], 1e3),
            f"**{row['times_faster']:.2f}**",
        ]
        cells += [
            number(row["update_s"], 1e3),
            *(number(row[k], 1 / MIB) for k in ("training_bytes", "accounted_bytes")),
        ]
        cells += [*(number(row[k], 1 / MIB) for k in ("update_bytes", "kernel_bytes")), number(row["peak_bytes"], 1e-6)]
        cells += ["" if math.isnan(row["ran_sparse"]) else f"{row['ran_sparse']:.0%}"]
        print("| " + " | ".join(cells) + (f" | {row['failure']}" if row["failure"] else "") + " |")


def print_inference(table: list[dict[str, Any]]) -> None:
    """The tables of README.md."""
    for part, title in (("inference", "fastest dense / this"), ("prediction", "dense VI / this")):
        if not (rows := [row for row in table if row["part"] == part]):
            continue
        print(f"\n| {part}: network, batch | | ms | {title} | stored, MiB | kernels' tables, MiB |")
        print("|---|---|---|---|---|---|")
        for row in rows:
            cells = [f"{row['case']}, {row['batch']}", row["way"] + ", compiled" * row["compiled"]]
            cells += [number(row["step_s"], 1e3), f"**{row['times_faster']:.2f}**"]
            cells += [number(row.get(key, math.nan), 1 / MIB) for key in ("stored_bytes", "kernel_bytes")]
            print("| " + " | ".join(cells) + " |")


def print_targets(table: list[dict[str, Any]]) -> None:
    """What was to be reached, and what was, on the ResNet."""
    found = {(r["part"], r["way"], r["batch"] if r["part"] == "inference" else r.get("compiled")): r for r in table
             if r["case"] == "resnet18" and (r["part"] == "training" or not r["compiled"])}  # fmt: skip
    cuda = any(row.get("device", "cpu") != "cpu" for row in table)
    wanted = [("training", "SSVI channel 90%", mode, "times_faster", 2.0 if cuda else 3.0) for mode in (False, True)]
    if not cuda:
        wanted += [
            ("training", "SSVI 95%", False, "times_faster", 2.0),
            ("inference", "SSVI 95%", 1, "times_faster", 2.5),
        ]
        wanted += [("inference", "SSVI channel 95%", 1, "times_faster", 3.0)]
        if ("training", "SSVI 95%", False) in found:
            size = found["training", "SSVI 95%", False]["training_bytes"] / MIB
            print(f"\ntraining bytes of SSVI 95%: {size:.1f} MiB, wanted under 20")
    for part, way, mode, key, least in wanted:
        if (row := found.get((part, way, mode))) is not None:
            note = ", compiled" if mode is True else ""
            print(f"{part} of {way}{note}: {row[key]:.2f} times as fast as dense, wanted at least {least}")


def number(value: float, unit: float) -> str:
    """With three digits, or nothing where there is none."""
    if math.isnan(value) or value == 0:
        return ""
    value *= unit
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
