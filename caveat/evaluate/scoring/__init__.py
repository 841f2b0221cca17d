"""Scoring: predict every data set, write the predictions down, and score what was written.

    posterior, data -> predictions/*.npz -> metrics.json

`evaluation` goes through the data sets; `scores` says which metrics a data set gets and holds the results.

Called by `caveat.evaluate`, the command line, `bench` and `reference`.
"""

from caveat.evaluate.scoring.evaluation import evaluate
from caveat.evaluate.scoring.scores import Scored, Scores, score

__all__ = ["Scored", "Scores", "evaluate", "score"]
