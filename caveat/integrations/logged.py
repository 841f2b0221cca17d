"""What trackers of experiments want to know of a posterior: flat names and numbers."""

import dataclasses
import math
from typing import Any

from torch import Tensor

from caveat.evaluate import Scores
from caveat.methods import method_name
from caveat.posterior import Posterior

__all__ = ["flat_knobs", "flat_scores"]


def flat_knobs(posterior: Posterior) -> dict[str, Any]:
    """The method's name and knobs, `training.epochs` among them, and what the fit took."""
    info = posterior.info
    network = {
        "likelihood": type(posterior.network.likelihood).__name__,
        "prior": type(posterior.network.prior).__name__,
    }
    cost = {"weights": posterior.network.n_parameters, "seconds": info.seconds, "seed": info.seed}
    return {"method": method_name(posterior.method)} | _flat(posterior.method, "") | network | cost


def flat_scores(scores: Scores) -> dict[str, float]:
    """Every finite score as `<data>/<metric>`, in characters that trackers take."""
    return {
        f"{''.join(c if c.isalnum() else '_' for c in one.name)}/{name}": value.mean
        for one in scores.data
        for name, value in one.metrics.items()
        if math.isfinite(value.mean)
    }


def _flat(knobs: Any, prefix: str) -> dict[str, Any]:
    """The fields of a dataclass and of those inside it; of a tensor its shape."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(knobs):
        value = getattr(knobs, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            flat |= _flat(value, f"{prefix}{field.name}.")
        else:
            flat[f"{prefix}{field.name}"] = f"tensor {list(value.shape)}" if isinstance(value, Tensor) else value
    return flat
