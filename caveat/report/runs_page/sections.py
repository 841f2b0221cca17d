"""The sections of the page of runs, from the summary to how the runs were fitted."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from caveat.report.draw import (
    TableLine,
    cost_plots,
    coverage_plot,
    entropies,
    entropy_panels,
    fit_folds,
    fold,
    gain_plot,
    interval_panels,
    names_fold,
    plot_figure,
    plot_grid,
    reliability_panels,
    results_table,
    risk_coverage_plot,
    section,
    severity_folds,
    styles,
    uncertainty_dots,
    verdict_list,
    warning_note,
)
from caveat.report.numbers import Answer, answers, baseline
from caveat.report.numbers import table as metrics_table
from caveat.report.saved import SavedRun, data_by_title, left_out_notes, marginal_notes, ood_sets, shift_families
from caveat.report.wording import joined_by_and, plural

__all__ = [
    "classification_sections",
    "configuration_section",
    "cost_section",
    "regression_sections",
    "shift_section",
    "summary_section",
    "table_section",
]


def summary_section(runs: Sequence[SavedRun]) -> str:
    """Say which run is best for each question, and how every run compares with the baseline."""
    every_answer, style = answers(runs), styles(runs)
    cards = "".join(
        f'<article class="answer" style="--colour:{style[answer.best].colour}"><h3>{escape(answer.question)}</h3>'
        f'<p class="best">{escape(_winner(answer))}</p><p class="value">{escape(answer.value)}</p>'
        f"<p>{escape(answer.sentence)}</p></article>"
        for answer in every_answer
    )
    body = f'<div class="answers">{cards}</div>' if cards else "<p>No data set with targets was scored.</p>"
    body += "".join(f'<p class="note">{escape(note)}</p>' for note in (*left_out_notes(runs), *marginal_notes(runs)))
    body += warning_note(runs) + _against_baseline(runs, every_answer)
    return section("summary", "In short", _lead(runs), body)


def _winner(answer: Answer) -> str:
    """The best run, or that there is none: those that cannot be told from it are level with it."""
    if not answer.tied:
        return answer.best
    return f"Tie: {answer.best}, {answer.tied[0]}" if len(answer.tied) == 1 else f"Tie of {len(answer.tied) + 1} runs"


def _lead(runs: Sequence[SavedRun]) -> str:
    parts = [f"{plural(run.clean.rows, 'clean test row')}" for run in runs if run.clean][:1]
    shifts, ood = shift_families(runs), ood_sets(runs)
    if shifts:
        parts.append(f"{plural(len(shifts), 'kind')} of shift ({', '.join(shifts)})")
    if ood:
        parts.append(f"out-of-distribution data ({', '.join(ood)})")
    return f"{plural(len(runs), 'run')}, judged on {joined_by_and(parts)}."


def _against_baseline(runs: Sequence[SavedRun], every_answer: Sequence[Answer]) -> str:
    base = baseline(runs)
    compared = [answer for answer in every_answer if answer.against_baseline]
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


def table_section(runs: Sequence[SavedRun]) -> str:
    """Show the results table, which the reader sorts by its column heads."""
    table, style = metrics_table(runs), styles(runs)
    best = [table.best(index) for index in range(len(table.columns))]
    lines = [
        TableLine(label, style[label], table.cells[row], {i for i, rows in enumerate(best) if row in rows})
        for row, label in enumerate(table.labels)
    ]
    caption = (
        "Mean ± standard error over test rows, best in bold. Columns of a shift are means over its severities, with an "
        "upper bound of the standard error. Fits include what they start from; a prediction is a row's share of the "
        "evaluation."
    )
    lead = "Press a column's head to sort by it, best first; press again to turn it round."
    caption = " ".join([caption, *table.notes])
    drawn = results_table(table.columns, lines, "Run", caption) + names_fold(runs, table.columns)
    return section("results", "Results", lead, drawn)


def shift_section(runs: Sequence[SavedRun]) -> str:
    """Show curves against severity for each shift family."""
    lead = (
        "The same test rows, made harder step by step. A good posterior grows unsure as it grows wrong. "
        "Bands are one standard error."
    )
    return section("shift", "Under shift", lead, severity_folds(runs, shift_families(runs)))


def classification_sections(runs: Sequence[SavedRun]) -> str:
    """Show reliability, entropy out of distribution, and risk against coverage."""
    reliability_lead = (
        "Points on the dotted line are calibrated; below it, the network is over-confident. Larger points hold more "
        "rows; bars are one standard error; bins of fewer than five rows are left out."
    )
    ood_lead = (
        "Entropy of clean rows (ring) and of rows of no known class (disc): medians and quartiles. The farther they "
        "are apart, the higher the AUROC."
    )
    refusal_lead = (
        "Error rate when only the least uncertain rows are kept. Lower is better; a steep fall to the left means that "
        "uncertainty finds the mistakes."
    )
    ood = "".join(_out_of_distribution(runs, name) for name in ood_sets(runs))
    refusal = plot_grid([risk_coverage_plot(runs, title, names) for title, names in data_by_title(runs)])
    calibration = plot_grid(reliability_panels(runs), "small")
    return (
        section("reliability", "Does confidence match accuracy?", reliability_lead, calibration)
        + section("ood", "Does it notice out-of-distribution data?", ood_lead, ood)
        + section("refusal", "What if it may refuse?", refusal_lead, refusal)
    )


def _out_of_distribution(runs: Sequence[SavedRun], name: str) -> str:
    """One plot for all runs, and their histograms folded away."""
    dots = uncertainty_dots(runs, name, entropies(runs, name), "Entropy, nats")
    if dots is None:
        return ""
    panels = plot_grid(entropy_panels(runs, name), "small")
    return plot_grid([dots]) + fold(f"Histograms: {name}", "", panels, is_open=False)


def regression_sections(runs: Sequence[SavedRun]) -> str:
    """Show coverage against nominal level, and predictions with their intervals."""
    coverage_lead = (
        "Share of targets inside the central interval of each level. Below the dotted line intervals are too narrow, "
        "above it too wide."
    )
    interval_lead = (
        "Clean data with 90% intervals; of a large set, rows spread evenly over the order of the targets. Crosses are "
        "targets outside their interval."
    )
    coverage = plot_grid([coverage_plot(runs, title, names) for title, names in data_by_title(runs)])
    return section("coverage", "Do the intervals hold what they promise?", coverage_lead, coverage) + section(
        "intervals", "Predicted against true", interval_lead, plot_grid(interval_panels(runs), "small")
    )


def cost_section(runs: Sequence[SavedRun]) -> str:
    """Show quality against cost."""
    lead = (
        "Down and to the left is better: a lower NLL for less. Fits include what they start from. Bars are one "
        "standard error."
    )
    return section("cost", "What it costs", lead, plot_grid(cost_plots(runs)))


def configuration_section(runs: Sequence[SavedRun]) -> str:
    """Show how every run was fitted, folded away."""
    return section(
        "configuration",
        "How they were fitted",
        "Every knob, warning and version, run by run.",
        fit_folds(runs, styles(runs)),
    )
