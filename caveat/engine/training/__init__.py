"""Training: one loop that minimises -log p(D, theta) / N over mini-batches, for every method that trains.

    knobs                  `Training`, every knob of the loop in one dataclass
    loop                   the loop itself: batches, precision, ranks, checkpoints, early stopping
    side_by_side           several loops at the same time on one GPU
    meeting                fits whose loops are such
    point_training         weights and noise that maximise log p(D, theta)
    arrival                whether weights are at an optimum: what one step along the gradient would still gain
    marginals              whether what was fitted predicts better than the targets' marginals; asked after every fit
    against_point          and whether worse than the point that it starts from
    learned_noise          whether the noise that a point learns can be believed
    batchnorm_statistics   BatchNorm statistics for weights that no training step has seen
    temperature_scaling    one number that makes a trained network as sure as it should be

Called by MAP, deep ensembles, SWAG and MC dropout, by the variational methods, and by chains that start from a point.
"""

from caveat.engine.training.arrival import gain_left, warn_if_no_optimum
from caveat.engine.training.batchnorm_statistics import has_batchnorm, refreshed_statistics, statistic_names
from caveat.engine.training.knobs import ADAM, Training
from caveat.engine.training.learned_noise import warn_of_noise
from caveat.engine.training.loop import BatchPart, Moments, Variables, optimise, run_loop, steps_per_epoch, total_steps
from caveat.engine.training.marginals import check_against_marginals
from caveat.engine.training.meeting import Meeting
from caveat.engine.training.point_training import (
    PointTraining,
    row_losses,
    train_point,
    train_points,
    training_report,
)
from caveat.engine.training.temperature_scaling import fit_temperature

__all__ = [
    "ADAM",
    "BatchPart",
    "Meeting",
    "Moments",
    "PointTraining",
    "Training",
    "Variables",
    "check_against_marginals",
    "fit_temperature",
    "gain_left",
    "has_batchnorm",
    "optimise",
    "refreshed_statistics",
    "row_losses",
    "run_loop",
    "statistic_names",
    "steps_per_epoch",
    "total_steps",
    "train_point",
    "train_points",
    "training_report",
    "warn_if_no_optimum",
    "warn_of_noise",
]
