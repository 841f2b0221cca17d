"""The page's sections, from the summary to the cost."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from caveat.report.drawing import styles
from caveat.report.markup import draw, fold, plot_figure, plural, section
from caveat.report.panels import coverage_plot, entropy_panels, interval_panels, reliability_panels
from caveat.report.plots import cost_plots, gain_plot, risk_coverage_plot, severity_curves
from caveat.report.results_table import Line, results_table
from caveat.report.runs import Run
from caveat.report.shared import left_out, listed, shared_names
from caveat.report.summary import Answer, answers, baseline, verdicts
from caveat.report.tables import families, outside_names
from caveat.report.tables import table as metrics_table

OPEN_FAMILIES = 3  # further shift families are folded


def summary_section(runs: Sequence[Run]) -> str:
    """The best run for each question, and how every run compares with the baseline."""
    found, style = answers(runs), styles(runs)
    cards = "".join(
        f'<article class="answer" style="--colour:{style[answer.best].colour}"><h3>{escape(answer.question)}</h3>'
        f'<p class="best">{escape(answer.best)}</p><p class="value">{escape(answer.value)}</p>'
        f"<p>{escape(answer.sentence)}</p></article>"
        for answer in found
    )
    body = f'<div class="answers">{cards}</div>' if cards else "<p>No data set with targets was scored.</p>"
    body += "".join(f'<p class="note">{escape(note)}</p>' for note in left_out(runs))
    warned = [f"{run.label} ({len(run.info['warnings'])})" for run in runs if run.info.get("warnings")]
    if warned:
        link = '<a href="#configuration">how they were fitted</a>'
        body += f'<p class="note">Fits with warnings: {escape(listed(warned))}; see {link}.</p>'
    return section("summary", "In short", _lead(runs), body + _against_baseline(runs, found))


def _lead(runs: Sequence[Run]) -> str:
    parts = [f"{plural(run.clean.rows, 'clean test row')}" for run in runs if run.clean][:1]
    shifts, outside = families(runs), outside_names(runs)
    if shifts:
        parts.append(f"{plural(len(shifts), 'kind')} of shift ({', '.join(shifts)})")
    if outside:
        parts.append(f"data from elsewhere ({', '.join(outside)})")
    return f"{plural(len(runs), 'run')}, judged on {listed(parts)}."


def _against_baseline(runs: Sequence[Run], found: Sequence[Answer]) -> str:
    base = baseline(runs)
    compared = [answer for answer in found if answer.against_baseline]
    if base is None:
        return '<p class="note">There is no MAP run here, so nothing says what the runs gain over a plain network.</p>'
    if not compared:
        return ""
    figures = "".join(plot_figure(gain_plot(runs, answer), verdict_list(answer, base.label)) for answer in compared)
    return (
        f'<h3>Compared with {escape(base.label)}</h3><div class="grid">{figures}</div>'
        '<p class="quiet">Gains are paired, row by row, with 95% intervals over test rows. They do not say what '
        "another training seed would give.</p>"
    )


def verdict_list(answer: Answer, base: str) -> str:
    """Which runs are better than the baseline, not distinguishable from it, and worse."""
    words = {
        "better": f"Better than {base}",
        "level": f"Level with {base} to the digits shown",
        "not distinguishable": f"Not distinguishable from {base}",
        "worse": f"Worse than {base}",
    }
    items = "".join(
        f'<li class="{verdict.split()[0]}"><b>{escape(words[verdict])}:</b> {escape(listed(labels))}</li>'
        for verdict, labels in verdicts(answer).items()
        if labels
    )
    return f'<ul class="verdicts">{items}</ul>'


def table_section(runs: Sequence[Run]) -> str:
    """The results table, sortable by its column heads."""
    table, style = metrics_table(runs), styles(runs)
    best = [table.best(index) for index in range(len(table.columns))]
    lines = [
        Line(label, style[label], table.cells[row], {i for i, rows in enumerate(best) if row in rows})
        for row, label in enumerate(table.labels)
    ]
    caption = (
        "Mean ± standard error over test rows, best in bold. Columns of a shift are means over its severities, with an "
        "upper bound of the standard error."
    )
    lead = "Press a column's head to sort by it, best first; press again to turn it round."
    caption = " ".join([caption, *table.notes])
    return section("results", "Results", lead, results_table(table.columns, lines, "Run", caption))


def shift_section(runs: Sequence[Run]) -> str:
    """Curves against severity for each family."""
    drawn = [(family, severity_curves(runs, family)) for family in families(runs)]
    drawn = [(family, plots) for family, plots in drawn if plots]
    body = "".join(fold(family, "", draw(plots), i < OPEN_FAMILIES) for i, (family, plots) in enumerate(drawn))
    lead = (
        "The same test rows, made harder step by step. A good posterior grows unsure as it grows wrong. "
        "Bands are one standard error."
    )
    return section("shift", "Under shift", lead, body)


def classification_sections(runs: Sequence[Run]) -> str:
    """Reliability, entropy out of distribution, risk against coverage."""
    reliability_lead = (
        "Points on the dotted line are calibrated; below it, the network is over-confident. Larger points hold more "
        "rows; bars are one standard error; bins of fewer than five rows are left out."
    )
    outside_lead = (
        "Entropy on clean data (filled) and on data of no known class (line). The less they overlap, the higher the "
        "AUROC."
    )
    refusal_lead = (
        "Error rate when only the least uncertain rows are kept. Lower is better; a steep fall to the left means that "
        "uncertainty finds the mistakes."
    )
    panels = [(name, draw(entropy_panels(runs, name), "small")) for name in outside_names(runs)]
    outside = "".join(f"<h3>{escape(name)}</h3>{panel}" for name, panel in panels if panel)
    refusal = draw([risk_coverage_plot(runs, title, names) for title, names in test_groups(runs)])
    calibration = draw(reliability_panels(runs), "small")
    return (
        section("reliability", "Does confidence match accuracy?", reliability_lead, calibration)
        + section("outside", "Does it notice data from elsewhere?", outside_lead, outside)
        + section("refusal", "What if it may refuse?", refusal_lead, refusal)
    )


def regression_sections(runs: Sequence[Run]) -> str:
    """Coverage against nominal level, and predictions with their intervals."""
    coverage_lead = (
        "Share of targets inside the central interval of each level. Below the dotted line intervals are too narrow, "
        "above it too wide."
    )
    interval_lead = (
        "Clean data with 90% intervals; of a large set, rows spread evenly over the order of the targets. Crosses are "
        "targets outside their interval."
    )
    coverage = draw([coverage_plot(runs, title, names) for title, names in test_groups(runs)])
    return section("coverage", "Do the intervals hold what they promise?", coverage_lead, coverage) + section(
        "intervals", "Predicted against true", interval_lead, draw(interval_panels(runs), "small")
    )


def test_groups(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Titles and names of data that go together: the clean set, and each family at all severities."""
    groups = [("clean data", [run.clean.name]) for run in runs if run.clean][:1]
    for family in families(runs):
        names, every = shared_names(runs, family), {s.name for run in runs for s in run.shifts.get(family, ())}
        title = f"{family}, all severities" if len(every) > 1 else family
        if len(names) < len(every):
            title = f"{family}, severities that all runs have"
        groups += [(title, names)] if names else []
    return groups


def cost_section(runs: Sequence[Run]) -> str:
    """Quality against cost."""
    lead = "Down and to the left is better: a lower NLL for less. Bars are one standard error."
    return section("cost", "What it costs", lead, draw(cost_plots(runs)))
