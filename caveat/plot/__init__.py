"""Plots of predictions for notebooks: plotly figures, drawn as the report draws them.

    plot.reliability(prediction, y)      plot.risk_coverage({"MAP": one, "SWAG": two}, y)     plot.entropy(clean, ood)
    plot.bands(x, prediction, y)         plot.intervals(prediction, y)           plot.chosen_weights(posterior)

A prediction is what `posterior.predict` returns; several are a dict of labels. `figure.show()`, or the last line of a
cell, shows it. They need the extra `caveat[report]`. Called by users.
"""

from caveat.plot.prediction_plots import bands, chosen_weights, entropy, intervals, reliability, risk_coverage

__all__ = ["bands", "chosen_weights", "entropy", "intervals", "reliability", "risk_coverage"]
