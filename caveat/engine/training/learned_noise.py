"""Whether learned noise can be believed: that of rows which the weights can learn by heart falls towards zero.

With as many weights as targets the likelihood has no maximum: a network that passes through every target is the more
probable the smaller the noise. Validation rows show the noise that there is; without any it is only said.
"""

import torch

from caveat.engine.run import Run
from caveat.likelihoods import HeteroscedasticGaussian, learned_noise
from caveat.task import Task

__all__ = ["warn_of_noise"]


def warn_of_noise(task: Task, run: Run) -> None:
    """Warn of noise that a point learns from the very rows that it is trained on, of which it has as many weights."""
    likelihood, weights = task.network.likelihood, task.network.n_parameters
    learned = learned_noise(likelihood, task.hyper) is not None or isinstance(likelihood, HeteroscedasticGaussian)
    if task.validation is not None or not learned:
        return
    _, y = next(task.train.batches([torch.arange(1)]))
    if weights < task.n * y.numel():
        return
    run.warnings.append(
        f"noise is learned from {task.n:,} training rows, which {weights:,} weights can learn by heart: it may come "
        "out far too small, and intervals with it; give the task validation=0.1, or the noise where it is known "
        "(Gaussian(noise=...))"
    )
