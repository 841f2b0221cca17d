"""The page of a bench: what methods gain over a tempered MAP, and everything that this rests on.

Sections are those of the page of runs, once for each data set and model, with means and standard errors over seeds,
s / sqrt(n). Buttons hide methods and data sets in every table and plot. The page is made from the folder's files alone.

Called by `caveat.report.write` for folders of `caveat bench`.
"""

from caveat.report.bench_page.compose_bench import write_bench

__all__ = ["write_bench"]
