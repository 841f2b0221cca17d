"""The demo: a small problem whose posterior is known, several ways to it, and what each is worth and costs.

    grainy_digits.py   the experiment, run by `bench`      sentences.py   what its tables say, as text

Called by `caveat demo`, and by docs/fill.py, which fills the pages with what it measured.
"""

from caveat.demo.grainy_digits import SEEDS, run_demo
from caveat.demo.sentences import NAMES, demo_rows, demo_verdicts

__all__ = ["NAMES", "SEEDS", "demo_rows", "demo_verdicts", "run_demo"]
