"""Evaluation: predict, write the predictions down, score what was written."""

from caveat.evaluate.evaluation import evaluate
from caveat.evaluate.fidelity import Fidelity, fidelity
from caveat.evaluate.reference_set import ReferenceSet
from caveat.evaluate.scores import Score, Scored, Scores

__all__ = ["Fidelity", "ReferenceSet", "Score", "Scored", "Scores", "evaluate", "fidelity"]
