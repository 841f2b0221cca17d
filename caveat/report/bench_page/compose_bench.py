"""Puts the page of a bench together: the verdicts first, then everything that they rest on."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from caveat.report.bench_page.bench_tables import bench_table, between_table, fidelity_tables
from caveat.report.bench_page.seed_curves import calibration_plots, histogram_plots, ood_dots, rejection_plot, roc_plot
from caveat.report.bench_page.shown_inputs import disagreement_gallery, toy_plots
from caveat.report.bench_page.verdict_cards import verdict_sections
from caveat.report.draw import (
    cost_plots,
    coverage_plot,
    fit_folds,
    fold,
    graph_objects,
    interval_panels,
    legend,
    plot_grid,
    section,
    settings_list,
    severity_folds,
    styles,
    write_page,
)
from caveat.report.saved import BenchGroup, SavedBench, data_by_title, ood_sets, read_bench, shift_families

__all__ = ["write_bench"]


def write_bench(folder: str | Path, target: Path, title: str | None = None) -> Path:
    """Write the page of a folder that `caveat bench` wrote, and return where it is."""
    graph_objects()  # says what to install before any work is done
    bench = read_bench(folder)
    body = verdict_sections(bench) + _results(bench) + _quality(bench) + _inputs(bench) + _configuration(bench)
    bar = legend(bench.groups[0].runs, [group.title for group in bench.groups])
    return write_page(target, title or bench.title, bar, body)


def _by_group(bench: SavedBench, body_of: Callable[[BenchGroup], str]) -> str:
    """The body of every data set and model that has one, under its name where there are several."""
    parts = [(group, body_of(group)) for group in bench.groups]
    many = len(bench.groups) > 1
    return "".join(
        f'<div data-set="{group.index}">{f"<h3>{escape(group.title)}</h3>" if many else ""}{body}</div>'
        for group, body in parts
        if body
    )


def _results(bench: SavedBench) -> str:
    lead = "Press a column's head to sort by it, best first; again to turn it round. The first head restores the order."
    return section("results", "Results", lead, bench_table(bench)) + section(
        "shift",
        "Under shift",
        "The same test rows, made harder step by step. A good posterior grows unsure as it grows wrong. Bands are one "
        "standard error over seeds.",
        _by_group(bench, lambda group: severity_folds(group.runs, shift_families(group.done))),
    )


def _quality(bench: SavedBench) -> str:
    """Calibration, out-of-distribution data, rejection, cost, fidelity."""
    parts = {
        ("reliability", "Does confidence match accuracy?"): (
            "Points on the dotted line are calibrated; below it, the network is over-confident. All seeds together; "
            "bars are one standard error of a single seed; bins of fewer than five rows are left out.",
            lambda group: plot_grid(calibration_plots(group), "small") if group.kind == "classification" else "",
        ),
        ("coverage", "Do the intervals hold what they promise?"): (
            "Share of targets inside the central interval of each level, of the first seed. Below the dotted line "
            "intervals are too narrow, above it too wide.",
            lambda group: _coverage(group) if group.kind == "regression" else "",
        ),
        ("ood", "Does it notice out-of-distribution data?"): (
            "How well a threshold on the uncertainty tells them apart, with one standard error over seeds; and the "
            "uncertainty itself, medians and quartiles, of clean rows (ring) and of these (disc).",
            _ood,
        ),
        ("rejection", "What if it may refuse?"): (
            "The most uncertain rows are rejected first. A curve that rises steeply (for an RMSE: falls) means that "
            "uncertainty finds the mistakes. Bands are one standard error over seeds.",
            lambda group: plot_grid(
                [rejection_plot(group, title, names) for title, names in data_by_title(group.done)]
            ),
        ),
        ("cost", "What it costs"): (
            "Down and to the left is better: a lower NLL for less. Nothing shown beats the methods on the dotted line "
            "in both. Bars are one standard error over seeds.",
            lambda group: plot_grid(cost_plots(group.runs)),
        ),
        ("fidelity", "How near do they come to HMC, and to each other?"): (
            "Closeness to a stored HMC posterior, where the experiment names one, and of the methods to each other.",
            lambda group: fidelity_tables(group) + (between_table(group) if len(group.done) > 1 else ""),
        ),
    }
    return "".join(section(*names, lead, _by_group(bench, body_of)) for names, (lead, body_of) in parts.items())


def _coverage(group: BenchGroup) -> str:
    curves = plot_grid([coverage_plot(group.runs, title, names) for title, names in data_by_title(group.done)])
    return curves + fold(
        "Predicted against true", "clean data", plot_grid(interval_panels(group.runs), "small"), is_open=False
    )


def _ood(group: BenchGroup) -> str:
    names = ood_sets(group.done)
    dots = [plot for name in names if (plot := ood_dots(group, name)) is not None]
    histograms = "".join(
        fold(f"Histograms: {name}", "", plot_grid(histogram_plots(group, name), "small"), is_open=False)
        for name in names
    )
    return plot_grid([*(roc_plot(group, name) for name in names), *dots]) + histograms


def _inputs(bench: SavedBench) -> str:
    gallery = (
        "Of the inputs that were kept, those about which the methods' probabilities differ most; one seed, the first "
        "that all methods have. Entropy is in nats."
    )
    toys = "Predictions over the input space, one seed. Grey dots are the true values; bands are 90% intervals."
    return section("gallery", "Where they disagree", gallery, _by_group(bench, disagreement_gallery)) + section(
        "toys", "What they predict", toys, _by_group(bench, lambda group: plot_grid(toy_plots(group), "small"))
    )


def _configuration(bench: SavedBench) -> str:
    body = f"<pre>{escape(bench.experiment)}</pre>"
    body = fold("The experiment file", "", body, is_open=False)
    body += fold("The machine", "", settings_list(bench.index["machine"]), is_open=False)
    if bench.unfinished_cells:
        items = "".join(
            f"<li>{escape(' '.join(str(cell[key]) for key in ('data', 'model', 'method')))} seed {cell['seed']}: "
            f"{escape(str(cell['error'] or 'not run yet'))}</li>"
            for cell in bench.unfinished_cells
        )
        body += fold("Fits that failed or are missing", "", f'<ul class="warnings">{items}</ul>', is_open=True)
    body += _by_group(bench, lambda group: fit_folds(group.done, styles(group.runs), group.index))
    lead = "The experiment, and every knob, warning and version, method by method; costs are means over seeds."
    return section("configuration", "How they were fitted", lead, body)
