"""Evaluation: all statistics live here.

    metrics       one number a row, their means, calibration, refusal, detection; the catalogue of metrics
    feature_distance  how far inputs are from the training rows, a baseline for out-of-distribution scores
    predictions   the arrays of a prediction file
    comparison    gains with intervals over rows and over seeds, averages over seeds
    fidelity      how far a posterior is from a reference, HMC where it can be had
    diagnosis     whether the chains of a sampler may be trusted
    scoring       `evaluate`: predict, write the predictions down, score what was written

Called by the user, by `bench`, by `report` and by the command line.
"""

from caveat.evaluate.fidelity import Fidelity, ReferenceSet, fidelity
from caveat.evaluate.metrics import Score
from caveat.evaluate.scoring import Scored, Scores, evaluate

__all__ = ["Fidelity", "ReferenceSet", "Score", "Scored", "Scores", "evaluate", "fidelity"]
