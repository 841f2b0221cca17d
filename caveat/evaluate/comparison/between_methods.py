"""How far the predictions of methods lie from each other.

The disagreement about one input is how far the methods' probabilities p_m lie from their mean q, in total variation:
    1/M sum_m 1/2 sum_c |p_mc - q_c|.
"""

import numpy as np

__all__ = ["disagreement", "mean_distance", "mean_total_variation"]


def disagreement(probs: np.ndarray) -> np.ndarray:
    """Return how much methods with probabilities [M, N, C] disagree about each of N inputs; 0 where all are alike."""
    return np.asarray(0.5 * np.abs(probs - probs.mean(0)).sum(2).mean(0))


def mean_total_variation(probs: np.ndarray, others: np.ndarray) -> float:
    """Return the total variation distance between the probabilities of two methods, [N, C] each, averaged over rows."""
    return 0.5 * mean_distance(probs, others)


def mean_distance(predictions: np.ndarray, others: np.ndarray) -> float:
    """Return the summed |difference| of the outputs of two methods, [N, ...] each, averaged over rows."""
    apart = np.abs(predictions.astype(np.float64) - others.astype(np.float64)).reshape(len(predictions), -1)
    return float(apart.sum(1).mean())
