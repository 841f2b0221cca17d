"""What the demo prints, made from the csv files of its results: a table of means over seeds, and what they say.

A sentence says "better" or "worse" only where the paired 95% interval over seeds and rows does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from caveat.evaluate.metrics import METRICS, format_number
from caveat.references import PACKAGED, load_reference

__all__ = ["NAMES", "demo_rows", "demo_sentences", "demo_table", "demo_verdicts"]

Row = Mapping[str, Any]
NAMES = {  # label of the experiment -> what people call it
    "map": "MAP, the trained network",
    "map_tempered": "MAP with a temperature",
    "deep_ensemble": "DeepEnsemble, 4 networks",
    "last_layer_laplace": "LastLayerLaplace",
    "subnetwork_laplace": "SubnetworkLaplace",
    "sampled_laplace": "SampledLaplace",
    "ssvi": "SSVI",
    "hmc": "HMC, 2 chains of 100 draws",
}
COLUMNS = (  # title, shift ("" is clean), metric
    ("accuracy", "", "accuracy"),
    ("NLL clean", "", "nll"),
    ("NLL rotated", "rotation", "nll"),
    ("joint NLL", "", "joint_nll"),
    ("TV to HMC", "", "total_variation"),
    ("fit", "", "fit_seconds"),
    ("a prediction", "", "predict_seconds_per_row"),
)
TEMPERED, POINT = "map_tempered", "map"


def demo_rows(summary: Sequence[Row]) -> dict[str, list[float]]:
    """Mean over seeds of every column of the table, by label; a shift is averaged over its severities."""
    return {label: [_mean(summary, label, shift, metric) for _, shift, metric in COLUMNS] for label in NAMES}


def demo_verdicts(comparisons: Sequence[Row]) -> dict[tuple[str, str], dict[str, str]]:
    """How each method stands to the tempered MAP, by shift ("" is clean) and metric, by label."""
    keys = (("", "nll"), ("rotation", "nll"), ("", "joint_nll"))
    labels = [label for label in NAMES if label != TEMPERED]
    return {
        (shift, metric): {label: _verdict(comparisons, label, shift, metric) for label in labels}
        for shift, metric in keys
    }


def demo_table(summary: Sequence[Row]) -> str:
    """The table as text; the last row is the long run of HMC that closeness is measured from."""
    rows = [("", *(title for title, _, _ in COLUMNS))]
    for label, values in demo_rows(summary).items():
        rows.append(
            (NAMES[label], *(_text(metric, value) for (*_, metric), value in zip(COLUMNS, values, strict=True)))
        )
    reference = load_reference(PACKAGED / "grainy_digits")
    scores = reference.facts["scores"]
    known = {metric: format_number(scores[metric]["mean"]) for metric in ("accuracy", "nll")}
    size = f"HMC, {reference.chains} chains of {reference.draws:,}"
    rows.append(
        (size, known["accuracy"], known["nll"], "", "", "0", _text("fit_seconds", reference.facts["seconds"]), "")
    )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def demo_sentences(summary: Sequence[Row], comparisons: Sequence[Row], confidence: float) -> list[str]:
    """What the results say; `confidence` is the mean probability of the label that the trained network names."""
    values = {
        label: dict(zip((title for title, _, _ in COLUMNS), row, strict=True))
        for label, row in demo_rows(summary).items()
    }
    posteriors = [label for label in NAMES if label not in (POINT, TEMPERED)]
    seeds = int(summary[0]["seeds"])
    truth = load_reference(PACKAGED / "grainy_digits").facts["scores"]["nll"]["mean"]
    point, tempered = values[POINT], values[TEMPERED]
    sentences = [
        f"Means over {seeds} seeds. TV is the total variation distance from the probabilities of the long HMC run; a "
        "fit includes the training that it starts from; a prediction is a row's share of 512 at once.",
        f"The trained network says {confidence:.0%} of its labels and is right in {point['accuracy']:.0%}. Its NLL on "
        f"clean rows is {point['NLL clean']:.2f}, with a temperature {tempered['NLL clean']:.2f}; the long HMC run has "
        f"{truth:.2f}.",
    ]
    for title, shift, metric in (("clean rows", "", "nll"), ("rotated rows", "rotation", "nll")):
        sentences.append(
            f"Against the temperature, NLL on {title}: {_by_verdict(comparisons, posteriors, shift, metric)}."
        )
    sentences.append(
        f"Labels of several rows together (joint NLL): {_by_verdict(comparisons, posteriors, '', 'joint_nll')}."
    )
    distance = {label: row["TV to HMC"] for label, row in values.items()}
    nearer = sorted((label for label in posteriors if distance[label] < distance[POINT]), key=distance.__getitem__)
    sentences.append(
        f"Nearer to HMC than the trained network ({distance[POINT]:.3f}; with a temperature {distance[TEMPERED]:.3f}): "
        f"{', '.join(f'{_short(label)} ({distance[label]:.3f})' for label in nearer) or 'none'}."
    )
    return sentences


def _by_verdict(comparisons: Sequence[Row], labels: Sequence[str], shift: str, metric: str) -> str:
    """The methods by how they stand to the tempered MAP, in words."""
    verdicts = {label: _verdict(comparisons, label, shift, metric) for label in labels}
    groups = [(word, [_short(label) for label in labels if verdicts[label] == word]) for word in ("better", "worse")]
    rest = [_short(label) for label in labels if verdicts[label] not in ("better", "worse")]
    said = [f"{word}: {', '.join(names)}" for word, names in [*groups, ("not distinguishable", rest)] if names]
    return "; ".join(said)


def _verdict(comparisons: Sequence[Row], label: str, shift: str, metric: str) -> str:
    """How a method stands to the tempered MAP on clean rows, or over all severities of a shift."""
    for row in comparisons:
        where = (
            row["role"] == "shift" and row["shift"] == shift and not row["severity"]
            if shift
            else row["role"] == "clean"
        )
        if row["method"] == label and row["metric"] == metric and where:
            return str(row["verdict"])
    raise KeyError(f"comparisons.csv has no row of {label}, {metric}, {shift or 'clean'}")


def _mean(summary: Sequence[Row], label: str, shift: str, metric: str) -> float:
    rows = [
        row
        for row in summary
        if row["method"] == label and (row["shift"] == shift if shift else row["role"] == "clean")
    ]
    return sum(float(row[metric]) for row in rows) / len(rows)


def _short(label: str) -> str:
    return NAMES[label].partition(",")[0]


def _text(metric: str, value: float) -> str:
    name = "seconds" if metric == "fit_seconds" else metric
    return METRICS[name].text(value)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *cells = (
        cell.rjust(width) if place else cell.ljust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *cells]).rstrip()
