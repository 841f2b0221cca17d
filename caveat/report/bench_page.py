"""The page of a bench: what methods gain over a tempered MAP, and everything that this rests on.

Sections are those of the report of single runs, once for each data set and model, with means and standard errors over
seeds. Buttons hide methods and data sets in every table and plot. Made from the folder's files alone.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from caveat.report.bench_guards import guard_sections
from caveat.report.bench_inputs import disagreement_gallery, toy_plots
from caveat.report.bench_plots import calibration_plots, histogram_plots, rejection_plot, roc_plot
from caveat.report.bench_runs import Bench, Group, read_bench
from caveat.report.bench_tables import bench_table, between_table, fidelity_tables
from caveat.report.configuration import pairs, run_folds
from caveat.report.drawing import graph_objects
from caveat.report.markup import draw, fold, legend, section
from caveat.report.panels import coverage_plot, interval_panels
from caveat.report.plots import cost_plots, severity_curves
from caveat.report.sections import OPEN_FAMILIES, test_groups
from caveat.report.shell import write_page
from caveat.report.tables import families, outside_names

__all__ = ["write_bench"]


def write_bench(folder: str | Path, target: Path, title: str | None = None) -> Path:
    """Writes the page of a folder that `caveat bench` wrote."""
    graph_objects()  # says what to install before any work is done
    bench = read_bench(folder)
    body = guard_sections(bench) + _results(bench) + _quality(bench) + _inputs(bench) + _configuration(bench)
    bar = legend(bench.groups[0].runs, [group.title for group in bench.groups])
    return write_page(target, title or bench.title, bar, body)


def _each(bench: Bench, make: Callable[[Group], str]) -> str:
    """What there is of every data set and model, under its name where there are several."""
    parts = [(group, make(group)) for group in bench.groups]
    many = len(bench.groups) > 1
    return "".join(
        f'<div data-set="{group.index}">{f"<h3>{escape(group.title)}</h3>" if many else ""}{body}</div>'
        for group, body in parts
        if body
    )


def _results(bench: Bench) -> str:
    lead = "Press a column's head to sort by it, best first; again to turn it round. The first head restores the order."
    return section("results", "Results", lead, bench_table(bench)) + section(
        "shift",
        "Under shift",
        "The same test rows, made harder step by step. A good posterior grows unsure as it grows wrong. Bands are one "
        "standard error over seeds.",
        _each(bench, _shifts),
    )


def _shifts(group: Group) -> str:
    drawn = [(family, severity_curves(group.runs, family)) for family in families(group.done)]
    shown = [(family, plots) for family, plots in drawn if plots]
    return "".join(fold(family, "", draw(plots), i < OPEN_FAMILIES) for i, (family, plots) in enumerate(shown))


def _quality(bench: Bench) -> str:
    """Calibration, data from outside, rejection, cost, fidelity."""
    parts = {
        ("reliability", "Does confidence match accuracy?"): (
            "Points on the dotted line are calibrated; below it, the network is over-confident. All seeds together; "
            "bars are one standard error of a single seed; bins of fewer than five rows are left out.",
            lambda group: draw(calibration_plots(group), "small") if group.kind == "classification" else "",
        ),
        ("coverage", "Do the intervals hold what they promise?"): (
            "Share of targets inside the central interval of each level, of the first seed. Below the dotted line "
            "intervals are too narrow, above it too wide.",
            lambda group: _coverage(group) if group.kind == "regression" else "",
        ),
        ("outside", "Does it notice data from outside?"): (
            "Uncertainty about clean rows (filled) and about rows from outside (line), and how well a threshold tells "
            "them apart. Bands are one standard error over seeds.",
            _outside,
        ),
        ("rejection", "What if it may refuse?"): (
            "The most uncertain rows are rejected first. A curve that rises steeply (for an RMSE: falls) means that "
            "uncertainty finds the mistakes. Bands are one standard error over seeds.",
            lambda group: draw([rejection_plot(group, title, names) for title, names in test_groups(group.done)]),
        ),
        ("cost", "What it costs"): (
            "Down and to the left is better: a lower NLL for less. Nothing shown beats the methods on the dotted line "
            "in both. Bars are one standard error over seeds.",
            lambda group: draw(cost_plots(group.runs)),
        ),
        ("fidelity", "How near do they come to HMC, and to each other?"): (
            "Closeness to a stored HMC posterior, where the experiment names one, and of the methods to each other.",
            lambda group: fidelity_tables(group) + (between_table(group) if len(group.done) > 1 else ""),
        ),
    }
    return "".join(section(*names, lead, _each(bench, make)) for names, (lead, make) in parts.items())


def _coverage(group: Group) -> str:
    curves = draw([coverage_plot(group.runs, title, names) for title, names in test_groups(group.done)])
    return curves + fold(
        "Predicted against true", "clean data", draw(interval_panels(group.runs), "small"), is_open=False
    )


def _outside(group: Group) -> str:
    names = outside_names(group.done)
    curves = draw([roc_plot(group, name) for name in names])
    return curves + "".join(fold(name, "", draw(histogram_plots(group, name), "small"), is_open=True) for name in names)


def _inputs(bench: Bench) -> str:
    gallery = (
        "Of the inputs that were kept, those about which the methods' probabilities differ most; one seed, the first "
        "that all methods have. Entropy is in nats."
    )
    toys = "Predictions over the input space, one seed. Grey dots are the true values; bands are 90% intervals."
    return section("gallery", "Where they disagree", gallery, _each(bench, disagreement_gallery)) + section(
        "toys", "What they predict", toys, _each(bench, lambda group: draw(toy_plots(group), "small"))
    )


def _configuration(bench: Bench) -> str:
    missing = [cell for cell in bench.index["cells"] if cell["status"] != "done"]
    body = f"<pre>{escape(bench.experiment)}</pre>"
    body = fold("The experiment file", "", body, is_open=False)
    body += fold("The machine", "", pairs(bench.index["machine"]), is_open=False)
    if missing:
        items = "".join(
            f"<li>{escape(' '.join(str(cell[key]) for key in ('data', 'model', 'method')))} seed {cell['seed']}: "
            f"{escape(str(cell['error'] or 'not run yet'))}</li>"
            for cell in missing
        )
        body += fold("Fits that failed or are missing", "", f'<ul class="warnings">{items}</ul>', is_open=True)
    body += _each(bench, lambda group: run_folds(group.done))
    lead = "The experiment, and every knob, warning and version, method by method; costs are means over seeds."
    return section("configuration", "How they were fitted", lead, body)
