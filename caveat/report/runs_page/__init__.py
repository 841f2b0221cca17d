"""The page of runs: which of the posteriors in a folder is best, by how much, and whether that is more than chance.

It goes from the answers to what they rest on: the table of results, curves under shift, calibration, data out of
distribution, images that go wrong, costs, and how every run was fitted. Intervals are over test rows.

Called by `caveat.report.write` for folders of `caveat evaluate` and `caveat demo`.
"""

from caveat.report.runs_page.compose_runs import write_runs

__all__ = ["write_runs"]
