"""Caveat gives a PyTorch network a posterior: predictions that say how sure they are."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

# What type checkers and editors know: the names that `__getattr__` brings; tests/test_typed_names.py holds them equal.
if TYPE_CHECKING:
    from caveat import bench as bench
    from caveat import data as data
    from caveat import models as models
    from caveat import plot as plot
    from caveat import report as report
    from caveat.methods.aeb import AEB as AEB
    from caveat.methods.deep_ensemble import DeepEnsemble as DeepEnsemble
    from caveat.methods.ensemble import Ensemble as Ensemble
    from caveat.methods.group_variational_dropout import GroupVariationalDropout as GroupVariationalDropout
    from caveat.methods.hmc import HMC as HMC
    from caveat.methods.ivon import IVON as IVON
    from caveat.methods.laplace import Laplace as Laplace
    from caveat.methods.last_layer_laplace import LastLayerLaplace as LastLayerLaplace
    from caveat.methods.map import MAP as MAP
    from caveat.methods.masked_bnn import MaskedBNN as MaskedBNN
    from caveat.methods.mc_dropout import MCDropout as MCDropout
    from caveat.methods.mean_field_vi import MeanFieldVI as MeanFieldVI
    from caveat.methods.rigl import RigL as RigL
    from caveat.methods.sampled_laplace import SampledLaplace as SampledLaplace
    from caveat.methods.sgmcmc import SGMCMC as SGMCMC
    from caveat.methods.ssvi import SSVI as SSVI
    from caveat.methods.structured_bayesian_pruning import StructuredBayesianPruning as StructuredBayesianPruning
    from caveat.methods.subnetwork_laplace import SubnetworkLaplace as SubnetworkLaplace
    from caveat.methods.swag import SWAG as SWAG
    from caveat.methods.variational_dropout import VariationalDropout as VariationalDropout
    from caveat.public import *  # noqa: F403

__version__ = "0.2.0"

_FUNCTIONS = {"deploy", "evaluate"}  # public names that modules have too


class _Package(ModuleType):
    """The package: `caveat.evaluate` stays the function when somebody imports from the folder of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _FUNCTIONS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A module, a public name, or a method of this package by its class's name: imported when it is asked for."""
        if not name.startswith("_"):
            if name not in _FUNCTIONS and importlib.util.find_spec(f"caveat.{name}") is not None:
                return importlib.import_module(f"caveat.{name}")
            globals().update(_public())
            if name not in globals():
                globals().update(_methods())
            if name in globals():
                return globals()[name]
        elif name == "__all__":
            return [*_public()]
        raise AttributeError(f"module 'caveat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_public(), *_methods()})


def _public() -> dict[str, Any]:
    public = importlib.import_module("caveat.public")
    return {name: getattr(public, name) for name in public.__all__}


def _methods() -> dict[str, Any]:
    return {method.__name__: method for method in importlib.import_module("caveat.methods").built_in().values()}
