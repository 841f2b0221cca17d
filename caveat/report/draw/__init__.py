"""Drawing: figures, tables and images as pieces of one HTML page that needs no network.

A plot is a plotly figure with its description in words; page.js draws it in the reader's browser, in light or dark, and
hides and shows runs. `figures` has what all plots share, `joint_plots` show all runs together, `run_panels` one run
each on common axes, `reliability_plot` how often stated confidences are right; `html_pieces` are sections, folds and
legends, `sortable_table` is the table of results, `image_cards` and `fit_facts` what runs said of images and how they
were fitted, `names_explained` what methods and metrics are; `page_file` writes the file.

Called by the three pages.
"""

from caveat.report.draw.dot_plots import uncertainty_dots
from caveat.report.draw.figures import (
    COLOURS,
    LEGEND_ABOVE,
    Plot,
    Style,
    band,
    diagonal,
    figure,
    graph_objects,
    line,
    palette_style,
    styles,
)
from caveat.report.draw.fit_facts import fit_folds, settings_list, warning_note
from caveat.report.draw.html_pieces import (
    fold,
    legend,
    plot_figure,
    plot_grid,
    scrolling,
    section,
    swatch,
    toggle_button,
)
from caveat.report.draw.image_cards import Exhibit, exhibit_fold
from caveat.report.draw.joint_plots import cost_plots, gain_plot, risk_coverage_plot
from caveat.report.draw.names_explained import names_fold
from caveat.report.draw.page_file import write_page
from caveat.report.draw.reliability_plot import reliability_panel, reliability_panels
from caveat.report.draw.run_panels import (
    coverage_plot,
    entropies,
    entropy_panels,
    histogram_panels,
    interval_panels,
)
from caveat.report.draw.shared_sections import severity_folds, verdict_list
from caveat.report.draw.sortable_table import TableLine, results_table

__all__ = [
    "COLOURS",
    "LEGEND_ABOVE",
    "Exhibit",
    "Plot",
    "Style",
    "TableLine",
    "band",
    "cost_plots",
    "coverage_plot",
    "diagonal",
    "entropies",
    "entropy_panels",
    "exhibit_fold",
    "figure",
    "fit_folds",
    "fold",
    "gain_plot",
    "graph_objects",
    "histogram_panels",
    "interval_panels",
    "legend",
    "line",
    "names_fold",
    "palette_style",
    "plot_figure",
    "plot_grid",
    "reliability_panel",
    "reliability_panels",
    "results_table",
    "risk_coverage_plot",
    "scrolling",
    "section",
    "settings_list",
    "severity_folds",
    "styles",
    "swatch",
    "toggle_button",
    "uncertainty_dots",
    "verdict_list",
    "warning_note",
    "write_page",
]
