"""How long a trajectory, how many chains, how many draws, and how soon from the first weights? HMC on small problems.

    python experiments/hmc/chains.py            # chains.csv and chains.png: ten minutes on one core
    python experiments/hmc/chains.py --summary  # only the tables of the README and the figure

The problems and the reference of `posteriors.toml`: 4 chains of 200 draws. Three questions:

    trajectory   the same number of iterations with trajectories of a part or a multiple of pi/2 prior widths
    draws        averages of the first draws of the reference: of one chain, of all four
    start        a chain from its first weights on, with the step size of the reference and no warm-up
"""

import csv
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded

from problems import network, problem, task
from tables import COLOURS, measured, table
from torch import Tensor

import caveat
from caveat import HMC
from caveat.data import DataSet
from caveat.evaluate.diagnosis import gather_evidence

NAMES = ("digits", "mnist1d")
PARTS = (1 / 16, 1 / 4, 1 / 2, 1.0, 2.0)  # of the default trajectory
SHORT = HMC(chains=4, length=60, warmup=60)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200)
FIRST = 60  # iterations from the first weights
Found = Iterator[tuple[str, float, str, float]]  # question, setting, quantity, value


def reference(rows: DataSet, references: Path) -> caveat.Posterior:
    """HMC as `posteriors.toml` has it, from its folder where it is there."""
    folder = references / f"{rows.name}-0"
    if folder.exists():
        return caveat.load(folder, network(rows.name))
    method = HMC(chains=4, length=100 if rows.name == "mnist" else 200, warmup=80)
    return caveat.fit(task(rows), method, seed=0, folder=folder, progress=False)


def chain_facts(posterior: caveat.Posterior, rows: DataSet) -> dict[str, float]:
    """How HMC went, and how well its predictions and its weights have mixed."""
    diagnostics = posterior.info.diagnostics
    facts = {key: float(diagnostics[key]) for key in ("acceptance", "leapfrog_steps")}
    evidence = gather_evidence(posterior, rows.test, rows=200)
    for name, quantities in (("function", evidence.predictions), ("weights", evidence.weights)):
        mixing = quantities.mixing()
        facts |= {f"rhat_{name}": mixing.rhat_max, f"ess_{name}": mixing.ess_bulk_min}
    return facts


def by_draw(posterior: caveat.Posterior, x: Tensor) -> Tensor:
    """Probabilities of every draw, [chains, draws, B, C]."""
    return posterior.predict(x).samples.unflatten(0, posterior.state["stats"]["lp"].shape)


def scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    """NLL and accuracy of averaged probabilities [B, C]."""
    nll = -probs.gather(-1, y[:, None]).log().mean()
    return {"NLL": float(nll), "accuracy": float((probs.argmax(-1) == y).double().mean())}


def trajectory(rows: DataSet) -> Found:
    """Sampling with trajectories of several lengths."""
    x, y = rows.test.tensors
    for part in PARTS:
        method = replace(SHORT, trajectory=part * SHORT.trajectory)
        posterior = caveat.fit(task(rows), method, seed=0, progress=False)
        facts = chain_facts(posterior, rows)
        for quantity, value in scores(by_draw(posterior, x).mean((0, 1)), y).items():
            yield "trajectory", part, quantity, value
        for key in ("acceptance", "leapfrog_steps", "rhat_function", "ess_function", "rhat_weights", "ess_weights"):
            yield "trajectory", part, key, facts[key]


def draws(rows: DataSet, posterior: caveat.Posterior) -> Found:
    """Averages of the first n draws: of single chains (the mean over them), and of all chains together."""
    x, y = rows.test.tensors
    probs = by_draw(posterior, x)
    for count in COUNTS:
        if count <= probs.shape[1]:
            first = probs[:, :count].mean(1)  # [chains, B, C]
            each = [scores(own, y) for own in first]
            for quantity, value in scores(first.mean(0), y).items():
                yield "draws", count, f"one chain: {quantity}", mean(one[quantity] for one in each)
                yield "draws", count, f"four chains: {quantity}", value


def start(rows: DataSet, posterior: caveat.Posterior) -> Found:
    """Single draws, and the average of those so far, from the first iteration on."""
    x, y = rows.test.tensors
    step = float(posterior.state["stats"]["step_size"].double().mean())
    method = HMC(chains=4, length=FIRST, warmup=0, step_size=step)
    chain = caveat.fit(task(rows), method, seed=100, progress=False)
    probs, density = by_draw(chain, x), chain.state["stats"]["lp"].mean(0)
    settled = float(posterior.state["stats"]["lp"].mean())
    for i in range(FIRST):
        yield "start", i + 1, "log density less the reference's", float(density[i]) - settled
        yield "start", i + 1, "NLL of a draw", mean(scores(own, y)["NLL"] for own in probs[:, i])
        yield (
            "start",
            i + 1,
            "NLL of the average so far",
            mean(scores(own, y)["NLL"] for own in probs[:, : i + 1].mean(1)),
        )


def measure(path: Path, references: Path) -> None:
    """All questions, problem by problem; a problem that the csv has is not run again."""
    done = {name for name, *_ in read(path)}
    for name in (name for name in NAMES if name not in done):
        rows = problem(name)
        posterior = reference(rows, references)
        questions = (draws(rows, posterior), start(rows, posterior), trajectory(rows))
        numbers = [(name, *number) for question in questions for number in question]
        fresh = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([("problem", "question", "setting", "quantity", "value")] if fresh else [])
            writer.writerows((*number[:4], f"{number[4]:.5g}") for number in numbers)
        print(f"{name}: {len(numbers)} numbers", flush=True)


def read(path: Path) -> list[tuple[str, str, float, str, float]]:
    """What has been measured."""
    if not path.exists():
        return []
    with path.open() as file:
        rows = csv.DictReader(file)
        return [(r["problem"], r["question"], float(r["setting"]), r["quantity"], float(r["value"])) for r in rows]


def summarise(found: list[tuple[str, str, float, str, float]]) -> None:
    """The tables of the README."""
    for question, settings in (("trajectory", PARTS), ("draws", COUNTS), ("start", (1, 2, 5, 10, 20, 40, FIRST))):
        known = {(name, setting, quantity): value for name, q, setting, quantity, value in found if q == question}
        quantities = list(dict.fromkeys(quantity for _, _, quantity in known))
        for name in NAMES:
            print(f"{name}\n")
            rows = [
                (f"{s:g}", [f"{known[name, s, q]:.4g}" if (name, s, q) in known else "" for q in quantities])
                for s in settings
            ]
            table([question, *quantities], rows)


def draw(found: list[tuple[str, str, float, str, float]], path: Path) -> None:
    """NLL against the trajectory, against the draws, and along the chain."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(NAMES), 3, figsize=(13, 7), layout="constrained", squeeze=False)
    panels = (
        ("trajectory", {"NLL": "-"}, "trajectory, times π/2 prior widths"),
        ("draws", {"one chain: NLL": "--", "four chains: NLL": "-"}, "draws of each chain"),
        ("start", {"NLL of a draw": ":", "NLL of the average so far": "-"}, "iteration from the first weights"),
    )
    for row, name in zip(axes, NAMES, strict=True):
        for axis, (question, lines, label) in zip(row, panels, strict=True):
            for quantity, style in lines.items():
                points = [(s, v) for n, q, s, what, v in found if (n, q, what) == (name, question, quantity)]
                axis.plot(*zip(*points, strict=True), style, color=COLOURS[name], label=quantity, marker="o", ms=3)
            axis.set(xscale="log", xlabel=label, title=name)
            axis.legend(frameon=False, fontsize=8)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("test NLL")
    figure.savefig(path, dpi=110)


def main() -> None:
    path = measured(__file__, __doc__, measure)
    found = read(path)
    summarise(found)
    draw(found, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
