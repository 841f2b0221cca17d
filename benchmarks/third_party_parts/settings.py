"""The settings: every method that there is, short, and the structures of Laplace one by one."""

import dataclasses
from typing import Any

import caveat
from caveat.methods import discover

EPOCHS = 6  # of methods that train from scratch
CORE = ("map", "ensemble", "hmc", "ivon", "laplace", "last_layer_laplace", "mc_dropout", "mean_field_vi",
        "sampled_laplace", "sgmcmc", "ssvi", "subnetwork_laplace", "swag")  # fmt: skip


def settings() -> dict[str, Any]:
    """Every setting by name: the quick instance of each method with few epochs, and more of some methods."""
    found = {name: _short(kind.quick) for name, kind in discover().items() if name != "map"}
    return {
        "map": caveat.MAP(),  # replaced by the case's own training: the others start from it
        **found,
        "laplace diagonal": caveat.Laplace(structure="diagonal"),
        "laplace low rank": caveat.Laplace(structure="low_rank", rank=10),
        "subnetwork_laplace by variance": caveat.SubnetworkLaplace(weights=40, score="variance"),
        "sampled_laplace closed": caveat.SampledLaplace(samples=8, precision=1.0, prediction="closed"),
    }


def _short(method: Any) -> Any:
    """A method with as little training as shows whether it runs."""
    changes: dict[str, Any] = {}
    fields = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    if isinstance(fields.get("training"), caveat.Training):
        changes["training"] = dataclasses.replace(fields["training"], epochs=EPOCHS)
    shorter = {"members": 2, "chains": 2, "length": 6, "burn_in": 6, "interval": 4, "samples": 8,
               "default_draws": 10}  # fmt: skip
    changes |= {name: value for name, value in shorter.items() if name in fields}
    if "trajectory" in fields:
        changes |= {"trajectory": 0.05, "warmup": 20}
    if "burn_in" in fields and "learning_rate" in fields:
        changes["learning_rate"] = 1e-3
    if isinstance(fields.get("weights"), float | int):
        changes["weights"] = 40
    return dataclasses.replace(method, **changes)
