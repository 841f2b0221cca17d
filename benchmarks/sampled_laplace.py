"""How fast products with a network's Jacobian and its transpose are, K vectors at once.

    python benchmarks/sampled_laplace.py                       # on a CPU
    python benchmarks/sampled_laplace.py --device cuda         # on a GPU, in bfloat16 and in TF32

A pass is M z = sum_i J_i^T B_i J_i z over all rows, for K vectors z: the forward pass of a row, F operations, shared by
all, and four times F for each vector. The floor is that many operations at the rate of a large product of matrices of
the same type, measured in the same run. `naive` is torch.vmap over torch.func.jvp, then over torch.func.vjp, in batches
of 16 rows on a CPU and of 250 on a GPU. Of large data a part is timed, and the table gives the time for all rows in
proportion. Times are the least of three.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import caveat
from caveat import models
from caveat.engine.cost import forward_flops, peak_bytes, reset_peak
from caveat.engine.linear_model import LinearModel
from caveat.engine.network_features import NetworkBlock, NetworkFeatures
from caveat.network import Network
from caveat.rows import Rows

VECTORS = (1, 8, 64)


def lenet_small() -> nn.Module:
    """14,597 weights for 28 x 28 grey images."""
    convolutions = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(256, 45), nn.ReLU(), nn.Linear(45, 10))


@dataclass(frozen=True)
class Case:
    """A network, its rows, and how many of them are timed."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int
    timed: dict[str, int]  # by device


CASES = {
    "lenet small": Case(lenet_small, (1, 28, 28), 10_000, {"cpu": 2048, "cuda": 8192}),
    "resnet18 width 16": Case(lambda: models.resnet18(width=16), (3, 32, 32), 50_000, {"cpu": 64, "cuda": 2048}),
    "resnet18": Case(lambda: models.resnet18(), (3, 32, 32), 50_000, {"cpu": 16, "cuda": 2048}),
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
    module = case.make()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d) and layer.running_mean is not None and layer.running_var is not None:
            layer.running_mean.normal_(0, 0.1)
            layer.running_var.uniform_(0.5, 2)
    x, y = torch.randn(rows, *case.shape), torch.randint(10, (rows,))
    return Network(module, caveat.Categorical()).to(device), Rows((x, y)).on(device)


def naive_pass(network: Network, rows: Rows, z: Tensor, size: int, bfloat16: bool) -> Tensor:
    """The same product by torch.func."""
    params, total = network.params(), torch.zeros_like(z)
    sizes = [value.numel() for value in params.values()]

    def outputs(own: dict[str, Tensor], x: Tensor) -> Tensor:
        with torch.autocast(z.device.type, torch.bfloat16, enabled=bfloat16):
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


def passes(name: str, device: torch.device, bfloat16: bool, vectors: tuple[int, ...], naive: bool) -> list[dict]:
    """Seconds of a pass, ours and by torch.func."""
    case, kind = CASES[name], device.type
    timed = case.timed[kind]
    network, rows = problem(case, timed, device)
    rate = matrix_rate(device, torch.bfloat16 if bfloat16 else torch.float32, kind == "cuda")
    x = next(rows.batches([torch.arange(8)], device))[0]
    flops = forward_flops(network, network.params(), x) / 8
    features = NetworkFeatures(network, network.params(), rows, bfloat16=bfloat16)
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
            "network": name, "device": kind, "type": "bfloat16" if bfloat16 else single,
            "vectors": k, "rows": case.rows, "timed rows": timed, "block": features.block_rows,
            "seconds": round(ours, 3), "floor": round(floor, 3), "share": round(floor / ours, 3),
            "rate": f"{floor / ours * rate / 1e12:.3g} TFLOP/s", "matrix rate": f"{rate / 1e12:.3g} TFLOP/s",
            "peak MB": peak_bytes(device) // 10**6, "naive": "",
        }  # fmt: skip
        if naive and k <= 8:
            took = seconds(lambda z=z: naive_pass(network, part, z, size, bfloat16), device, 1)  # type: ignore[misc]
            row["naive"] = round(took * case.rows / len(part), 3)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        found.append(row)
    return found


def main() -> None:
    """Print a line for each measurement, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--vectors", type=int, action="append")
    parser.add_argument("--no-naive", action="store_true")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = []
    for bfloat16 in (True, False) if device.type == "cuda" else (False,):
        for name in arguments.case or CASES:
            rows += passes(name, device, bfloat16, tuple(arguments.vectors or VECTORS), not arguments.no_naive)
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
