"""What pages say of whole experiments, beside the tables of methods: the bandit, SWAG on digits, the papers' scale."""

import csv
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

ROOT = Path(__file__).parents[1]
Row = Mapping[str, str]


def words(page: str) -> str:
    """A page with single spaces, so that it does not matter where lines are broken."""
    return " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())


def read(name: str) -> list[dict[str, str]]:
    """The rows of a csv file of the experiments."""
    with (ROOT / "experiments" / name).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def spread(values: list[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    return mean(values), stdev(values) / len(values) ** 0.5


def regrets(table: str, policy: str) -> dict[str, float]:
    """The regret at the end of each game, by its seed."""
    rows = [row for row in read("bandit/bandit.csv") if (row["table"], row["policy"]) == (table, policy)]
    last = max(int(row["round"]) for row in rows)
    return {row["seed"]: float(row["regret"]) for row in rows if int(row["round"]) == last}


def test_the_bandit() -> None:
    page = words("bandit.md").replace("**", "").replace(" (one act in ten at random)", "")
    for table in ("digits", "wine"):
        thompson = regrets(table, "thompson")
        for policy in ("greedy", "epsilon"):
            regret = regrets(table, policy)
            paired = spread([thompson[seed] - regret[seed] for seed in thompson])
            shown = " | ".join(f"{value:.0f} ± {error:.0f}" for value, error in (spread([*regret.values()]), paired))
            head = f"{table} | {len(regret)}" if policy == "greedy" else "|"
            assert f"| {head} | {policy.replace('epsilon', 'epsilon-greedy')} | {shown} |" in page
            if (table, policy) == ("wine", "greedy"):
                assert f"(the difference is {paired[0] / paired[1]:.1f} standard errors)" in page
        assert "| | | Thompson sampling | {:.0f} ± {:.0f} | |".format(*spread([*thompson.values()])) in page
    of = {policy: mean(regrets("digits", policy).values()) for policy in ("thompson", "epsilon", "greedy")}
    epsilon, greedy = (f"{1 - of['thompson'] / of[policy]:.0%}" for policy in ("epsilon", "greedy"))
    assert (
        f"Thompson sampling has {greedy} less regret than greedy play, and {epsilon} less than epsilon-greedy" in page
    )


def digits(method: str, shift: str) -> list[str]:
    """The NLL on digits with each of three seeds; under a shift the mean over its severities."""
    of_seeds = [
        [
            row["nll"]
            for row in read("hmc/results.csv")
            if (row["cell"], row["data"]) == (f"methods/digits/{method}/0", shift)
        ]
    ]
    for seed in ("1", "2"):
        key = ("digits", method.lower(), seed, shift)
        rows = read("hmc/posteriors.csv")
        of_seeds.append(
            [row["nll"] for row in rows if tuple(row[name] for name in ("data", "method", "seed", "shift")) == key]
        )
    return [f"{mean(map(float, values)):.3f}".removeprefix("0") for values in of_seeds]


def test_swag_on_digits() -> None:
    page = words("methods/swag.md")
    for shift, sentence in (
        ("clean", "on clean rows (NLL {} with three seeds, MAP {})"),
        ("rotation", "worse under rotation with each ({}, MAP {})"),
    ):
        swag, point = digits("SWAG", shift), digits("MAP", shift)
        assert sentence.format(*(f"{a}, {b} and {c}" for a, b, c in (swag, point))) in page
        assert shift == "clean" or all(map(float.__gt__, map(float, swag), map(float, point)))


def test_the_field_s_accuracies_at_the_papers_scale() -> None:
    page = words("papers_scale.md")
    dense = {
        data: [
            float(row["accuracy"])
            for row in read("ssvi/cifar.csv")
            if (row["data"], row["method"], row["epochs"]) == (data, "dense", "200") and "rate 0.4" in row["knobs"]
        ]
        for data in ("cifar10", "cifar100")
    }
    ours = {data: f"{mean(values):.1%}" for data, values in dense.items()}
    assert f"dense variational training has {ours['cifar10']} on CIFAR-10 and {ours['cifar100']} on CIFAR-100" in page
    points = [
        [
            float(row["value"])
            for row in read(name)
            if (row["method"], row["metric"]) == ("map", "accuracy") and wanted(row)
        ]
        for name, wanted in (
            ("subnetwork/cifar10.csv", lambda row: row["on"] == "clean"),
            ("sampled_laplace/cifar.csv", lambda row: row["data"] == "cifar10"),
        )
    ]
    low, high = (100 * values[-1] for values in points)
    assert f"its earlier runs had 40 epochs, and {low:.1f} and {high:.1f}%" in page


def test_what_a_last_layer_takes_on_disk() -> None:
    weights = (512 + 1) * 10
    sentence = f"512 features and 10 classes are {weights:,} weights: {4 * weights**2 / 1e6:.0f} MB on disk."
    assert sentence in words("methods/last_layer_laplace.md")
