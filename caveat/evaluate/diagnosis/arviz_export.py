"""Chains for ArviZ: a tree of xarray data sets with dimensions (chain, draw), which it plots, compares and stores.

posterior              weights, and a learned noise
sample_stats           lp, energy, acceptance_rate, diverging, step_size, n_steps: what the sampler recorded
log_likelihood         y: log density of each row's targets in each draw          with data
posterior_predictive   probs or mean: what each draw predicts, without noise      with data
observed_data          y: the targets                                             with data
"""

from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from caveat.evaluate.diagnosis.by_draw import LEARNED, chains_of, predict_by_draw
from caveat.posterior import Posterior
from caveat.rows import Data

__all__ = ["to_arviz"]


def to_arviz(posterior: Posterior, data: Data | None = None, *, parameters: str = "*", rows: int | None = None) -> Any:
    """Turn the chains of a posterior into an `xarray.DataTree` that ArviZ reads; `.to_netcdf(path)` writes it.

    Args:
        posterior: of a method that runs chains.
        data: rows with targets; without them there are weights and the sampler's own records.
        parameters: pattern of the names of the weights to take along: all of a large network are large.
        rows: at most this many rows of the data, spread evenly; all of them unless given.
    """
    try:
        from arviz_base import from_dict
    except ImportError as error:
        raise ImportError('chains are handed to ArviZ by its own packages: pip install "caveat[mcmc]"') from error
    chains_of(posterior)  # refuses a posterior without chains
    chosen = {name: stack for name, stack in posterior.state["params"].items() if fnmatchcase(name, parameters)}
    if not chosen:
        known = list(posterior.state["params"])[:8]
        raise ValueError(f"parameters={parameters!r} matches none of the posterior's weights: {known}")
    groups = {"posterior": {name.removeprefix(LEARNED): stack for name, stack in chosen.items()}}
    groups["sample_stats"] = dict(posterior.state["stats"])
    coords: dict[str, Any] = {}
    dims: dict[str, list[str]] = {}
    if data is not None:
        by_draw = predict_by_draw(posterior, data, rows)
        predicted = "probs" if posterior.network.likelihood.kind == "classification" else "mean"
        groups["log_likelihood"] = {"y": by_draw.log_prob}
        groups["posterior_predictive"] = {predicted: by_draw.samples}
        groups["observed_data"] = {"y": by_draw.targets}
        coords["row"] = by_draw.rows.numpy()
        dims = {"y": ["row"], predicted: ["row", *(f"output_{i}" for i in range(by_draw.samples.ndim - 3))]}
    arrays = {
        group: {name: _array(values) for name, values in variables.items()} for group, variables in groups.items()
    }
    described = {"inference_library": "caveat", "method": repr(posterior.method)}
    return from_dict(arrays, coords=coords, dims=dims, attrs={"posterior": described})


def _array(values: Tensor) -> Any:
    values = values.detach().cpu()
    return (values.float() if values.is_floating_point() and values.dtype.itemsize < 4 else values).numpy()
