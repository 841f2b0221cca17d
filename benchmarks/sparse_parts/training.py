"""Training: a step is forward, backward and optimiser, timed inside the library's own loop; the batch is there already.

SGD with momentum moves means, Adam log standard deviations, on every side. Every `interval`-th step exchanges weights
and is timed apart; the table charges it to the step at the default of one in 100. Bytes are those of the tensors that
are there between the way back and the optimiser's end, each storage once: values, gradients, moments, places, buffers
("training bytes", beside what the accounting says), and the tables that native kernels make of the places. Peaks are of
the process, above what it held with network and data. Each measurement is a process of its own; repeats alternate, the
table has medians. On a GPU a step is in bfloat16 (autocast) with channels last, on every side.
"""

import argparse
import importlib
import math
import statistics
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import caveat
from caveat.engine.training import loop as training_loop

from . import peer
from .cases import CASES, PEERS, method_of
from .job import Job, measure
from .sizes import resident_bytes, storage_bytes, table_bytes
from .tables import Table
from .watch import Watch

DEFAULT_INTERVAL = 100  # steps from one exchange to the next, of SSVI and RigL


def compare_training(arguments: argparse.Namespace, case: str, table: Table) -> None:
    """A row for every way to train a network; repeats alternate."""
    cuda = arguments.device != "cpu"
    modes = {"eager": (False,), "compiled": (True,), "both": (False, True)}[arguments.mode if cuda else "eager"]
    batch = arguments.batch or (512 if cuda else CASES[case].batch)
    size = batch, arguments.device, arguments.threads, arguments.interval or (20 if cuda else 5), arguments.blocks
    jobs = [Job(case, way, *size, arguments.processor_time, compiled) for compiled in modes
            for way in arguments.way if not (compiled and way in PEERS)]  # fmt: skip
    measured: dict[Job, list[dict[str, Any]]] = {job: [] for job in jobs}
    for _ in range(arguments.repeats or (1 if cuda else 3)):
        for job in jobs:
            measured[job].append(measure(job, arguments.peer, arguments.limit))
            rows = [summary(job, results) for job, results in measured.items() if results]
            for row in rows:
                dense = [r["step_s"] for r in rows if r["way"] == "dense VI" and r["compiled"] == row["compiled"]]
                row["times_faster"] = dense[0] / row["step_s"] if dense else math.nan
            table.keep(rows)


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
    if job.way in PEERS:
        peer.library()
    held = resident_bytes(job.device)
    if job.device != "cpu":  # where the loop brings the rows
        held += storage_bytes([x, y])
    return (peer.train if job.way in PEERS else train_ours)(job, module, x, y, Watch(job, held))


def train_ours(job: Job, module: nn.Module, x: Tensor, y: Tensor, watch: Watch) -> dict[str, Any]:
    """The library's own loop, watched; all of training in one epoch."""
    loop: Any = training_loop.Loop
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
    training = caveat.Training(epochs=1, batch_size=job.batch, optimizer="sgd", learning_rate=1e-3)
    if job.device != "cpu":
        training = replace(training, precision="bfloat16", channels_last=True, compile=job.compiled)
    method = method_of(job.way, training)
    if job.way not in ("deterministic", "dense VI"):
        method = replace(method, interval=job.interval, stop=1.0)
    task = caveat.Task(module, (x, y), caveat.Categorical(), caveat.GaussianPrior(1.0))
    posterior = caveat.fit(task, method, device=job.device, progress=False)
    diagnostics = posterior.info.diagnostics
    found = watch.found(exchanges=diagnostics.get("exchanges", 0) > 0)
    if "account" in diagnostics:
        found["accounted_bytes"] = diagnostics["account"]["total"]["training_bytes"]
        found["update_bytes"] = diagnostics["account"]["update_bytes"]
    return found | {"ran_sparse": diagnostics.get("ran_sparse")}


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
