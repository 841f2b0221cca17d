"""What the pages of methods say was measured is what the csv files of the experiments and benchmarks hold.

Each test puts a table or a sentence together from the files, and looks for it in the page, so that a number changed in
either of them fails. The tables of docs/results.md, README and the demo have tests of their own.
"""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import pytest

from caveat.engine.chains.diagnostics import rhat_null

ROOT = Path(__file__).parents[1]
Row = Mapping[str, str]


def words(page: str) -> str:
    """A page with single spaces, so that it does not matter where lines are broken."""
    return " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())


def read(name: str, heads: Sequence[str] | None = None) -> list[dict[str, str]]:
    """The rows of a csv file."""
    with (ROOT / name).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, fieldnames=heads))


def mean_of(rows: Sequence[Row], column: str = "value", **where: str) -> float:
    """The mean of a column over the rows that are as `where` says; there must be some."""
    return mean(float(row[column]) for row in rows if all(row[name] == value for name, value in where.items()))


def short(value: float, digits: int = 3) -> str:
    """A figure as the pages write it: .208 in place of 0.208."""
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("0") and digits else text


def line(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def bold_least(values: Sequence[float]) -> list[str]:
    """Figures of three digits, the lowest in bold."""
    return [f"**{short(value)}**" if value == min(values) else short(value) for value in values]


CIFAR_RUNS = {"dense variational inference": ("dense", 1.0), "SSVI, 90%": ("ssvi", 0.1), "SSVI, 95%": ("ssvi", 0.05)}


@pytest.mark.parametrize("name", CIFAR_RUNS)
def test_ssvi_on_cifar(name: str) -> None:
    method, density = CIFAR_RUNS[name]
    cells = []
    for data in ("cifar10", "cifar100"):
        runs = [
            row
            for row in read("experiments/ssvi/cifar.csv")
            if (row["data"], row["method"], row["epochs"]) == (data, method, "200")
            and abs(float(row["density"]) - density) < 0.01
            and "rate 0.4" in row["knobs"]
        ]
        scores = [mean_of(runs, column) for column in ("accuracy", "marginal_ece", "ece")] if runs else []
        cells.append(f"{scores[0]:.2%}, {short(scores[1], 4)}, {short(scores[2], 4)}" if scores else "not run")
    removed = " of the weights removed" if method == "ssvi" else ""
    assert line(name + removed, *cells) in words("methods/ssvi.md")


def resnet(method: str, score: str, weights: str, metric: str, on: Sequence[str] = ("clean",)) -> list[float]:
    """A score of a ResNet-18 on CIFAR-10, by network, of the precision that suits its clean validation rows."""
    rows = [
        row
        for row in read("experiments/subnetwork/cifar10.csv")
        if (row["method"], row["score"], row["weights"], row["metric"]) == (method, score, weights, metric)
        and row["on"] in on
    ]
    return [mean_of(rows, seed=seed) for seed in ("0", "1") if any(row["seed"] == seed for row in rows)]


def test_the_last_layer_of_a_resnet() -> None:
    rows = {
        "last": ("last layer", "", "5130"),
        "map": ("map", "", "0"),
        "tempered": ("map tempered", "", "0"),
        "energy": ("subnetwork", "energy", "4000"),
    }
    nll = {name: short(resnet(*row, "nll")[0]) for name, row in rows.items()}
    joint = {name: short(resnet(*row, "joint_nll")[0]) for name, row in rows.items()}
    sentence = (
        f"NLL {nll['last']} on clean rows, against {nll['map']} for MAP, {nll['tempered']} for MAP with a temperature "
        f"and {nll['energy']} for 4,000 chosen weights of all layers; joint NLL {joint['last']}, against "
        f"{joint['map']}, {joint['tempered']} and {joint['energy']}."
    )
    assert sentence in words("methods/last_layer_laplace.md")


SELECTED = {
    "MAP": ("map", "", "0"),
    "MAP with a temperature": ("map tempered", "", "0"),
    "last layer (5,130 weights)": ("last layer", "", "5130"),
    "diagonal, all weights": ("laplace diagonal", "", "-1"),
    "random, 4,000": ("subnetwork", "random", "4000"),
    '`"energy"`, 4,000': ("subnetwork", "energy", "4000"),
    '`"gradient"`, 4,000': ("subnetwork", "gradient", "4000"),
    '`"obd"`, 4,000': ("subnetwork", "obd", "4000"),
    '`"magnitude"`, 4,000': ("subnetwork", "magnitude", "4000"),
    '`"swag"`, 4,000': ("subnetwork", "swag", "4000"),
    '`"variance"`, 4,000': ("subnetwork", "variance", "4000"),
    "random, 42,438": ("subnetwork", "random", "42438"),
    '`"energy"`, 42,438': ("subnetwork", "energy", "42438"),
    '`"gradient"`, 42,438': ("subnetwork", "gradient", "42438"),
}
CORRUPTED = [f"{kind} {strength}" for kind in ("noise", "blur", "contrast") for strength in (1, 2, 3)]


@pytest.mark.parametrize("name", SELECTED)
def test_what_selection_adds(name: str) -> None:
    row = SELECTED[name]
    columns = [("nll", ["clean"]), ("joint_nll", ["clean"]), ("nll", CORRUPTED), ("ece", CORRUPTED)]
    columns.append(("auroc", ["cifar100"]))
    cells = [", ".join(short(value) for value in resnet(*row, metric, on)) for metric, on in columns]
    assert line(name, *cells) in words("methods/subnetwork_laplace.md")


def test_scores_of_weights_on_protein() -> None:
    rows = [row for row in read("experiments/subnetwork/uci.csv") if row["split"].startswith("gap")]
    of = {
        method: f"{mean_of(rows, 'nll', data='protein', method=f'{method} {weights}'.strip(), weights=weights):.3f}"
        for method, weights in (("energy", "600"), ("random", "600"), ("variance", "600"), ("MAP", ""), ("full", ""))
    }
    scores = f"energy {of['energy']}, random {of['random']}, variance {of['variance']}"
    text = f"{scores}; MAP {of['MAP']}, all weights {of['full']})"
    assert text in words("methods/subnetwork_laplace.md")


PRECISIONS = {
    ("MAP", ""): ("map", ""),
    ("MAP with a temperature", ""): ("map", "tempered"),
    ("Kronecker", "given"): ("kronecker", "given"),
    ("", "evidence"): ("kronecker", "evidence"),
    ("", "validation"): ("kronecker", "validation"),
    ("subnetwork of 5%", "given"): ("subnetwork 0.05", "given"),
    ("", "scaled"): ("subnetwork 0.05", "scaled"),
    (" ", "evidence"): ("subnetwork 0.05", "evidence"),
    (" ", "validation"): ("subnetwork 0.05", "validation"),
}


@pytest.mark.parametrize("heads", PRECISIONS)
def test_precisions(heads: tuple[str, str]) -> None:
    method, precision = PRECISIONS[heads]
    rows = read("experiments/subnetwork/precision.csv")
    cells = []
    for data, on, digits in (
        ("digits", "clean", 4),
        ("digits", "rotated", 3),
        ("mnist1d", "clean", 3),
        ("diabetes", "clean", 3),
        ("breast_cancer", "clean", 4),
    ):
        cells.append(short(mean_of(rows, "nll", data=data, on=on, method=method, precision=precision), digits))
    assert line(*(head.strip() for head in heads), *cells) in words("methods/laplace.md")


TEMPERED = {"MNIST, 2,000 rows, ": "mnist", "CIFAR-10, 3,000 rows, ": "cifar10"}


@pytest.mark.parametrize("prior", ["one precision", "g-prior"])
@pytest.mark.parametrize("start", TEMPERED)
def test_temperatures_of_sampled_laplace(start: str, prior: str) -> None:
    rows = [row for row in read("experiments/sampled_laplace/temperature.csv") if row["data"] == TEMPERED[start]]
    values = [mean_of(rows, "nll", prior="", temperature="0.0")]
    values += [mean_of(rows, "nll", prior=prior, temperature=t) for t in ("1.0", "0.25", "0.0625", "0.01")]
    name = f"{start}one precision for all" if prior == "one precision" else "... g-prior"
    assert line(name, *bold_least(values)) in words("methods/sampled_laplace.md")


def test_damage_of_corruptions() -> None:
    page, rows = words("shifts.md"), read("experiments/shifts/damage.csv")
    assert f"({mean_of(rows, 'error', corruption='clean'):.1f}% error on clean CIFAR-10;" in page
    names = dict.fromkeys(row["corruption"] for row in rows)
    del names["clean"]
    assert len(names) == 19
    for name in names:
        errors = [mean_of(rows, "error", corruption=name, severity=str(severity)) for severity in range(1, 6)]
        assert line(f"`{name}`", *(f"{error:.1f}" for error in errors)) in page


def lenet(problem: str, method: str, column: str) -> float:
    """A score of LeNet-5-Caffe, the mean over three seeds."""
    return mean_of(read("experiments/ssvi/second_table.csv"), column, problem=problem, method=method)


def test_sparse_networks_of_lenet() -> None:
    mnist, fashion = (1 - lenet(problem, "AEB", "accuracy") for problem in ("mnist", "fashion_mnist"))
    more = [
        lenet(problem, "SSVI", "accuracy") + error - 1
        for problem, error in (("mnist", mnist), ("fashion_mnist", fashion))
    ]
    page = words("methods/aeb.md")
    assert f"the error is {mnist:.1%} on MNIST and {fashion:.1%} on Fashion-MNIST, half a point and " in page
    assert 0.0035 < more[0] < 0.0065
    assert f"half a point and {short(100 * more[1], 1)} points more than" in page
    ece = [short(lenet(problem, "AEB", "ece"), 3) for problem in ("mnist", "fashion_mnist")]
    assert f"(top-label ECE {ece[0]} and {ece[1]})" in page
    kib = [round(lenet("mnist", method, "bytes") / 1024) for method in ("AEB", "SSVI")]
    assert f"Ten draws are {kib[0]} KiB, SSVI is {kib[1]}." in page


def test_calibration_of_dropped_weights() -> None:
    ece = {method: lenet("fashion_mnist", method, "ece") for method in ("VariationalDropout", "SSVI", "MeanFieldVI")}
    figures = [short(ece["VariationalDropout"]), short(ece["SSVI"], 4), short(ece["MeanFieldVI"], 4)]
    others = "[`SSVI`](ssvi.md) and [`MeanFieldVI`](mean_field_vi.md)"
    sentence = f"ECE is {figures[0]}, where {others} have {figures[1]} and {figures[2]}."
    assert sentence in words("methods/variational_dropout.md")


@pytest.mark.parametrize(
    ("chains", "draws", "quantities"), [(4, 100, 5000), (4, 150, 3600), (4, 400, 5000), (4, 400, 100_000)]
)
def test_what_r_hats_are_by_chance(chains: int, draws: int, quantities: int) -> None:
    null = rhat_null(chains, draws, quantities)
    digits = 3 if draws < 400 else 4
    cells = [f"{null.maximum:.{digits}f}", f"{null.limit:.{digits}f}"]
    page = words("diagnostics.md")
    assert f"| {chains} x {draws} | {quantities:,} | " in page
    shown = page.split(f"| {chains} x {draws} | {quantities:,} | ")[1].split(" | ")[0]
    decimals = len(shown.rstrip("%").partition(".")[2])
    assert shown == f"{null.share_above:.{decimals}%}"
    assert line(f"{chains} x {draws}", f"{quantities:,}", shown, *cells) in page


@pytest.mark.parametrize("name", ["digits", "grainy_digits"])
def test_references_that_come_with_the_package(name: str) -> None:
    (file,) = (ROOT / "caveat" / "references" / name).glob("*.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    (shown,) = (row for row in words("fidelity.md").split("| `")[1:] if row.startswith(f"{name}` |"))
    cells = [cell.strip() for cell in shown.split("|")]
    floor = content["floor"]["clean"]
    assert cells[3] == f"{content['data']['training_rows']:,}"
    assert f"R-hat of {content['diagnostics']['clean']['rows'] * 11:,} predictions is {cells[5]} " in str(
        content["diagnostics"]["clean"]["reasons"]
    )
    agreement, distance = floor["agreement"]["mean"], floor["total_variation"]["mean"]
    assert cells[6] == f"agreement {short(agreement)}, TV {short(distance)}"
    assert cells[8] == f"{content['seconds']:.0f} s"


RESNET = {"MAP": "map", "temperature 1": "sampled-g-32-0.02, temperature 1", '`"validation"`': "sampled-g-32-0.02"}


def test_sampled_laplace_of_a_resnet_under_shift() -> None:
    rows = read("experiments/sampled_laplace/cifar.csv")
    last = {(row["method"], row["metric"]): float(row["value"]) for row in rows}  # of the two networks, the second
    page = words("methods/sampled_laplace.md")
    for head, metric in (("NLL", "nll"), ("ECE", "ece"), ("NLL a label, ten jointly", "joint nll a label")):
        values = {
            name: [last[method, f"{metric}, severity {severity}" if severity else metric] for severity in (0, 1, 3, 5)]
            for name, method in RESNET.items()
        }
        for name, of_method in values.items():
            best = [min(column) for column in zip(*values.values(), strict=True)]
            cells = [
                f"**{short(value)}**" if value == least else short(value)
                for value, least in zip(of_method, best, strict=True)
            ]
            assert line(head if name == "MAP" else "", name, *cells) in page


PUBLISHED = [
    "one HMC chain",
    "SGD",
    "ensemble of 50",
    "mean-field VI",
    "SGLD",
    "SGHMC",
    "cyclical SGHMC",
    "preconditioned cyclical SGHMC",
]


def test_what_izmailov_et_al_found() -> None:
    value = {
        (row["table"], row["row"], row["column"]): row["value"]
        for row in read("experiments/papers.csv")
        if row["paper"] == "hmc"
    }
    page = words("fidelity.md")
    for table, after in (("cifar10", ""), ("cifar10 corrupted", ", -C")):
        for column in ("accuracy", "agreement", *(("total variation",) if not after else ())):
            assert line(column + after, *(value[table, row, column] for row in PUBLISHED)) in page


def test_what_posteriors_over_adapters_take() -> None:
    found = {(row["step"], row["figure"]): float(row["value"]) for row in read("benchmarks/adapters.csv")}
    share = {key: f"{100 * value:.0f}% of the base" for key, value in found.items() if key[1].endswith("_share")}
    weights, size, own = (found["model", name] for name in ("base_weights", "base_mb", "adapters_mb"))
    page = words("adapters.md")
    assert (
        f"a base of {weights / 1e6:.1f} million weights ({size:.0f} MB in float32) with adapters of {own:.2f} MB"
        in page
    )
    small, whole = (found[name, "written_mb"] for name in ("Laplace", "Laplace, whole factors"))
    assert f"written without the base | {small:.1f} MB" in page
    assert f"(whole factors: {whole:.0f} MB)" in page
    assert f"grows by {100 * found['Laplace', 'load_grew_share']:.1f}% of the base; all" in page
    assert found["MAP", "frozen_shared"] == found["MAP", "frozen_tensors"]
    assert f"all {found['MAP', 'frozen_tensors']:.0f} frozen tensors" in page
    assert f"the task | the process grows by {share['task', 'grew_share']}" in page
    bare = share["bare training step, the first", "grew_share"].removesuffix(" of the base")
    assert f"its peak | {share['MAP', 'grew_share']}; a bare training step of torch grows it by {bare}" in page
    assert f"the fit of Laplace, its peak | {share['Laplace', 'fit_grew_share']}" in page


def test_sampled_laplace_over_adapters_beside_laplace_torch() -> None:
    page = words("methods/sampled_laplace.md")
    names = ("`SampledLaplace()`, exact by itself", "`SampledLaplace(solver=ConjugateGradients())`",
             "laplace-torch 0.3, Kronecker factors")  # fmt: skip
    rows = read("benchmarks/sampled_adapters.csv")
    for name, row in zip(names, rows, strict=True):
        times = (f"{float(row[column]):.1f}" for column in ("fit_seconds", "prediction_seconds"))
        assert line(name, *times, f"{float(row['peak_mb']):,.0f}", f"{float(row['nll']):.3f}") in page
    assert f"({int(rows[0]['weights']):,} adapter weights, {rows[0]['rows']} rows, two classes," in page


def left(row: Row) -> list[int]:
    """What is left of each layer, or of each kind of unit, in a run of LeNet-5-Caffe."""
    return [int(part.split(": ")[1].split(" of ")[0]) for part in row["left"].split(", ")]


def lenets(problem: str, method: str) -> list[dict[str, str]]:
    """The runs of LeNet-5-Caffe by a method, one a seed."""
    rows = read("experiments/ssvi/second_table.csv")
    return [row for row in rows if (row["problem"], row["method"]) == (problem, method)]


@pytest.mark.parametrize(
    ("page", "method"),
    [
        ("structured_bayesian_pruning", "StructuredBayesianPruning"),
        ("group_variational_dropout", "GroupVariationalDropout"),
    ],
)
def test_widths_of_lenet(page: str, method: str) -> None:
    runs = lenets("mnist", method)
    counts = [left(row) for row in runs]  # channels, channels, units, inputs of the units
    widths = ", ".join(f"{one}-{two}-{inputs}-{units}" for one, two, units, inputs in counts)
    totals = [", ".join(str(sum(count)) for count in counts)] if "structured" in page else []
    errors = ", ".join(f"{1 - float(row['accuracy']):.2%}" for row in runs)
    assert line("ours", widths, *totals, errors) in words(f"methods/{page}.md")


def test_group_variational_dropout_is_the_worst_calibrated_on_mnist() -> None:
    methods = {row["method"] for row in read("experiments/ssvi/second_table.csv")}
    ece = {method: lenet("mnist", method, "ece") for method in methods}
    assert max(ece, key=lambda method: ece[method]) == "GroupVariationalDropout"
    page = words("methods/group_variational_dropout.md")
    assert (
        f"Of the eight methods there it is the worst calibrated on MNIST (top-label ECE {short(max(ece.values()))})"
        in page
    )
    runs = lenets("fashion_mnist", "GroupVariationalDropout")
    ends = [sorted({count[place] for count in map(left, runs)}) for place in (0, 1, 3, 2)]
    error = 1 - lenet("fashion_mnist", "GroupVariationalDropout", "accuracy")
    said = " - ".join(f"{low} {'or' if high - low == 1 else 'to'} {high}" for low, *_, high in ends)
    assert f"leave {said}, at {error:.1%}" in page


def test_weights_that_variational_dropout_keeps() -> None:
    page, kept = words("methods/variational_dropout.md"), {}
    for problem in ("mnist", "fashion_mnist"):
        kept[problem] = 1 / (1 - mean_of(lenets(problem, "VariationalDropout"), "sparsity"))
    error = {problem: 1 - lenet(problem, "VariationalDropout", "accuracy") for problem in kept}
    size = lenet("mnist", "VariationalDropout", "bytes") / 1024
    text = f"keeps one weight of {kept['mnist']:.0f} at an error of {error['mnist']:.2%}, {size:.0f} KiB in all"
    assert text in page
    assert f"keep one weight of {kept['fashion_mnist']:.0f} on Fashion-MNIST, at {error['fashion_mnist']:.1%}" in page


def test_what_the_paper_says_of_ssvi() -> None:
    value = {(row["table"], row["row"], row["column"]): row["value"] for row in read("experiments/papers.csv")}
    names = {"dense VI": "dense variational inference", "SSVI 90%": "SSVI, 90% of the weights removed"}
    for row, name in (names | {"SSVI 95%": "SSVI, 95% of the weights removed"}).items():
        cells = [
            f"{value[data, row, 'accuracy']}%, {value[data, row, 'marginal calibration error']}"
            for data in ("cifar10", "cifar100")
        ]
        assert line(name, *cells) in words("methods/ssvi.md")


def test_ssvi_with_another_weight_of_the_divergence() -> None:
    (run,) = (
        row
        for row in read("experiments/ssvi/cifar.csv")
        if (row["data"], row["method"], row["epochs"]) == ("cifar10", "ssvi", "200")
        and abs(float(row["density"]) - 0.05) < 0.01
        and "kl 0.01 " in row["knobs"]
    )
    sentence = f"SSVI had {float(run['accuracy']):.1%} on CIFAR-10 at 95%, and an ECE of {short(float(run['ece']), 4)};"
    assert sentence in words("methods/ssvi.md")


def milliseconds(text: str) -> str:
    return f"{float(text):,.0f}" if float(text) >= 1000 else f"{float(text):.3g}"


def test_the_service_and_its_latency() -> None:
    page, of_both = words("serve.md"), dict[str, dict[str, Row]]()
    for row in read("benchmarks/latency.csv"):
        of_both.setdefault(row["method"], {})[row["rows"]] = row
    assert {"MAP", "LastLayerLaplace", "SubnetworkLaplace", "SampledLaplace"} <= of_both.keys()
    for method, by_rows in of_both.items():
        one, many = by_rows["1"], by_rows["64"]
        cells = [f"`{method}`", one["draws"]]
        for row, goal in ((one, [one["goal"]]), (many, [])):
            cells += [", ".join(milliseconds(row[name]) for name in ("p50_ms", "p99_ms")), f"{float(row['ratio']):.1f}"]
            cells += goal
        assert line(*cells) in page, line(*cells)
        assert not one["goal"] or float(one["ratio"]) < float(one["goal"]), "a goal that is missed is to be said"
    for row in read("benchmarks/service.csv"):
        what = f"`{row['method']}`, {row['draws']} {'members' if row['method'] == 'DeepEnsemble' else 'draws'}"
        times = [f"{row[name]} ms" for name in ("p50_ms", "p99_ms")]
        assert line(what, f"{int(row['requests_a_second']):,}", *times, row["rows_a_pass"], row["errors"]) in page


def test_how_far_work_on_a_gpu_is_from_the_floor() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    rows = read("benchmarks/floor.csv")
    for row in rows:
        here, floor = (float(row[name]) for name in ("here", "floor"))
        digits = 0 if here > 1000 else 3 if here < 1 else 2 if here < 5 else 1
        assert line(row["work"], f"{here:,.{digits}f}", f"{floor:,.{digits}f}") in page
    rate = {row["work"]: f"{float(row['here']):,.0f}" for row in rows if row["part"] == "sgmcmc"}
    few, many = (f"{round(float(rate[work].replace(',', '')), -3):,.0f}" for work in rate)
    sentence = f"ResNet-20-FRN makes {few} chain-images a second on an H200 in batches of 80 with eight chains"
    assert sentence in words("methods/sgmcmc.md")
    assert f"and {many} in batches of 500 with four" in words("methods/sgmcmc.md")


def test_how_long_few_rows_take() -> None:
    page, rows = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8"), read("benchmarks/few_rows.csv")
    for case in {row["case"] for row in rows}:
        exact, gradients = (row for row in rows if row["case"] == case)
        assert (exact["solver"], gradients["solver"]) == ("Exact", "ConjugateGradients")
        found = [f"{exact[name]}, {gradients[name]}" for name in ("precision", "effective dimension")]
        assert line(case, f"**{exact['seconds']} s**", f"{gradients['seconds']} s", *found) in page
