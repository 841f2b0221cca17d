"""A posterior and its scores in MLflow: knobs as parameters, scores as metrics, the folder as an artifact.

with mlflow.start_run():
log_posterior(posterior, scores)
"""

import tempfile
from pathlib import Path

import mlflow

from caveat.evaluate import Scores
from caveat.integrations.logged import flat_knobs, flat_scores
from caveat.posterior import Posterior

__all__ = ["log_posterior"]


def log_posterior(posterior: Posterior, scores: Scores | None = None, name: str = "posterior") -> None:
    """Log to the active run of MLflow; one is started where there is none.

    Args:
        posterior: its method's knobs become parameters, its folder (what `save` writes) the artifact `name`.
        scores: what `caveat.evaluate` returned; each becomes a metric `<data>/<metric>`.
        name: of the artifact's folder.
    """
    mlflow.log_params({key: str(value)[:500] for key, value in flat_knobs(posterior).items()})
    if scores is not None:
        mlflow.log_metrics(flat_scores(scores))
    with tempfile.TemporaryDirectory() as place:
        folder = posterior.save(Path(place) / "posterior")
        mlflow.log_artifacts(str(folder), name)
