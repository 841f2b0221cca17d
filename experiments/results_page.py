"""The tables and figures of docs/results.md: what the papers report beside what was measured here.

    python experiments/results_page.py            # writes the tables into docs/results.md, and its figures
    python experiments/results_page.py --check    # says which tables of the page are not those of the csv files

The papers' numbers are in papers.csv, ours in the csv files beside each experiment. A table of the page stands between
`<!-- NAME -->` and `<!-- end -->`.
"""

import argparse
import csv
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from pieces_table import markdown, pieces, several

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "results.md"
IMAGES = HERE.parent / "docs" / "images"
BLOCK = re.compile(r"<!-- (?P<name>[a-z_]+) -->\n.*?<!-- end -->", re.DOTALL)
CORRUPTIONS = 15
PAPER_COLOUR, OUR_COLOUR = "#c1440e", "#14406b"
Row = dict[str, str]


def read(name: str) -> list[Row]:
    """The rows of a csv of the experiments."""
    with (HERE / name).open() as file:
        return list(csv.DictReader(file))


def papers(table: str) -> dict[tuple[str, str], float]:
    """What a paper's table says, by row and column."""
    return {(row["row"], row["column"]): float(row["value"]) for row in read("papers.csv") if row["table"] == table}


def number(value: float | None, form: str) -> str:
    """In the form of its column, or nothing."""
    return "" if value is None else f"{value:{form}}"


SSVI_ROWS = {"dense VI": ("dense", 1.0), "SSVI 90%": ("ssvi", 0.1), "SSVI 95%": ("ssvi", 0.05)}
FEWER_LEFT_OUT = {"SSVI 80%": ("ssvi", 0.2)}  # of CIFAR-100


def ssvi_runs(data: str, label: str) -> list[Row]:
    """The runs of 200 epochs with the settings that the page speaks of, one a seed."""
    method, density = (SSVI_ROWS | FEWER_LEFT_OUT)[label]
    return [
        row
        for row in read("ssvi/cifar.csv")
        if (row["data"], row["method"], row["epochs"]) == (data, method, "200")
        and abs(float(row["density"]) - density) < 0.01
        and "rate 0.4" in row["knobs"]
    ]


def ssvi(data: str) -> str:
    """Accuracy, likelihood, calibration and cost beside the paper's."""
    theirs, rows = papers(data), []
    labels = SSVI_ROWS if data == "cifar10" else {"dense VI": SSVI_ROWS["dense VI"]} | FEWER_LEFT_OUT | SSVI_ROWS
    for label in labels:
        runs = ssvi_runs(data, label)
        column = lambda name, runs=runs: [float(run[name]) for run in runs]  # noqa: E731
        rows.append(
            [
                label,
                number(theirs.get((label, "accuracy")), ".2f"),
                several([100 * value for value in column("accuracy")], ".2f"),
                number(theirs.get((label, "NLL")), ".3f"),
                several(column("nll"), ".3f"),
                number(theirs.get((label, "marginal calibration error")), ".4f"),
                several(column("marginal_ece"), ".4f"),
                several(column("ece"), ".3f"),
                number(theirs.get((label, "training PFLOP")), ".1f"),
                several(column("training_pflop")[:1], ".1f"),
                several(column("stored_mb")[:1], ".1f"),
                str(len(runs)) if runs else "not yet run",
            ]
        )
    heads = ["", "accuracy: paper", "ours", "NLL: paper", "ours", "marginal calibration error: paper", "ours"]
    heads += ["top-label ECE, ours", "training PFLOP: paper", "ours", "stored MiB, ours", "seeds"]
    return markdown(heads, rows)


def ssvi_shift() -> str:
    """CIFAR-10 under corruption, and images of CIFAR-100 among its own."""
    rows = []
    shifted = read("ssvi/cifar_shift.csv")
    for label, (method, density) in SSVI_ROWS.items():
        own = [
            row
            for row in shifted
            if (row["data"], row["method"]) == ("cifar10", method) and abs(float(row["density"]) - density) < 0.01
        ]
        seeds = sorted({row["seed"] for row in own})
        corrupted = [row for row in own if row["severity"]]
        assert len({row["on"] for row in corrupted}) == CORRUPTIONS
        by_seed: Callable[[str], list[float]] = lambda name, rows=corrupted, seeds=seeds: [  # noqa: E731
            mean(float(row[name]) for row in rows if row["seed"] == seed) for seed in seeds
        ]
        apart = [float(row["auroc_entropy"]) for row in own if row["on"] == "cifar100"]
        rows.append(
            [
                label,
                several([100 * value for value in by_seed("accuracy")], ".1f"),
                several(by_seed("nll"), ".2f"),
                several(by_seed("ece"), ".3f"),
                several(apart, ".3f"),
                str(len(seeds)),
            ]
        )
    return markdown(["", "accuracy", "NLL", "top-label ECE", "AUROC, CIFAR-100", "seeds"], rows)


RIVALS = {
    "VD": "VariationalDropout",
    "SBP": "StructuredBayesianPruning",
    "AEB": "AEB",
    "mBNN": "MaskedBNN",
    "SSVI": "SSVI",
}


def rivals() -> str:
    """The paper's second table on CIFAR-10, and ours on Fashion-MNIST with LeNet-5-Caffe."""
    theirs, ours = papers("cifar10 rivals"), read("ssvi/second_table.csv")
    rows = []
    for label, name in RIVALS.items():
        runs = [row for row in ours if (row["problem"], row["method"]) == ("fashion_mnist", name)]
        column = lambda metric, runs=runs: mean(float(run[metric]) for run in runs)  # noqa: E731
        rows.append(
            [
                label,
                *(number(theirs.get((label, metric)), form) for metric, form in RIVAL_COLUMNS.items()),
                f"{100 * column('accuracy'):.2f}",
                f"{column('nll'):.3f}",
                f"{column('marginal'):.4f}",
                f"{100 * column('sparsity'):.1f}",
                str(len(runs)),
            ]
        )
    heads = [*(f"paper, CIFAR-10: {name}" for name in RIVAL_COLUMNS), "ours, Fashion-MNIST: accuracy", "NLL"]
    return markdown(["", *heads, "marginal calibration error", "sparsity", "seeds"], rows)


def rivals_hundred() -> str:
    """The paper's second table on CIFAR-100, and ours."""
    theirs, ours = papers("cifar100 rivals"), read("ssvi/second_table.csv")
    columns = {"accuracy": (100, ".2f"), "nll": (1, ".3f"), "marginal": (1, ".4f"), "sparsity": (100, ".1f")}
    rows = []
    for label, name in RIVALS.items():
        runs = [row for row in ours if (row["problem"], row["method"]) == ("cifar100", name)]
        cells = [number(theirs.get((label, metric)), form) for metric, form in RIVAL_COLUMNS.items()]
        cells += [several([times * float(run[key]) for run in runs], form) for key, (times, form) in columns.items()]
        rows.append([label, *cells, str(len(runs)) if runs else "not yet run"])
    heads = [f"{who}: {name}" for who in ("paper, CIFAR-100", "ours") for name in RIVAL_COLUMNS]
    return markdown(["", *heads, "seeds"], rows)


RIVAL_COLUMNS = {"accuracy": ".2f", "NLL": ".3f", "marginal calibration error": ".4f", "sparsity": ".1f"}
SUBNETWORKS = {
    "MAP": ("map", "", "0"),
    "MAP, temperature": ("map tempered", "", "0"),
    "diagonal, all weights": ("laplace diagonal", "", "-1"),
    "last layer": ("last layer", "", "5130"),
    "42,438 weights by variance (the paper's rule)": ("subnetwork", "variance", "42438"),
    "42,438 by energy": ("subnetwork", "energy", "42438"),
    "42,438 by squared gradient": ("subnetwork", "gradient", "42438"),
    "42,438 at random": ("subnetwork", "random", "42438"),
    "4,000 by energy": ("subnetwork", "energy", "4000"),
    "4,000 by magnitude": ("subnetwork", "magnitude", "4000"),
    "4,000 at random": ("subnetwork", "random", "4000"),
}


def subnetwork() -> str:
    """ResNet-18 on CIFAR-10, every posterior's precision (or temperature) tuned on the same validation rows."""
    measured = read("subnetwork/cifar10.csv")
    rows = []
    for label, wanted in SUBNETWORKS.items():
        own = [row for row in measured if (row["method"], row["score"], row["weights"]) == wanted]
        seeds = sorted({row["seed"] for row in own})

        tempered = [row for row in measured if row["method"] == "map tempered" and row["seed"] in seeds]
        scores = {name: _clean_mean(own, name) for name in ("accuracy", "nll", "joint_nll")}
        less = _corrupted_nll(own) - _corrupted_nll(tempered)
        apart = mean(float(row["value"]) for row in own if (row["on"], row["metric"]) == ("cifar100", "auroc"))
        cells = [f"{100 * scores['accuracy']:.1f}", f"{scores['nll']:.3f}", f"{scores['joint_nll']:.3f}"]
        cells += [f"{_corrupted_nll(own):.3f}", "" if label == "MAP, temperature" else f"{less:+.3f}"]
        rows.append([label, *cells, f"{apart:.3f}", str(len(seeds))])
    heads = ["", "accuracy", "NLL", "joint NLL a label", "NLL under corruption", "... less the temperature's"]
    return markdown([*heads, "AUROC, CIFAR-100", "networks"], rows)


def _clean_mean(rows: list[Row], metric: str) -> float:
    return mean(float(row["value"]) for row in rows if (row["on"], row["metric"]) == ("clean", metric))


def _corrupted_nll(rows: list[Row]) -> float:
    """Over noise, blur and contrast at three severities each: conditions that end in a digit, unlike the other set."""
    kinds = ("noise ", "blur ", "contrast ")
    return mean(float(row["value"]) for row in rows if row["metric"] == "nll" and row["on"].startswith(kinds))


SAMPLED = {
    "MAP": "map",
    "samples, temperature 1": "sampled-g-32-0.02, temperature 1",
    "samples, temperature from validation rows": "sampled-g-32-0.02",
}


def sampled_scores() -> dict[tuple[str, str], float]:
    """Of all 11 million weights of ResNet-18 on CIFAR-10; where a run was scored twice, the later."""
    rows = read("sampled_laplace/cifar.csv")
    return {
        (row["method"], row["metric"]): float(row["value"])
        for row in rows
        if row["data"] == "cifar10" and row["value"] not in ("", None)
    }


def sampled() -> str:
    """Single rows, ten labels jointly, and by severity of corruption."""
    scores = sampled_scores()
    rows = []
    for label, method in SAMPLED.items():
        cells = [scores[method, metric] for metric in ("accuracy", "nll", "ece", "joint nll a label")]
        cells += [scores[method, f"{metric}, severity {s}"] for s in (1, 3, 5) for metric in ("nll",)]
        cells += [scores[method, "joint nll a label, severity 5"]]
        rows.append([label, f"{100 * cells[0]:.2f}", *(f"{cell:.3f}" for cell in cells[1:])])
    heads = ["", "accuracy", "NLL", "top-label ECE", "joint NLL a label", "NLL, severity 1", "3", "5"]
    return markdown([*heads, "joint NLL a label, severity 5"], rows)


FIDELITY = {  # the paper's name: the cell of hmc/results.csv
    "one HMC chain": "reference",
    "SGD": "MAP",
    "ensemble of 50": "ensemble of 50",
    "mean-field VI": "mean-field VI",
    "SGLD": "SGLD",
    "SGHMC": "SGHMC",
    "cyclical SGHMC": "cyclical SGHMC",
    "preconditioned cyclical SGHMC": "preconditioned cyclical SGHMC",
}
PROBLEMS = ("digits", "mnist1d", "mnist")


def nearness(name: str, problem: str, metric: str, corrupted: bool = False) -> float:
    """Agreement or total variation with our HMC, the mean over conditions and seeds."""
    start = f"reference/{problem}/" if name == "reference" else f"methods/{problem}/{name}/"
    values = [
        float(row[metric])
        for row in read("hmc/results.csv")
        if row["cell"].startswith(start) and (row["data"] != "clean") == corrupted
    ]
    return mean(values)


def fidelity() -> str:
    """Agreement and total variation, the paper's on CIFAR-10 and ours on three small problems."""
    clean, corrupted = papers("cifar10"), papers("cifar10 corrupted")
    rows = []
    for label, name in FIDELITY.items():
        cells = [f"{clean[label, 'agreement']:.1f}", f"{clean[label, 'total variation']:.3f}"]
        for problem in PROBLEMS:
            cells += [f"{100 * nearness(name, problem, 'agreement'):.1f}"]
            cells += [f"{nearness(name, problem, 'total_variation'):.3f}"]
        cells += [f"{corrupted[label, 'agreement']:.1f}"]
        cells += [f"{100 * nearness(name, problem, 'agreement', True):.1f}" for problem in PROBLEMS]
        rows.append([label, *cells])
    heads = ["", "CIFAR-10 (paper): agreement, %", "total variation"]
    for problem in PROBLEMS:
        heads += [f"{problem} (ours)", "total variation"]
    heads += ["corrupted: CIFAR-10-C (paper)", *(f"{problem} (ours)" for problem in PROBLEMS)]
    return markdown(heads, rows)


SEVERAL = {  # what a table calls a method: its labels in results.csv (seed 0) and in posteriors.csv (the others)
    "HMC": ("HMC", "hmc"),
    "MAP": ("MAP", "map"),
    "MAP, temperature": ("MAP tempered", "map_tempered"),
    "ensemble of 5": ("ensemble of 5", "ensemble"),
    "SWAG": ("SWAG", "swag"),
    "mean-field VI": ("mean-field VI", "mean_field_vi"),
    "SGLD": ("SGLD", "sgld"),
    "SGHMC": ("SGHMC", "sghmc"),
    "cyclical SGHMC": ("cyclical SGHMC", "cyclical_sghmc"),
    "preconditioned cyclical SGHMC": ("preconditioned cyclical SGHMC", "preconditioned_sghmc"),
}


def by_seed(problem: str, names: tuple[str, str], metric: str) -> list[float]:
    """A metric of clean test rows, for each seed that has been run; seed 0 is that of the earlier script."""
    first = {f"{kind}/{problem}/{names[0]}/0" for kind in ("reference", "methods")}
    rows = [row for row in read("hmc/results.csv") if row["cell"] in first and row["data"] == "clean"]
    rows += [
        row
        for row in read("hmc/posteriors.csv")
        if (row["data"], row["method"], row["shift"]) == (problem, names[1], "clean")
    ]
    if names[1] == "hmc" and metric in ("agreement", "total_variation"):
        return []  # of one chain it is the floor, in the table before
    return [float(row[metric]) for row in rows if row[metric]]


def fidelity_seeds() -> str:
    """Likelihood and nearness to HMC over seeds, each of which draws rows, weights and chains anew."""
    rows = []
    for label, names in SEVERAL.items():
        cells = [label]
        for problem in PROBLEMS:
            cells += [several(by_seed(problem, names, "nll"), ".3f")]
            cells += [several(by_seed(problem, names, "total_variation"), ".3f")]
        counts = [len(by_seed(problem, names, "nll")) for problem in PROBLEMS]
        rows.append([*cells, ", ".join(map(str, counts))])
    heads = [f"{problem}: {what}" for problem in PROBLEMS for what in ("NLL", "total variation")]
    return markdown(["", *heads, "seeds"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "ssvi_cifar_ten": lambda: ssvi("cifar10"),
    "ssvi_cifar_hundred": lambda: ssvi("cifar100"),
    "ssvi_shift": ssvi_shift,
    "ssvi_rivals": rivals,
    "ssvi_rivals_hundred": rivals_hundred,
    "subnetwork": subnetwork,
    "subnetwork_trained_longer": lambda: pieces(HERE / "subnetwork" / "resnet18_cifar10.csv", "cifar10"),
    "subnetwork_rotated": lambda: pieces(HERE / "subnetwork" / "resnet18_mnist.csv", "mnist"),
    "sampled": sampled,
    "sampled_hundred": lambda: pieces(HERE / "sampled_laplace" / "resnet18_cifar100.csv", "cifar100"),
    "fidelity": fidelity,
    "fidelity_seeds": fidelity_seeds,
    "fidelity_lenet": lambda: pieces(HERE / "hmc" / "lenet_cifar10.csv", "cifar10"),
    "fidelity_resnet": lambda: pieces(HERE / "hmc" / "resnet20_fidelity.csv", "cifar10"),
}


def filled(page: str) -> str:
    """The page with every table as the csv files have it."""
    return BLOCK.sub(lambda found: f"<!-- {found['name']} -->\n{TABLES[found['name']]()}\n<!-- end -->", page)


def draw(folder: Path) -> None:
    """Two pictures: how near each method is to HMC, and sparse training beside the paper's."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    theirs = papers("cifar10")
    shapes = dict(zip(PROBLEMS, "osD", strict=True))
    for place, (label, name) in enumerate(FIDELITY.items()):
        axes.plot(theirs[label, "total variation"], place, "*", color=PAPER_COLOUR, markersize=11)
        for problem, shape in shapes.items():
            axes.plot(nearness(name, problem, "total_variation"), place, shape, color=OUR_COLOUR, alpha=0.75)
    axes.plot([], [], "*", color=PAPER_COLOUR, markersize=11, label="paper, CIFAR-10")
    for problem, shape in shapes.items():
        axes.plot([], [], shape, color=OUR_COLOUR, alpha=0.75, label=f"ours, {problem}")
    axes.set_yticks(range(len(FIDELITY)), list(FIDELITY))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xticks([0.01, 0.03, 0.1, 0.3], ["0.01", "0.03", "0.1", "0.3"])
    axes.set_xlabel("total variation from HMC (left is nearer)")
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside right center", frameon=False)
    figure.savefig(folder / "results_fidelity.png", dpi=150)
    plt.close(figure)

    figure, both = plt.subplots(1, 2, figsize=(7.2, 2.8), layout="constrained")
    for axes, data, title in zip(both, ("cifar10", "cifar100"), ("CIFAR-10", "CIFAR-100"), strict=True):
        theirs = papers(data)
        axes.plot(range(3), [theirs[label, "accuracy"] for label in SSVI_ROWS], "*-", color=PAPER_COLOUR, label="paper")
        for place, label in enumerate(SSVI_ROWS):
            values = [100 * float(run["accuracy"]) for run in ssvi_runs(data, label)]
            axes.plot([place] * len(values), values, "o", color=OUR_COLOUR, label="ours, a seed" if not place else None)
        axes.set_xticks(range(3), list(SSVI_ROWS))
        axes.set_title(title, fontsize=10)
        axes.set_ylabel("accuracy, %")
        axes.grid(alpha=0.3)
    both[0].legend(frameon=False)
    figure.savefig(folder / "results_ssvi.png", dpi=150)
    plt.close(figure)


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table is not that of the csv")
    page = PAGE.read_text()
    if parser.parse_args().check:
        sys.exit(None if filled(page) == page else f"{PAGE} is not what the csv files say: run {Path(__file__).name}")
    PAGE.write_text(filled(page))
    draw(IMAGES)


if __name__ == "__main__":
    main()
