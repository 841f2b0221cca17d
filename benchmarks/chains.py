"""Chains, ensembles and HMC of ResNet-20-FRN on a GPU, beside bare loops of the same arithmetic in the same run.

    python benchmarks/chains.py --csv chains_cuda.csv        # four minutes on an H200

"Bare" is a hand-written loop: the log likelihood compiled, forward, backward and the Langevin update recorded in one
CUDA graph, chains as parallel branches of it. Rates are chain-images a second, bfloat16 with channels last unless said.
The time that a fit takes to start (compiling, recording) is left out of its rate and given beside it.
"""

import argparse
import csv
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

import caveat
from caveat import SGMCMC, DeepEnsemble, Training, models
from caveat.engine.chains import Coordinates, ParallelChains, PassSettings
from caveat.engine.run import Run

FAST: dict[str, Any] = {"precision": "bfloat16", "channels_last": True, "compile": True}


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Seconds of one call, the best of two runs."""
    best = math.inf
    for _ in range(2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - started) / repeats)
    return best


class Bare:
    """The loops by hand."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y, self.device = x.to("cuda"), y.to("cuda"), torch.device("cuda")
        self.module = models.resnet20_frn().to("cuda").requires_grad_(False).eval()
        self.names = [name for name, _ in self.module.named_parameters()]
        self.shapes = [p.shape for p in self.module.parameters()]
        self.compiled = torch.compile(self.log_likelihood, dynamic=False)

    def log_likelihood(self, weights: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of a batch, in bfloat16."""
        last = torch.channels_last
        weights = [w.contiguous(memory_format=last) if w.ndim == 4 else w for w in weights]
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            given = dict(zip(self.names, weights, strict=True))
            outputs = functional_call(self.module, given, (x.contiguous(memory_format=last),))
        return -torch.nn.functional.cross_entropy(outputs.float(), y, reduction="sum")

    def gradient(self, flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Of the log likelihood at flat weights."""
        parts = flat.split([shape.numel() for shape in self.shapes])
        leaves = [p.view(s).detach().requires_grad_() for p, s in zip(parts, self.shapes, strict=True)]
        found = torch.autograd.grad(self.compiled(leaves, x, y), leaves)
        return torch.cat([g.reshape(-1) for g in found])

    def chains(self, count: int, batch: int) -> float:
        """Chain-images a second of SGHMC."""
        one = torch.cat([p.detach().flatten() for p in self.module.parameters()])
        position = one.repeat(count, 1)
        momentum, rows, steps = torch.zeros_like(position), len(self.x), len(self.x) // batch
        order = torch.randperm(rows, device=self.device)[: steps * batch].view(steps, batch)
        place = torch.zeros(count, 1, dtype=torch.long, device=self.device)
        generators = [torch.Generator("cuda").manual_seed(i) for i in range(count)]
        streams = [torch.cuda.Stream() for _ in range(count)]
        root = math.sqrt(1e-7)

        def step(i: int) -> None:
            chosen = order.index_select(0, place[i])[0]
            gradient = self.gradient(position[i], self.x.index_select(0, chosen), self.y.index_select(0, chosen))
            noise = torch.randn(len(one), device=self.device, generator=generators[i])
            momentum[i].mul_(0.9).add_(gradient * (rows / batch) - 5 * position[i], alpha=root)
            momentum[i].add_(noise, alpha=math.sqrt(0.2))
            position[i].add_(momentum[i], alpha=root)
            place[i].add_(1).remainder_(steps)

        def all_chains() -> None:
            here = torch.cuda.current_stream()
            for i, stream in enumerate(streams):
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    step(i)
            for stream in streams:
                here.wait_stream(stream)

        for _ in range(3):
            all_chains()
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            all_chains()
        return count * batch / timed(graph.replay, max(20, 8000 // (count * batch // 20)))

    def full_gradient(self, piece: int = 1000) -> float:
        """Seconds of the gradient over all rows, in pieces that divide them."""
        flat = torch.cat([p.detach().flatten() for p in self.module.parameters()])
        total = torch.zeros_like(flat)

        def everything() -> None:
            for x, y in zip(self.x.split(piece), self.y.split(piece), strict=True):
                total.add_(self.gradient(flat, x, y))

        with torch.cuda.stream(torch.cuda.Stream()):
            everything()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            everything()
        return timed(graph.replay, 2)


def rates(problem: caveat.Task, method: Callable[[int], caveat.Method], few: int, more: int) -> tuple[float, float]:
    """Seconds of one epoch, and of what is not epochs, from two fits of different length."""
    seconds, together = [], []
    for epochs in (few, few, more):  # the first one compiles
        started = time.perf_counter()
        posterior = caveat.fit(problem, method(epochs), device="cuda", progress=False)
        together.append(posterior.info.diagnostics.get("chains_at_a_time"))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    print(f"seconds of fits of {few}, {few} and {more} epochs: {seconds}; at a time: {together}", flush=True)
    epoch = (seconds[2] - seconds[1]) / (more - few)
    return epoch, seconds[0] - few * epoch


def main() -> None:
    """Measure every row and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--only", nargs="*", default=["sgmcmc", "ensemble", "hmc"])
    parser.add_argument("--csv", type=Path)
    a = parser.parse_args()
    torch.manual_seed(0)
    x, y = torch.randn(a.rows, 3, 32, 32), torch.randint(10, (a.rows,))
    problem = caveat.Task(models.resnet20_frn(), (x, y), caveat.Categorical(), caveat.GaussianPrior(5.0))
    bare, table = Bare(x, y), []

    def say(work: str, here: float, floor: float, unit: str, start: float) -> None:
        share = here / floor if unit == "images/s" else floor / here
        row = {
            "work": work,
            "here": f"{here:.4g}",
            "bare": f"{floor:.4g}",
            "unit": unit,
            "of the bare loop": f"{share:.2f}",
        }
        table.append(row | {"seconds to start": f"{start:.0f}"})
        print("  ".join(f"{k} {v}" for k, v in table[-1].items()), flush=True)

    for batch, chains in ((80, 8), (500, 4)) if "sgmcmc" in a.only else ():
        floor = bare.chains(chains, batch)

        def method(epochs: int, batch: int = batch, chains: int = chains) -> SGMCMC:
            return SGMCMC(
                chains=chains, length=1, thin=1, burn_in=epochs - 1, learning_rate=1e-5, batch_size=batch, **FAST
            )

        epoch, start = rates(problem, method, 1, 3)
        say(f"SG-MCMC, batches of {batch}, {chains} chains", chains * a.rows / epoch, floor, "images/s", start)
    if "ensemble" in a.only:
        found = {}
        for members in (1, 5):

            def ensemble(epochs: int, members: int = members) -> DeepEnsemble:
                return DeepEnsemble(members=members, training=Training(epochs=epochs, batch_size=500, **FAST))

            found[members] = rates(problem, ensemble, 1, 4)
        say("an epoch of 5 members, beside one member's", found[5][0], found[1][0], "s", found[5][1])
    if "hmc" in a.only:
        started = time.perf_counter()
        run = Run(0, torch.device("cuda"))
        network = problem.network.to("cuda")
        coordinates = Coordinates.of(network, problem.hyper)
        with ParallelChains(problem, run, 1, coordinates, settings=PassSettings(**FAST)) as alone:
            position = coordinates.at(network.params())[None]
            alone.gradient(alone.log_posteriors[0][1], position)
            start = time.perf_counter() - started
            here = timed(lambda: alone.gradient(alone.log_posteriors[0][1], position), 2)
            say(f"HMC, gradient of {a.rows:,} rows", here, bare.full_gradient(), "s", start)
    if a.csv is not None:
        with a.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, table[0])
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
