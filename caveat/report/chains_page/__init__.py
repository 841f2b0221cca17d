"""The page about the chains of a sampler: may they be trusted, and what says so? Colours stand for chains.

The verdict comes first, then its numbers (R-hat, effective draws, E-BFMI), and plots of what they rest on: traces,
ranks, energies, R-hats beside those of independent draws, and the posterior between the chains.

Called by `caveat diagnose`.
"""

from caveat.report.chains_page.compose_chains import write_chains

__all__ = ["write_chains"]
