"""How fast HMC is: gradients and effective samples a second against BlackJAX, NumPyro and Pyro on the same targets.

    python benchmarks/hmc.py                                     # our side alone
    python benchmarks/hmc.py --peers mcmc/bin/python             # all four: about half an hour on two CPU cores
    python benchmarks/hmc.py --peers ... --case lenet --chains 4 --csv benchmarks/hmc.csv
    python benchmarks/hmc.py --peers ... --processor-time        # on a machine that others use as well

The peers live in an environment of their own:

    python3.11 -m venv mcmc
    mcmc/bin/pip install "jax[cpu]==0.10.2" blackjax==1.7.1 numpyro==0.22.0 pyro-ppl==1.9.2 torch==2.13.0 numpy

Everyone gets the same rows, log density (checked first at the same weights: value and gradient against float64), step
size and number of leapfrog steps, an identity mass and no adaptation, in float32. Peers share their chains' first
weights, ours draw their own. A gradient is one over all rows for one
chain; set-up and compilation are not counted. Effective samples are the median bulk size over the class probabilities
of 100 test rows, after as many draws that are thrown away. Every measurement is a process of its own, and memory its
peak. Peers run as fast as they can be made to: in whichever of their modes is fastest (chains batched, one after the
other, over two XLA devices; traced or not; in processes), which is found first. Repeats alternate, the table has
medians. Threads of several programs on one core wait for each other, so on a machine in use only the seconds that a
process itself computes on one thread compare: that is --processor-time.
"""

import argparse
import csv
import dataclasses
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
TEST_ROWS = 100
LINEAR = {"digits": ("1", "3"), "mlp": ("1", "3", "5"), "lenet": ("7", "9", "11")}  # names of the linear layers


@dataclass(frozen=True)
class Case:
    """A target and how to move on it; the step size is in units of the weights."""

    title: str
    prior_variance: float
    step_size: float
    leapfrogs: int
    draws: int
    burn_in: int = 0


CASES = {
    "digits": Case("MLP 64-32-10, 1,438 rows", 0.1, 0.015, 34, draws=100, burn_in=100),
    "mlp": Case("MLP 784-100-100-10, 10,000 rows", 0.1, 1e-4, 10, draws=3),
    "lenet": Case("LeNet, 2,000 colour images", 0.1, 1e-4, 5, draws=2),
}
MODES = {  # by sampler and whether there are several chains; the first is tried where nothing else is said
    ("caveat", False): ("",),
    ("caveat", True): ("",),
    ("blackjax", False): ("map",),
    ("blackjax", True): ("vmap", "map", "vmap on 2 devices", "map on 2 devices"),
    ("numpyro", False): ("map",),
    ("numpyro", True): ("vmap", "map", "vmap on 2 devices", "map on 2 devices"),
    ("pyro", False): ("traced", "eager", "traced on a thread", "eager on a thread"),
    ("pyro", True): ("traced", "eager", "traced in processes", "eager in processes"),
}


@dataclass(frozen=True)
class Job:
    """One measurement: what a process of its own is asked for."""

    case: str
    sampler: str
    mode: str
    chains: int
    draws: int
    burn_in: int
    threads: int
    processor_time: bool
    folder: str  # of the rows and first weights
    only_density: bool = False


@dataclass
class Measured:
    """What came of a job; what did not come is zero or infinite."""

    gradients_a_second: float = 0.0
    samples_a_second: float = 0.0
    bytes: float = math.inf
    acceptance: float = math.nan
    failure: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="python of an environment with BlackJAX, NumPyro and Pyro")
    parser.add_argument("--case", choices=CASES, action="append", help="only this target; may be repeated")
    parser.add_argument("--chains", type=int, action="append", help="1 and 4 unless given; may be repeated")
    parser.add_argument("--peer", choices=("blackjax", "numpyro", "pyro"), action="append", help="only this one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="the process's own seconds, on one thread")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that one measurement may take")
    parser.add_argument("--csv", help="also write the table to this file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        return work(Job(**json.loads(arguments.job)))
    threads = 1 if arguments.processor_time else arguments.threads
    print(f"{threads} threads, load {os.getloadavg()[0]:.1f} at the start")
    table: list[dict[str, Any]] = []
    for case in arguments.case or CASES:
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(case, Path(folder))
            how = threads, arguments.processor_time, arguments.limit
            run = Runner(case, folder, arguments.peers, *how, arguments.peer or ("blackjax", "numpyro", "pyro"))
            run.compare_densities()
            for chains in arguments.chains or (1, 4):
                table += run.compare_speed(chains, arguments.repeats)
    print_markdown(table)
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:  # noqa: PTH123
            writer = csv.DictWriter(file, table[0].keys())
            writer.writeheader()
            writer.writerows(table)


def write_inputs(case: str, folder: Path) -> None:
    """Rows and each chain's first weights, for everyone to read; digits are real, the other rows drawn at random."""
    import torch

    from caveat.data import load

    torch.manual_seed(0)
    if case == "digits":
        data = load("digits")
        (x, y), (x_test, _) = data.train.tensors, data.test.tensors
    else:
        x = torch.randn(10_000, 784) if case == "mlp" else torch.randn(2000, 3, 32, 32)
        x_test = x[:TEST_ROWS]
        with torch.no_grad():
            y = network(case)(x).argmax(1)
    starts = [network(case).state_dict() for _ in range(4)]
    weights = {f"start/{name}": np.stack([start[name].numpy() for start in starts]) for name in starts[0]}
    rows = {"x": x.numpy(), "y": y.numpy(), "x_test": x_test[:TEST_ROWS].numpy()}
    np.savez(folder / "inputs.npz", **rows, **weights)


def network(case: str) -> Any:
    """The PyTorch module."""
    from torch import nn

    from caveat import models

    if case == "lenet":
        return models.lenet5(3, 10, 32)
    return models.mlp(64, 10, (32,), nn.SiLU) if case == "digits" else models.mlp(784, 10, (100, 100))


@dataclass
class Runner:
    """Starts the measurements of one target and puts them side by side."""

    case: str
    folder: str
    python: str | None  # with the peers
    threads: int
    processor_time: bool
    limit: float
    peers: Sequence[str]

    def samplers(self) -> tuple[str, ...]:
        """All there are, ours last."""
        return (*self.peers, "caveat") if self.python else ("caveat",)

    def job(self, sampler: str, chains: int, mode: str) -> Job:
        """A full measurement."""
        case = CASES[self.case]
        how = self.threads, self.processor_time, self.folder
        return Job(self.case, sampler, mode, chains, case.draws, case.burn_in, *how)

    def compare_densities(self) -> None:
        """Print how far everyone's log density and gradient at the first weights are from float64's."""
        expected, gradient = exact_density(self.case, Path(self.folder))
        largest = max(float(np.abs(g).max()) for g in gradient.values())
        for sampler in self.samplers():
            job = dataclasses.replace(self.job(sampler, 1, MODES[sampler, False][0]), only_density=True)
            if (failure := self.start(job)[1]) is not None:
                print(f"{self.case} {sampler}: no log density: {failure}")
                continue
            with np.load(Path(self.folder) / f"density-{sampler}.npz") as found:
                value = abs(float(found["value"]) - expected) / abs(expected)
                worst = max(float(np.abs(found[name] - g).max()) for name, g in gradient.items()) / largest
            print(f"{self.case} {sampler}: log density off by {value:.0e}, gradient by {worst:.0e}, of {expected:.2f}")

    def compare_speed(self, chains: int, repeats: int) -> list[dict[str, Any]]:
        """A row of the table for every sampler."""
        jobs = {sampler: self.fastest(sampler, chains) for sampler in self.samplers()}
        measured: dict[str, list[Measured]] = {sampler: [] for sampler in jobs}
        for _ in range(repeats):
            for sampler, job in jobs.items():
                measured[sampler].append(self.measure(job))
        table = []
        for sampler, results in measured.items():
            row: dict[str, Any] = {"case": self.case, "chains": chains, "sampler": sampler, "mode": jobs[sampler].mode}
            for key in ("gradients_a_second", "samples_a_second", "bytes", "acceptance"):
                row[key] = statistics.median(getattr(result, key) for result in results)
            row["slowest"] = min(result.gradients_a_second for result in results)
            row["fastest"] = max(result.gradients_a_second for result in results)
            table.append(row | {"failure": next((result.failure for result in results if result.failure), "")})
        return table

    def fastest(self, sampler: str, chains: int) -> Job:
        """The job in the sampler's fastest mode, tried with a few draws."""
        modes = MODES[sampler, chains > 1]
        if self.threads == 1:
            modes = tuple(mode for mode in modes if not mode.endswith(("devices", "processes", "a thread")))
        jobs = [self.job(sampler, chains, mode) for mode in modes]
        if len(jobs) == 1:
            return jobs[0]
        few = max(1, CASES[self.case].draws // 8)
        tried = [self.measure(dataclasses.replace(job, draws=few, burn_in=0)) for job in jobs]
        return jobs[max(range(len(jobs)), key=lambda i: tried[i].gradients_a_second)]

    def measure(self, job: Job) -> Measured:
        """Run a job and say what came of it."""
        found, failure = self.start(job)
        result = Measured(failure=failure or "", **found)
        if job.burn_in and not failure:
            gradients = job.chains * job.draws * CASES[job.case].leapfrogs
            result.samples_a_second = effective_samples(job) * result.gradients_a_second / gradients
        print(
            f"{job.case:<7} {job.chains} chains {job.sampler:<9} {job.mode:<20} "
            f"{result.gradients_a_second:9.2f} gradients/s  {result.samples_a_second:7.2f} samples/s  "
            f"{result.bytes / 1e6:6.0f} MB  acceptance {result.acceptance:.2f}  load {os.getloadavg()[0]:.1f}  "
            f"{result.failure}",
            flush=True,
        )
        return result

    def start(self, job: Job) -> tuple[dict[str, float], str | None]:
        """Run a job in a new process: what it printed, and why it failed if it did.

        -P keeps this folder off the path: scripts in it have the names of packages.
        """
        python = sys.executable if job.sampler == "caveat" else str(self.python)
        command = [python, "-P", __file__, "--job", json.dumps(dataclasses.asdict(job))]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        environment["OMP_NUM_THREADS"] = str(job.threads)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=self.limit, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            return {}, "over the time limit"
        if done.returncode:
            return {}, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]  # a library may print as well
        return json.loads(lines[-1]) if lines else {}, None


def exact_density(case: str, folder: Path) -> tuple[float, Arrays]:
    """Log density and gradient at the first chain's first weights, in float64."""
    import torch

    rows, starts = read_inputs(folder)
    params = {name: torch.from_numpy(start[0]).double().requires_grad_() for name, start in starts.items()}
    value = torch_log_density(case, params, torch.from_numpy(rows["x"]).double(), torch.from_numpy(rows["y"]))
    gradients = torch.autograd.grad(value, [*params.values()])
    return value.item(), {name: gradient.numpy() for name, gradient in zip(params, gradients, strict=True)}


def torch_log_density(case: str, params: dict[str, Any], x: Any, y: Any) -> Any:
    """Log likelihood plus log prior."""
    from torch.nn import functional

    variance = CASES[case].prior_variance
    likelihood = -functional.cross_entropy(torch_forward(case, params, x), y, reduction="sum")
    squares = sum(weight.square().sum() for weight in params.values())
    count = sum(weight.numel() for weight in params.values())
    return likelihood - 0.5 * (squares / variance + count * math.log(2 * math.pi * variance))


def torch_forward(case: str, params: dict[str, Any], x: Any) -> Any:
    """The networks of `network`, as functions that torch.jit can trace."""
    from torch.nn import functional

    if case == "lenet":
        for name, padding in (("0", 2), ("3", 0)):
            x = functional.conv2d(x, params[f"{name}.weight"], params[f"{name}.bias"], padding=padding)
            x = functional.max_pool2d(functional.relu(x), 2)
    x, activation = x.flatten(1), functional.silu if case == "digits" else functional.relu
    for i, name in enumerate(LINEAR[case]):
        x = functional.linear(x if i == 0 else activation(x), params[f"{name}.weight"], params[f"{name}.bias"])
    return x


def effective_samples(job: Job) -> float:
    """The median over class probabilities of their bulk effective sample size, from the weights that a job left."""
    import torch

    from caveat.engine.chains.diagnostics import effective_sample_size

    rows, _ = read_inputs(Path(job.folder))
    x = torch.from_numpy(rows["x_test"])
    with np.load(Path(job.folder) / f"draws-{job.sampler}.npz") as found:
        params = {name: torch.from_numpy(found[name]).flatten(0, 1) for name in found}
    with torch.no_grad():
        outputs = torch.vmap(lambda draw: torch_forward(job.case, draw, x))(params)
    probabilities = outputs.softmax(-1).reshape(job.chains, job.draws, -1)
    return float(effective_sample_size(probabilities)[0].median())


def read_inputs(folder: Path) -> tuple[Arrays, Arrays]:
    """Rows, and first weights [chains, ...]."""
    with np.load(folder / "inputs.npz") as found:
        arrays = dict(found)
    starts = {name.removeprefix("start/"): arrays.pop(name) for name in list(arrays) if name.startswith("start/")}
    return arrays, starts


def work(job: Job) -> None:
    """In the process of its own: one sampler, and a line of json."""
    warnings.simplefilter("ignore")
    if hasattr(os, "sched_setaffinity"):  # XLA takes every core it is allowed
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: job.threads])
    folder = Path(job.folder)
    rows, starts = read_inputs(folder)
    side = {"caveat": Caveat, "blackjax": BlackJAX, "numpyro": NumPyro, "pyro": Pyro}[job.sampler](job, rows, starts)
    if job.only_density:
        value, gradient = side.density()
        np.savez(folder / f"density-{job.sampler}.npz", value=value, **gradient)
        return
    rate, draws = side.sample()
    if job.burn_in:
        np.savez(folder / f"draws-{job.sampler}.npz", **draws)
    status = Path("/proc/self/status").read_text().split()
    own = int(status[status.index("VmHWM:") + 1])  # getrusage would count the parent's, from before this program began
    workers = job.chains * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss if "processes" in job.mode else 0
    some = next(iter(draws.values())).reshape(job.chains, job.draws, -1)
    moved = float((some[:, 1:] != some[:, :-1]).any(-1).mean()) if job.draws > 1 else math.nan
    result = {"gradients_a_second": rate, "bytes": 1024.0 * (own + workers), "acceptance": moved}
    print(json.dumps(result))


def seconds(job: Job) -> float:
    """The clock."""
    return time.process_time() if job.processor_time else time.perf_counter()


Sampled = tuple[float, Arrays]  # gradients a second, and weights [chains, draws, ...]


class Caveat:
    """Ours, through `caveat.fit`, with its own choice of pieces and threads; it draws its chains' first weights."""

    def __init__(self, job: Job, rows: Arrays, starts: Arrays) -> None:
        import torch

        import caveat

        self.job, self.case, self.starts = job, CASES[job.case], starts
        data = torch.from_numpy(rows["x"]), torch.from_numpy(rows["y"])
        prior = caveat.GaussianPrior(1 / self.case.prior_variance)
        self.task = caveat.Task(network(job.case), data, caveat.Categorical(), prior)

    def density(self) -> tuple[float, Arrays]:
        """Log density and gradient at the first weights."""
        import torch

        from caveat.engine.chains import Coordinates, LogPosterior
        from caveat.engine.chains.log_posterior import RowPieces

        coordinates = Coordinates.of(self.task.network, self.task.hyper)
        log_posterior = LogPosterior(self.task.network, coordinates, 1, self.task.hyper)
        start = {name: torch.from_numpy(start[0]) for name, start in self.starts.items()}
        position = coordinates.at(start).unsqueeze(0)
        likelihood, gradient = log_posterior.gradient(position, RowPieces(self.task.train, self.task.network).part())
        scale = math.sqrt(self.case.prior_variance)  # positions are weights over it
        found = {name: value.numpy() / scale for name, value in coordinates.split(gradient[0]).items()}
        return float(likelihood + log_posterior.log_prior(position)), found

    def sample(self) -> Sampled:
        """Draw, and measure it."""
        warm, draws, chains = self.job.burn_in, self.job.draws, self.job.chains
        self.timed(0, 1)  # torch's first calls
        (short, _), (long, posterior) = self.timed(0, 1), self.timed(warm, draws + 1)
        gradients = chains * (warm + draws) * self.case.leapfrogs
        found = {name: value[:, 1:].numpy() for name, value in posterior.state["params"].items()}
        return gradients / (long - short), found

    def timed(self, warmup: int, length: int) -> tuple[float, Any]:
        """Seconds of a fit, and its posterior."""
        import caveat

        scale = math.sqrt(self.case.prior_variance)  # the method's steps are in units of it
        step = self.case.step_size / scale
        method = caveat.HMC(
            chains=self.job.chains,
            length=length,
            warmup=warmup,
            step_size=step,
            trajectory=step * (self.case.leapfrogs - 0.5),  # rounded up to whole steps
        )
        begin = seconds(self.job)
        posterior = caveat.fit(self.task, method, progress=False)
        return seconds(self.job) - begin, posterior


class BlackJAX:
    """All draws of a chain in one compiled scan; several chains batched or in turn, on one XLA device or on two."""

    def __init__(self, job: Job, rows: Arrays, starts: Arrays) -> None:
        devices = 2 if "2 devices" in job.mode else 1
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        import jax

        self.jax, self.job, self.case, self.devices = jax, job, CASES[job.case], devices
        self.starts = {name: start[: job.chains] for name, start in starts.items()}
        x = rows["x"].transpose(0, 2, 3, 1) if job.case == "lenet" else rows["x"].reshape(len(rows["x"]), -1)
        self.x, self.y = jax.numpy.asarray(x), jax.numpy.asarray(rows["y"])

    def log_density(self, params: Any, x: Any, y: Any) -> Any:
        """Log likelihood plus log prior."""
        jnp, variance = self.jax.numpy, self.case.prior_variance
        logs = self.jax.nn.log_softmax(jax_forward(self.job.case, params, x))
        squares = sum((weight**2).sum() for weight in params.values())
        constant = sum(weight.size for weight in params.values()) * math.log(2 * math.pi * variance)
        return jnp.take_along_axis(logs, y[:, None], 1).sum() - 0.5 * (squares / variance + constant)

    def density(self) -> tuple[float, Arrays]:
        """Log density and gradient at the first weights."""
        import blackjax

        start = {name: self.jax.numpy.asarray(start[0]) for name, start in self.starts.items()}
        state = blackjax.hmc.init(start, lambda params: self.log_density(params, self.x, self.y))
        return float(state.logdensity), {name: np.asarray(g) for name, g in state.logdensity_grad.items()}

    def chain(self, key: Any, start: Any, x: Any, y: Any) -> Any:
        """Weights of the draws of one chain."""
        import blackjax

        mass = self.jax.numpy.ones(sum(weight.size for weight in start.values()))
        leapfrogs = self.case.leapfrogs
        sampler = blackjax.hmc(lambda params: self.log_density(params, x, y), self.case.step_size, mass, leapfrogs)

        def step(state: Any, key: Any) -> Any:
            state, _ = sampler.step(key, state)
            return state, state.position

        return self.jax.lax.scan(step, sampler.init(start), self.jax.random.split(key, self.job.draws))[1]

    def sample(self) -> Sampled:
        """Draw, and measure it."""
        jax, devices = self.jax, self.devices
        if self.job.mode.startswith("vmap"):
            chains: Callable[..., Any] = jax.vmap(self.chain, (0, 0, None, None))
        else:
            chains = lambda keys, starts, x, y: jax.lax.map(lambda pair: self.chain(*pair, x, y), (keys, starts))  # noqa: E731
        keys, starts = jax.random.split(jax.random.key(0), self.job.chains), self.starts
        if devices > 1:
            chains = jax.pmap(chains, in_axes=(0, 0, None, None))
            keys, starts = jax.tree.map(lambda a: a.reshape(devices, -1, *a.shape[1:]), (keys, starts))
        else:
            chains = jax.jit(chains)
        chains = chains.lower(keys, starts, self.x, self.y).compile()  # type: ignore[attr-defined]
        if self.job.burn_in:
            draws = jax.block_until_ready(chains(keys, starts, self.x, self.y))
            axis = 1 if devices == 1 else 2
            starts = {name: np.asarray(values).take(-1, axis) for name, values in draws.items()}
        begin = seconds(self.job)
        draws = jax.block_until_ready(chains(keys, starts, self.x, self.y))
        taken = seconds(self.job) - begin
        shape = self.job.chains, self.job.draws
        found = {name: np.asarray(w).reshape(*shape, *self.starts[name].shape[1:]) for name, w in draws.items()}
        return math.prod(shape) * self.case.leapfrogs / taken, found


class NumPyro(BlackJAX):
    """The same log density and ways to run chains, with NumPyro's kernel and loop within."""

    def kernel(self, x: Any, y: Any) -> Any:
        """Static HMC."""
        from numpyro.infer import HMC

        return HMC(
            potential_fn=lambda params: -self.log_density(params, x, y),
            step_size=self.case.step_size,
            num_steps=self.case.leapfrogs,
            trajectory_length=None,
            adapt_step_size=False,
            adapt_mass_matrix=False,
        )

    def density(self) -> tuple[float, Arrays]:
        """Log density and gradient at the first weights."""
        start = {name: self.jax.numpy.asarray(start[0]) for name, start in self.starts.items()}
        state = self.kernel(self.x, self.y).init(self.jax.random.key(0), 0, start, (), {})
        return -float(state.potential_energy), {name: -np.asarray(g) for name, g in state.z_grad.items()}

    def chain(self, key: Any, start: Any, x: Any, y: Any) -> Any:
        """Weights of the draws of one chain."""
        from numpyro.infer import MCMC

        run = MCMC(self.kernel(x, y), num_warmup=0, num_samples=self.job.draws, progress_bar=False)
        run.run(key, init_params=start)
        return run.get_samples()


def jax_forward(case: str, params: dict[str, Any], x: Any) -> Any:
    """The networks of `network` in JAX.

    XLA's convolutions were far slower on a CPU inside a loop, such as a trajectory is: hence patches and a matrix.
    """
    import jax
    from jax import numpy as jnp

    def convolve(x: Any, name: str, padding: int) -> Any:
        weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]  # (out, in, 5, 5)
        x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
        side = x.shape[1] - 4
        patches = jnp.concatenate([x[:, i : i + side, j : j + side] for i in range(5) for j in range(5)], -1)
        x = jax.nn.relu(patches @ weight.transpose(2, 3, 1, 0).reshape(-1, len(weight)) + bias)
        return x.reshape(len(x), side // 2, 2, side // 2, 2, -1).max((2, 4))

    if case == "lenet":
        x = convolve(convolve(x, "0", 2), "3", 0)  # (B, 6, 6, 16)
        x = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    activation = jax.nn.silu if case == "digits" else jax.nn.relu
    for i, name in enumerate(LINEAR[case]):
        x = (x if i == 0 else activation(x)) @ params[f"{name}.weight"].T + params[f"{name}.bias"]
    return x


class Pyro:
    """Chains one after the other, or each in a process with a thread; the density traced by torch.jit or not."""

    def __init__(self, job: Job, rows: Arrays, starts: Arrays) -> None:
        import torch

        self.job, self.case = job, CASES[job.case]
        self.starts = {name: torch.from_numpy(start) for name, start in starts.items()}
        self.potential = Potential(job)

    def density(self) -> tuple[float, Arrays]:
        """Log density and gradient at the first weights."""
        from pyro.ops.integrator import potential_grad

        start = {name: value[0].clone() for name, value in self.starts.items()}
        gradient, potential = potential_grad(self.potential, start)
        return -float(potential), {name: -g.numpy() for name, g in gradient.items()}

    def sample(self) -> Sampled:
        """Draw, and measure it."""
        job = self.job
        self.timed(0, 1)  # tracing, and torch's first calls
        (short, _), (long, draws) = self.timed(0, 1), self.timed(job.burn_in, job.draws + 1)
        gradients = job.chains * (job.burn_in + job.draws) * self.case.leapfrogs
        return gradients / (long - short), {name: value[:, 1:].numpy() for name, value in draws.items()}

    def timed(self, burn_in: int, draws: int) -> tuple[float, Any]:
        """Seconds of the whole, and weights [chains, draws, ...]."""
        import torch
        from pyro.infer import HMC, MCMC

        together = self.job.chains if "processes" in self.job.mode else 1
        begin, found = seconds(self.job), []
        for chain in range(0, self.job.chains, together):
            start = {name: value[chain : chain + together].clone() for name, value in self.starts.items()}
            kernel = HMC(
                potential_fn=self.potential,
                step_size=self.case.step_size,
                trajectory_length=self.case.step_size * (self.case.leapfrogs + 0.5),  # rounded down to whole steps
                adapt_step_size=False,
                adapt_mass_matrix=False,
            )
            run = MCMC(
                kernel,
                draws,
                burn_in,
                start if together > 1 else {name: value[0] for name, value in start.items()},
                num_chains=together,
                mp_context="spawn" if together > 1 else None,
                disable_progbar=True,
            )
            run.run()
            found.append(run.get_samples(group_by_chain=True))
        return seconds(self.job) - begin, {name: torch.cat([f[name] for f in found]) for name in found[0]}


class Potential:
    """Minus the log density, as Pyro wants it; it can be sent to another process, which then reads the rows itself."""

    def __init__(self, job: Job) -> None:
        self.job, self.function = job, None

    def __getstate__(self) -> dict[str, Any]:
        return {"job": self.job, "function": None}

    def __call__(self, params: dict[str, Any]) -> Any:
        """Trace at the first call, where that is wanted."""
        if self.function is None:
            self.function = self.build(params)
        return self.function(*(params[name] for name in sorted(params)))

    def build(self, params: dict[str, Any]) -> Any:
        """A function of the weights in the order of their names."""
        import torch

        if self.job.mode.endswith(("processes", "a thread")):
            torch.set_num_threads(1)
        names, (rows, _) = sorted(params), read_inputs(Path(self.job.folder))
        x, y = torch.from_numpy(rows["x"]), torch.from_numpy(rows["y"])

        def potential(*weights: Any) -> Any:
            return -torch_log_density(self.job.case, dict(zip(names, weights, strict=True)), x, y)

        values = tuple(params[name].detach().clone().requires_grad_() for name in names)
        return torch.jit.trace(potential, values) if self.job.mode.startswith("traced") else potential


def print_markdown(table: list[dict[str, Any]]) -> None:
    """The table of README.md; ratios are ours over theirs."""
    print("\n| target | chains | sampler | gradients a second | Caveat's over it | effective samples a second | MB |")
    print("|---|---|---|---|---|---|---|")
    ours = {(row["case"], row["chains"]): row for row in table if row["sampler"] == "caveat"}
    names = {"caveat": "**Caveat**", "blackjax": "BlackJAX", "numpyro": "NumPyro", "pyro": "Pyro"}
    for row in table:
        rate, same = row["gradients_a_second"], ours[row["case"], row["chains"]]
        ratio = f"**{same['gradients_a_second'] / rate:.2f}**" if rate and row is not same else ""
        shown = f"{rate:,.0f}" if rate >= 100 else f"{rate:.2f}"
        samples = f"{row['samples_a_second']:.1f}" if row["samples_a_second"] else ""
        sampler = names[row["sampler"]] + (f", {row['mode']}" if row["mode"] else "")
        cells = [CASES[row["case"]].title, str(row["chains"]), sampler, row["failure"] or shown, ratio, samples]
        print("| " + " | ".join([*cells, f"{row['bytes'] / 1e6:,.0f}"]) + " |")


if __name__ == "__main__":
    main()
