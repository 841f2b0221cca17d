"""A posterior and its scores in Weights & Biases: knobs in the config, scores in the summary, the folder an artifact.

with wandb.init(project="mine") as run:
log_posterior(run, posterior, scores)
"""

import tempfile
from pathlib import Path

import wandb

from caveat.evaluate import Scores
from caveat.integrations.logged import flat_knobs, flat_scores
from caveat.posterior import Posterior

__all__ = ["log_posterior"]


def log_posterior(run: wandb.Run, posterior: Posterior, scores: Scores | None = None, name: str = "posterior") -> None:
    """Log to a run.

    Args:
        run: what `wandb.init` returned.
        posterior: its method's knobs go to the run's config, its folder (what `save` writes) becomes an artifact of
            type "posterior".
        scores: what `caveat.evaluate` returned; each is logged as `<data>/<metric>`.
        name: of the artifact.
    """
    run.config.update(flat_knobs(posterior))
    if scores is not None:
        run.log(flat_scores(scores))
    with tempfile.TemporaryDirectory() as place:
        artifact = wandb.Artifact(name, type="posterior")
        artifact.add_dir(str(posterior.save(Path(place) / "posterior")))
        run.log_artifact(artifact)
