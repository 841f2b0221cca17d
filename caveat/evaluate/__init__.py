"""Evaluation: predict, write the predictions down, score what was written."""

from caveat.evaluate.evaluation import evaluate
from caveat.evaluate.scores import Score, Scored, Scores

__all__ = ["Score", "Scored", "Scores", "evaluate"]
