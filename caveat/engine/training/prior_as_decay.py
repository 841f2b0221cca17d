"""A Gaussian prior as weight decay: the gradient of -log p(w) / N is precision / N times the weight."""

from caveat.network import Params

__all__ = ["weight_decay"]


def weight_decay(precisions: Params | None, rows: int) -> dict[str, float] | None:
    """The decay of each weight tensor, precision / rows; None where the prior has to be in the loss instead.

    Args:
        precisions: of each tensor, as `gaussian_precisions` gives them: None for a prior that is not Gaussian.
        rows: of the training data.
    """
    if precisions is None or any(precision.numel() > 1 for precision in precisions.values()):
        return None
    return {name: float(precision) / rows for name, precision in precisions.items()}
