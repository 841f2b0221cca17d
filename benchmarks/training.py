"""How fast the training loop is: rows a second of `MAP` against a hand-written PyTorch loop of the same network.

    python benchmarks/training.py                 # the CPU cases
    OMP_NUM_THREADS=1 python benchmarks/training.py --processor-time --case "mlp 64-32-10"    # where others compute too
    python benchmarks/training.py --device cuda   # ResNet-18 in float32, bfloat16 and compiled

Both do the same arithmetic: forward, backward, SGD with Nesterov momentum, the prior as weight decay. Repeats alternate
between the two; the table gives the best of each and their ratio. On a machine in use only the seconds that a process
itself computes on one thread compare: that is --processor-time, where an epoch is the difference of two fits.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import caveat
from caveat import Training, models


@dataclass(frozen=True)
class Case:
    """A network, the shape of a row, the batch, and how to run it."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int
    batch: int
    training: Training


SGD = Training(epochs=1, optimizer="sgd", learning_rate=1e-3, schedule="constant", warmup=0.0)
FAST = replace(SGD, precision="bfloat16", channels_last=True)
CPU = [
    Case("mlp 64-32-10", lambda: models.mlp(64, 10, hidden=(32,)), (64,), 6400, 64, SGD),
    Case("mlp 784-100-100-10", lambda: models.mlp(784, 10, hidden=(100, 100)), (784,), 12_800, 128, SGD),
    Case("lenet5", lambda: models.lenet5(), (1, 28, 28), 2560, 128, SGD),
    Case("resnet18 width 16", lambda: models.resnet18(width=16), (3, 32, 32), 256, 64, SGD),
]
CUDA = [
    Case("resnet18 float32", lambda: models.resnet18(), (3, 32, 32), 12_800, 128, SGD),
    Case("resnet18 bfloat16 b128", lambda: models.resnet18(), (3, 32, 32), 25_600, 128, FAST),
    Case("resnet18 bfloat16 b512", lambda: models.resnet18(), (3, 32, 32), 51_200, 512, FAST),
    Case("resnet18 compiled b128", lambda: models.resnet18(), (3, 32, 32), 25_600, 128, replace(FAST, compile=True)),
    Case("resnet18 compiled b512", lambda: models.resnet18(), (3, 32, 32), 51_200, 512, replace(FAST, compile=True)),
]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def by_hand(case: Case, x: Tensor, y: Tensor, device: torch.device, processor_time: bool) -> Callable[[int], float]:
    """A plain loop; returns a function that runs epochs and gives the seconds of the last."""
    training = case.training
    module = case.build().to(device).train()
    if training.channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    run = torch.compile(module) if training.compile else module
    optimizer = torch.optim.SGD(module.parameters(), 1e-3, momentum=0.9, nesterov=True, weight_decay=1 / len(x))
    x, y = x.to(device), y.to(device)

    def epochs(count: int) -> float:
        for _ in range(count):
            wait(device)
            clock = time.perf_counter()
            for rows in torch.randperm(len(x), device=device).split(case.batch):
                batch = x[rows]
                if training.channels_last:
                    batch = batch.contiguous(memory_format=torch.channels_last)
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(device.type, torch.bfloat16, enabled=training.precision == "bfloat16"):
                    outputs = run(batch)
                loss = nn.functional.cross_entropy(outputs.float(), y[rows])
                loss.backward()
                optimizer.step()
            wait(device)
        return time.perf_counter() - clock

    def ten_epochs(count: int) -> float:
        clock = time.process_time()
        epochs(10)
        return (time.process_time() - clock) / 10

    return ten_epochs if processor_time else epochs


def by_caveat(case: Case, x: Tensor, y: Tensor, device: torch.device, processor_time: bool) -> Callable[[int], float]:
    """`MAP`; the seconds of an epoch are those of its own history, or the difference of a long and a short fit."""
    data = DataLoader(TensorDataset(x, y), case.batch)
    task = caveat.Task(case.build().to(device), data, caveat.Categorical(), caveat.GaussianPrior(1.0))

    def epochs(count: int) -> float:
        method = caveat.MAP(training=replace(case.training, epochs=count))
        if not processor_time:
            return caveat.fit(task, method, progress=False).info.diagnostics["history"][-1]["seconds"]
        seconds = []
        for length in (count, count + 10):
            clock = time.process_time()
            caveat.fit(task, replace(method, training=replace(case.training, epochs=length)), progress=False)
            seconds.append(time.process_time() - clock)
        return (seconds[1] - seconds[0]) / 10

    return epochs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--case", action="append", help="only this one; may be repeated")
    parser.add_argument("--processor-time", action="store_true", help="the process's own seconds, on one thread")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv", help="also write the table to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.processor_time:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    table = []
    for case in CUDA if device.type == "cuda" else CPU:
        if arguments.case and case.name not in arguments.case:
            continue
        x, y = torch.randn(case.rows, *case.shape), torch.randint(0, 10, (case.rows,))
        how = case, x, y, device, arguments.processor_time
        loops = {"hand": by_hand(*how), "caveat": by_caveat(*how)}
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for _ in range(arguments.repeats):
            for name, loop in loops.items():
                seconds[name].append(loop(2))
        hand, ours = (case.rows / min(seconds[name]) for name in ("hand", "caveat"))
        table.append(
            {
                "case": case.name,
                "hand_rows_s": round(hand),
                "caveat_rows_s": round(ours),
                "ratio": round(ours / hand, 3),
            }
        )
        print(
            f"{case.name:<26} by hand {hand:>10,.0f} rows/s   caveat {ours:>10,.0f} rows/s   ratio {ours / hand:.2f}",
            flush=True,
        )
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:  # noqa: PTH123
            writer = csv.DictWriter(file, table[0].keys())
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    sys.exit(main())
