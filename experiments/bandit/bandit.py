"""Does it pay to act on a sample of the posterior rather than on its mean?

    python experiments/bandit/bandit.py --data-dir DATA     # bandit.csv, bandit.png and the README's table

Two contextual bandits from tables with known answers; an agent sees a context, acts, and learns the reward of what it
did and of nothing else.

    digits   an image of a digit; ten acts, one a class; reward 1 for the right one                 (always there)
    wine     eleven measurements of a wine; buy it or not; reward quality - 6 for a wine bought, 0 otherwise

The reward of an act is linear in features of context and act, phi(x, a) theta: for digits each act has 65 parameters of
its own (the pixels and a constant), for wine 500 random Fourier features. Every 20 rounds the posterior of theta is
fitted again to all rewards seen (`caveat.BayesianLinearModel`, prior precision and noise by the evidence).

    greedy       argmax_a  phi(x, a) mean
    epsilon      the same, but in one round of ten an act at random
    thompson     argmax_a  phi(x, a) theta_k, another posterior sample theta_k each round
"""

import argparse
import csv
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor

import caveat
from caveat import data

mpl.use("Agg")
from matplotlib import pyplot as plt

REFIT = 20  # rounds from one fit to the next; also the samples of a fit, one a round
EPSILON = 0.1
POLICIES = ("greedy", "epsilon", "thompson")
COLUMNS = ["table", "seed", "policy", "round", "regret"]


@dataclass(frozen=True)
class Table:
    """Contexts with the reward of every act."""

    features: Callable[[Tensor], Tensor]  # rows of x -> [B, acts, d]
    x: Tensor
    rewards: Tensor  # [rows, acts]


def digits(seed: int) -> Table:
    """Ten acts with parameters of their own: phi(x, a) is (x, 1) in the place of act a."""
    x, y = (torch.cat(pair) for pair in zip(*(part.tensors for part in both("digits", None)), strict=True))
    x = torch.cat([x.flatten(1).double() / 8, torch.ones(len(x), 1).double()], 1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    acts = torch.eye(10).double()
    return Table(lambda rows: torch.einsum("bd,ac->bacd", rows, acts).flatten(2), x[order], acts[y[order]])


def wine(seed: int, folder: str | None) -> Table:
    """Buy or leave: random Fourier features of the wine for the first, zeros for the second, whose reward is known."""
    rng = torch.Generator().manual_seed(seed)
    x, y = (torch.cat(pair) for pair in zip(*(part.tensors for part in both("uci/wine", folder)), strict=True))
    x, y = x.double(), y.double().flatten()
    frequencies = 0.25 * torch.randn(x.shape[1], 500, generator=rng, dtype=torch.float64)
    phases = 2 * math.pi * torch.rand(500, generator=rng, dtype=torch.float64)

    def features(rows: Tensor) -> Tensor:
        buy = math.sqrt(2 / 500) * torch.cos(rows @ frequencies + phases)
        return torch.stack([buy, torch.zeros_like(buy)], 1)

    order = torch.randperm(len(x), generator=rng)
    return Table(features, x[order], torch.stack([y - 6, torch.zeros_like(y)], 1)[order])


def both(name: str, folder: str | None) -> tuple[torch.utils.data.TensorDataset, ...]:
    """All rows of a set: a bandit has no test rows."""
    loaded = data.load(name, data_dir=folder)
    return loaded.train, loaded.test


def play(table: Table, policy: str, seed: int) -> Tensor:
    """The regret of every round, [rounds]."""
    rng = torch.Generator().manual_seed(1000 + seed)
    seen, rewards, regret = [], [], []
    posterior, precision = None, 1.0
    for turn, (x, reward) in enumerate(zip(table.x, table.rewards, strict=True)):
        if turn % REFIT == 0 and len(seen) > 1:
            model = caveat.BayesianLinearModel(torch.stack(seen), torch.stack(rewards), prior_precision=precision)
            posterior = model.fit(samples=REFIT, seed=turn)
            precision = float(posterior.prior_precision[0])
        phi, acts = table.features(x.unsqueeze(0))[0], len(reward)
        explore = policy == "epsilon" and float(torch.rand((), generator=rng)) < EPSILON
        if posterior is None or explore:
            act = int(torch.randint(acts, (), generator=rng))
        else:
            theta = posterior.samples[turn % REFIT] if policy == "thompson" else posterior.mean
            act = int((phi @ theta).argmax())
        if phi[act].any():  # what is known to give nothing teaches nothing
            seen.append(phi[act])
            rewards.append(reward[act])
        regret.append(reward.max() - reward[act])
    return torch.stack(regret)


def table_of(name: str, seed: int, folder: str | None) -> Table:
    """A bandit by its name."""
    return digits(seed) if name == "digits" else wine(seed, folder)


def run(path: Path, seeds: dict[str, int], folder: str | None) -> None:
    """Play what is not yet in the csv; a game is written when it has ended."""
    done = {(r["table"], r["seed"], r["policy"]) for r in read(path)}
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if not done:
            writer.writerow(COLUMNS)
        for name, count in seeds.items():
            for seed in range(count):
                for policy in POLICIES:
                    if (name, str(seed), policy) in done:
                        continue
                    total = play(table_of(name, seed, folder), policy, seed).cumsum(0)
                    marks = range(REFIT - 1, len(total), REFIT)
                    writer.writerows([name, seed, policy, t + 1, round(float(total[t]), 3)] for t in marks)
                    file.flush()
                    print(f"{name} seed {seed} {policy}: regret {float(total[-1]):.1f}", file=sys.stderr)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of the csv, if there is one."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def curves(rows: list[dict[str, str]], name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Rounds [T], and for each policy the regret so far, [seeds, T]."""
    mine = [r for r in rows if r["table"] == name]
    rounds = sorted({int(r["round"]) for r in mine})
    seeds = sorted({int(r["seed"]) for r in mine})
    found = {(r["policy"], int(r["seed"]), int(r["round"])): float(r["regret"]) for r in mine}
    by_policy = {p: torch.tensor([[found[p, s, t] for t in rounds] for s in seeds]) for p in POLICIES}
    return torch.tensor(rounds), by_policy


def summary(rows: list[dict[str, str]]) -> str:
    """Regret at the end, and what Thompson sampling saves in the same game, with standard errors over seeds."""
    lines = ["| table | games | policy | regret | Thompson's less this one's, paired |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(r["table"] for r in rows):
        _, by_policy = curves(rows, name)
        for policy, regret in by_policy.items():
            last, saved = regret[:, -1], (by_policy["thompson"] - regret)[:, -1]
            paired = "" if policy == "thompson" else spread_of(saved)
            lines.append(f"| {name} | {len(last)} | {policy} | {spread_of(last)} | {paired} |")
    return "\n".join(lines)


def spread_of(values: Tensor) -> str:
    """Mean and standard error."""
    return f"{float(values.mean()):.1f} ± {float(values.std()) / math.sqrt(len(values)):.1f}"


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Regret against rounds, with bands of one standard error."""
    names = list(dict.fromkeys(r["table"] for r in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(5 * len(names), 3.6), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        rounds, by_policy = curves(rows, name)
        for policy, colour, style in zip(POLICIES, ("#8a8a8a", "#d08a1d", "#2f5bd0"), (":", "--", "-"), strict=True):
            mean = by_policy[policy].mean(0)
            error = by_policy[policy].std(0) / math.sqrt(len(by_policy[policy]))
            axis.plot(rounds, mean, style, color=colour, label=policy)
            axis.fill_between(rounds, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)
        axis.set(title=name, xlabel="round", ylabel="regret so far")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Play, draw and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--digits", type=int, default=5, help="games with digits (a minute each)")
    parser.add_argument("--wine", type=int, default=20, help="games with wine (ten seconds each)")
    parser.add_argument("--data-dir", help="where uci_regression.npz is; otherwise as caveat.data looks for it")
    chosen = parser.parse_args()
    here = Path(__file__).parent
    warnings.simplefilter("ignore")  # the first fits have a handful of rows: precisions at their bounds are expected
    run(here / "bandit.csv", {"digits": chosen.digits, "wine": chosen.wine}, chosen.data_dir)
    rows = read(here / "bandit.csv")
    draw(rows, here / "bandit.png")
    print(summary(rows))


if __name__ == "__main__":
    main()
